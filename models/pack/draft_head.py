"""The head that guesses further tokens (multi-token prediction), in a file of its own next to a pack's other files.

A pack runs without it. Its layer is stored as the model's are, under the names that it has in a model of one layer; the
embedding and the output head are the model's. Nothing is calibrated, so no neuron of it is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.rule import NEVER
from ...kernels.weights import ExpertRows, LinearWeights, SignalWeights
from ..checkpoint import read_config
from ..errors import damaged
from . import assistant, quantized_linears
from .assistant import PackedAssistant
from .manifest import DRAFT, Manifest, signal_names
from .packed_layer import PackedLayer
from .tensor_file import TensorShapes

# Names in the file; what begins otherwise is the dense part.
JOINED, EMBEDDING_NORM, HIDDEN_NORM = "joined", "embedding_norm.weight", "hidden_norm.weight"
EXPERTS = "experts."
LAYER, NORM = "model.layers.0.", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class PackedHead:
    """What a pack has of the head. It reads joined · [norm of the next token's embedding, norm of the model's output].

    Attributes:
        config: of a model whose only layer is the head's. dense: what this model has besides experts, embedding and
            output head, by its modules' names. experts: None where the layer has none.
        joined: (H, 2 H). embedding_norm, hidden_norm: (H,) float32, as they multiply.
    """

    config: Any
    dense: dict[str, Tensor]
    experts: PackedLayer | None
    joined: LinearWeights | Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor


def experts_plan(manifest: Manifest) -> TensorShapes:
    """The tensors of the layer's experts: those of the model's layers, without what is measured of these."""
    plan = manifest.layer_plan(manifest.family.signals[0])
    measured = ("threshold", "product", "plain")
    return {f"{EXPERTS}{name}": entry for name, entry in plan.items() if name not in measured}


def load(folder: Path, manifest: Manifest) -> PackedHead | PackedAssistant:
    """The head of a pack, or the model that does the same, as views of the mapped file.

    Raises:
        PackError: the file cannot be read, or holds something else.
    """
    family, name = manifest.family, DRAFT
    if family.head is None and family.assistant is None:
        raise damaged(folder, f"{family.called} has no head that guesses further tokens.")
    try:
        with safe_open(folder / name, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("_pad.")}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise damaged(folder, f"{name} cannot be read: {error}") from error
    if family.head is None:
        return assistant.load(folder, manifest, tensors)
    config = family.head.config(read_config(folder))
    hidden, bits = int(config.hidden_size), manifest.widths.dense

    def numbers(key: str, *shape: int) -> Tensor:
        found = tensors.get(key)
        if found is None or not found.is_floating_point() or tuple(found.shape) != shape:
            have = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise damaged(folder, f"{name} holds {have} as {key} instead of numbers {shape}.")
        return found

    def norm(key: str) -> Tensor:
        weight = numbers(key, hidden).float()
        return 1 + weight if family.centred else weight.clone()

    if bits == 16:
        joined: LinearWeights | Tensor = numbers(f"{JOINED}.weight", hidden, 2 * hidden)
    else:
        joined = quantized_linears.load(tensors, JOINED, hidden, 2 * hidden, bits)
    numbers(NORM, hidden)
    dense = {key: tensor for key, tensor in tensors.items() if key == NORM or key.startswith(LAYER)}
    experts = _experts(folder, manifest, tensors) if family.expert_layers(config) else None
    return PackedHead(config, dense, experts, joined, norm(EMBEDDING_NORM), norm(HIDDEN_NORM))


def _experts(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> PackedLayer:
    for key, (dtype, shape) in experts_plan(manifest).items():
        found = tensors.get(key)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            have = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise damaged(folder, f"{DRAFT} holds {have} as {key} instead of {dtype} {shape}.")
    signal = manifest.family.signals[0]
    q, scale, zero = (tensors[f"{EXPERTS}{key}"] for key in signal_names(signal))
    never = torch.full((manifest.architecture.experts, manifest.calibration.quantiles), NEVER)
    rows = ExpertRows(manifest.row_layout(signal), tensors[f"{EXPERTS}rows"])
    return PackedLayer(SignalWeights(manifest.signal_layout(signal), q, scale, zero), rows, never, never, whole=True)
