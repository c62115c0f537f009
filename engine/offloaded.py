"""One layer whose rows lie in RAM: a decode step, start to end (DESIGN section 5).

Find the active neurons; locate their rows; place what is absent, copied or computed by the CPU where it lies; compute
what is there; look ahead to the next layer; add up what has come: those in between are offloaded_step.py's. Prompts go
by expert instead, see streaming.py.

On a GPU the host waits once per layer, for what the step needs (`Device.arrived`). What the preset leaves out or
replaces is decided on the device, and the list of neurons that is guessed for the next layer is taken when it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.types import Active, Calls, Work
from ..models.packed import PackedLayer
from . import selection
from .cache import Keys
from .fetching import Asked
from .moe import DECODE_TOKENS, Control, MoELayer, computed
from .offload import Offload
from .offloaded_step import Given, Step
from .ruled_layer import RuledLayer, Share
from .streaming import Prompt
from .telemetry import LayerCounts, Telemetry

RESIDENT = 0.5  # share of an expert's rows in the pool from which it counts as resident


class OffloadedLayer(MoELayer):
    """The experts of one layer: up projections on the device, rows in RAM and some of them in the pool.

    Args:
        packed: up projections and thresholds on the device, rows in RAM. ram: the same layer, all of it in RAM.

    Attributes:
        following: the next layer; None for the last. gate: this layer's router; without it no expert is replaced.
    """

    def __init__(
        self,
        index: int,
        packed: PackedLayer,
        ram: PackedLayer,
        shared: Offload,
        control: Control,
        telemetry: Telemetry,
    ) -> None:
        super().__init__(index, packed, control, telemetry)
        self.ram, self.shared = ram, shared
        self.following: OffloadedLayer | None = None
        self.gate: Any = None
        self._guess: tuple[Keys, Tensor] | None = None
        self._routed: Tensor | None = None  # the router's own choice, where others may stand in
        self._limits: Tensor  # the thresholds of a step's calls, on the host
        self._in_ram: RuledLayer | None = None

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `MoELayer`."""
        with self.shared.device.host():
            return super().forward(hidden, top_k_index, top_k_weights)

    def _choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Resident experts may stand in for absent ones of about the same score (importance-driven scheduling)."""
        rule, self._routed = self.ruled.rule, None
        if not rule.alpha or hidden.shape[0] > DECODE_TOKENS or self.gate is None:
            return index, weights
        self._routed = index
        probabilities = F.linear(hidden.float(), self.gate.weight.float()).softmax(-1)
        shares = self.shared.pool.resident(self.index)
        (resident,) = self.shared.device.sent(torch.from_numpy(shares >= RESIDENT))
        normalized = selection.normalizes(self.gate)
        return selection.substitute_there(probabilities, index, weights, resident, rule.alpha, normalized=normalized)

    def _step(self, hidden: Tensor, work: Work) -> tuple[Tensor, Tensor]:
        shared, ruled, device = self.shared, self.ruled, self.shared.device
        shared.look()
        device.dense(hidden.shape[0])
        limits, *parts = device.sent(work.thresholds, *Given(hidden, work.calls, work.products).tensors()[1:])
        there = Given.of([hidden, *parts])
        # A prompt's hidden states are much, and few of them go to the CPU: they go over if it takes a share.
        left = [] if hidden.shape[0] <= DECODE_TOKENS else [hidden]
        asked = there.tensors()[len(left) :]
        optional = [tensor for tensor in (self._routed, work.late) if tensor is not None]
        untold, shared.untold = shared.untold, []
        active, values, here = device.up(
            *(hidden, ruled.layer.up, there.calls, limits, ruled.preset.x_bits),
            (*asked, self.chosen, self.scores, limits, *optional, *(late.counts for late in untold)),
        )
        shared.pool.release()  # the device has done all that came before
        shared.collect()
        shared.forget(self.index)  # what was guessed and has not begun: now it is known what is needed
        shared.ahead = None
        here, rest = Given.of([*left, *here[: len(asked)]]), here[len(asked) :]
        self.chosen, self.scores, self._limits, *rest = rest
        self._routed = None if self._routed is None else rest.pop(0)
        weakest = None if work.late is None else rest.pop(0)
        for late, counts in zip(untold, rest, strict=True):
            late.layer.tell(late, counts)
        step = Step(self, there, here, active, values, weakest)
        self._compare(step.here.calls, active)
        step.locate()
        step.place()
        step.compute()
        if hidden.shape[0] <= DECODE_TOKENS:
            self._look_ahead(hidden, step.y)
        result = step.finish()
        shared.look()
        return result

    def _count(self, chosen: Tensor, work: Work, counts: Tensor) -> None:
        """Where the counts are still to be computed, they are told when the host next waits, in whichever layer."""
        if self._routed is not None:
            others = (self.chosen[:, :, None] != self._routed[:, None]).all(-1)
            self.telemetry.layers[self.index].substituted += int(others.sum())
        late = Untold(self, self.telemetry.layers[self.index], chosen, self._limits, counts)
        if counts.is_cpu:
            self.tell(late, counts)
        else:
            self.shared.untold.append(late)

    def tell(self, late: Untold, counts: Tensor) -> None:
        """Count a step whose `counts` (P, 2) are on the host now; left out if another answer is counted by now."""
        if self.telemetry.layers[self.index] is not late.answer:
            return
        self.add_counts(late.chosen.tolist(), computed(counts, late.limits, self.ruled.rule))

    def _many(self, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        Prompt(self.shared, self.index, self.ruled, self.in_ram(), hidden, out, self.control).run(shares)

    def in_ram(self) -> RuledLayer:
        """What the preset in force makes of the rows in RAM."""
        if self._in_ram is None or self._in_ram.preset is not self.ruled.preset:
            self._in_ram = RuledLayer(self.ram, self.ruled.preset, self.index)
        return self._in_ram

    def _look_ahead(self, hidden: Tensor, output: Tensor | None) -> None:
        """Ask what the next layer will probably need (FloE section 3.3): its experts by the predictor, their neurons by
        its own up projection, left out what the preset leaves out at such scores. Nobody waits for the answer, see
        `Offload.look`. output: (B, H) of this layer, as far as it is known; None for nothing."""
        shared, following = self.shared, self.following
        if following is None or shared.predictor is None:
            return
        device, ruled = shared.device, following.in_force()
        if shared.predictor.attends:
            device.dense(hidden.shape[0])
        guess = shared.predictor.guess(self.index, hidden, output)
        (chosen,) = device.sent(self.chosen)
        scores = shared.predictor.experts(self.index, hidden, chosen, guess)
        best = scores.topk(self.chosen.shape[1])
        weights = best.values.float().softmax(-1)
        work = ruled.work(best.indices, weights)
        also = work.calls.experts, work.calls.weights, best.indices
        asked = device.ask(guess, ruled.layer.up, work.calls, work.thresholds, 8, also)
        shared.ahead = Ahead(following, ruled, asked)

    def guess(self, keys: Keys, experts: Tensor) -> None:
        """Note the neurons that this layer will need by the predictor, each once or once per token, and the experts
        (B, K), to be compared with those that it does."""
        self._guess = keys, experts

    def _compare(self, calls: Calls, active: Active) -> None:
        guess, self._guess = self._guess, None
        if guess is None or not self.control.counting:
            return
        keys, experts = guess
        counts, marks = self.telemetry.layers[self.index], self.shared.marks
        marks[keys] = True
        counts.guessed += keys.size
        counts.needed += active.neurons.numel()
        counts.right += int(np.count_nonzero(marks[self.keys(self.ruled, calls.experts, active)]))
        marks[keys] = False
        counts.experts_guessed += experts.numel()
        counts.experts_needed += self.chosen.numel()
        for named, chosen in zip(experts.tolist(), self.chosen.tolist(), strict=True):
            counts.experts_right += len({*named} & {*chosen})

    @staticmethod
    def keys(ruled: RuledLayer, experts: Tensor, active: Active) -> Keys:
        """(N,) of the active neurons of calls of experts (P,): e * F + n, the same in halves and in whole experts."""
        starts = experts.numpy() * ruled.layer.rows.data.shape[1]
        return np.repeat(starts, np.diff(active.offsets.numpy())) + active.neurons.numpy()


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a layer will probably need, as soon as the device has found it.

    Attributes:
        ruled: by which it was asked. asked: its neurons; also experts and scores of the calls, and all named (B, K).
    """

    layer: OffloadedLayer
    ruled: RuledLayer
    asked: Asked

    def fetch(self) -> None:
        """Ask for the rows that are absent, those of the likeliest expert first."""
        active, _, (experts, weights, named) = self.asked.answer()
        layer, shared = self.layer, self.layer.shared
        keys, ends, worth = layer.keys(self.ruled, experts, active), active.offsets.tolist(), weights.tolist()
        if not isfinite(sum(worth)):
            return  # the model has failed, and is going to be told so
        layer.guess(keys, named)
        table = shared.pool.layers[layer.index]
        for call in sorted(range(len(worth)), key=worth.__getitem__, reverse=True):
            wanted = keys[ends[call] : ends[call + 1]]
            absent = wanted[table[wanted] < 0]
            if absent.size and not shared.prefetch(layer.index, absent, worth[call]):
                return  # the pool has no room for more


@dataclass(frozen=True, slots=True)
class Untold:
    """A step of a layer that is not counted yet.

    Attributes:
        answer: what it is counted in. chosen: (B, K), limits: (P,) the thresholds of calls, both on the host.
        counts: (P, 2) on the device.
    """

    layer: OffloadedLayer
    answer: LayerCounts
    chosen: Tensor
    limits: Tensor
    counts: Tensor
