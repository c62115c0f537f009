"""One layer whose rows are in RAM: a decode step, start to end.

Find the active neurons; place their rows (absent ones are copied, or computed in RAM by the CPU); compute those that
are there; look ahead to the next layer; add up what arrived. The stages in between are in offloaded_step.py. Prompts go
by expert instead, see offloaded_prefill.py.

On a GPU the host waits once per layer, for what the step needs (`Device.arrived`). The device decides what the preset
leaves out or replaces, and the list of neurons predicted for the next layer is taken once it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.offload.placing import Found
from ...kernels.rule import Rule
from ...kernels.types import Limits, Work
from ...models.pack.packed_model import PackedLayer
from ..offload.offload import Offload
from ..offload.scheduler import PendingPrefetch
from ..telemetry import Telemetry
from . import substitution
from .moe_layer import DECODE_TOKENS, Choice, Control, MoELayer, Result
from .offloaded_prefill import StreamedPrompt
from .offloaded_step import OffloadedStep, StepInputs, Sum
from .ruled_layer import RuledLayer, Share

RESIDENT = 0.5  # share of its rows in the pool from which an expert counts as resident


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The neighbours of a layer, wrapped in one value since nn.Module would register modules as its own parts.

    Attributes:
        gate: this layer's router of probabilities; without it no expert is replaced. following: the next layer; None
            for the last. normalized: whether the weights of a token's experts add up to a constant.
    """

    gate: Any = None
    following: OffloadedLayer | None = None
    normalized: bool = True


def expected(experts: Tensor, scores: Tensor, limits: Limits, rule: Rule) -> tuple[Work, Tensor]:
    """The work of a layer for which these experts and scores (B, K) are predicted, and its thresholds (P,). Left out is
    what the rule leaves out at those scores, and experts of less than the mean score: they are right too seldom for
    what their rows displace.
    """
    work = kernels.select(experts, scores.float().softmax(-1), limits, rule)
    return work, work.thresholds.masked_fill(work.calls.weights * experts.shape[1] < 1, torch.inf)


