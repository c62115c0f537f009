"""The experts of layers whose rows are in a pool, on a card: graphs around what the host decides.

A layer's graph (`card_layers.py`) ends with the neurons that it found active, listed in pinned memory together with
all else that the host's decisions need (`card_lists.py`). The host waits for that, places the rows
(experts/offloaded_step.py), and leaves lists of those that are there in pinned memory too. A graph adds them up, others
add those that come later and what the CPU has computed. These are the same for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.listed import Total
from ...kernels.located import Part
from ...kernels.types import Active, Calls, Limits, Work
from ..experts.moe_layer import Cancelled, Choice
from ..experts.offloaded_layer import OffloadedLayer
from ..experts.offloaded_step import OffloadedStep, StepInputs, Sum
from ..experts.ruled_layer import RuledLayer
from ..offload.device import Device, Joined
from .card_lists import LISTS, Form, Residents, fields
from .graphs import Captured


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """What a step computed, but for how many neurons reached the second threshold on the device."""

    layer: OffloadedLayer
    ruled: RuledLayer
    calls: list[int]
    computed: int
    active: int
    reached: int  # on the CPU

    def count(self, reached: int) -> None:
        self.layer.add_totals(self.ruled, self.calls, self.computed, self.active, self.reached + reached)


class _CardSum(Sum):
    """The running sum of a step, on the card by graphs. y: (1, H), which the next step overwrites.

    Attributes:
        reached_here: neurons that reached the second threshold on the CPU.
    """

    def __init__(self, form: Form, y: Tensor) -> None:
        super().__init__()
        self._form, self._sum, self._parts = form, y, 0
        self.reached_here = 0

    def rows(self, step: OffloadedStep, part: Part) -> None:
        """See `Sum`. A list is used again only after a wait for the device: then rows come in several loads."""
        self._form.add(min(self._parts, LISTS - 1), part)
        self._parts += 1
        self.y = self._sum

    def beside(self, device: Device, joined: Joined) -> None:
        """See `Sum`."""
        y, reached = joined()
        self.end()
        self._form.add_beside(y)
        self.reached_here += int(reached.sum())

    def end(self) -> None:
        """There is a sum, even of nothing."""
        if self.y is None:
            self._form.add_none()
            self.y = self._sum


@dataclass(slots=True)
class _Layer:
    """A layer and what its steps are made of: with views of the record's memory, so once for all tokens.

    Attributes:
        captured: under the preset of the capture. ruled: under the one in force. limits: of that, in place.
    """

    layer: OffloadedLayer
    captured: RuledLayer
    ruled: RuledLayer
    limits: Limits
    form: Form
    choice: Choice
    there: StepInputs

    def step(self) -> OffloadedStep:
        """The step whose neurons were found last."""
        listing, choice, shared = self.form.listing, self.choice, self.layer.shared
        total = int(listing.offsets[-1])
        active = Active(listing.offsets, listing.neurons[:total], listing.copies[:total])
        here = self.form.record.here
        given = shared, self.layer.pooled, choice, self.layer.in_ram, here["hidden"]
        return OffloadedStep(*given, self.there, active, listing.values, here.get("heard"))


class CardExperts:
    """The experts of the layers of a model that are in a pool, for one token on one card.

    Args:
        blocks: of all layers; None for one that is called as a module. total: where each layer's output goes.
    """

    def __init__(self, blocks: Sequence[OffloadedLayer | None], top_k: int, total: Total) -> None:
        self._total = total
        first = next(block for block in blocks if block is not None)
        self._control, self._shared, self._telemetry = first.control, first.shared, first.telemetry
        self._forms: dict[object, Form] = {}
        self._layers = [None if block is None else self._made(block, top_k) for block in blocks]
        self._uncounted: _Uncounted | None = None
        self._asked = False

    def serves(self) -> bool:
        """Whether the preset in force asks for the same work, with other limits at most."""
        return all(one is None or one.layer.in_force().structure == one.ruled.structure for one in self._layers)

    def limit(self) -> None:
        """Work by the limits in force, which are those of the same structure."""
        for one in self._layers:
            if one is not None:
                one.ruled = one.layer.in_force()
                one.choice = replace(one.choice, ruled=one.ruled)
                one.ruled.limits_into(one.limits)

    def _made(self, block: OffloadedLayer, top_k: int) -> _Layer:
        ruled = block.in_force()
        key = ruled.structure, block.substitutes
        if key not in self._forms:
            room, like = top_k * block.packed.rows.data.shape[1], fields(ruled, top_k, self._total, block.heard(1))
            form = self._forms[key] = Form(like, room, self._total, self._control)
            if block.substitutes:
                form.residents = Residents(block.packed.rows.data.shape[0], self._total.y.device)
        form = self._forms[key]
        here, there = form.record.here, form.record.there
        calls = Calls(torch.zeros_like(here["experts"]), here["experts"], here["weights"])
        work = Work(calls, here["thresholds"], here.get("products"), here.get("late"))
        choice = Choice(ruled, here["chosen"], here["scores"], work, here["routed"] if block.substitutes else None)
        stepped = StepInputs(there["hidden"], form.calls, there.get("products"))
        return _Layer(block, ruled, ruled, ruled.limits_in_place(), form, choice, stepped)

    def find(self, index: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> None:
        """Captured: the end of layer `index` before the host decides. hidden (1, H), experts and weights (1, K)."""
        one = self._layers[index]
        assert one is not None
        form, ruled = one.form, one.captured
        found = {"hidden": hidden, "reached": self._total.reached, "routed": experts}
        if form.residents is not None:
            experts, weights = one.layer.stand_in(hidden, experts, weights, form.residents.read())
        work = kernels.select(experts, weights, one.limits, ruled.rule)
        calls = replace(work.calls, tokens=form.calls.tokens)
        given = hidden, ruled.layer.up, calls, work.thresholds, form.listing
        kernels.list_active(*given, x_bits=self._control.preset.x_bits)
        found |= {"chosen": experts, "scores": weights.float(), "experts": calls.experts, "thresholds": work.thresholds}
        found["weights"] = calls.weights.float()
        for name, tensor in (("products", work.products), ("late", work.late), ("heard", one.layer.heard(1))):
            if tensor is not None:
                found[name] = tensor
        form.record.write(found)
        self._total.reached.zero_()

    def begin(self) -> None:
        """Capture sums where the rows are elsewhere than they were. The device has done all its work."""
        for one in self._layers:
            if one is not None and one.form.serves != self._shared.memory.rows.data_ptr():
                one.form.sum(self._shared.rows(one.ruled.layer.rows.layout))

    def run(self, index: int, before: Captured) -> None:
        """Layer `index`, whose graph is `before`, from there to its output.

        Raises:
            Cancelled: the answer was stopped.
        """
        one, shared = self._layers[index], self._shared
        assert one is not None
        if self._control.cancelled.is_set():
            raise Cancelled
        if one.form.residents is not None:
            one.form.residents.write(one.layer.residents())
        before.replay()
        shared.scheduler.look()
        before.wait()
        self._count(one.form.record.here["reached"])
        step, total = one.step(), _CardSum(one.form, self._total.y)
        one.layer.decide(step, total)
        total.end()
        if self._control.counting:
            self._keep(one, step, total)
        shared.scheduler.look()

    def _keep(self, one: _Layer, step: OffloadedStep, total: _CardSum) -> None:
        """Count the step once the device has counted its neurons: with the next one, or when the telemetry is read."""
        choice = step.choice
        calls = choice.experts.flatten().bincount(minlength=len(self._telemetry.layers[0].calls)).tolist()
        computed, active = int(choice.work.thresholds.isfinite().sum()), step.active.neurons.numel()
        self._uncounted = _Uncounted(one.layer, one.ruled, calls, computed, active, total.reached_here)
        one.layer.count_substituted(choice)
        if not self._asked:
            self._asked = True
            self._telemetry.count(self._read, self._total.reached)

    def _read(self, reached: Tensor) -> None:
        self._asked = False
        self._count(reached)

    def _count(self, reached: Tensor) -> None:
        if self._uncounted is not None:
            step, self._uncounted = self._uncounted, None
            step.count(int(reached))
