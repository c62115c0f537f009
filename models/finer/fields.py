"""The config.json of a model of finer experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import config_limits, private_file
from ..checkpoint import LARGEST_CONFIG, Checkpoint
from ..errors import CheckpointError
from ..families.sizes import NAMES

# Other names that some publish beside the one that is read.
_ALSO = {"num_experts_per_tok": ("experts_per_token",)}
_GUESSING = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers that guess further tokens


def finer_fields(source: Checkpoint, parts: int, *, without_guessing: bool) -> dict[str, Any]:
    """Those of the source's config.json with `parts` times as many experts, which are that much smaller.

    Args:
        without_guessing: whether layers that guess further tokens are left out.

    Raises:
        CheckpointError: more experts than are supported.
    """
    fields: dict[str, Any] = private_file.read_json(source.folder / "config.json", LARGEST_CONFIG)
    family, config = source.family, source.config
    for given in (fields, fields.get("text_config") or {}):
        given.pop("quantization_config", None)  # what is written has 16 bits
    language = fields["text_config"] if family.within and fields["model_type"] == family.within else fields
    values = {
        "num_local_experts": source.experts * parts,
        "num_experts_per_tok": config.num_experts_per_tok * parts,
        family.width: source.neurons // parts,
    }
    if family.shared is not None and not family.shared.width:  # as wide as so many experts
        values[family.shared.count] = getattr(config, family.shared.count) * parts
    layers = config.num_hidden_layers
    if cause := config_limits.problem(values | {"num_hidden_layers": layers}):
        raise CheckpointError("The model would have too many experts", cause, "Choose fewer parts.")
    for name, value in values.items():
        _state(language, config, name, value)
    if without_guessing:
        language.update({name: 0 for name in _GUESSING if name in language})
    return fields


def _state(fields: dict[str, Any], config: Any, name: str, value: int) -> None:
    """Under every name that the file has for it, or, where it relies on a default, the one that transformers reads."""
    names = (*NAMES.get(name, (name,)), *_ALSO.get(name, ()))
    stated = [given for given in names if fields.get(given) is not None]
    aliases: Mapping[str, str] = type(config).attribute_map
    usual = next(aliases.get(given, given) for given in names if hasattr(config, given))
    fields.update(dict.fromkeys(stated or [usual], value))
