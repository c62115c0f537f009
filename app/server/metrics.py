"""GET /metrics, for Prometheus: what the desk has done, in figures that only grow, and what it does now."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from .desk import Desk

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Counted(Collector):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        counts = self._desk.counts
        answers = CounterMetricFamily("floe_answers", "Answers, by how they ended.", labels=["reason"])
        for reason, number in counts.answers.copy().items():
            answers.add_metric([reason], number)
        yield answers
        for name, text, number in (
            ("floe_prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("floe_reused_tokens", "Tokens of prompts that were computed before.", counts.reused_tokens),
            ("floe_new_tokens", "Tokens of answers, thinking among them.", counts.new_tokens),
            ("floe_busy_seconds", "Seconds in which an answer was computed.", counts.seconds),
            ("floe_refused", "Requests that found the line full.", counts.refused),
        ):
            yield CounterMetricFamily(name, text, number)
        yield GaugeMetricFamily("floe_waiting", "Answers that wait.", self._desk.waiting)
        yield GaugeMetricFamily("floe_running", "Answers that the engine has.", self._desk.running)


def text(desk: Desk) -> bytes:
    """The figures of now."""
    registry = CollectorRegistry()
    registry.register(_Counted(desk))
    return generate_latest(registry)
