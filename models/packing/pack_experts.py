"""One layer's experts while they are packed: measured, ordered, quantized and written one at a time.

The module replaces transformers' experts, so that it receives the output of the packed layers before it, and returns
what the packed experts will.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ...kernels.activation import Projection, side
from ...kernels.operations import fast_type
from ...kernels.rule import NEVER
from ...kernels.weights import SignalWeights
from ..checkpoint import Checkpoint, loses
from ..families.storage import ExpertTensors
from ..pack.manifest import DOWN_BIAS, Architecture, Manifest, layer_file, signal_names
from ..pack.quantize import Codes, by_hqq, keeping, store
from ..pack.tensor_file import TensorFile, TensorShapes
from ..pack.widths import CALIBRATED
from . import calibration
from .allotment import LayerTables, spread
from .journal import Journal, lost
from .rounding import hessian, round_down, round_for
from .signal_choice import AUTO, PRODUCT, SHARE, choose, exempt, skips_nothing, unpackable

Given = Callable[[Tensor, Tensor], None]


def measures_plan(a: Architecture) -> TensorShapes:
    """What is measured of a layer and goes into the profile."""
    return {
        "popularity": (torch.float32, (a.experts,)),
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
        self._folder = folder
        self._calibrated = manifest.widths.rounding == CALIBRATED

    def _open(self, signal: Projection) -> None:
        """The layer's files, and how they hold weights."""
        manifest, layer, journal = self._manifest, self._layer, self._journal
        self._signal: Projection = signal
        self._signals, self._rows = manifest.signal_layout(signal), manifest.row_layout(signal)
        resume = any(key[0] == layer for key in journal.experts)
        measures = journal.folder / f"{measures_name(layer)}.safetensors"
        try:
            self._file = TensorFile(self._folder / layer_file(layer), manifest.layer_plan(signal), resume=resume)
            self._measures = TensorFile(measures, measures_plan(manifest.architecture), resume=resume)
        except ValueError as error:
            raise lost(self._folder, f"{error}.") from error

    def _asked(self) -> Projection | Literal["auto"]:
        """The signal that was asked for; that of a family which has only one is not measured."""
        (only, *others), asked = self._source.family.signals, self._journal.settings["signal"]
        return only if not others else "up" if asked == "up" else "gate" if asked == "gate" else AUTO

    def _chosen_signal(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Projection:
        """As asked for, as the journal says, or as measured."""
        if self._layer not in self._journal.signals:
            asked = self._asked()
            found = asked if asked != AUTO else choose(self._source, self._layer, hidden, top_k_index, top_k_weights)
            self._journal.note_signal(self._layer, found)
        return self._journal.signals[self._layer]

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        self._given(hidden, top_k_index)
        self._open(self._chosen_signal(hidden, top_k_index, top_k_weights))
        out, kind = torch.zeros_like(hidden), fast_type(hidden.device)
        experts = self._manifest.architecture.experts
        tables = LayerTables(experts)
        weighed = self._manifest.calibration.weighed  # unless a pack of before is repaired
        worths = calibration.worths(top_k_weights) if weighed else torch.ones_like(top_k_weights)
        self._measures["router_score"].copy_(calibration.quantile_table(top_k_weights))
        self._inputs = cache(lambda: hessian(hidden.to(self._device)))
        down_bias = self._file[DOWN_BIAS] if self._rows.biased else None
        plain = torch.zeros(experts, calibration.QUANTILES) if self._manifest.calibration.plain else None
        with self._file, self._measures:
            for expert in range(experts):
                token, slot = (top_k_index == expert).nonzero(as_tuple=True)
                # An expert that the text never reaches is measured on all tokens: a rough table is better than none.
                x = (hidden[token] if token.numel() else hidden).to(kind)
                worth = worths[token, slot, None].float() if token.numel() else torch.ones(len(x), 1)
                if (self._layer, expert) in self._journal.experts:
                    v, h, down = self._compute(expert, x)
                else:
                    self._measures["popularity"][expert] = token.numel() / max(1, top_k_index.numel())
                    v, h, down = self._pack(expert, x)
                    self._file.flush()
                    self._measures.flush()
                    self._journal.note_expert(self._layer, expert)
                self._packed(expert)
                weights = top_k_weights[token, slot, None].float() if token.numel() else None
                if plain is not None:
                    plain[expert] = calibration.quantile_table(v)
                tables.measure(expert, v, h, down, worth, weights)
                if weights is not None:
                    y = (h @ down).to(out.dtype)
                    y = y if down_bias is None else y + down_bias[expert].to(y.dtype)
                    out.index_add_(0, token, y * weights)
            if layer_file(self._layer) not in self._journal.files:
                losing, tokens = tables.lost(SHARE, PRODUCT)
                never = exempt(losing, tokens)
                if self._layer not in self._journal.whole:
                    losing[never] = 0
                    self._journal.note_whole(self._layer, skips_nothing(losing, tables.energy))
                for name, table in tables.allotted(exempt=never).items() if weighed else tables.own.items():
                    self._file[name].copy_(table)
                    self._file[name][never] = NEVER if weighed else 0
                if plain is not None:
                    self._file["plain"].copy_(plain)
        return out

    def _pack(self, expert: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write one expert, neurons by falling importance; see `_compute`."""
        file, signals, rows, kind = self._file, self._signals, self._rows, x.dtype
        source = self._source.whole_expert(self._layer, expert)
        matrices, biases = [source.gate, source.up], source.biases
        names = self._source.expert_names(self._source.layers[self._layer], expert)[:2]
        beside: list[Tensor | None] = [None, None] if biases is None else [biases.gate, biases.up]
        if self._signal == "up":  # the signal comes first
            for each in (matrices, names, beside):
                each.reverse()
        try:
            along = partial(self._along if self._calibrated else by_hqq, values=kind)
            vectors, codes = (signals.vector, rows.other), map(self._source.codes, names)
            quantizers = [keeping(kept, vector, along, kind) for kept, vector in zip(codes, vectors, strict=True)]
            both = [
                store(matrix.to(self._device), vector, rows.float16, by, kind)
                for matrix, vector, by in zip(matrices, vectors, quantizers, strict=True)
            ]
            # By what the rounded neurons give on some tokens, which says in which order they lie.
            _, h = self._through(x[spread(len(x))], [part.dense() for part in both], beside)
            order = calibration.importance(h, source.down).argsort(descending=True)
            signal, other = both = [part.ordered(order) for part in both]
            beside = [None if part is None else part[order] for part in beside]
            v, h = self._through(x, [part.dense() for part in both], beside)
            across = partial(by_hqq, values=kind)
            if self._calibrated:
                across = partial(round_down, h.to(self._device), short=rows.down.short, values=kind)
            down = store(source.down.T.contiguous()[order].to(self._device), rows.down, rows.float16, across, kind)
            records = rows.join(other.vectors(rows.other), down.vectors(rows.down), beside[1])
        except ValueError as error:
            raise unpackable(self._layer, expert, str(error)) from error
        self._note_loses(expert, source)
        stored = (*signal_names(self._signal), "rows")
        parts = dict(zip(stored, (signal.packed, signal.scale, signal.zero, records), strict=True))
        if biases is not None and (own := beside[0]) is not None:
            parts |= {f"{self._signal}.bias": own, DOWN_BIAS: biases.down}
        for part, tensor in parts.items():
            file[part][expert] = tensor
        return v, h, down.dense()

    def _note_loses(self, expert: int, source: ExpertTensors) -> None:
        """Note the tensor with a matrix that is stored at 16 bits, and had more."""
        first, *others = self._source.expert_names(self._source.layers[self._layer], expert)
        apart = len(others) > 1 and not self._source.storage.together
        names = (first, *others[:2]) if apart else (first, first, others[0])
        sides = [self._rows.other, self._signals.vector]
        vectors = (*(reversed(sides) if self._signal == "gate" else sides), self._rows.down)
        for name, matrix, vector in zip(names, source[:3], vectors, strict=True):
            if vector.bits == 16 and loses(matrix, self._rows.float16):
                self._journal.note_loses(name)

    def _along(self, matrix: Tensor, bits: int, group: int, values: torch.dtype) -> Codes:
        return round_for(self._inputs(), matrix, bits, group, short=self._signals.vector.short, values=values)

    def _compute(self, expert: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H) -> the signal and silu(gate·x) up·x, (T, F), and down (F, H) of an expert as it is packed."""
        file, rows = self._file, self._rows
        q, scale, zero = (file[part][expert][None] for part in signal_names(self._signal))
        records = file["rows"][expert]
        other, down = rows.read(records, x.dtype)
        own = file[f"{self._signal}.bias"][expert] if rows.biased else None
        signal = SignalWeights(self._signals, q, scale, zero).dense(0, x.dtype)
        return *self._through(x, [signal, other], [own, rows.read_bias(records, x.dtype)]), down

    def _through(self, x: Tensor, sides: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """The signal and what enters down (T, F), by the signal's projection and the other one (F, H)."""
        functions = self._signals.function, self._rows.function
        v, besides = (side(*each) for each in zip(functions, (x, x), sides, biases, strict=True))
        return v, besides * v
