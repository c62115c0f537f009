"""Reads a pack's config.json as transformers would, without importing transformers.

Only plain files are read here: of the families in families/, with fields of the expected types and the usual rope.
transformers reads all others, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from . import config_limits, private_file
from .checkpoint import LARGEST_CONFIG, read_config
from .errors import CheckpointError, damaged
from .families import FAMILIES, family_of

_log = logging.getLogger("floe_chat.models")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The parts of a configuration that the engine reads, by transformers' names.

    A family without such a part has None or False.

    Attributes:
        rope_parameters: "rope_type", which is "default", and "rope_theta".
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_local_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    head_dim: int | None
    sliding_window: int | None
    attention_bias: bool
    clip_qkv: float | None
    norm_topk_prob: bool
    moe_intermediate_size: int | None
    decoder_sparse_step: int | None
    mlp_only_layers: list[int] | None
    use_sliding_window: bool | None
    rope_parameters: dict[str, Any]


# The types of Config's fields in a file, as strict as transformers is.
_INTEGER, _MAYBE = (int,), (int, NoneType)
_TYPES: dict[str, tuple[type, ...]] = {
    "vocab_size": _INTEGER,
    "hidden_size": _INTEGER,
    "intermediate_size": _INTEGER,
    "num_hidden_layers": _INTEGER,
    "num_attention_heads": _INTEGER,
    "num_key_value_heads": _INTEGER,
    "num_local_experts": _INTEGER,
    "num_experts_per_tok": _INTEGER,
    "max_position_embeddings": _INTEGER,
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "tie_word_embeddings": (bool,),
    "head_dim": _MAYBE,
    "sliding_window": _MAYBE,
    "attention_bias": (bool,),
    "clip_qkv": (float, NoneType),
    "norm_topk_prob": (bool,),
    "moe_intermediate_size": _MAYBE,
    "decoder_sparse_step": _MAYBE,
    "mlp_only_layers": (list, NoneType),
    "use_sliding_window": (bool, NoneType),
}
# What a family does not have, and transformers' defaults in each family for what config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "head_dim": None,
    "sliding_window": None,
    "attention_bias": False,
    "clip_qkv": None,
    "norm_topk_prob": False,
    "moe_intermediate_size": None,
    "decoder_sparse_step": None,
    "mlp_only_layers": None,
    "use_sliding_window": None,
}
# Fields by which transformers changes the meaning of others; null changes nothing.
_INVOLVED = ("rope_scaling", "partial_rotary_factor", "per_layer_config", "layer_types", "mlp_layer_types", "auto_map")


def read(folder: Path) -> Any:
    """The configuration in `folder`: a `Config`, or transformers' own where the file is not plain.

    Raises:
        PackError: it cannot be read, or does not describe a model that floe-chat can run.
    """
    path = folder / "config.json"
    try:
        return parse(private_file.read_json(path, LARGEST_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        _log.info("transformers reads %s: %s", path, error)
    try:
        return read_config(folder)
    except CheckpointError as error:
        raise damaged(folder, f"Its config.json cannot be used: {error.cause or error.title}") from error


def parse(fields: Any) -> Config:
    """The configuration that the fields of a config.json describe.

    Raises:
        ValueError: they are not plain; the message names the first that is not.
    """
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not family.plain:
        raise ValueError(f"its model type is {kind!r}")
    if involved := [name for name in _INVOLVED if fields.get(name) is not None]:
        raise ValueError(f"it has {involved[0]}")
    given = dict(fields)
    experts = given.pop("num_experts", None)  # the same under the other family's name
    if experts is not None and given.setdefault("num_local_experts", experts) != experts:
        raise ValueError("it has two numbers of experts")
    defaults = _DEFAULTS | dict(family.defaults)
    theta = defaults.pop("rope_theta")
    values: dict[str, Any] = {name: given.get(name, value) for name, value in defaults.items()}
    if values["num_key_value_heads"] is None and defaults["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, types in _TYPES.items():
        if type(values[name]) not in types:
            raise ValueError(f"its {name} is {values[name]!r}")
    if "use_sliding_window" in family.defaults and not values["use_sliding_window"]:
        values["sliding_window"] = None
    config = Config(model_type=family.model_type, rope_parameters=_rope(given, theta), **values)
    _check(config)
    return config


def _rope(fields: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The usual rope's two values; older files have its base beside it."""
    stated: Any = fields.get("rope_parameters") or {}
    if not isinstance(stated, dict) or stated.keys() - {"rope_type", "rope_theta"}:
        raise ValueError("its rope settings have unknown fields")
    rope = {"rope_theta": fields.get("rope_theta", theta), "rope_type": "default", **stated}
    if rope["rope_type"] != "default" or type(rope["rope_theta"]) not in (int, float):
        raise ValueError(f"its rope is {rope}")
    return rope


def _check(config: Config) -> None:
    """Leave to transformers what it would refuse, or what needs its code."""
    if any(type(layer) is not int for layer in config.mlp_only_layers or ()):
        raise ValueError("its mlp_only_layers are no numbers")
    values = {name: getattr(config, name) for name in _TYPES} | config.rope_parameters
    if cause := config_limits.problem(values):
        raise ValueError(cause)
    if config.hidden_act != family_of(config.model_type).activation:
        raise ValueError(f"its experts use {config.hidden_act}")
