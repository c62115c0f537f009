"""A layer of which each process holds a part of the experts; `routes.py` brings tokens to them.

Two ways lead to a layer's output. Where all processes have the same tokens, as in a step of a few, each adds up what
its own experts give, and one sum over all processes completes it. Of a prompt each process is home to some of the
tokens: their states go to the experts, and the results come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.types import Calls, Work
from ...models.pack.packed_model import PackedLayer
from ..experts.moe_layer import DECODE_TOKENS, Cancelled, Choice, Control, MoELayer
from ..experts.ruled_layer import RuledLayer, Share
from ..quality_presets import Preset
from ..telemetry import Telemetry
from .holding import Holding
from .spread import Spread


class HeldLayer(RuledLayer):
    """A layer's held part under a preset: `limits` are of all experts, or all halves, and `layer` of the held ones."""

    def __init__(self, packed: PackedLayer, preset: Preset, index: int, holding: Holding) -> None:
        super().__init__(packed, preset, index)
        own, parts = holding.own, self.rule.parts
        self._holding = holding
        self._first, self._end = own.start * parts, own.stop * parts
        up, gate, down = self.costs
        self.costs = up * holding.grid.slices, gate, down  # of a whole expert, as the counts are

    def all_work(self, index: Tensor, weights: Tensor, ease: float) -> Work:
        """The work of all processes for a router's choice (B, K), in numbers of all experts.

        Args:
            ease: a factor of the limits by which experts are left out.
        """
        limits, rule = self.limits, self.rule
        if rule.drops and ease < 1:
            least = [ease * limit for limit in rule.least()]
            given = torch.tensor(least, dtype=torch.float64, device=index.device)
            limits = type(limits)(limits.signal, limits.product, limits.late, given)
        return kernels.select(index, weights, limits, rule)

    def work(self, index: Tensor, weights: Tensor, tokens: int | None = None) -> Work:
        """This process's own, without calls that are left out; in numbers of the held experts.

        Args:
            tokens: of the step in all processes, if they are more than these.
        """
        ease = self._holding.ease(index, len(index) if tokens is None else tokens) if self.rule.drops else 1.0
        work = self.all_work(index, weights, ease)
        experts = work.calls.experts
        work = work.part((experts >= self._first) & (experts < self._end) & (work.thresholds != torch.inf))
        calls = work.calls
        own = Calls(calls.tokens, calls.experts - self._first, calls.weights)
        return Work(own, work.thresholds, work.products, work.late)


class SpreadLayer(MoELayer):
    """A layer's held part.

    Args:
        packed: as `Holding.of_layer` gives it.
    """

    alone = False

    def __init__(self, index: int, packed: PackedLayer, control: Control, telemetry: Telemetry, spread: Spread) -> None:
        self.spread = spread
        super().__init__(index, packed, control, telemetry)
        self.held = HeldLayer(packed, control.preset, index, spread.holding)
        self.ruled = self.held

    def in_force(self) -> HeldLayer:
        """See `MoELayer`."""
        if self.held.preset is not self.control.preset:
            self.held = HeldLayer(self.packed, self.control.preset, self.index, self.spread.holding)
            self.ruled = self.held
        return self.held

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `MoELayer`. All processes raise Cancelled in the same layer."""
        if (divided := self.spread.divided) is not None and self.spread.routes is not None:
            given, stop = (hidden, top_k_index, top_k_weights), self.control.cancelled.is_set()
            return self.spread.routes.routed(self, *given, divided.tokens, stop=stop)
        if len(hidden) <= DECODE_TOKENS or (routes := self.spread.routes) is None:
            return self._summed(hidden, top_k_index, top_k_weights)
        given = hidden, top_k_index, top_k_weights
        return routes.home(self, *given, stop=self.control.cancelled.is_set())

    def all_work(self, index: Tensor, weights: Tensor) -> Work:
        """The calls of all processes; those that are surely left out have an infinite threshold."""
        # Where that depends on the load of who computes them, that one leaves them out.
        return self.in_force().all_work(index, weights, 0.0 if self.spread.by.balanced else 1.0)

    def own(self, hidden: Tensor, index: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
        """What the held experts add for these tokens, (B, H), and the number of calls, of active neurons, and of those
        that reached the second threshold; numbers are 0 where they are not counted.

        Args:
            tokens: of the step in all processes.
        """
        ruled = self.in_force()
        choice = Choice(ruled, index, weights, ruled.work(index, weights, tokens))
        if not choice.work.thresholds.numel():
            return torch.zeros_like(hidden), [0, 0, 0]
        if len(hidden) > DECODE_TOKENS:
            return self._prefill(hidden, choice), [0, 0, 0]
        result = self._step(hidden, choice)
        if not self.control.counting:
            return result.y, [0, 0, 0]
        return result.y, [len(result.counts), *result.counts.sum(0).tolist()]

    def _summed(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        y, counts = self.own(hidden, index, weights, len(hidden))
        # The leader alone is told to stop, at any time: what it knows now is the same for all once it is added up.
        beside = torch.tensor([float(self.control.cancelled.is_set()), *counts], dtype=torch.float32)
        total = self.spread.group.sum(torch.cat([y.float().flatten(), beside.to(y.device)]))
        stopped, calls, active, kept = total[-4:].tolist()
        if stopped:
            raise Cancelled
        if self.control.counting:
            self._count_all(index, int(calls), int(active), int(kept))
        return total[:-4].view_as(hidden).to(hidden.dtype)

    def _count_all(self, index: Tensor, calls: int, active: int, kept: int) -> None:
        held, chosen = self.held, index.flatten().bincount(minlength=self.spread.holding.experts).tolist()
        self.add_totals(held, chosen, calls // self.spread.grid.slices, active, kept)
        whole, own = self.packed.rows.neurons * self.spread.grid.slices, self.packed.rows.neurons
        self.telemetry.layers[self.index].neurons += sum(chosen) * (whole - own)

    def _many(self, ruled: RuledLayer, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        """See `MoELayer`; without a stop, which the others would not see."""
        layer, x_bits = ruled.layer, ruled.preset.x_bits
        for share in shares:
            if self.control.cancelled.is_set() and not self.spread.routes:
                return  # the sum that follows says so
            given = (hidden[share.tokens], layer.signal, layer.rows, share.expert)
            y, _, _ = kernels.expert_swiglu(*given, *share.limits, x_bits=x_bits)
            out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))
