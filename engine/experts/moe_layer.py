"""One MoE layer, start to end: the module that replaces transformers' experts.

This version reads rows in place, in RAM or in the mapped file: route (the model's own), find the active neurons,
compute. Offloaded layers add locating, placing and looking ahead in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, inf

import torch
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.cpu.binding import Stop
from ...kernels.types import Work
from ...models.pack.packed_model import PackedLayer
from ..events import Notice
from ..quality_presets import Preset
from ..telemetry import Telemetry
from .ruled_layer import RuledLayer, Share

PREFILL_CHUNK, LONGEST_CHUNK, STREAMED_CHUNK = 256, 1024, 2048
SHORTEST_CHUNK = 16  # where memory is short: more than go neuron by neuron
_SHARING = 32  # tokens of a chunk for each expert: what it costs to unpack its weights is then shared by enough
DECODE_TOKENS = 8  # tokens in one step: up to this many go neuron by neuron, more expert by expert
# Tokens of a prompt that share an expert: up to this many still go neuron by neuron. More tokens need so many of the
# neurons that reading each once for all of them is faster (measured on full-width experts, CPU).
FEW_TOKENS, FEW_TOKENS_SPARSE = 3, 12


def chunk_for(experts: int, top_k: int) -> int:
    """Tokens of a prompt that go through a model with so many experts at once, where their weights are in RAM."""
    parts = ceil(_SHARING * experts / top_k / PREFILL_CHUNK)
    return min(LONGEST_CHUNK, max(1, parts) * PREFILL_CHUNK)


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The answer was stopped; raised at the next layer."""


class Flag(threading.Event):
    """An event that compiled code can check too, through its `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = Stop()

    def set(self) -> None:
        self.stop.set(True)
        super().set()

    def clear(self) -> None:
        super().clear()
        self.stop.set(False)


class Control:
    """Controls of a running answer, for other threads.

    Attributes:
        preset: what a token may skip, read by each layer at each step. cancelled: set to stop within one layer.
        counting: whether layers add to the telemetry (decode does, prefill does not).
        chunk: tokens of a prompt that go through the model at once: bounds activations, and sets how often progress is
            reported. If experts stream to the device, each chunk brings all of them, so chunks are longer there.
        notices: for the user, until collected.
        make_room: frees some device memory after it ran out; False if there is none to free. None: nothing can.
        ran_out: what the driver said then, which names the card. narrow: whether activations are float16.
    """

    def __init__(self, preset: Preset, chunk: int = PREFILL_CHUNK) -> None:
        self.preset, self.chunk = preset, chunk
        self.cancelled = Flag()
        self.counting = False
        self.notices: list[Notice] = []
        self.make_room: Callable[[], bool] | None = None
        self.ran_out, self.narrow = "", False

    def cut(self, tokens: int) -> bool:
        """Let parts of prompts be at most half as long as these tokens, which device memory was too small for; False if
        they are few already.
        """
        if tokens <= SHORTEST_CHUNK:
            return False
        self.chunk = max(SHORTEST_CHUNK, tokens // 2)
        self.notices.append(
            Notice(
                "The graphics card ran out of memory",
                f"Prompts are now read {self.chunk} tokens at a time, which takes longer. The answer continues.",
            )
        )
        return True


@dataclass(frozen=True, slots=True)
class Choice:
    """The experts of a step's B tokens, and the work on them.

    Attributes:
        ruled: the layer under the preset in force. experts, weights: (B, K). work: the calls of `ruled`.
        routed: (B, K) the router's own choice if resident experts may have replaced some of it; else None.
    """

    ruled: RuledLayer
    experts: Tensor
    weights: Tensor
    work: Work
    routed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a step.

    Attributes:
        choice: what was computed; its experts, weights and thresholds are on the host.
        y: (B, H). counts: (P, 2) neurons per call and stage, as `kernels.moe_step` gives them.
    """

    choice: Choice
    y: Tensor
    counts: Tensor


