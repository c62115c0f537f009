"""The sizes of a model by the fields of its config.json, which are checked; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import config_limits, supported
from .catalog_entry import Sizes
from .errors import CheckpointError
from .families import FAMILIES, language_fields
from .families.sizes import NAMES, sizes_of, view


def architecture_sizes(fields: Mapping[str, Any], what: str) -> Sizes:
    """The architecture of a config.json; `what` names it in errors.

    Raises:
        CheckpointError: its family is not supported, it has no experts, or its values make no sense.
    """
    if (error := supported.refused_type(fields, what)) is not None:
        raise error
    fields = language_fields(fields)
    kind = str(fields["model_type"])

    def number(*names: str) -> None:
        value = next((fields[name] for name in names if fields.get(name) is not None), None)
        if cause := config_limits.out_of_range(names[0], value):
            raise _no_model(what, cause)

    family = FAMILIES[kind]
    needed = ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", family.width)
    for called in (*((name,) for name in needed), *NAMES.values()):
        number(*called)
    config = view(family, fields)
    values = {name: getattr(config, name) for name in config_limits.SIZES if getattr(config, name) is not None}
    values["use_sliding_window"] = config.use_sliding_window
    if cause := config_limits.problem(config_limits.in_force(values, family.defaults)):
        raise _no_model(what, cause)
    try:
        sizes = sizes_of(family, config)
    except (TypeError, ValueError, AttributeError) as error:  # fields of other types than numbers
        raise _no_model(what, f"{error}.") from error
    if not sizes.layers:
        raise _no_model(what, "None of its layers has experts.")
    return sizes


def _no_model(what: str, cause: str) -> CheckpointError:
    return CheckpointError(f"{what} does not describe a model", cause, "Download config.json again.")
