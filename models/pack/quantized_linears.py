"""The dense part's linear layers at low width: attention projections and head as codes.

dense.safetensors holds such a layer as three tensors, named as published with .q, .scale and .zero for .weight.
Norms, routers, embeddings and biases stay as published, and with `dense` at 16 bit so do the linear layers. The head is
never below HEAD_BITS: it is read once per token, not once per layer, and what it rounds goes straight into the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.codes import group_size, packed_bytes
from ...kernels.layouts import VectorLayout
from ...kernels.weights import LinearWeights
from ..checkpoint import Checkpoint
from ..errors import CheckpointError, PackError
from .quantize import Quantizer, quantize
from .quantize import store as stored_form
from .tensor_file import TensorShapes

HEAD_BITS = 8


def width_of(layer: str, bits: int) -> int:
    """Bits per weight of `layer`, by its name in transformers' module, in a pack whose `dense` is `bits`."""
    return max(bits, HEAD_BITS) if layer == "lm_head" else bits


def layout_of(columns: int, bits: int) -> VectorLayout:
    """One row of a layer with `columns` inputs: groups of 64, or the next smaller size that divides it."""
    return VectorLayout(columns, bits, group_size(columns))


def stored_layers(source: Checkpoint, bits: int) -> dict[str, str]:
    """The layers that a pack stores as codes: published name without .weight -> the tensor it is made of; none at 16.

    Where the head is the embedding, the head alone becomes codes: tokens are looked up in the embedding as published.

    Raises:
        CheckpointError: a weight that is no matrix of floating point.
    """
    if bits == 16:
        return {}
    names = [name for name in source.dense_names() if name.endswith(".weight")]
    found = {name.removesuffix(".weight"): name for name in names}
    found = {layer: name for layer, name in found.items() if source.family.is_linear(layer)}
    embedding = next(filter(source.family.is_embedding, names), None)
    if getattr(source.config, "tie_word_embeddings", False) and embedding is not None:
        found.setdefault("lm_head", embedding)
    for layer, name in found.items():
        place = source.places[name][1]
        if len(place.shape) != 2 or not min(place.shape):
            raise CheckpointError(
                f"{layer} of the checkpoint cannot be packed",
                f"It is of shape {place.shape}; a matrix is needed.",
                "Use the model's original, unquantized checkpoint.",
            )
    return found


def plan(layer: str, rows: int, columns: int, bits: int) -> TensorShapes:
    """The tensors that `store` makes of a layer of `rows` by `columns`, as in the file."""
    vector = layout_of(columns, bits)
    return {
        f"{layer}.q": (torch.uint8, (rows, packed_bytes(columns, bits))),
        f"{layer}.scale": (torch.float16, (rows, vector.groups)),
        f"{layer}.zero": (torch.float16, (rows, vector.groups)),
    }


def store(layer: str, matrix: Tensor, bits: int, by: Quantizer = quantize) -> dict[str, Tensor]:
    """The three tensors of a layer, (N, K) -> q (N, packed bytes) uint8, scale and zero (N, groups) float16.

    Raises:
        CheckpointError: values that cannot be quantized.
    """
    try:
        q, scale, zero, _ = stored_form(matrix, layout_of(matrix.shape[1], bits), torch.bfloat16, by)
    except ValueError as error:
        raise CheckpointError(f"{layer} cannot be packed", str(error), "Download the checkpoint again.") from error
    return {f"{layer}.q": q, f"{layer}.scale": scale, f"{layer}.zero": zero}


def load(tensors: Mapping[str, Tensor], layer: str, rows: int, columns: int, bits: int) -> LinearWeights:
    """What `store` made of a layer of `rows` by `columns`.

    Raises:
        PackError: one of the three tensors is missing or of another dtype or shape.
    """
    vector = layout_of(columns, bits)
    codes = _checked(tensors, f"{layer}.q", torch.uint8, (rows, packed_bytes(columns, bits)))
    scale, zero = (
        _checked(tensors, f"{layer}.{part}", torch.float16, (rows, vector.groups)) for part in ("scale", "zero")
    )
    return LinearWeights(vector, codes, scale, zero)


def _checked(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
        have = "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise PackError(
            "The dense part of the model does not fit its configuration",
            f"{name} is {have}; {dtype} of {shape} is needed.",
            "Pack the source checkpoint again.",
        )
    return tensor