class OffloadedLayer(MoELayer):
    """The experts of one layer: up projections on the device, rows in RAM and some of them in the pool.

    Args:
        index: a layer that the pool serves. packed: up projections and thresholds on the device, rows in RAM.
        ram: the same layer, all of it in RAM.

    Attributes:
        pooled: the layer's number in the pool's tables, by which everything shared knows it.
    """

    resident = False

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
        self.ram, self.shared, self.pooled = ram, shared, shared.pooled[index]
        self.neighbours = Neighbours()
        shared.ring.register(index, ram, self.pooled)
        self._in_ram: RuledLayer | None = None
        self._scores: Tensor | None = None

    def hears(self, weight: Tensor) -> Tensor:
        """Where a router of `weight` (E, H) leaves the scores of all experts, (T, E), before a step of a few tokens."""
        self._scores = weight.new_empty(DECODE_TOKENS, len(weight), dtype=torch.float32)
        return self._scores

    def heard(self, tokens: int) -> Tensor | None:
        """Those scores of a step of so many tokens, on the device; None where nothing leaves them."""
        return None if self._scores is None else self._scores[:tokens]

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `MoELayer`."""
        with self.shared.device.host("pool", prompt=hidden.shape[0] > DECODE_TOKENS):
            return super().forward(hidden, top_k_index, top_k_weights)

    def choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Choice:
        """Resident experts may stand in for absent ones of about the same score (importance-driven scheduling)."""
        ruled = self.in_force()
        if not self.substitutes or hidden.shape[0] > DECODE_TOKENS:
            return Choice(ruled, index, weights, ruled.work(index, weights))
        (resident,) = self.shared.device.sent(self.residents())
        experts, scores = self.stand_in(hidden, index, weights, resident)
        return Choice(ruled, experts, scores, ruled.work(experts, scores), routed=index)

    @property
    def substitutes(self) -> bool:
        """Whether the preset in force lets resident experts stand in for absent ones."""
        return self.in_force().rule.alpha > 0 and self.neighbours.gate is not None

    def residents(self) -> Tensor:
        """Which experts count as resident, (E,) bool."""
        return torch.from_numpy(self.shared.pool.resident(self.pooled) >= RESIDENT)

    def stand_in(self, hidden: Tensor, index: Tensor, weights: Tensor, resident: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights (B, K) after resident ones have replaced absent ones; all on the device."""
        gate = self.neighbours.gate
        probabilities = kernels.plain(hidden.float(), gate.weight).softmax(-1)
        given, normalized = (probabilities, index, weights, resident), self.neighbours.normalized
        return substitution.substitute_there(*given, self.ruled.rule.alpha, normalized=normalized)

    def _step(self, hidden: Tensor, choice: Choice) -> Result:
        shared, device = self.shared, self.shared.device
        device.dense(hidden.shape[0])
        step = self._found(hidden, choice)
        if hidden.shape[0] == 1:
            shared.found(self.pooled)
        found = step.found()
        placed, joined = step.start(found)
        total = Sum()
        step.add(placed.ready, total)
        device.began()
        if hidden.shape[0] <= DECODE_TOKENS:
            self.look_ahead(hidden, step.choice, total.y)
        self.compare(found)
        waited = step.finish(found, placed, joined, total)
        if self.control.counting:
            step.count(self.telemetry.layers[self.index], placed, waited)
        result = step.result(total)
        shared.scheduler.look()
        self._look_elsewhere()
        return result

    def _look_elsewhere(self) -> None:
        """The next layer is another card's: let that fetch meanwhile what was predicted."""
        following = self.neighbours.following
        if following is not None and following.shared is not self.shared:
            following.shared.device.meet(self.shared.device)
            following.shared.scheduler.look()

    def _found(self, hidden: Tensor, choice: Choice) -> OffloadedStep:
        """Find the active neurons, and wait for them and for everything else that the host's decisions need."""
        shared, device, ruled, work = self.shared, self.shared.device, choice.ruled, choice.work
        limits, *parts = device.sent(work.thresholds, *StepInputs(hidden, work.calls, work.products).tensors()[1:])
        there = StepInputs.of([hidden, *parts])
        # A prompt's hidden states are large, and few of them go to the CPU: copy them only if it takes a share.
        stays = [] if hidden.shape[0] <= DECODE_TOKENS else [hidden]
        asked = there.tensors()[len(stays) :]
        heard = None if stays else self.heard(hidden.shape[0])
        optional = [tensor for tensor in (choice.routed, work.late, heard) if tensor is not None]
        uncounted = self.telemetry.uncounted()
        active, values, found = device.up(
            *(hidden, ruled.layer.signal, there.calls, limits, ruled.preset.x_bits),
            (*asked, choice.experts, choice.weights, limits, *optional, *chain(*(late.tensors for late in uncounted))),
            shared.scheduler.look_again,
        )
        here, rest = StepInputs.of([*stays, *found[: len(asked)]]), iter(found[len(asked) :])
        experts, weights, limits = next(rest), next(rest), next(rest)
        routed = None if choice.routed is None else next(rest)
        work = Work(here.calls, limits, here.limits, None if work.late is None else next(rest))
        heard = None if heard is None else next(rest)
        for late in uncounted:
            late.count(*(next(rest) for _ in late.tensors))
        choice = Choice(ruled, experts, weights, work, routed)
        return OffloadedStep(shared, self.pooled, choice, self.in_ram, here.hidden, there, active, values, heard)

    def _count(self, result: Result) -> None:
        choice, found = result.choice, self.telemetry.layers[self.index]
        if choice.routed is not None:
            found.substituted += int((choice.experts[:, :, None] != choice.routed[:, None]).all(-1).sum())
        super()._count(result)

    def _many(self, ruled: RuledLayer, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        StreamedPrompt(self.shared, self.index, ruled, self.in_ram(), hidden, out, self.control).run(shares)

    def in_ram(self) -> RuledLayer:
        """The rows in RAM under the preset in force."""
        if self._in_ram is None or self._in_ram.preset is not self.ruled.preset:
            self._in_ram = RuledLayer(self.ram, self.ruled.preset, self.index)
        return self._in_ram

    def look_ahead(self, hidden: Tensor, choice: Choice, output: Tensor | None) -> None:
        """Predict what the next layer will need (FloE section 3.3): its experts by the predictor, their neurons by its
        own up projection, see `expected`. Nothing waits for the answer, see `Scheduler.look`.

        Args:
            output: (B, H) of this layer, as far as it is known; None for nothing.
        """
        shared, following = self.shared, self.neighbours.following
        predictor = shared.looks(self.pooled)
        if following is None or predictor is None:
            return
        device, there, ruled = shared.device, following.shared, following.in_force()
        device.looks()
        if predictor.attends:
            device.dense(hidden.shape[0])
        guess = predictor.guess(self.index, hidden, output)
        (chosen,) = device.sent(choice.experts)
        best = predictor.experts(self.index, hidden, chosen, guess).topk(choice.experts.shape[1])
        work, limits = expected(best.indices, best.values, ruled.limits, ruled.rule)
        also = work.calls.experts, work.calls.weights, best.indices
        if there is not shared:
            there.device.meet(device)
            guess = guess.to(there.device.place)
        asked = there.device.ask(guess, ruled.layer.signal, work.calls, limits, 8, also)
        there.scheduler.ahead = PendingPrefetch(following.pooled, ruled.layer.rows.data.shape[1], asked)

    def compare(self, found: Found) -> None:
        """Count how much of what was predicted for this step is needed."""
        guess = self.shared.scheduler.guessed.pop(self.pooled, None)
        if guess is None or not self.control.counting:
            return
        keys, experts, fetched = guess
        counts, pool, slots = self.telemetry.layers[self.index], self.shared.pool, self.shared.pool.layers[found.layer]
        came = fetched[slots[fetched] >= 0]  # the others were dropped
        counts.unused += (came.size - pool.right(found, came)) * self.shared.memory.row_bytes
        counts.guessed += keys.size
        counts.needed += found.active.neurons.numel()
        counts.right += pool.right(found, keys)
        counts.experts_guessed += experts.numel()
        counts.experts_needed += found.chosen.numel()
        for named, chosen in zip(experts.tolist(), found.chosen.tolist(), strict=True):
            counts.experts_right += len({*named} & {*chosen})
