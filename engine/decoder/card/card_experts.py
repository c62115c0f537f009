"""The experts of layers whose rows are in a pool, on a card: graphs around what the host decides.

A layer's graph (`card_layers.py`) ends with the neurons that it found active, listed in pinned memory together with
all else that the host's decisions need (`card_lists.py`). The host waits for that, and one compiled call places the
rows and lists in pinned memory those that are there, which a graph adds up. Another call waits for those on their way
and for the CPU's share, which a second graph adds. These two graphs serve all layers. So a layer takes six calls from
Python, three of them graphs; what was computed is counted for all layers at once (`card_counts.py`).

A layer that looks ahead has a graph more for each predictor, behind the first sum: what the next layer will need,
listed in the same way. The host sends for it once the next layer's graph is under way, which the card begins behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels.cpu.binding import codes, library
from ....kernels.cpu.offload_steps import Beside
from ....kernels.listed import Total
from ....kernels.offload.placing import Found
from ....kernels.types import Active, Calls, Limits, Work
from ...experts.moe_layer import Cancelled, Choice
from ...experts.offloaded_layer import OffloadedLayer
from ...experts.offloaded_step import OffloadedStep, StepInputs
from ...experts.ruled_layer import RuledLayer
from ...offload.predictor import Predictor
from ...offload.scheduler import Scheduler
from ..graphs import Captured, mark
from .card_counts import CardCounts
from .card_lists import Form, Guess, Residents, fields


@dataclass(slots=True)
class _Layer:
    """A layer, and what its steps are made of: views of memory that stays, so once for all tokens.

    Attributes:
        captured: under the preset of the capture. ruled: under the one in force. limits: of that, in place.
        step, placed: `floe_step` and its `floe_placed`. noted: see `CardCounts`.
        aheads: predict the next layer's step, by the predictor's name. expects: what the layer before predicts.
        guess: its `floe_guess`.
    """

    layer: OffloadedLayer
    captured: RuledLayer
    ruled: RuledLayer
    limits: Limits
    form: Form
    step: Any = None
    placed: Any = None
    noted: tuple[NDArray[Any], ...] = ()
    aheads: dict[str, Captured] = field(default_factory=dict)
    expects: Guess | None = None
    guess: Any = None

    def choice(self) -> Choice:
        """What the host knows of a step, once it is found."""
        here = self.form.record.here
        calls = Calls(torch.zeros_like(here["experts"]), here["experts"], here["weights"])
        work = Work(calls, here["thresholds"], here.get("products"), here.get("late"))
        routed = here["routed"] if self.form.residents is not None else None
        return Choice(self.ruled, here["chosen"], here["scores"], work, routed)

    def stepped(self, total: int) -> OffloadedStep:
        """The step with so many active neurons."""
        listing, here, there = self.form.listing, self.form.record.here, self.form.record.there
        active = Active(listing.offsets, listing.neurons[:total], listing.copies[:total])
        inputs = StepInputs(there["hidden"], self.form.calls, there.get("products"))
        given = self.layer.shared, self.layer.pooled, self.choice(), self.layer.in_ram, here["hidden"], inputs
        return OffloadedStep(*given, active, listing.values, here.get("heard"))

    def found(self) -> Found:
        """The step, with room for all neurons."""
        return self.stepped(self.form.listing.neurons.numel()).found()

    def prepare(self, scheduler: Scheduler) -> None:
        """Make what the compiled calls take."""
        step = self.stepped(0)
        work, rows = step.choice.work, self.layer.in_ram().layer.rows
        beside = Beside(rows, step.hidden, work.calls, work.products, self.ruled.preset.x_bits)
        self.step, self.placed = scheduler.lasting(self.found(), beside, self.form.lists)
        if self.expects is not None:
            guess = self.expects.found(self.layer.pooled, self.ruled.layer.rows.data.shape[1])
            self.guess = scheduler.guessing(guess, self.expects.record.here["named"])


class CardExperts:
    """The experts of the layers of a model that are in a pool, for one token on one card.

    Args:
        blocks: of all layers; None for one that is called as a module. total: where each layer's output goes.

    Raises:
        Unsupported: the host's decisions are not compiled.
    """

    def __init__(self, blocks: Sequence[OffloadedLayer | None], top_k: int, total: Total) -> None:
        first = next(block for block in blocks if block is not None)
        self._total, self._control, self._shared = total, first.control, first.shared
        self._scheduler, self._settled = first.shared.scheduler, -1
        self._forms: dict[object, Form] = {}
        self._guesses: dict[object, Guess] = {}
        self._asked = mark(total.y.device)
        self._layers = [None if block is None else self._made(block, top_k) for block in blocks]
        self._pooled = [one for one in self._layers if one is not None]
        self._served = [0, *itertools.accumulate(int(one is not None) for one in self._layers)]  # of so many layers
        self.counts = CardCounts(self._pooled, total.reached)
        for one, noted in zip(self._pooled, self.counts.noted, strict=True):
            one.noted = noted

    def serves(self) -> bool:
        """Whether the preset in force asks for the same work, with other limits at most."""
        return all(one.layer.in_force().structure == one.ruled.structure for one in self._pooled)

    def limit(self) -> None:
        """Work by the limits in force, which are those of the same structure."""
        self.counts.drain()
        for one in self._pooled:
            one.ruled = one.layer.in_force()
            one.ruled.limits_into(one.limits)
        self._settled = -1

    def _made(self, block: OffloadedLayer, top_k: int) -> _Layer:
        ruled = block.in_force()
        key = ruled.structure, block.substitutes
        if key not in self._forms:
            room, like = top_k * block.packed.rows.data.shape[1], fields(ruled, top_k, self._total, block.heard(1))
            form = self._forms[key] = Form(like, room, self._total, self._control)
            if block.substitutes:
                form.residents = Residents(block.packed.rows.data.shape[0], self._total.y.device)
        return _Layer(block, ruled, ruled, ruled.limits_in_place(), self._forms[key])

    def number(self, index: int) -> int:
        """Of a layer among those with experts."""
        one = self._layers[index]
        assert one is not None
        return one.layer.index

    def looks(self, index: int) -> tuple[Predictor, ...]:
        """What predicts the step of layer index + 1 in layer `index`'s step, if both are among these. It has memory for
        that afterwards.
        """
        one, following = self._layers[index], self._layers[index + 1] if index + 1 < len(self._layers) else None
        if one is None or following is None or one.layer.neighbours.following is not following.layer:
            return ()
        found = self._shared.may_look(one.layer.pooled)
        if found and following.expects is None:
            there, key = following.form.record.there, following.captured.structure
            if key not in self._guesses:
                like = {"experts": there["experts"], "weights": there["weights"], "named": there["chosen"]}
                self._guesses[key] = Guess(like, following.form.listing.neurons.numel(), there["hidden"])
            following.expects = self._guesses[key]
        return found

    def predict(self, index: int, predictor: Predictor, hidden: Tensor, guess: Tensor) -> None:
        """Captured: what layer index + 1 will need. hidden: (1, H) layer `index`'s input. guess: that layer's."""
        one, following = self._layers[index], self._layers[index + 1]
        assert one is not None and following is not None
        chosen, ruled = one.form.record.there["chosen"], following.captured
        best = predictor.experts(one.layer.index, hidden, chosen, guess).topk(chosen.shape[1])
        assert following.expects is not None, "`looks` comes before"
        following.expects.write(guess, ruled, (best.values, best.indices), following.limits)

    def look(self, index: int, predictor: Predictor, graph: Captured) -> None:
        """In layer `index` this one does that."""
        one = self._layers[index]
        assert one is not None
        one.aheads[predictor.name] = graph

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
        given = hidden, ruled.layer.signal, calls, work.thresholds, form.listing
        kernels.list_active(*given, x_bits=self._control.preset.x_bits)
        found |= {"chosen": experts, "scores": weights.float(), "experts": calls.experts, "thresholds": work.thresholds}
        found["weights"] = calls.weights.float()
        for name, tensor in (("products", work.products), ("late", work.late), ("heard", one.layer.heard(1))):
            if tensor is not None:
                found[name] = tensor
        form.record.write(found)
        self._total.reached.zero_()

    def begin(self) -> None:
        """Before a token: capture sums where the rows are elsewhere than before. The device has done all its work."""
        if self._settled == self._scheduler.settled:
            return
        self.counts.drain()
        for one in self._pooled:
            if one.form.serves != self._shared.memory.rows.data_ptr():
                one.form.sum(self._shared.rows(one.ruled.layer.rows.layout))
            one.prepare(self._scheduler)
        self._settled = self._scheduler.settled

    def run(self, layers: range, graphs: Sequence[Captured]) -> None:
        """Layers in a row, whose graphs these are, from there to the last one's output.

        Raises:
            Cancelled: the answer was stopped. RuntimeError: the link's failure.
        """
        functions, scheduler, predicts = library(), self._scheduler, self._shared.predicts
        stop, start, end = self._control.cancelled.stop.record, functions.step_start, functions.step_end
        guess, compare, guessed = functions.step_guess, functions.step_compare, False
        offload = scheduler.begin_token(self._shared.device.cpu_share if self._shared.parts.cpu else 0.0)
        ended = False
        try:
            for one, before in zip(self._layers[layers.start : layers.stop], graphs, strict=True):
                assert one is not None
                if stop.raised:
                    raise Cancelled
                step, (ready, late), residents = one.step, one.form.sums, one.form.residents
                if residents is not None:
                    residents.write(one.layer.residents())
                before.replay()
                if guessed:
                    self._asked.synchronize()
                    if code := guess(offload, one.guess):
                        scheduler.failed(one.layer.pooled, code)
                elif predicts:
                    scheduler.look_again()
                before.wait()
                if predicts:
                    self._shared.found(one.layer.pooled)
                if code := start(offload, step):
                    scheduler.failed(one.layer.pooled, code)
                ready.replay()
                if guessed and self._control.counting and (code := compare(offload, step, one.guess)):
                    scheduler.failed(one.layer.pooled, code)
                guessed = predicts and self._look_ahead(one)
                if code := end(offload, step):
                    self._loads(one, offload, code)
                if step.late:
                    late.replay()
                if predicts:
                    scheduler.look()
                seen, record, sizes, ends, kept, reached = one.noted
                seen[:], sizes[:-1], kept[:] = record, ends, reached
                sizes[-1] = one.form.listing.offsets[-1]
            ended = True
        finally:
            scheduler.end_token()
            if not ended:
                self.counts.leave_out()

    def _look_ahead(self, one: _Layer) -> bool:
        """While the device adds up the rows that are there; whether it has been asked what the next layer will need."""
        predictor, layer = self._shared.looks(one.layer.pooled), one.layer
        if layer.pooled in self._scheduler.guessed:  # another card's layer has
            layer.compare(one.stepped(int(one.form.listing.offsets[-1])).found())
        if predictor is None:
            return False
        if (graph := one.aheads.get(predictor.name)) is not None:
            graph.replay()
            self._asked.record()
            return True
        following = layer.neighbours.following
        if following is not None and following.shared is not self._shared:
            step = one.stepped(int(one.form.listing.offsets[-1]))
            layer.look_ahead(step.there.hidden, step.choice, self._total.y)
        return False

    def _loads(self, one: _Layer, offload: Any, code: int) -> None:
        """The rows of a step that come in several loads, since the pool is too small, up to the last one."""
        while code == codes.MORE:
            one.form.sums[1].replay()
            self._shared.device.finish()
            code = library().step_end(offload, one.step)
        if code:
            self._scheduler.failed(one.layer.pooled, code)

    def end(self, layers: int) -> None:
        """Count a token that went through so many layers, if tokens are counted."""
        if self._control.counting:
            self.counts.add(self._served[layers])
        else:
            self.counts.leave_out()
