"""One MoE layer, start to end: the module that stands where transformers' experts stand (DESIGN section 5).

This version reads rows where they lie, in RAM or in the mapped file: route (the model's own), find the active
neurons, compute. Locating, placing and looking ahead slot in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.types import Calls
from ..models.calibration import threshold_at
from ..models.packed import PackedLayer
from . import selection
from .quality import Preset
from .telemetry import Telemetry

PREFILL_CHUNK, STREAMED_CHUNK = 256, 2048
DECODE_TOKENS = 8  # in one step: up to so many go neuron by neuron, more expert by expert
# Of a prompt's tokens that share an expert: up to so many still go neuron by neuron. Above it the tokens want so many
# of the neurons that reading each once for all of them is faster (measured on full-width experts, CPU).
FEW_TOKENS, FEW_TOKENS_SPARSE = 3, 8


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The answer was stopped; raised at the next layer."""


class Control:
    """What a running answer can be told from another thread.

    Attributes:
        preset: what a token may skip, read by each layer at each step. cancelled: set to stop within one layer.
        counting: whether layers add to the telemetry (decode does, prefill does not).
        chunk: tokens of a prompt that go through the model at once: bounds activations, and sets how often progress is
            told. Where experts stream to the device each chunk brings them all, so that there it is longer.
        make_room: frees some device memory after it ran out; False if there is none to free. None: nothing can.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.cancelled = threading.Event()
        self.counting = False
        self.chunk = PREFILL_CHUNK
        self.make_room: Callable[[], bool] | None = None


class MoELayer(nn.Module):
    """The experts of one layer from the packed layout.

    Attributes:
        plan: what the preset in force makes of it. chosen, scores: (B, K) the experts and weights of this step.
    """

    chosen: Tensor
    scores: Tensor

    def __init__(self, index: int, packed: PackedLayer, control: Control, telemetry: Telemetry) -> None:
        super().__init__()
        self.index, self.packed, self.control, self.telemetry = index, packed, control, telemetry
        self.plan = Plan(packed, control.preset)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H).

        Raises:
            Cancelled: the answer was stopped.
        """
        if self.control.cancelled.is_set():
            raise Cancelled
        if self.plan.preset is not self.control.preset:
            self.plan = Plan(self.packed, self.control.preset)
        self.chosen, self.scores = self._choose(hidden, top_k_index, top_k_weights)
        calls = self.plan.calls(self.chosen, self.scores)
        if hidden.shape[0] > DECODE_TOKENS:
            return self._prefill(hidden, calls)
        y, counts = self._step(hidden, calls)
        if self.control.counting:
            self._count(self.chosen, calls, counts)
        return y

    def _choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The experts (B, K) and weights that are taken instead of the router's choice: here the same."""
        return index, weights

    def _step(self, hidden: Tensor, calls: Calls) -> tuple[Tensor, Tensor]:
        plan = self.plan
        up, rows, x_bits = plan.layer.up, plan.layer.rows, plan.preset.x_bits
        down_thresholds = None if plan.products is None else plan.products[calls.experts]
        thresholds = plan.thresholds[calls.experts]
        return kernels.moe_step(hidden, up, rows, calls, thresholds, down_thresholds, x_bits=x_bits)

    def _prefill(self, hidden: Tensor, calls: Calls) -> Tensor:
        plan = self.plan
        few = FEW_TOKENS_SPARSE if plan.preset.sparsity >= 0.5 else FEW_TOKENS
        counts = calls.experts.bincount(minlength=len(plan.thresholds))
        rare = counts[calls.experts] <= few
        out, _ = self._step(hidden, Calls(calls.tokens[rare], calls.experts[rare], calls.weights[rare]))
        shares = [Share.of(calls, expert) for expert in (counts > few).nonzero().squeeze(1).tolist()]
        self._many(hidden, shares, out)
        return out

    def _many(self, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        """Add to out (B, H) what experts make of the many tokens that each has."""
        plan = self.plan
        for share in shares:
            if self.control.cancelled.is_set():
                raise Cancelled
            y, _, _ = kernels.expert_swiglu(
                hidden[share.tokens],
                plan.layer.up,
                plan.layer.rows,
                share.expert,
                *plan.limits(share.expert),
                x_bits=plan.preset.x_bits,
            )
            out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))

    def _count(self, chosen: Tensor, calls: Calls, counts: Tensor) -> None:
        layer, telemetry = self.plan.layer, self.telemetry.layers[self.index]
        active, kept = counts.sum(0).tolist()
        gate = layer.rows.layout.gate.nbytes
        telemetry.dropped += 2 * chosen.numel() - self.plan.halves(calls)
        telemetry.neurons += chosen.numel() * self.packed.rows.data.shape[1]
        telemetry.active += active
        telemetry.bytes += calls.experts.numel() * layer.up.bytes_per_expert()
        telemetry.bytes += active * gate + kept * (layer.rows.layout.nbytes - gate)
        for expert in chosen.flatten().tolist():
            telemetry.calls[expert] += 1


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's part of a prompt: tokens (T,) int64 and the router's weights for them (T, 1)."""

    expert: int
    tokens: Tensor
    weights: Tensor

    @classmethod
    def of(cls, calls: Calls, expert: int) -> Share:
        mine = calls.experts == expert
        return cls(expert, calls.tokens[mine], calls.weights[mine, None])


class Plan:
    """What a preset makes of a layer: experts, whole or as halves, and their thresholds (E,) or (2E,).

    Attributes:
        products: thresholds of what enters down; None where the preset has none.
    """

    def __init__(self, packed: PackedLayer, preset: Preset, *, halves: bool = True) -> None:
        self.preset, self._split = preset, halves and preset.major > preset.drop
        self.layer = packed.halved() if self._split else packed
        self.thresholds = threshold_at(self.layer.thresholds, preset.sparsity)
        self.products = threshold_at(self.layer.products, preset.product) if preset.product else None

    def halves(self, calls: Calls) -> int:
        """Halves of experts that these calls compute."""
        return calls.experts.numel() * (1 if self._split else 2)

    def limits(self, expert: int) -> tuple[float, float]:
        """Both thresholds of an expert."""
        return float(self.thresholds[expert]), 0.0 if self.products is None else float(self.products[expert])

    def calls(self, index: Tensor, weights: Tensor) -> Calls:
        """index and weights (B, K), the router's choice -> what is computed of it."""
        if not self.preset.drop and not self._split:
            tokens = torch.arange(len(index), device=index.device).repeat_interleave(index.shape[1])
            return Calls(tokens, index.flatten(), weights.flatten())
        # In plain Python, since a decode step has two of them and each operation on tensors costs as much as them all.
        shares = weights.tolist()
        computed: list[tuple[int, int, float]] = []
        parts = selection.halves(shares, self.preset.drop, self.preset.major)
        for token, row in enumerate(zip(index.tolist(), shares, parts, strict=True)):
            for expert, share, part in zip(*row, strict=True):
                wanted = (2 * expert, 2 * expert + 1)[:part] if self._split else (expert,)[:part]
                computed += [(token, one, share) for one in wanted]
        tokens, experts, kept = zip(*computed, strict=True) if computed else ((), (), ())
        return Calls(
            torch.tensor(tokens, dtype=torch.int64, device=index.device),
            torch.tensor(experts, dtype=torch.int64, device=index.device),
            torch.tensor(kept, dtype=weights.dtype, device=index.device),
        )
