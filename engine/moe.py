"""One MoE layer, start to end: the module that stands where transformers' experts stand (DESIGN section 5).

This version reads rows where they lie, in RAM or in the mapped file: route (the model's own), find the active
neurons, compute. Locating, placing and looking ahead slot in between.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from .. import kernels
from ..kernels.types import Calls
from ..models.calibration import threshold_at
from ..models.packed import PackedLayer
from .telemetry import Telemetry

DECODE_TOKENS = 8  # in one step: up to so many go neuron by neuron, more expert by expert
# Of a prompt's tokens that share an expert: up to so many still go neuron by neuron. Above it the tokens want so many
# of the neurons that reading each once for all of them is faster (measured on full-width experts, CPU).
FEW_TOKENS, FEW_TOKENS_SPARSE = 3, 8


class Cancelled(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The answer was stopped; raised at the next layer."""


class Control:
    """What a running answer can be told from another thread.

    Attributes:
        sparsity: 0..1, read by each layer at each step. exact: whether the kernels keep float32's precision of what
            experts read. cancelled: set to stop within one layer.
        counting: whether layers add to the telemetry (decode does, prefill does not).
    """

    def __init__(self, sparsity: float, *, exact: bool) -> None:
        self.sparsity, self.exact = sparsity, exact
        self.cancelled = threading.Event()
        self.counting = False


class MoELayer(nn.Module):
    """The experts of one layer from the packed layout."""

    def __init__(self, index: int, packed: PackedLayer, control: Control, telemetry: Telemetry) -> None:
        super().__init__()
        self.index, self.packed, self.control, self.telemetry = index, packed, control, telemetry
        self._sparsity: float | None = None
        self._thresholds = torch.empty(0)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H).

        Raises:
            Cancelled: the answer was stopped.
        """
        if self.control.cancelled.is_set():
            raise Cancelled
        if self._sparsity != self.control.sparsity:
            self._sparsity = self.control.sparsity
            self._thresholds = threshold_at(self.packed.thresholds, self._sparsity)
        compute = self._decode if hidden.shape[0] <= DECODE_TOKENS else self._prefill
        return compute(hidden, top_k_index, top_k_weights)

    def _decode(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = torch.arange(hidden.shape[0], device=hidden.device).repeat_interleave(top_k_index.shape[1])
        calls = Calls(tokens, top_k_index.flatten(), top_k_weights.flatten())
        thresholds = self._thresholds[calls.experts]
        y, active = kernels.moe_step(
            hidden, self.packed.up, self.packed.rows, calls, thresholds, exact=self.control.exact
        )
        if self.control.counting:
            self._count(calls, int(active.sum()))
        return y

    def _prefill(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        few = FEW_TOKENS_SPARSE if self.control.sparsity >= 0.5 else FEW_TOKENS
        exact = self.control.exact
        up, rows = self.packed.up, self.packed.rows
        flat, weights = top_k_index.flatten(), top_k_weights.flatten()
        tokens = torch.arange(hidden.shape[0], device=hidden.device).repeat_interleave(top_k_index.shape[1])
        counts = flat.bincount(minlength=rows.data.shape[0])
        rare = counts[flat] <= few
        calls = Calls(tokens[rare], flat[rare], weights[rare])
        out, _ = kernels.moe_step(hidden, up, rows, calls, self._thresholds[calls.experts], exact=exact)
        for expert in (counts > few).nonzero().squeeze(1).tolist():
            if self.control.cancelled.is_set():
                raise Cancelled
            mine = flat == expert
            token = tokens[mine]
            threshold = float(self._thresholds[expert])
            y, _ = kernels.expert_swiglu(hidden[token], up, rows, expert, threshold, exact=exact)
            out.index_add_(0, token, y * weights[mine, None].to(y.dtype))
        return out

    def _count(self, calls: Calls, active: int) -> None:
        counts = self.telemetry.layers[self.index]
        rows = self.packed.rows
        counts.neurons += calls.experts.numel() * rows.data.shape[1]
        counts.active += active
        counts.bytes += calls.experts.numel() * self.packed.up.bytes_per_expert() + active * rows.layout.nbytes
        for expert in calls.experts.tolist():
            counts.calls[expert] += 1
