"""One MoE layer, start to end: the module that stands where transformers' experts stand (DESIGN section 5).

This version reads rows where they lie, in RAM or in the mapped file: route (the model's own), find the active
neurons, compute. Locating, placing and looking ahead slot in between.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.layouts import ExpertRows, RowLayout, UpWeights
from ..kernels.step import ExpertLayer
from ..kernels.types import Calls
from ..models.calibration import threshold_at
from ..models.packed import PackedLayer
from . import selection
from .quality import Preset
from .telemetry import Telemetry

PREFILL_CHUNK, STREAMED_CHUNK = 256, 2048
DECODE_TOKENS = 8  # in one step: up to so many go neuron by neuron, more expert by expert
# Of a prompt's tokens that share an expert: up to so many still go neuron by neuron. Above it the tokens want so many
# of the neurons that reading each once for all of them is faster (measured on full-width experts, CPU).
FEW_TOKENS, FEW_TOKENS_SPARSE = 3, 8


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The answer was stopped; raised at the next layer."""


class Flag(threading.Event):
    """An event that compiled code can look at too. `seen_there`: not 0 once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_there = c_int32(0)

    def set(self) -> None:
        self.seen_there.value = 1
        super().set()

    def clear(self) -> None:
        super().clear()
        self.seen_there.value = 0


class Control:
    """What a running answer can be told from another thread.

    Attributes:
        preset: what a token may skip, read by each layer at each step. cancelled: set to stop within one layer.
        counting: whether layers add to the telemetry (decode does, prefill does not).
        chunk: tokens of a prompt that go through the model at once: bounds activations, and sets how often progress is
            told. Where experts stream to the device each chunk brings them all, so that there it is longer.
        make_room: frees some device memory after it ran out; False if there is none to free. None: nothing can.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.cancelled = Flag()
        self.counting = False
        self.chunk = PREFILL_CHUNK
        self.make_room: Callable[[], bool] | None = None


