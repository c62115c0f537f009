"""Packing's measurements on calibration text: activity quantiles, expert popularity, neuron importance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...kernels.activation import Activation, function_of, side
from ...kernels.rule import MOST_EASE
from ..errors import CheckpointError, PackError
from ..families.storage import ExpertTensors
from ..tokenizer.chat_process import encode
from ..tokenizer.tiktoken import WAYS

QUANTILES = 101  # entries of a threshold table: the percentiles 0, 1 ... 100
_SAMPLE = 1 << 19  # most values used for a quantile table: sorting more adds no precision
# Passages and tokens of each: every expert of a balanced Mixtral layer sees about 1,000.
TEXT_SHAPE = (16, 256)


def read_tokens(folder: Path, text: str) -> Tensor:
    """Calibration tokens: passages spread evenly over `text`, by the tokenizer in `folder`.

    Returns:
        (N, T) int64, TEXT_SHAPE or as much of it as the text has.

    Raises:
        CheckpointError: no tokenizer.json, or one that cannot be used.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"The checkpoint at {folder} has no tokenizer.json",
            "Without it no text can be turned into tokens.",
            "Set it up by its hub id: then one is made of its vocabulary."
            if any((folder / name).is_file() for name in WAYS)
            else "Download the model's tokenizer files into that folder.",
        )
    try:
        ids = encode(folder, text)
    except PackError as error:
        raise CheckpointError(f"{path} cannot be read", error.cause, "Download that file again.") from error
    if not ids:
        raise CheckpointError(f"{path} makes no tokens of the calibration text", "", "Download that file again.")
    return torch.tensor(passages(ids))


def passages(ids: list[int]) -> list[list[int]]:
    """As many passages as TEXT_SHAPE says and a text's tokens allow, spread evenly over them."""
    rows, length = TEXT_SHAPE
    length = min(length, len(ids))
    rows = min(rows, len(ids) // length)
    starts = [index * (len(ids) - length) // max(1, rows - 1) for index in range(rows)]
    return [ids[start : start + length] for start in starts]


def both_sides(x: Tensor, expert: ExpertTensors, activation: Activation) -> tuple[Tensor, Tensor]:
    """What the functions of an expert's gate and up give on tokens x (T, H): (T, F) each; 1 without a gate."""
    gate, up = (None, None) if expert.biases is None else expert.biases[:2]
    return (
        side(function_of("gate", activation), x, expert.gate, gate),
        side(function_of("up", activation), x, expert.up, up),
    )


def importance(h: Tensor, down: Tensor) -> Tensor:
    """How much each neuron does on T tokens: the energy of what it adds to the output, (F,) float32.

    Computing only the half of the neurons that this names first loses less than with any of the four measures of
    DualSparse-MoE section 4.2, which leave out down (tests/bench/LOG.md).

    Args:
        h: (T, F) hidden values. down: (H, F).
    """
    return _energy(h) * _energy(down)


def _energy(values: Tensor) -> Tensor:
    return (torch.ones(1, len(values), dtype=values.dtype) @ values.square())[0].float()  # faster than a sum


def worths(weights: Tensor) -> Tensor:
    """A router's weights (B, K) relative to the mean of each token's: what neurons' values are multiplied by where
    thresholds are weighed (`Rule.weighed`), and so in the tables that these are read from.
    """
    mean = weights.mean(-1, keepdim=True)
    return torch.where(mean == 0, 1.0, weights / mean).clamp(min=1 / MOST_EASE)


def quantile_table(values: Tensor, worth: Tensor | None = None) -> Tensor:
    """The table that turns a sparsity into a threshold: (QUANTILES,) float32 quantiles of |values|, rising.

    Entry 0 is 0, so that sparsity 0 keeps every neuron, also one that is quieter than any seen here.

    Args:
        values: (T, any). worth: (T, 1) multiplies them.
    """
    flat = values.flatten()
    step = -(-flat.numel() // _SAMPLE)
    flat = flat[::step].float()
    if worth is not None:
        row = torch.arange(0, values.numel(), step).div_(values[0].numel(), rounding_mode="floor")
        flat = flat * worth.flatten().float()[row]
    ordered = _sorted(flat.abs())
    places = torch.linspace(0, ordered.numel() - 1, QUANTILES).round().long()
    table = ordered[places]
    table[0] = 0.0
    return table


def _sorted(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort().values
    return torch.from_numpy(np.sort(values.numpy()))  # takes a twentieth of torch's time


def threshold_at(tables: Tensor, sparsity: float) -> Tensor:
    """The magnitude below which a neuron is skipped, so that `sparsity` (0..1) of them are on text like the
    calibration's.

    Args:
        tables: (E, Q) quantile tables.

    Returns:
        (E,) float32, interpolated between entries.
    """
    place = min(max(sparsity, 0.0), 1.0) * (tables.shape[1] - 1)
    low = min(int(place), tables.shape[1] - 2)
    return torch.lerp(tables[:, low], tables[:, low + 1], place - low)
