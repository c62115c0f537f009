"""transformers' own model with the values that a pack's dense codes stand for, read without the program's reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from floe_chat.kernels.codes import unpack_codes
from safetensors.torch import load_file


def use_stored_linears(model: Any, pack: Path) -> set[str]:
    """Give a model of the source the values of `pack` in the place of its own; returns the layers that got some."""
    bits = json.loads((pack / "manifest.json").read_text())["widths"]["dense"]
    tensors = load_file(pack / "dense.safetensors")
    names = {name.removesuffix(".q") for name in tensors if name.endswith(".q")}
    for name in names:
        layer = model.get_submodule(name)
        scale, zero = (tensors[f"{name}.{part}"].float()[..., None] for part in ("scale", "zero"))
        rows, columns = layer.weight.shape
        width = max(bits, 8) if name == "lm_head" else bits
        codes = unpack_codes(tensors[f"{name}.q"], columns, width).float().view(rows, scale.shape[1], -1)
        # A new parameter, since a tied embedding keeps the old one.
        layer.weight = torch.nn.Parameter(((codes - zero) * scale).view(rows, columns))
    return names
