"""In which order the neurons of every expert lie before they are cut: the most important ones first.

The calibration text goes through the published weights, one decoder layer at a time. What is known after a layer is on
the disk, so that an interrupted run goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...kernels.operations import fast_type
from .. import private_file
from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..packing.calibration import both_sides, importance
from ..packing.dense_part import DensePart
from ..packing.layer_pass import LayerPass
from .cutting import unit

_ORDER, _HIDDEN, _DONE = "order", "hidden", "layers"
_PUBLISHED = 16  # bits at which nothing is rounded


class _Published:
    """The source's tensors, read when they are asked for."""

    def __init__(self, dense: DensePart) -> None:
        self._dense = dense

    def __getitem__(self, name: str) -> Tensor:
        return self._dense.read(name)


class _Measuring(nn.Module):
    """A layer's experts, as published. `order` (E, F) is filled in when they are called."""

    def __init__(self, source: Checkpoint, layer: int, order: Tensor) -> None:
        super().__init__()
        self._source, self._layer, self._order = source, layer, order

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (B, H), top_k_index and top_k_weights (B, K) -> (B, H)."""
        out, kind = torch.zeros_like(hidden), fast_type(hidden.device)
        for number in range(self._source.experts):
            token, slot = (top_k_index == number).nonzero(as_tuple=True)
            expert = self._source.whole_expert(self._layer, number)
            # An expert that the text never reaches is measured on all tokens.
            x = (hidden[token] if token.numel() else hidden).to(kind)
            gate, up = both_sides(x, expert, self._source.family.experts_by)
            h, down = gate * up, expert.down.to(kind)
            self._order[number] = falling(importance(h, down), unit(self._source.storage))
            if token.numel():
                y = (h @ down.T).to(out.dtype)
                y = y if expert.biases is None else y + expert.biases.down
                out.index_add_(0, token, y * top_k_weights[token, slot, None])
        return out


def falling(values: Tensor, unit: int) -> Tensor:
    """Importance of neurons (F,) -> their numbers (F,) int64, most important first; `unit` of them stay together."""
    first = values.unflatten(0, (-1, unit)).sum(1).argsort(descending=True, stable=True) * unit
    return (first[:, None] + torch.arange(unit)).flatten()


def ordered(source: Checkpoint, tokens: Tensor, kept: Path, say: Callable[[str], None]) -> Tensor:
    """The order of all experts' neurons, (L, E, F) int32, for the layers with experts.

    Args:
        tokens: (N, T) int64 calibration text. kept: the file in which it is kept between layers.

    Raises:
        CheckpointError: the source cannot be read. OSError: `kept` cannot be written.
    """
    if int(tokens.max()) >= source.config.vocab_size:
        raise CheckpointError(
            "The tokenizer does not belong to this checkpoint",
            f"It has token {int(tokens.max())}; the weights are for {source.config.vocab_size} tokens.",
            "Download the model's own tokenizer files.",
        )
    dense = DensePart(source, _PUBLISHED)
    passing, file = LayerPass(source.config, source.family, _PUBLISHED), _Published(dense)
    order = torch.zeros(len(source.layers), source.experts, source.neurons, dtype=torch.int32)
    if (state := _read(kept)) is None:
        hidden, done = passing.embed(dense, file, tokens), 0
    else:
        order, hidden, done = state[_ORDER], state[_HIDDEN], int(state[_DONE])
    for decoder in range(done, source.layers[-1] + 1):
        say(f"Measuring layer {decoder + 1} of {source.layers[-1] + 1}")
        experts = None
        if decoder in source.layers:
            layer = source.layers.index(decoder)
            experts = _Measuring(source, layer, order[layer])
        hidden = passing.run(passing.layer(decoder, dense, file, experts), hidden)
        with private_file.replacing(kept, private_file.SHARED) as partial:
            save_file({_ORDER: order, _HIDDEN: hidden, _DONE: torch.tensor(decoder + 1)}, partial)
    return order


def _read(kept: Path) -> dict[str, Tensor] | None:
    """What an earlier run has measured; None if there is none, or it is damaged."""
    try:
        return load_file(kept) if kept.is_file() else None
    except SafetensorError:
        return None
