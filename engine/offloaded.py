"""One layer whose rows lie in RAM: a decode step, start to end (DESIGN section 5).

Find the active neurons; locate their rows; place what is absent, copied or computed by the CPU where it lies; compute
what is there; look ahead to the next layer; add up what has come. Prompts go by expert instead, see streaming.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.layouts import ExpertRows
from ..kernels.types import Active, Calls
from ..models.packed import PackedLayer
from . import placement, selection
from .cache import Keys
from .devices import Partial
from .moe import DECODE_TOKENS, Control, MoELayer, Plan, Share
from .offload import Offload
from .streaming import Prompt
from .telemetry import Telemetry

RESIDENT = 0.5  # share of an expert's rows in the pool from which it counts as resident

Mask = NDArray[np.bool_]


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

    def _choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Resident experts may stand in for absent ones of about the same score (importance-driven scheduling)."""
        alpha = self.plan.preset.alpha
        if not alpha or self.router is None or len(hidden) > DECODE_TOKENS:
            return index, weights
        probabilities = F.linear(hidden.float(), self.router.float()).softmax(-1)
        resident = _InPool(self.shared.pool.resident(self.index))
        taken, kept = selection.substitute_all(probabilities, index, weights, resident, alpha)
        if self.control.counting:
            self.telemetry.layers[self.index].substituted += int((taken[:, :, None] != index[:, None]).all(-1).sum())
        return taken, kept

    def _step(self, hidden: Tensor, calls: Calls) -> tuple[Tensor, Tensor]:
        shared, plan = self.shared, self.plan
        shared.device.dense(len(hidden))
        limits = plan.thresholds[calls.experts]
        active = shared.device.up(hidden, plan.layer.up, calls, limits, plan.preset.lossless)
        shared.pool.release()  # the device has done all that came before
        shared.collect()
        shared.forget(self.index)  # what was guessed and has not begun: now it is known what is needed
        step = _Step(self, hidden, calls, active)
        self._compare(step.keys)
        step.locate()
        step.place()
        step.compute()
        if len(hidden) <= DECODE_TOKENS:
            self._look_ahead(hidden, step.y)
        return step.finish()

    def _many(self, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        ram = Plan(self.ram, self.plan.preset)
        Prompt(self.shared, self.index, self.plan, ram, hidden, out, self.control).run(shares)

    def _look_ahead(self, hidden: Tensor, output: Tensor) -> None:
        """Fetch what the next layer will probably need (FloE section 3.3): its experts by the predictor, their neurons
        by its own up projection. output: (B, H) of this layer, as far as it is known."""
        shared, following = self.shared, self.following
        if following is None or shared.predictor is None:
            return
        if shared.predictor.attends:
            shared.device.dense(len(hidden))
        guess = shared.predictor.guess(self.index, hidden, output)
        scores = shared.predictor.experts(self.index, hidden, self.chosen, guess)
        best = scores.topk(self.chosen.shape[1])
        tokens = torch.arange(len(hidden), device=hidden.device).repeat_interleave(self.chosen.shape[1])
        calls = Calls(tokens, best.indices.flatten(), best.values.flatten())
        plan = following.guessing()
        found = shared.device.up(guess, plan.layer.up, calls, plan.thresholds[calls.experts], exact=False)
        keys, ends, worth = following.keys(plan, calls, found), found.offsets.tolist(), calls.weights.tolist()
        following.guess(keys)
        table = shared.pool.slots[following.index].reshape(-1)
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

    def _compare(self, keys: Keys) -> None:
        if self._guess is None or not self.control.counting:
            return
        counts, marks = self.telemetry.layers[self.index], self.shared.marks
        marks[self._guess] = True
        counts.guessed += self._guess.size
        counts.needed += keys.size
        counts.right += int(np.count_nonzero(marks[keys]))
        marks[self._guess] = False
        self._guess = None

    @staticmethod
    def keys(plan: Plan, calls: Calls, active: Active) -> Keys:
        """(N,) of the active neurons: e * F + n, which is the same in halves and in whole experts."""
        neurons = plan.layer.rows.data.shape[1]
        return (
            np.repeat(calls.experts.cpu().numpy() * neurons, np.diff(active.offsets.numpy())) + active.neurons.numpy()
        )


class _InPool:
    """The experts of which the pool holds at least half."""

    def __init__(self, shares: NDArray[np.float32]) -> None:
        self._shares = shares

    def __contains__(self, expert: int) -> bool:
        return bool(self._shares[expert] >= RESIDENT)

    def use(self, expert: int) -> bool:
        return expert in self


class _Step:
    """A few tokens in one layer. Masks are (N,), over the active neurons of all calls."""

    def __init__(self, layer: OffloadedLayer, hidden: Tensor, calls: Calls, active: Active) -> None:
        self.layer, self.shared, self.device = layer, layer.shared, layer.shared.device
        self.plan, self.hidden, self.calls, self.active = layer.plan, hidden, calls, active
        self.ends = active.offsets.numpy()
        self.keys = layer.keys(layer.plan, calls, active)
        self.limits = None if self.plan.products is None else self.plan.products[calls.experts]
        self.table = self.shared.pool.slots[layer.index].reshape(-1)
        self.y = torch.zeros_like(hidden)
        self.reached = torch.zeros(len(calls.experts), dtype=torch.int64, device=hidden.device)
        self.on_cpu = np.zeros(len(self.keys), np.bool_)
        self.beside: Future[Partial] | None = None
        self.waited = 0.0

    def locate(self) -> None:
        """Which of the rows are there, on their way, or absent."""
        pool, layer = self.shared.pool, self.layer
        scores = np.zeros(pool.slots.shape[1], np.float32)
        np.add.at(scores, layer.chosen.cpu().numpy().reshape(-1), layer.scores.float().cpu().numpy().reshape(-1))
        pool.heard(layer.index, scores / len(layer.chosen))
        found = pool.find(layer.index, self.keys)
        self.ready, self.coming, self.absent = found.ready, found.coming, found.slots < 0

    def place(self) -> None:
        """Start the absent rows: on their way, or computed by the CPU where they lie (Fiddler)."""
        lenient = self.plan.preset.lenient
        missing = self._per_call(self.absent)
        if not lenient and self.shared.parts.cpu and missing.any():
            self._share_with_cpu(missing)
        self.copied = self.absent & ~self.on_cpu
        # In the lenient mode nothing is waited for (CORM): what is absent is left out and comes for later tokens.
        self.left = self._each_once(self.copied)
        self.first = self.shared.fetch(self.layer.index, self.left, urgent=not lenient)
        self._move_whole(missing)

    def compute(self) -> None:
        """What is there already."""
        self._add(self.ready)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Add what has come since: y (B, H) and counts (P, 2) as `kernels.moe_step` gives them."""
        if self.plan.preset.lenient:
            self.coming |= self.absent
        else:
            if self.coming.any():
                self.waited += self.shared.await_slots(self.layer.index, self.table[self.keys[self.coming]])
                self._add(self.coming)
            self._add_copied()
            if self.beside is not None:
                y, reached = self.device.joined(self.beside)
                self.y += y
                self.reached += reached
        if self.layer.control.counting:
            self._count()
        return self.y, torch.stack([self.active.offsets.diff().to(self.reached.device), self.reached], dim=1)

    def _share_with_cpu(self, missing: NDArray[np.int64]) -> None:
        device, nbytes = self.device, self.shared.rows.shape[1]
        queued = device.link.queued_bytes() / device.rates.link_bytes_s
        weights = self.calls.weights.float().tolist()
        taken = placement.share(missing.tolist(), nbytes, weights, device.rates, queued, device.cpu_share)
        if not any(taken):
            return
        # The last of each call: neurons lie by falling importance, and those that are copied stay for later tokens.
        rank = np.cumsum(self.absent)
        rank = rank - self._spread(np.concatenate(([0], rank))[self.ends[:-1]])
        self.on_cpu = self.absent & (rank > self._spread(missing - np.array(taken)))
        rows = Plan(self.layer.ram, self.plan.preset).layer.rows
        hidden, limits = self.hidden.cpu(), None if self.limits is None else self.limits.cpu()
        calls = Calls(self.calls.tokens.cpu(), self.calls.experts.cpu(), self.calls.weights.cpu())
        part = self._part(self.on_cpu, self.active.neurons)
        part = Active(part.offsets, part.neurons, part.values.cpu())
        self.beside = device.rows_beside(hidden, rows, calls, part, limits, self.plan.preset.lossless)

    def _move_whole(self, missing: NDArray[np.int64]) -> None:
        """Of an expert that is mostly active and partly absent, bring the rest as well (CORM)."""
        neurons = self.plan.layer.rows.data.shape[1]
        counts, experts = np.diff(self.ends), self.calls.experts.tolist()
        for call in np.flatnonzero(missing):
            if placement.whole(int(counts[call]), neurons, self.shared.parts.whole):
                rest = np.arange(experts[call] * neurons, (experts[call] + 1) * neurons)
                rest = rest[self.table[rest] < 0]
                self.shared.fetch(self.layer.index, rest, urgent=False, score=np.inf)

    def _add_copied(self) -> None:
        """Rows that were fetched for this step; where the pool is smaller than that, load after load."""
        shared, transfer, left = self.shared, self.first, self.left
        while left.size:
            arrived, left = np.split(left, [transfer.index.size])
            if arrived.size:
                self.waited += self.device.wait(transfer)
                shared.collect()
                every = arrived.size == self.left.size
                self._add(self.copied if every else self.copied & np.isin(self.keys, arrived))
            if left.size:
                shared.settle()  # what this step has computed may go now
                transfer = shared.fetch(self.layer.index, left, urgent=True)

    def _add(self, mask: Mask) -> None:
        if not mask.any():
            return
        part = self._part(mask, torch.from_numpy(self.table[self.keys].astype(np.int64)))
        shared, layout = self.shared, self.plan.layer.rows.layout
        rows, exact = ExpertRows(layout, shared.rows[None]), self.plan.preset.lossless
        y, reached = self.device.rows(self.hidden, rows, self.calls, part, self.limits, exact)
        self.y += y
        self.reached += reached

    def _part(self, mask: Mask, places: Tensor) -> Active:
        """The active neurons under a mask; `places` (N,) says where their rows are."""
        chosen = torch.from_numpy(np.flatnonzero(mask))
        values = self.active.values.index_select(0, chosen.to(self.active.values.device))
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(mask)))[self.ends])
        return Active(offsets, places[chosen], values)

    def _per_call(self, mask: Mask) -> NDArray[np.int64]:
        return np.diff(np.concatenate(([0], np.cumsum(mask)))[self.ends])

    def _each_once(self, mask: Mask) -> Keys:
        """The keys under a mask; one token names none twice."""
        keys = self.keys[mask]
        return keys if len(self.hidden) == 1 else np.unique(keys)

    def _spread(self, of_calls: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.repeat(of_calls, np.diff(self.ends))

    def _count(self) -> None:
        counts = self.layer.telemetry.layers[self.layer.index]
        counts.ready += int(self.ready.sum())
        counts.coming += int(self.coming.sum())
        counts.copied += int(self.copied.sum())
        counts.on_cpu += int(self.on_cpu.sum())
        counts.waited += self.waited
        hit = 2 * self._per_call(self.ready | self.coming) >= np.diff(self.ends)
        counts.looked += hit.size
        counts.hit += int(hit.sum())
