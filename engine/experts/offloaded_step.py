"""A few tokens in one layer whose rows are in RAM: place the rows, compute, add up what arrived.

Lists are on the host, in numpy, and go to the device as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.cpu.offload_steps import Beside
from ...kernels.offload.located import Part
from ...kernels.offload.placing import Found, Placed
from ...kernels.types import Active, Calls
from ..offload.device import Joined
from ..offload.offload import Offload
from ..telemetry import LayerCounts
from .moe_layer import Choice, Result
from .ruled_layer import RuledLayer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step, on the device or on the host.

    Attributes:
        hidden: (B, H). limits: (P,) the second thresholds of the calls; None if the preset has none.
    """

    hidden: Tensor
    calls: Calls
    limits: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        """As `of` takes them."""
        limits = () if self.limits is None else (self.limits,)
        return (self.hidden, self.calls.tokens, self.calls.experts, self.calls.weights, *limits)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> StepInputs:
        """The inverse of `tensors`."""
        hidden, tokens, experts, weights, *limits = tensors
        return cls(hidden, Calls(tokens, experts, weights), limits[0] if limits else None)


class Sum:
    """The running sum of a step.

    Attributes:
        y: (B, H). reached: (P,) neurons that reached the second threshold. None while nothing has arrived.
    """

    def __init__(self) -> None:
        self.y: Tensor | None = None
        self.reached: Tensor | None = None

    def add(self, y: Tensor, reached: Tensor) -> None:
        """Add a part."""
        self.y = y if self.y is None else self.y + y
        self.reached = reached if self.reached is None else self.reached + reached


@dataclass(frozen=True, slots=True)
class OffloadedStep:
    """A step whose active neurons are known: its stages, each with the results of those before it.

    Attributes:
        choice: on the host. ram: the layer's rows in RAM under the preset in force. hidden: (B, H) on the host; a
            prompt's on the device. there: the inputs on the device. active: on the host. values: on the device.
        heard: (B, E) the router's scores of all experts, on the host, if known.
    """

    shared: Offload
    index: int
    choice: Choice
    ram: Callable[[], RuledLayer]
    hidden: Tensor
    there: StepInputs
    active: Active
    values: Tensor
    heard: Tensor | None = None

    @property
    def _neurons(self) -> int:
        return self.choice.ruled.layer.rows.data.shape[1]

    def found(self) -> Found:
        """What the pool has to know."""
        choice, work = self.choice, self.choice.work
        calls = work.calls
        return Found(
            *(self.index, self._neurons, self.active, calls.experts, calls.weights),
            *(choice.experts, choice.weights, work.late, self.heard),
        )

    def start(self, found: Found) -> tuple[Placed, Joined | None]:
        """Place the rows and start absent ones: copied over the link, or computed by the CPU from RAM (Fiddler)."""
        shared, work, x_bits = self.shared, self.choice.work, self.choice.ruled.preset.x_bits
        beside = Beside(self.ram().layer.rows, self.hidden, work.calls, work.products, x_bits)
        placed, joined = shared.scheduler.start(found, beside, shared.device.cpu_share if shared.parts.cpu else 0.0)
        return placed, joined

    def finish(self, found: Found, placed: Placed, joined: Joined | None, total: Sum) -> float:
        """Add what has arrived since; returns the seconds waited."""
        waited = 0.0
        for part, seconds in self.shared.scheduler.finish(found, placed):
            self.add(part, total)
            waited += seconds
        self.shared.scheduler.look()  # new requests queue behind what is on its way
        if joined is not None:
            total.add(*joined())
        return waited

    def result(self, total: Sum) -> Result:
        """The step's result."""
        (counts,) = self.shared.device.sent(self.active.offsets.diff())
        if total.y is None or total.reached is None:
            return Result(
                self.choice, torch.zeros_like(self.there.hidden), torch.stack([counts, torch.zeros_like(counts)], 1)
            )
        return Result(self.choice, total.y, torch.stack([counts, total.reached], 1))

    def add(self, part: Part, total: Sum) -> None:
        """Compute rows that are on the device."""
        if part.at.size:
            device, there, x_bits = self.shared.device, self.there, self.choice.ruled.preset.x_bits
            rows = self.shared.rows(self.choice.ruled.layer.rows.layout)
            active = device.part(self.values, part.offsets, part.at, part.places)
            total.add(*device.rows(there.hidden, rows, there.calls, active, there.limits, x_bits))

    def count(self, counts: LayerCounts, placed: Placed, waited: float) -> None:
        """Add to the telemetry where the rows were."""
        ready, coming, copied, beside = placed.sizes
        counts.ready += ready
        counts.coming += coming
        counts.copied += copied
        counts.on_cpu += beside
        counts.waited += waited
        if left_out := int(self.active.offsets[-1]) - sum(placed.sizes):
            counts.left_out += left_out
            # `MoELayer.add_counts` counts them as read; their down halves are not read.
            counts.bytes -= left_out * self.choice.ruled.costs[1]
        counts.looked += placed.looked
        counts.hit += placed.hit
