"""One layer's experts while they are packed: measured, ordered, quantized and written one at a time.

The module replaces transformers' experts, so that it receives the output of the packed layers before it, and returns
what the packed experts will.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.weights import SignalWeights
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..pack.manifest import Architecture, Manifest, layer_file
from ..pack.quantize import store_matrix, store_vectors
from ..pack.tensor_file import TensorFile, TensorShapes
from . import calibration
from .journal import Journal, lost

Given = Callable[[Tensor, Tensor], None]


def measures_plan(a: Architecture) -> TensorShapes:
    """What is measured of a layer and goes into the profile."""
    return {
        "popularity": (torch.float32, (a.experts,)),
        "importance": (torch.float32, (a.experts, a.intermediate, len(calibration.MEASURES))),
        "router_score": (torch.float32, (calibration.QUANTILES,)),
    }


def measures_name(layer: int) -> str:
    """The working file in which a layer's measures are kept until the profile is written."""
    return f"measures_{layer:02d}"


class PackingExperts(nn.Module):
    """Packs a layer's experts when it is called. Those in the journal are read from the pack instead.

    Args:
        given: called first, with what the layer is given (B, H) and its chosen experts (B, K).
        packed: called after each expert with its number; its source is not needed any more.

    Raises:
        FloeError: the layer's file is not the one that the journal speaks of.
    """

    def __init__(
        self,
        source: Checkpoint,
        manifest: Manifest,
        folder: Path,
        journal: Journal,
        layer: int,
        device: str,
        given: Given,
        packed: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._source, self._manifest, self._layer, self._device = source, manifest, layer, device
        self._journal, self._given, self._packed = journal, given, packed
        resume = any(key[0] == layer for key in journal.experts)
        measures = journal.folder / f"{measures_name(layer)}.safetensors"
        try:
            self._file = TensorFile(folder / layer_file(layer), manifest.layer_plan(), resume=resume)
            self._measures = TensorFile(measures, measures_plan(manifest.architecture), resume=resume)
        except ValueError as error:
            raise lost(folder, f"{error}.") from error

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        self._given(hidden, top_k_index)
        out = torch.zeros_like(hidden)
        self._measures["router_score"].copy_(calibration.quantile_table(top_k_weights))
        with self._file, self._measures:
            for expert in range(self._manifest.architecture.experts):
                token, slot = (top_k_index == expert).nonzero(as_tuple=True)
                # An expert that the text never reaches is measured on all tokens: a rough table is better than none.
                x = hidden[token] if token.numel() else hidden
                if (self._layer, expert) in self._journal.experts:
                    y = self._compute(expert, x)[2]
                else:
                    self._measures["popularity"][expert] = token.numel() / max(1, top_k_index.numel())
                    y = self._pack(expert, x)
                    self._file.flush()
                    self._measures.flush()
                    self._journal.note_expert(self._layer, expert)
                self._packed(expert)
                if token.numel():
                    out.index_add_(0, token, y * top_k_weights[token, slot, None].to(y.dtype))
        return out

    def _pack(self, expert: int, x: Tensor) -> Tensor:
        """Write one expert, neurons by falling importance; x (T, H) -> what the packed expert makes of it."""
        file, signal_layout, row_layout = self._file, self._manifest.signal_layout, self._manifest.row_layout
        gate, up, down = self._source.expert(self._layer, expert)
        measures = calibration.importance(x, gate.to(x.dtype), up.to(x.dtype))
        order = measures[:, calibration.ORDER_BY].argsort(descending=True)
        self._measures["importance"][expert] = measures[order]
        try:
            q, scale, zero = store_matrix(up[order], signal_layout.vector, signal_layout.float16, self._device)
            records = row_layout.join(
                store_vectors(gate[order], row_layout.other, row_layout.float16, self._device),
                store_vectors(down.T[order], row_layout.down, row_layout.float16, self._device),
            )
        except ValueError as error:
            raise CheckpointError(
                f"Expert {expert} of layer {self._layer} cannot be packed",
                str(error),
                "Download the checkpoint again.",
            ) from error
        parts = {"up.q": q, "up.scale": scale, "up.zero": zero, "rows": records}
        for part, tensor in parts.items():
            file[part][expert] = tensor
        v, h, y = self._compute(expert, x)
        file["threshold"][expert] = calibration.quantile_table(v)
        file["product"][expert] = calibration.quantile_table(h)
        return y

    def _compute(self, expert: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) -> up·x (T, F), silu(gate·x) up·x (T, F) and the output (T, H) of an expert as it is packed."""
        file = self._file
        q, scale, zero = (file[part][expert][None] for part in ("up.q", "up.scale", "up.zero"))
        v = F.linear(x, SignalWeights(self._manifest.signal_layout, q, scale, zero).dense(0, x.dtype))
        gate, down = self._manifest.row_layout.read(file["rows"][expert], x.dtype)
        h = F.silu(F.linear(x, gate)) * v
        return v, h, h @ down
