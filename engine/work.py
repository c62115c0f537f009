"""What a preset makes of a layer and of its router's choice: which calls there are, and what a neuron must reach."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..kernels.layouts import ExpertRows, RowLayout, UpWeights
from ..kernels.step import ExpertLayer
from ..kernels.types import Calls
from ..models.calibration import threshold_at
from ..models.packed import PackedLayer
from . import selection
from .quality import Preset


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed of a step: P calls, and what a neuron must reach in each.

    A neuron adds weight · silu(gate · x) · up · x · down to y, so that the router's weight says as much of what it is
    worth as its own values do. Where a preset weighs them, an expert's thresholds are divided by the call's weight,
    relative to the mean of the token's (as `selection.halves` takes it): the same loss takes fewer rows then
    (BENCHMARKS.md, the frontier).

    Attributes:
        thresholds: (P,) float32 for |up · x|. products: (P,) for |silu(gate · x) up · x|; None where the preset has
            none. late: (P,) for |up · x|: rows of weaker neurons may be left out where they are not on the device;
            None where every row is awaited, as in long prompts.
    """

    calls: Calls
    thresholds: Tensor
    products: Tensor | None
    late: Tensor | None = None

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
        self._late = None if preset.late is None else threshold_at(self.layer.thresholds, preset.late)
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

        Where something may be left out in plain Python: a decode step has two calls, and each operation on tensors
        costs as much as them all.
        """
        if self.drops is None:
            return self.every(index, weights)[0]
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

    def every(self, index: Tensor, weights: Tensor) -> tuple[Work, Tensor | None]:
        """All calls of the experts index with these weights, (B, K) each, and which of them are left out (P,).

        As `work` gives them, but for those; all of it where the tensors are, and nobody waits for it. None: nothing
        can be left out.
        """
        (tokens, among), parts = index.shape, self.numbers.shape[1]
        experts = self.numbers.index_select(0, index.flatten()).flatten()
        weights_each = weights[..., None].expand(tokens, among, parts).flatten()
        calls = Calls(_tokens(tokens, among * parts, index.device), experts, weights_each)
        left_out = None if self.drops is None else selection.left_out_there(weights, self.drops).flatten()
        order: Tensor | None = None
        if self._places is not None:
            calls, order = self.placed(calls)
            left_out = None if left_out is None else left_out.index_select(0, order)
        ease: Tensor | None = None
        if self.preset.weighed:
            ease = selection.ease_there(weights)[..., None].expand(tokens, among, parts).flatten()
            ease = ease if order is None else ease.index_select(0, order)

        def limits(table: Tensor) -> Tensor:
            own = table.index_select(0, calls.experts)
            return own if ease is None else (own * ease).float()

        products, late = (None if table is None else limits(table) for table in (self.products, self._late))
        return Work(calls, limits(self.thresholds), products, late), left_out

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


@lru_cache
def _tokens(tokens: int, each: int, device: torch.device) -> Tensor:
    """Of which token each call is."""
    return torch.arange(tokens, device=device).repeat_interleave(each)


def _costs(up: UpWeights, rows: RowLayout) -> tuple[int, int, int]:
    return up.bytes_per_expert(), rows.gate.nbytes, rows.nbytes - rows.gate.nbytes