class MoELayer(nn.Module):
    """The experts of one layer from the packed layout.

    Attributes:
        plan: what the preset in force makes of it. chosen, scores: (B, K) the experts and weights of this step.
    """

    chosen: Tensor
    scores: Tensor

    # A step sets several, and torch's own way looks for parameters each time, of which there are none.
    __setattr__ = object.__setattr__  # pyright: ignore[reportAssignmentType]

    def __init__(self, index: int, packed: PackedLayer, control: Control, telemetry: Telemetry) -> None:
        super().__init__()
        self.index, self.packed, self.control, self.telemetry = index, packed, control, telemetry
        self.plan = Plan(packed, control.preset)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H).

        Raises:
            Cancelled: the answer was stopped.
        """
        if self.control.cancelled.is_set():
            raise Cancelled
        self.in_force()
        self.chosen, self.scores = self._choose(hidden, top_k_index, top_k_weights)
        work = self._work(self.chosen, self.scores)
        if hidden.shape[0] > DECODE_TOKENS:
            return self._prefill(hidden, work)
        y, counts = self._step(hidden, work)
        if self.control.counting:
            self._count(self.chosen, work.calls, counts)
        return y

    def in_force(self) -> Plan:
        """What the preset in force makes of this layer."""
        if self.plan.preset is not self.control.preset:
            self.plan = Plan(self.packed, self.control.preset)
        return self.plan

    def _choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (B, K) and weights that are taken instead of the router's choice: here the same."""
        return index, weights

    def _work(self, chosen: Tensor, scores: Tensor) -> Work:
        """What is computed of them."""
        return self.plan.work(chosen, scores)

    def _step(self, hidden: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        plan = self.plan
        if plan.layer.narrow is not None:
            return self._step_by_width(hidden, work)
        up, rows, x_bits = plan.layer.up, plan.layer.rows, plan.preset.x_bits
        return kernels.moe_step(hidden, up, rows, work.calls, work.thresholds, work.products, x_bits=x_bits)

    def _step_by_width(self, hidden: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        """The same where some experts are narrow: the same kernels, once for each width that was called."""
        found = list[tuple[Tensor, Tensor]]()
        for part in self.plan.by_width(work):
            limits = part.work.thresholds, part.work.products
            of_width = hidden, part.up, part.rows, part.within(), *limits
            found.append(kernels.moe_step(*of_width, x_bits=self.plan.preset.x_bits))
        y = found[0][0] + found[1][0] if found[1:] else found[0][0]
        return y, torch.cat([counts for _, counts in found])

    def _prefill(self, hidden: Tensor, work: Work) -> Tensor:
        plan, experts = self.plan, work.calls.experts
        few = FEW_TOKENS_SPARSE if plan.preset.sparsity >= 0.5 else FEW_TOKENS
        counts = experts.bincount(minlength=len(plan.thresholds))
        out, _ = self._step(hidden, work.part(counts[experts] <= few))
        shares = [Share.of(work, expert) for expert in (counts > few).nonzero().squeeze(1).tolist()]
        self._many(hidden, shares, out)
        return out

    def _many(self, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        """Add to out (B, H) what experts make of the many tokens that each has."""
        plan = self.plan
        for share in shares:
            if self.control.cancelled.is_set():
                raise Cancelled
            y, _, _ = kernels.expert_swiglu(
                hidden[share.tokens],
                *plan.layer.at(share.expert),
                *share.limits,
                x_bits=plan.preset.x_bits,
            )
            out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))

    def _count(self, chosen: Tensor, calls: Calls, counts: Tensor) -> None:
        self.add_counts(chosen.tolist(), counts.tolist(), self.plan.usual(calls))

    def add_counts(self, chosen: list[list[int]], counts: list[list[int]], usual: int) -> None:
        """Add to the telemetry, by lists: an operation on tensors costs as much as all of this.

        Args:
            chosen: (B, K). counts: (P, 2) of what was computed, the first `usual` of experts that are not narrow.
        """
        found, plan = self.telemetry.layers[self.index], self.plan
        among = sum(map(len, chosen))
        found.dropped += 2 * among - plan.halves(len(counts))
        found.neurons += among * self.packed.rows.data.shape[1]
        for (up, gate, down), mine in zip(plan.costs, (counts[:usual], counts[usual:]), strict=False):
            active, kept = sum(pair[0] for pair in mine), sum(pair[1] for pair in mine)
            found.active += active
            found.bytes += len(mine) * up + active * gate + kept * down
        for token in chosen:
            for expert in token:
                found.calls[expert] += 1


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed of a step: P calls, and what a neuron must reach in each.

    A neuron adds weight · silu(gate · x) · up · x · down to y, so that the router's weight says as much of what it is
    worth as its own values do. Where a preset weighs them, an expert's thresholds are divided by the call's weight,
    relative to the mean of the token's (as `selection.halves` takes it): the same loss takes fewer rows then
    (BENCHMARKS.md, the frontier).

    Attributes:
        thresholds: (P,) float32 for |up · x|. products: (P,) for |silu(gate · x) up · x|; None where the preset has
            none.
    """

    calls: Calls
    thresholds: Tensor
    products: Tensor | None

    def part(self, which: Tensor | slice) -> Work:
        """Some of it: bool (P,) or a slice."""
        calls = Calls(self.calls.tokens[which], self.calls.experts[which], self.calls.weights[which])
        return Work(calls, self.thresholds[which], None if self.products is None else self.products[which])


@dataclass(frozen=True, slots=True)
class Width:
    """A layer's experts of one width, and what is computed of them.

    Attributes:
        first: the place of its first expert. work: calls by place. span: which they are of a step's calls.
    """

    up: UpWeights
    rows: ExpertRows
    first: int
    work: Work
    span: slice

    def within(self) -> Calls:
        """The calls with experts as they are numbered within the width."""
        calls = self.work.calls
        return calls if not self.first else Calls(calls.tokens, calls.experts - self.first, calls.weights)


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's part of a prompt.

    Attributes:
        tokens: (T,) int64. weights: (T, 1) the router's. limits: both thresholds of each token, (T,); the second None
            where the preset has none.
    """

    expert: int
    tokens: Tensor
    weights: Tensor
    limits: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, work: Work, expert: int) -> Share:
        mine = work.part(work.calls.experts == expert)
        return cls(expert, mine.calls.tokens, mine.calls.weights[:, None], (mine.thresholds, mine.products))


