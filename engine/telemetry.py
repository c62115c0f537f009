"""Counters of an answer, or of some computed together. The MoE layers and the decode loop write, `stats` reads.

Counting is cheap: a layer adds a few integers per step. What it counts may still be on a device that computes it: then
only `stats` waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import psutil
from torch import Tensor

from .events import CardRows, LayerRows, Rows, Stats
from .host_copies import to_host

N = TypeVar("N", int, float)


def hidden(moved: float, busy: float, waited: float, unused: float) -> float | None:
    """The share of the link's busy seconds in which it moved what was needed and the device did not wait.

    Args:
        moved, unused: bytes. waited: seconds.
    """
    return max(0.0, 1 - waited / busy - unused / moved) if moved and busy else None


_UNCOUNTED = 8192  # steps of layers on a device: with so many, they are counted before `stats` asks


@dataclass(slots=True)
class LayerCounts:
    """One MoE layer's counters in decode.

    Attributes:
        neurons: of the chosen experts. active: of those. bytes: of weights that were read. calls: by expert.
        ready, coming, copied, on_cpu: of an offloaded layer's active neurons, those whose rows were in the pool, on
            their way there, fetched now, and computed by the CPU. left_out: those that a lenient preset skipped.
            These five add up to `active`. waited: seconds for rows on their way.
        guessed, needed, right: neurons that were predicted, that were active, and both. unused: bytes of rows that were
            fetched ahead and that their step did not need.
        experts_guessed, experts_needed, experts_right: likewise experts, and those that were computed.
        looked, hit: expert calls, and those of which at least half the rows were there or on their way.
        substituted, dropped: chosen experts that resident ones replaced, and halves left out by score.
    """

    experts: int
    neurons: int = 0
    active: int = 0
    bytes: int = 0
    ready: int = 0
    coming: int = 0
    copied: int = 0
    on_cpu: int = 0
    left_out: int = 0
    waited: float = 0.0
    guessed: int = 0
    needed: int = 0
    right: int = 0
    unused: int = 0
    experts_guessed: int = 0
    experts_needed: int = 0
    experts_right: int = 0
    looked: int = 0
    hit: int = 0
    substituted: int = 0
    dropped: int = 0
    calls: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.calls = [0] * self.experts


@dataclass(frozen=True, slots=True)
class Uncounted:
    """A layer's step that is not counted yet: tensors, of which some are on a device, and the function that counts it
    once they are on the host.
    """

    tensors: tuple[Tensor, ...]
    count: Callable[..., None]


class PoolReport(Protocol):
    """What a pool of rows reports about itself, see `Offload`."""

    def moved(self) -> tuple[int, float]:
        """Bytes that the link moved so far, and its busy seconds."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of device memory: pool, pool_used, up, dense, whole."""
        ...

    def resident(self) -> dict[int, float]:
        """The pool's layers, and the share of each one's rows that are in it."""
        ...

    def evicted(self) -> int:
        """Rows that gave way to others so far."""
        ...

    def link_peak(self) -> float:
        """Bytes per second that the link can move."""
        ...

    def cards(self) -> tuple[CardRows, ...]:
        """Of each of several cards, its link since the model was loaded; empty for one."""
        ...


@dataclass(slots=True)
class AnswerCounts:
    """What one answer counts by itself.

    Attributes:
        asked_at, recent: by the telemetry's clock, when it was sent, and when its last tokens were drawn. prefill_s,
            decode_s: seconds, with those in which others were computed. decoded: tokens of that. drafted, accepted:
            tokens that were computed before they were drawn, and how many of them were drawn. saved_s: seconds that
            this took less than its tokens one by one, None where the time of one is not known.
    """

    request: int
    prompt_tokens: int
    asked_at: float
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float = 0.0
    new_tokens: int = 0
    decoded: int = 0
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    saved_s: float | None = 0.0
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))


