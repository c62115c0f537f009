"""One layer whose rows lie in RAM: a decode step, start to end (DESIGN section 5).

Find the active neurons; locate their rows; place what is absent, copied or computed by the CPU where it lies; compute
what is there; look ahead to the next layer; add up what has come: those in between are offloaded_step.py's. Prompts go
by expert instead, see streaming.py.

On a GPU the host waits once for what a layer's step needs (`Device.fetched`); before that for the router's choice where
the preset leaves experts out or replaces some, and again for the list of neurons that is guessed for the next layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.types import Active, Calls
from ..models.packed import PackedLayer
from . import selection
from .cache import Keys
from .moe import DECODE_TOKENS, Control, MoELayer, Plan, Share
from .offload import Offload
from .offloaded_step import Given, Step
from .streaming import Prompt
from .telemetry import LayerCounts, Telemetry

RESIDENT = 0.5  # share of an expert's rows in the pool from which it counts as resident


class OffloadedLayer(MoELayer):
    """The experts of one layer: up projections on the device, rows in RAM and some of them in the pool.

    Args:
        packed: up projections and thresholds on the device, rows in RAM. ram: the same layer, all of it in RAM.

    Attributes:
        following: the next layer; None for the last. router: (E, H) this layer's; without it no expert is replaced.
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
        self.router: Tensor | None = None
        self._guess: Keys | None = None
        self._guessing: Plan | None = None
        self._in_ram: Plan | None = None

    def _choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Resident experts may stand in for absent ones of about the same score (importance-driven scheduling)."""
        preset, few = self.plan.preset, hidden.shape[0] <= DECODE_TOKENS
        if preset.alpha and few and self.router is not None:
            probabilities = F.linear(hidden.float(), self.router.float()).softmax(-1)
            index, weights, probabilities = self.shared.device.fetched(index, weights, probabilities)
            resident = _InPool(self.shared.pool.resident(self.index))
            taken, weights = selection.substitute_all(probabilities, index, weights, resident, preset.alpha)
            if self.control.counting:
                others = int((taken[:, :, None] != index[:, None]).all(-1).sum())
                self.telemetry.layers[self.index].substituted += others
            return taken, weights
        if few and (preset.drop or preset.major):  # what is left out is decided on the host
            index, weights = self.shared.device.fetched(index, weights)
        return index, weights

    def _step(self, hidden: Tensor, calls: Calls) -> tuple[Tensor, Tensor]:
        shared, plan, device = self.shared, self.plan, self.shared.device
        device.dense(hidden.shape[0])
        calls = Calls(*device.sent(calls.tokens, calls.experts, calls.weights))
        there = Given(hidden, calls, None if plan.products is None else plan.products.index_select(0, calls.experts))
        # A prompt's hidden states are much, and few of them go to the CPU: they go over if it takes a share.
        left = [] if hidden.shape[0] <= DECODE_TOKENS else [hidden]
        asked = there.tensors()[len(left) :]
        untold, shared.untold = shared.untold, []
        active, values, here = device.up(
            *(hidden, plan.layer.up, calls, plan.thresholds.index_select(0, calls.experts), plan.preset.x_bits),
            (*asked, self.chosen, self.scores, *(late.counts for late in untold)),
        )
        shared.pool.release()  # the device has done all that came before
        shared.collect()
        shared.forget(self.index)  # what was guessed and has not begun: now it is known what is needed
        self.chosen, self.scores, *told = here[len(asked) :]
        for late, counts in zip(untold, told, strict=True):
            late.layer.tell(late, counts)
        step = Step(self, there, Given.of([*left, *here[: len(asked)]]), active, values)
        self._compare(step.here.calls, active)
        step.locate()
        step.place()
        step.compute()
        if hidden.shape[0] <= DECODE_TOKENS:
            self._look_ahead(hidden, step.y)
        return step.finish()

    def _count(self, chosen: Tensor, calls: Calls, counts: Tensor) -> None:
        """Where the counts are still to be computed, they are told when the host next waits, in whichever layer."""
        late = Untold(self, self.telemetry.layers[self.index], chosen, calls, counts)
        if counts.is_cpu:
            self.tell(late, counts)
        else:
            self.shared.untold.append(late)

    def tell(self, late: Untold, counts: Tensor) -> None:
        """Count a step whose `counts` (P, 2) are on the host now; left out if another answer is counted by now."""
        if self.telemetry.layers[self.index] is late.answer:
            super()._count(late.chosen, late.calls, counts)

    def _many(self, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        Prompt(self.shared, self.index, self.plan, self.in_ram(), hidden, out, self.control).run(shares)

    def in_ram(self) -> Plan:
        """What the preset in force makes of the rows in RAM."""
        if self._in_ram is None or self._in_ram.preset is not self.plan.preset:
            self._in_ram = Plan(self.ram, self.plan.preset)
        return self._in_ram

    def _look_ahead(self, hidden: Tensor, output: Tensor | None) -> None:
        """Fetch what the next layer will probably need (FloE section 3.3): its experts by the predictor, their neurons
        by its own up projection. output: (B, H) of this layer, as far as it is known; None for nothing."""
        shared, following = self.shared, self.following
        if following is None or shared.predictor is None:
            return
        if shared.predictor.attends:
            shared.device.dense(hidden.shape[0])
        guess = shared.predictor.guess(self.index, hidden, output)
        (chosen,) = shared.device.sent(self.chosen)
        scores = shared.predictor.experts(self.index, hidden, chosen, guess)
        best = scores.topk(self.chosen.shape[1])
        tokens = torch.arange(len(hidden), device=hidden.device).repeat_interleave(self.chosen.shape[1])
        calls = Calls(tokens, best.indices.flatten(), best.values.flatten())
        plan = following.guessing()
        active, _, (experts, weights) = shared.device.up(
            *(guess, plan.layer.up, calls, plan.thresholds[calls.experts], 8), (calls.experts, calls.weights)
        )
        keys, ends, worth = following.keys(plan, experts, active), active.offsets.tolist(), weights.tolist()
        following.guess(keys)
        table = shared.pool.layers[following.index]
        for call in sorted(range(len(worth)), key=worth.__getitem__, reverse=True):
            wanted = keys[ends[call] : ends[call + 1]]
            absent = wanted[table[wanted] < 0]
            if absent.size and not shared.prefetch(following.index, absent, worth[call]):
                return  # the pool has no room for more

    def guessing(self) -> Plan:
        """How this layer's active neurons are guessed: by whole experts, since their scores are guesses too."""
        if self._guessing is None or self._guessing.preset is not self.control.preset:
            self._guessing = Plan(self.packed, self.control.preset, halves=False)
        return self._guessing

    def guess(self, keys: Keys) -> None:
        """Note the neurons that this layer will need by the predictor, each once or once per token, to be compared with
        those that it does."""
        self._guess = keys

    def _compare(self, calls: Calls, active: Active) -> None:
        if self._guess is None or not self.control.counting:
            return
        counts, marks = self.telemetry.layers[self.index], self.shared.marks
        marks[self._guess] = True
        counts.guessed += self._guess.size
        counts.needed += active.neurons.numel()
        counts.right += int(np.count_nonzero(marks[self.keys(self.plan, calls.experts, active)]))
        marks[self._guess] = False
        self._guess = None

    @staticmethod
    def keys(plan: Plan, experts: Tensor, active: Active) -> Keys:
        """(N,) of the active neurons of calls of experts (P,): e * F + n, the same in halves and in whole experts."""
        starts = experts.numpy() * plan.layer.rows.data.shape[1]
        return np.repeat(starts, np.diff(active.offsets.numpy())) + active.neurons.numpy()


@dataclass(frozen=True, slots=True)
class Untold:
    """A step of a layer that is not counted yet.

    Attributes:
        answer: what it is counted in. chosen: (B, K) on the host. counts: (P, 2) on the device.
    """

    layer: OffloadedLayer
    answer: LayerCounts
    chosen: Tensor
    calls: Calls
    counts: Tensor


class _InPool:
    """The experts of which the pool holds at least half."""

    def __init__(self, shares: NDArray[np.float32]) -> None:
        self._shares = shares

    def __contains__(self, expert: int) -> bool:
        return bool(self._shares[expert] >= RESIDENT)

    def use(self, expert: int) -> bool:
        return expert in self
