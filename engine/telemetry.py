"""Counters of one answer, really counted (DESIGN section 8). The MoE layers and the decode loop write, `stats` reads.

Counting stays out of the way: a layer adds a few integers per step; nothing here waits, locks or allocates tensors.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import psutil

from .events import Stats


@dataclass(slots=True)
class LayerCounts:
    """What one MoE layer did in decode: neurons it looked at, those that were active, bytes read, calls by expert."""

    experts: int
    neurons: int = 0
    active: int = 0
    bytes: int = 0
    calls: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.calls = [0] * self.experts


class Telemetry:
    """Counts one answer at a time; `begin` starts the next one.

    Times are seconds of `time.perf_counter`. Decode counts leave the prompt out: its tokens share each expert's
    weights, so bytes per token would mean something else there.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self.layers = [LayerCounts(experts) for _ in range(layers)]
        self._process = psutil.Process()
        self.begin(-1, 0, time.perf_counter())

    def begin(self, request: int, prompt_tokens: int, asked_at: float) -> None:
        """Start counting the answer to `request`, which was asked for at `asked_at`."""
        self.layers[:] = [LayerCounts(self._experts) for _ in self.layers]
        self.request = request
        self._prompt_tokens = prompt_tokens
        self._asked_at = asked_at
        self._prefill_s: float | None = None
        self._first_token_s: float | None = None
        self._decode_s = 0.0
        self._new_tokens = 0
        self._decoded = 0
        self._recent: deque[float] = deque(maxlen=4096)

    def prefill_done(self, seconds: float) -> None:
        """The whole prompt is in the KV cache; it took `seconds` of computing."""
        self._prefill_s = seconds

    def decoded(self, seconds: float) -> None:
        """A decode step ended, whatever it drew; it took `seconds`."""
        self._decode_s += seconds
        self._decoded += 1

    def token(self) -> None:
        """A token of the answer was drawn."""
        now = time.perf_counter()
        self._new_tokens += 1
        self._recent.append(now)
        if self._first_token_s is None:
            self._first_token_s = now - self._asked_at

    def stats(self, *, kv_bytes: int, vram_bytes: int | None, context_used: int, context_window: int) -> Stats:
        """The counters as they stand. What was not measured yet is None."""
        now = time.perf_counter()
        while self._recent and now - self._recent[0] > 1.0:
            self._recent.popleft()
        neurons = sum(layer.neurons for layer in self.layers)
        return Stats(
            request=self.request,
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            decode_tps=_rate(len(self._recent) - 1, now - self._recent[0] if self._recent else 0.0),
            decode_tps_mean=_rate(self._decoded, self._decode_s),
            prefill_tps=_rate(self._prompt_tokens, self._prefill_s or 0.0),
            first_token_s=self._first_token_s,
            active_neurons=sum(layer.active for layer in self.layers) / neurons if neurons else None,
            bytes_per_token=sum(layer.bytes for layer in self.layers) / self._decoded if self._decoded else None,
            layer_activity=tuple(la.active / la.neurons for la in self.layers if la.neurons),
            expert_use=tuple(
                tuple(calls / total for calls in la.calls) for la in self.layers if (total := sum(la.calls))
            ),
            ram_bytes=self._process.memory_info().rss,
            vram_bytes=vram_bytes,
            kv_bytes=kv_bytes,
            context_used=context_used,
            context_window=context_window,
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
