"""A layer under a preset: its experts, whole or in halves, and each one's thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.rule import LEAST, NEVER
from ...kernels.step import ExpertLayer
from ...kernels.types import Calls, Limits, Work
from ...models.pack.packed_model import PackedLayer
from ...models.packing.calibration import threshold_at
from ..quality_presets import Preset


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's part of a prompt.

    Attributes:
        tokens: (T,) int64. weights: (T, 1) the router's. limits: both thresholds of each token, (T,); the second None
            where the rule has none.
    """

    expert: int
    tokens: Tensor
    weights: Tensor
    limits: tuple[Tensor, Tensor | None]

    @classmethod
    def of_each(cls, work: Work, counts: Sequence[int], few: int) -> list[Share]:
        """Those of the experts with more than `few` calls. work: sorted by expert. counts: calls of each."""
        found: list[Share] = []
        end = 0
        for expert, count in enumerate(counts):
            own, end = slice(end, end + count), end + count
            if count > few:
                calls, products = work.calls, work.products
                limits = work.thresholds[own], None if products is None else products[own]
                found.append(cls(expert, calls.tokens[own], calls.weights[own, None], limits))
        return found

    @staticmethod
    def joined(shares: Sequence[Share]) -> Work:
        """All of them in one."""
        experts = torch.tensor([share.expert for share in shares])
        counts = torch.tensor([len(share.tokens) for share in shares])
        calls = Calls(
            torch.cat([share.tokens for share in shares]),
            experts.repeat_interleave(counts),
            torch.cat([share.weights[:, 0] for share in shares]),
        )
        products = [share.limits[1] for share in shares if share.limits[1] is not None]
        return Work(calls, torch.cat([share.limits[0] for share in shares]), torch.cat(products) if products else None)


class RuledLayer:
    """A layer under a preset.

    Attributes:
        rule: of this layer, number `index`. layer: with experts in halves if the rule divides them. limits: at the
            rule's shares, on the layer's device. costs: bytes of an expert's up projection, of a neuron's gate, and of
            its down half.
    """

    def __init__(self, packed: PackedLayer, preset: Preset, index: int) -> None:
        rule = preset.rule.at(index)
        self.preset, self.rule = preset, rule.of_whole_neurons() if packed.whole else rule
        if not packed.rows.layout.gated:
            self.rule = self.rule.ungated()
        self.layer = packed.halved() if self.rule.parts == 2 else packed
        self.limits = Limits(
            self._signal_limit(self.rule.lateness if preset.without_weak else self.rule.sparsity),
            threshold_at(self.layer.products, self.rule.product) if self.rule.product else None,
            self._signal_limit(self.rule.lateness) if self.rule.late else None,
        )
        rows = self.layer.rows.layout
        self.costs = self.layer.signal.bytes_per_expert(), rows.down_at, rows.nbytes - rows.down_at

    def _signal_limit(self, share: float) -> Tensor:
        """Each expert's at a share of its neurons, by tables of what it is compared with; or at the rule's theta."""
        layer, theta = self.layer, self.rule.theta
        found = threshold_at(layer.thresholds if layer.plain is None or self.rule.weighed else layer.plain, share)
        if not layer.rows.layout.gated:
            found = torch.where(found == NEVER, found, found.clamp(min=LEAST))
        if not theta or layer.signal.layout.projection != "gate":
            return found
        return found.clamp(min=theta) if share > self.rule.sparsity else torch.full_like(found, theta)

    def as_one(self) -> ExpertLayer:
        """As one record, for an operation that selects by itself."""
        return ExpertLayer(self.layer.signal, self.layer.rows, self.limits, self.rule)

    @property
    def structure(self) -> tuple[object, ...]:
        """What is part of captured work: which kernels run. Limits may change in place."""
        rule, limits = self.rule, self.limits
        return (
            *(self.preset.x_bits, rule.parts, rule.weighed, rule.drops),
            *(limits.product is not None, limits.late is not None, rule.alpha),
            self.layer.signal.layout.projection,
        )

    def limits_in_place(self) -> Limits:
        """The limits in memory of their own, for captured work."""
        given = self.limits
        product, late = (None if table is None else table.clone() for table in (given.product, given.late))
        least = torch.tensor(self.rule.least(), dtype=torch.float64).to(given.signal.device)
        return Limits(given.signal.clone(), product, late, least)

    def limits_into(self, memory: Limits) -> None:
        """Write the limits over those of another preset with the same structure."""
        new = self.limits_in_place()
        for name in ("signal", "product", "late", "least"):
            values, there = getattr(new, name), getattr(memory, name)
            if values is not None and there is not None:
                there.copy_(values)

    def halves(self, calls: int) -> int:
        """How many expert halves this many calls compute."""
        return calls if self.rule.parts == 2 else 2 * calls

    def work(self, index: Tensor, weights: Tensor) -> Work:
        """The work for a router's choice, index and weights (B, K)."""
        return kernels.select(index, weights, self.limits, self.rule)