class Telemetry:
    """Counts one answer at a time, or some that are computed together: `begin` starts the next one.

    Layers and links count for all of those; times are each one's own.

    Attributes:
        answer: the one that is being computed.

    Times are seconds of `clock`, which is a virtual device's own if there is one. Decode counts leave the prompt
    out: its tokens share each expert's weights, so bytes per token would mean something else there.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self.layers = [LayerCounts(experts) for _ in range(layers)]
        self._process = psutil.Process()
        self.clock: Callable[[], float] = time.perf_counter
        self.memory: PoolReport | None = None
        self.budget: int | None = None  # bytes of device memory that may be used
        self._uncounted: list[Uncounted] = []
        self.begin(-1, 0, self.clock())

    def begin(self, request: int, prompt_tokens: int, asked_at: float, *, beside: bool = False) -> None:
        """Start counting the answer to `request`, which was sent at `asked_at`. beside: others go on being computed."""
        self.answer = AnswerCounts(request, prompt_tokens, asked_at)
        if beside:
            return
        self.settle()  # what the last answer left on the device is not this one's
        self.layers[:] = [LayerCounts(self._experts) for _ in self.layers]
        self._decoded = 0
        self._moved_before, self._prefilled_at = (0, 0.0), asked_at
        self._evicted_before = 0 if self.memory is None else self.memory.evicted()
        self._cards_before: dict[str, CardRows] = {}

    def reused(self, tokens: int) -> None:
        """This many prompt tokens are in the KV cache already."""
        self.answer.reused = tokens

    def nothing(self, request: int, prompt_tokens: int, context_window: int) -> Stats:
        """Of an answer that was not begun, while others go on."""
        answer = self.answer
        self.begin(request, prompt_tokens, self.clock(), beside=True)
        found = self.stats(kv_bytes=0, vram_bytes=None, context_used=prompt_tokens, context_window=context_window)
        self.answer = answer
        return found

    @contextmanager
    def prompt(self) -> Generator[None]:
        """A part of the prompt is computed: neither its time nor what links move for it counts as decode's, where
        others have begun that.
        """
        if not self._decoded:
            yield
            return
        began, moved, cards = self.clock(), *self._moved()
        yield
        self._prefilled_at += self.clock() - began
        now, now_cards = self._moved()
        self._moved_before = (
            _later(self._moved_before[0], moved[0], now[0]),
            _later(self._moved_before[1], moved[1], now[1]),
        )
        for name, card in cards.items():
            before = self._cards_before.get(name, card)
            busy, there = (_later(before.busy, card.busy, now_cards[name].busy), now_cards[name].moved)
            self._cards_before[name] = replace(card, moved=_later(before.moved, card.moved, there), busy=busy)

    def _moved(self) -> tuple[tuple[int, float], dict[str, CardRows]]:
        """What links have moved so far, and each card's."""
        if self.memory is None:
            return (0, 0.0), {}
        return self.memory.moved(), {card.name: card for card in self.memory.cards()}

    def prefill_done(self, seconds: float) -> None:
        """The whole prompt is in the KV cache; it took `seconds` of computing."""
        self.answer.prefill_s = seconds
        if self._decoded:
            return  # others had begun before
        self._prefilled_at = self.clock()
        self._moved_before, self._cards_before = self._moved()

    def decoded(self, seconds: float, tokens: int = 1) -> None:
        """Decode steps of this many tokens ended; they took `seconds`."""
        self.answer.decode_s += seconds
        self.answer.decoded += tokens
        self._decoded += tokens

    def drafted(self, tokens: int, accepted: int, saved_s: float | None) -> None:
        """So many tokens were guessed and computed, of which the first ones were drawn; see `AnswerCounts`."""
        self.answer.drafted += tokens
        self.answer.accepted += accepted
        before = self.answer.saved_s
        self.answer.saved_s = None if before is None or saved_s is None else before + saved_s

    def token(self, at: float) -> None:
        """A token of the answer was drawn at time `at`."""
        self.answer.new_tokens += 1
        self.answer.recent.append(at)
        if self.answer.first_token_s is None:
            self.answer.first_token_s = at - self.answer.asked_at

    def count(self, count: Callable[..., None], *tensors: Tensor) -> None:
        """Call `count` with these tensors of a layer's step, once they are on the host, in this answer."""
        if not [tensor for tensor in tensors if not tensor.is_cpu]:
            count(*tensors)
            return
        self._uncounted.append(Uncounted(tensors, count))
        if len(self._uncounted) >= _UNCOUNTED:
            self.settle()

    def later(self, count: Callable[[], None]) -> None:
        """Call `count` before anything is read, in this answer."""
        self._uncounted.append(Uncounted((), count))

    def uncounted(self) -> list[Uncounted]:
        """The steps that are not counted yet, for a caller that waits for the device anyway and counts them."""
        taken, self._uncounted = self._uncounted, []
        return taken

    def settle(self) -> None:
        """Wait for the device and count all steps."""
        if not (steps := self.uncounted()):
            return
        here = iter(to_host([tensor for step in steps for tensor in step.tensors]).arrived())
        for step in steps:
            step.count(*(next(here) for _ in step.tensors))

    def stats(self, *, kv_bytes: int, vram_bytes: int | None, context_used: int, context_window: int) -> Stats:
        """The counters so far. What was not measured yet is None. Between two tokens: the device is done then."""
        self.settle()
        now, answer = self.clock(), self.answer
        recent = answer.recent
        while recent and now - recent[0] > 1.0:
            recent.popleft()
        neurons = sum(layer.neurons for layer in self.layers)
        return Stats(
            request=answer.request,
            prompt_tokens=answer.prompt_tokens,
            new_tokens=answer.new_tokens,
            decode_tps=_rate(len(recent) - 1, now - recent[0] if recent else 0.0),
            decode_tps_mean=_rate(answer.decoded, answer.decode_s),
            prefill_tps=_rate(answer.prompt_tokens - answer.reused, answer.prefill_s or 0.0),
            first_token_s=answer.first_token_s,
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
            reused_tokens=answer.reused,
            rows=None if self.memory is None else self._rows(self.memory, now),
            vram_budget=self.budget,
            drafted=answer.drafted,
            accepted=answer.accepted,
            draft_speedup=self._draft_speedup(),
        )

    def _draft_speedup(self) -> float | None:
        answer = self.answer
        if not answer.drafted or answer.saved_s is None:
            return None
        return _rate(answer.decode_s + answer.saved_s, answer.decode_s)

    def _card(self, card: CardRows) -> CardRows:
        """One of several cards, of this answer's decode."""
        if (before := self._cards_before.get(card.name)) is not None:
            card = replace(card, moved=card.moved - before.moved, busy=card.busy - before.busy)
        return replace(card, moved_per_token=_share(card.moved, self._decoded))

    def _rows(self, memory: PoolReport, now: float) -> Rows:
        def total(name: str) -> float:
            return sum(getattr(layer, name) for layer in self.layers)

        guessed, needed, resident = total("guessed"), total("needed"), memory.resident()
        pooled = [self.layers[layer] for layer in resident]
        ready, located = sum(layer.ready for layer in pooled), sum(map(_located, self.layers))
        chosen = sum(sum(layer.calls) for layer in self.layers)
        moved, busy = memory.moved()
        moved, busy = moved - self._moved_before[0], busy - self._moved_before[1]
        decoded = self._decoded > 0
        return Rows(
            ready=_share(ready, located),
            in_place=_share(total("ready") - ready, located),
            hits=_share(ready, sum(map(_located, pooled))),
            layers=tuple(_layer_rows(layer, resident.get(index)) for index, layer in enumerate(self.layers)),
            coming=_share(total("coming"), located),
            copied=_share(total("copied"), located),
            on_cpu=_share(total("on_cpu"), located),
            left_out=_share(total("left_out"), located),
            expert_hits=_share(sum(layer.hit for layer in pooled), sum(layer.looked for layer in pooled)),
            recall=_share(total("right"), needed),
            precision=_share(total("right"), guessed),
            recalls=tuple(_share(layer.right, layer.needed) for layer in self.layers),
            precisions=tuple(_share(layer.right, layer.guessed) for layer in self.layers),
            expert_recall=_share(total("experts_right"), total("experts_needed")),
            expert_precision=_share(total("experts_right"), total("experts_guessed")),
            expert_recalls=tuple(_share(layer.experts_right, layer.experts_needed) for layer in self.layers),
            expert_precisions=tuple(_share(layer.experts_right, layer.experts_guessed) for layer in self.layers),
            substituted=_share(total("substituted"), chosen),
            dropped=_share(total("dropped"), 2 * chosen),
            moved_per_token=moved / self._decoded if decoded else None,
            waited_per_token=total("waited") / self._decoded if decoded else None,
            link_bytes_s=_share(moved, busy) if decoded else None,
            link_peak=memory.link_peak(),
            link_busy=_share(busy, max(busy, now - self._prefilled_at)) if decoded else None,
            link_hidden=hidden(moved, busy, total("waited"), total("unused")) if decoded else None,
            evicted=memory.evicted() - self._evicted_before,
            virtual=self.clock is not time.perf_counter,
            cards=tuple(map(self._card, memory.cards())),
            **memory.sizes(),
        )


def _located(layer: LayerCounts) -> int:
    """Its active neurons; not `active`, which a GPU's layers count one token later than the rows' places."""
    return layer.ready + layer.coming + layer.copied + layer.on_cpu + layer.left_out


def _layer_rows(layer: LayerCounts, resident: float | None) -> LayerRows:
    parts = layer.ready, layer.coming, layer.copied, layer.on_cpu
    return LayerRows(resident, *(_share(part, _located(layer)) for part in parts))


def _later(before: N, then: N, now: N) -> N:
    return before + now - then


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
