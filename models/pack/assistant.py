"""A small model that guesses another one's tokens, in draft.safetensors of that one's pack.

It is stored under transformers' names, its output layer as "lm_head", with what its configuration says of its layers as
a tensor of bytes. Its embedding is not needed: it is given what the other model makes of a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.weights import LinearWeights
from .. import config_limits
from ..checkpoint import read_config
from ..errors import damaged
from ..families import Family
from ..families.family import Assistant
from . import quantized_linears
from .manifest import DRAFT, Manifest

CONFIG, JOINED, BACK, HEAD = "config.json", "joined", "back", "lm_head"  # in the file
_LARGEST = 1 << 16  # bytes of its configuration there
_FIELDS = (  # of a text_config, that say something about its layers
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_global_key_value_heads", "global_head_dim"),
    *("attention_k_eq_v", "per_layer_config", "sliding_window", "rope_parameters", "hidden_activation"),
)
_NONE = dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"), 0)


@dataclass(frozen=True, slots=True)
class PackedAssistant:
    """What a pack has of it.

    Attributes:
        config: transformers' configuration of its layers. dense: all of these, the last norm and the output layer, by
            its modules' names. joined: (h, 2 H), of the other model's H numbers. back: (H, h).
    """

    config: Any
    dense: dict[str, Tensor]
    joined: LinearWeights | Tensor
    back: LinearWeights | Tensor


def of(family: Family) -> Assistant:
    """How that of a family is read, which has one."""
    assert family.assistant is not None
    return family.assistant


def kept_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of its config.json that a pack keeps."""
    text = fields.get("text_config")
    own = {name: text[name] for name in _FIELDS if name in text} if isinstance(text, Mapping) else {}
    names = ("backbone_hidden_size", "use_ordered_embeddings")
    return {"text_config": own, **{name: fields[name] for name in names if name in fields}}


def config_of(fields: Mapping[str, Any], model: Any, family: Family) -> Any:
    """transformers' configuration of its layers, by `kept_fields`, which anyone may have written.

    Args:
        model: that of the other model, of `family`.

    Raises:
        ValueError: they describe none, or one of another model; says which difference, as a sentence.
    """
    text, layers = fields["text_config"], of(family).layers
    if fields.get("use_ordered_embeddings"):
        raise ValueError("Its vocabulary is in an order of its own (use_ordered_embeddings), which is not supported.")
    width, hidden = fields.get("backbone_hidden_size"), model.hidden_size
    if width != hidden:
        raise ValueError(f"It reads {config_limits.shown(width)} numbers of a token; this model gives {hidden:,}.")
    if cause := config_limits.problem(text):  # before transformers makes lists of such lengths
        raise ValueError(cause)
    try:
        config: Any = type(model)(**text, **_NONE, enable_moe_block=False)
        ours, wide = layers.parts(config)
        if cause := config_limits.problem({name: getattr(ours, name) for name in _FIELDS if hasattr(ours, name)}):
            raise ValueError(cause)
        own = _differing(config, ours, wide, layers)
        theirs = _differing(model, *family.parts(model), layers)
        kinds = {*config.layer_types} - {*model.layer_types}
    # transformers' configurations raise all kinds of errors.
    except Exception as error:
        raise ValueError(f"Its config.json does not describe its layers: {error}") from error
    if kinds:
        raise ValueError(f"It has layers of the kind {config_limits.shown(min(kinds))}; this model has none.")
    for name, value in own.items():
        if value != theirs[name]:
            said = config_limits.shown(value), config_limits.shown(theirs[name])
            raise ValueError(f"Its {name} is {said[0]}; this model's is {said[1]}.")
    return config


def _differing(config: Any, usual: Any, wide: Any, family: Family) -> dict[str, Any]:
    """What has to be the same in both models: each reads the other's keys and values, and tokens."""
    found = {"vocab_size": config.vocab_size, "sliding_window": config.sliding_window}
    found |= {"hidden_activation": getattr(config, "hidden_act", family.activation)}
    found |= {"num_key_value_heads": usual.num_key_value_heads, "head_dim": usual.head_dim}
    if wide is not None:
        found |= {"num_global_key_value_heads": wide.kv_heads, "global_head_dim": wide.head_dim}
    return found | {"rope_parameters": json.dumps(config.rope_parameters, sort_keys=True)}


def load(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> PackedAssistant:
    """That of a pack, of the tensors in its draft.safetensors.

    Raises:
        PackError: they are none, or do not fit the pack's model.
    """
    said = tensors.get(CONFIG)
    if said is None or said.dtype != torch.uint8 or said.ndim != 1 or len(said) > _LARGEST:
        raise damaged(folder, f"{DRAFT} does not say what {of(manifest.family).layers.called} has ({CONFIG}).")
    model = read_config(folder)
    try:
        fields: Any = json.loads(bytes(said.tolist()))
        config = config_of(fields, model, manifest.family)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder, f"{DRAFT} does not belong to this model. {error}") from error
    bits, own, hidden = manifest.widths.dense, int(config.hidden_size), int(model.hidden_size)

    def linear(name: str, rows: int, columns: int) -> LinearWeights | Tensor:
        if bits < 16:
            return quantized_linears.load(tensors, name, rows, columns, bits)
        found = tensors.get(f"{name}.weight")
        if found is None or not found.is_floating_point() or tuple(found.shape) != (rows, columns):
            raise damaged(folder, f"{DRAFT} has no {name}.weight of {rows} rows and {columns} columns.")
        return found

    dense = {key: tensor for key, tensor in tensors.items() if key.startswith(("model.", f"{HEAD}."))}
    return PackedAssistant(config, dense, linear(JOINED, own, 2 * hidden), linear(BACK, hidden, own))
