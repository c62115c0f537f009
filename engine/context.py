"""The model's window, and the room for an answer."""

from __future__ import annotations

from typing import Any

CONTEXT = 4096  # tokens whose keys and values have device memory reserved, unless somebody asks for more
DEFAULT_WINDOW = 4096  # for a configuration that names no limit


def window(config: Any) -> int:
    """Tokens that prompt and answer may take together, from transformers' configuration."""
    return int(getattr(config, "max_position_embeddings", None) or DEFAULT_WINDOW)


def room_for_answer(window: int, max_new_tokens: int) -> int:
    """Tokens of the window that a prompt leaves free: the answer's full length, but never over half the window."""
    return min(max_new_tokens, window // 2)