class Plan:
    """What a preset makes of a layer: experts, whole or as halves, and their thresholds (E,) or (2E,).

    Where some experts are narrow, calls name places instead of experts and ascend, so that each width's are together.

    Attributes:
        thresholds: of up · x. products: of what enters down; None where the preset has none. `Work` has those of calls.
        slots: how rows lie in slots that are made for the widest, by width.
        costs: by width the bytes of an expert's up projection, of a neuron's gate, and of its down half.
        numbers: (E, 1) or (E, 2) of whole experts or their halves. drops: see `selection.left_out_there`; None where no
            call is left out.
    """

    def __init__(self, packed: PackedLayer, preset: Preset, *, halves: bool = True) -> None:
        self.preset, self._split = preset, halves and preset.major > preset.drop
        self.layer = packed.halved() if self._split else packed
        self.thresholds = threshold_at(self.layer.thresholds, preset.sparsity)
        self.products = threshold_at(self.layer.products, preset.product) if preset.product else None
        self._listed = self.thresholds.tolist(), None if self.products is None else self.products.tolist()
        parts = 2 if self._split else 1
        self.numbers = torch.arange(len(self.thresholds), device=self.thresholds.device).view(-1, parts)
        limits = [preset.drop, preset.major][:parts]
        self.drops = torch.tensor(limits, dtype=torch.float64, device=self.thresholds.device) if any(limits) else None
        self.slots = (self.layer.rows.layout,)
        self.costs = [_costs(up, rows.layout) for up, rows in self.layer.parts]
        self._places: list[int] | None = None
        if self.layer.narrow is not None:
            self._places = self.layer.narrow.places.tolist()
            self._places_there = self.layer.narrow.places.to(self.thresholds.device)
            narrow = replace(self.layer.narrow.rows.layout, least=self.layer.rows.layout.nbytes)
            self.slots = (self.layer.rows.layout, narrow)

    def as_one(self) -> ExpertLayer:
        """For an operation that does the work itself; only where no expert is narrow."""
        preset, parts = self.preset, self.numbers.shape[1]
        limits = self.thresholds, self.products, preset.drop, preset.major
        return ExpertLayer(self.layer.up, self.layer.rows, *limits, parts, preset.weighed)

    def halves(self, calls: int) -> int:
        """Halves of experts that so many calls compute."""
        return calls if self._split else 2 * calls

    def work(self, index: Tensor, weights: Tensor) -> Work:
        """index and weights (B, K), the router's choice -> what is computed of it.

        In plain Python, since a decode step has two calls, and each operation on tensors costs as much as them all.
        """
        shares = weights.tolist()
        computed: list[tuple[int, int, float, float]] = []
        parts = selection.halves(shares, self.preset.drop, self.preset.major)
        for token, (experts, row, wanted) in enumerate(zip(index.tolist(), shares, parts, strict=True)):
            mean = sum(row) / len(row)
            for expert, share, part in zip(experts, row, wanted, strict=True):
                numbers = (2 * expert, 2 * expert + 1)[:part] if self._split else (expert,)[:part]
                ease = selection.ease(share, mean) if self.preset.weighed else 1.0
                computed += [(token, number, share, ease) for number in numbers]
        if self._places is not None:
            places = self._places
            computed = sorted(
                ((t, places[number], w, ease) for t, number, w, ease in computed), key=lambda call: call[1]
            )
        tokens, experts, kept, eases = zip(*computed, strict=True) if computed else ((), (), (), ())
        device = index.device
        calls = Calls(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(experts, dtype=torch.int64, device=device),
            torch.tensor(kept, dtype=weights.dtype, device=device),
        )

        def limits(table: list[float]) -> Tensor:
            own = [table[expert] * ease for expert, ease in zip(experts, eases, strict=True)]
            return torch.tensor(own, dtype=torch.float32, device=device)

        thresholds, products = self._listed
        return Work(calls, limits(thresholds), None if products is None else limits(products))

    def placed(self, calls: Calls) -> tuple[Calls, Tensor]:
        """Calls of experts by number -> by place, ascending, and in which order, where some are narrow."""
        places, order = self._places_there.index_select(0, calls.experts).sort(stable=True)
        return Calls(calls.tokens.index_select(0, order), places, calls.weights.index_select(0, order)), order

    def usual(self, calls: Calls) -> int:
        """How many of the calls, the first, are of experts that are not narrow. Waits for a device."""
        if self.layer.narrow is None:
            return calls.experts.numel()
        return bisect_left(calls.experts.tolist(), len(self.layer.up.q))

    def within(self, calls: Calls, width: int) -> Calls:
        """All of the calls, with experts as they are numbered within a width; those of the others are some of its."""
        if self.layer.narrow is None:
            return calls
        first, count = len(self.layer.up.q) * width, len(self.layer.parts[width][0].q)
        return Calls(calls.tokens, (calls.experts - first).clamp(0, count - 1), calls.weights)

    def wanted(self, calls: Calls) -> list[tuple[UpWeights, Calls]]:
        """Up projections by width, and all of the calls for each, see `within`."""
        return [(up, self.within(calls, width)) for width, (up, _) in enumerate(self.layer.parts)]

    def by_width(self, work: Work) -> Sequence[Width]:
        """The calls by width, as far as there are any; if there are none, none of the usual width."""
        cut = self.usual(work.calls)
        end, first = work.calls.experts.numel(), len(self.layer.up.q)
        if self.layer.narrow is None or cut == end:
            return (Width(self.layer.up, self.layer.rows, 0, work, slice(None)),)
        spans = ((slice(0, cut), 0), (slice(cut, end), first))
        return [
            Width(*part, first, work.part(span), span)
            for part, (span, first) in zip(self.layer.parts, spans, strict=True)
            if span.stop > span.start
        ]


def _costs(up: UpWeights, rows: RowLayout) -> tuple[int, int, int]:
    return up.bytes_per_expert(), rows.gate.nbytes, rows.nbytes - rows.gate.nbytes