class MoELayer(nn.Module):
    """The experts of one layer from the packed layout.

    Attributes:
        ruled: the layer under the last step's preset; `in_force` checks whether that is still in force.
        alone: whether it computes its output without other processes. resident: whether all its rows are where its
            hidden states are.
    """

    alone = resident = True

    def __init__(self, index: int, packed: PackedLayer, control: Control, telemetry: Telemetry) -> None:
        super().__init__()
        self.index, self.packed, self.control, self.telemetry = index, packed, control, telemetry
        self.ruled = RuledLayer(packed, control.preset, index)
        # Whoever goes on from the router's choice may add the bias of down instead.
        self._bias = None if packed.down_bias is None else self.register_forward_hook(_add_bias)

    def take_bias(self) -> Tensor | None:
        """(E, H) the bias of down, which the caller adds from now on; None where there is none."""
        if self._bias is not None:
            self._bias.remove()
            self._bias = None
        return self.packed.down_bias

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H).

        Raises:
            Cancelled: the answer was stopped.
        """
        if self.control.cancelled.is_set():
            raise Cancelled
        choice = self.choose(hidden, top_k_index, top_k_weights)
        if hidden.shape[0] > DECODE_TOKENS:
            return self._prefill(hidden, choice)
        result = self._step(hidden, choice)
        if self.control.counting:
            self._count(result)
        return result.y

    def in_force(self) -> RuledLayer:
        """This layer under the preset in force."""
        if self.ruled.preset is not self.control.preset:
            self.ruled = RuledLayer(self.packed, self.control.preset, self.index)
        return self.ruled

    def choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Choice:
        """The work for a router's choice, index and weights (B, K): here all that the rule does not skip."""
        ruled = self.in_force()
        return Choice(ruled, index, weights, ruled.work(index, weights))

    def _step(self, hidden: Tensor, choice: Choice) -> Result:
        ruled, work = choice.ruled, choice.work
        layer, x_bits = ruled.layer, ruled.preset.x_bits
        given = (hidden, layer.signal, layer.rows, work.calls, work.thresholds, work.products)
        return Result(choice, *kernels.moe_step(*given, x_bits=x_bits))

    def _prefill(self, hidden: Tensor, choice: Choice) -> Tensor:
        ruled, work = choice.ruled, choice.work
        backend, layer, rule = kernels.choose(hidden.device), ruled.layer, ruled.rule
        if self.resident and backend.grouped and (at_once := backend.experts_swiglu) is not None:
            given = (hidden, layer.signal, layer.rows, work.calls, work.thresholds, work.products)
            return at_once(*given, ruled.preset.x_bits)[0]
        work, count = replace(work, late=None), len(ruled.limits.signal)
        keys = work.calls.experts
        if rule.drops:  # behind all others
            keys = keys.masked_fill(work.thresholds == inf, count)
        # By expert: its rows are still in the caches. How many calls each one has is all that the host waits for.
        order = keys.argsort(stable=True)
        counts = keys.new_zeros(count + 1).scatter_add_(0, keys, torch.ones_like(keys)).tolist()[:count]
        few = FEW_TOKENS_SPARSE if rule.sparsity >= 0.4 else FEW_TOKENS
        spans = pairwise(accumulate(counts, initial=0))
        rare = torch.cat([order[:0], *(order[begin:end] for begin, end in spans if 0 < end - begin <= few)])
        out = self._step(hidden, replace(choice, work=work.part(rare))).y
        self._many(ruled, hidden, Share.of_each(work.part(order[: sum(counts)]), counts, few), out)
        return out

    def _many(self, ruled: RuledLayer, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        """Add the experts' outputs to out (B, H), for experts with many tokens each."""
        layer, x_bits = ruled.layer, ruled.preset.x_bits
        if shares and (together := kernels.choose(hidden.device).experts_swiglu) is not None:
            work = Share.joined(shares)
            given = (hidden, layer.signal, layer.rows, work.calls, work.thresholds, work.products, x_bits)
            out += together(*given)[0]
            return
        for share in shares:
            if self.control.cancelled.is_set():
                raise Cancelled
            given = (hidden[share.tokens], layer.signal, layer.rows, share.expert)
            y, _, _ = kernels.expert_swiglu(*given, *share.limits, x_bits=x_bits)
            out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))

    def _count(self, result: Result) -> None:
        choice = result.choice
        skipped = (choice.work.thresholds,) if choice.ruled.rule.drops else ()
        self.telemetry.count(partial(self._add, choice.ruled), choice.experts, result.counts, *skipped)

    def _add(self, ruled: RuledLayer, experts: Tensor, counts: Tensor, thresholds: Tensor | None = None) -> None:
        self.add_counts(ruled, experts.tolist(), computed(counts, thresholds))

    def add_counts(self, ruled: RuledLayer, experts: list[list[int]], counts: list[list[int]]) -> None:
        """Add to the telemetry, with lists: one operation on tensors costs as much as all of this.

        Args:
            experts: (B, K). counts: (P, 2) of what was computed.
        """
        calls = [0] * len(self.telemetry.layers[self.index].calls)
        for token in experts:
            for expert in token:
                calls[expert] += 1
        active, kept = [sum(stage) for stage in zip(*counts, strict=True)] or (0, 0)
        self.add_totals(ruled, calls, len(counts), active, kept)

    def add_totals(self, ruled: RuledLayer, calls: list[int], computed: int, active: int, kept: int) -> None:
        """Add any number of tokens to the telemetry.

        Args:
            calls: by expert, as chosen. computed: those of `ruled` that were not left out. active: their neurons; kept:
                those that reached the second threshold.
        """
        found, among = self.telemetry.layers[self.index], sum(calls)
        found.dropped += 2 * among - ruled.halves(computed)
        found.neurons += among * self.packed.rows.data.shape[1]
        up, gate, down = ruled.costs
        found.active += active
        found.bytes += computed * up + active * gate + kept * down
        found.calls = [before + added for before, added in zip(found.calls, calls, strict=True)]


def _add_bias(layer: nn.Module, given: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """The bias of down, which depends on no neuron: added whatever a rule leaves out."""
    assert isinstance(layer, MoELayer) and layer.packed.down_bias is not None
    bias, (_, index, weights) = layer.packed.down_bias, given
    shares = bias.new_zeros(len(index), len(bias)).scatter_add(1, index, weights.to(bias.dtype))
    return y + (shares @ bias).to(y.dtype)


def computed(counts: Tensor, thresholds: Tensor | None) -> list[list[int]]:
    """The counts (P, 2) of calls that are not left out: all, or those with a finite threshold."""
    pairs: list[list[int]] = counts.tolist()
    if thresholds is None:
        return pairs
    return [pair for pair, threshold in zip(pairs, thresholds.tolist(), strict=True) if threshold != inf]
