"""The modules of a small model that guesses another one's tokens, which hold its weights (models/pack/assistant.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..pack.assistant import BACK, JOINED
from . import library_model


def tree(config: Any, dtype: torch.dtype) -> nn.Module:
    """Its modules, without an embedding and without what makes keys and values; on torch's default device."""
    whole: Any = library_model.library(config, dtype)
    whole.model.embed_tokens = nn.Identity()
    for layer in whole.model.layers:
        for name in ("k_proj", "v_proj", "k_norm", "v_norm"):
            setattr(layer.self_attn, name, None)
    return whole


def shapes_of(config: Any, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of each tensor, as published but for the names in the file. hidden: H of the other model.

    Raises:
        PackError: a configuration that describes no model.
    """
    modules = library_model.empty(config, torch.float32, tree).state_dict(keep_vars=True)
    own = config.hidden_size
    found: dict[str, tuple[int, ...]] = {f"{JOINED}.weight": (own, 2 * hidden), f"{BACK}.weight": (hidden, own)}
    return found | {name: tuple(tensor.shape) for name, tensor in modules.items()}
