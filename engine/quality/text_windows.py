"""The parts of a text that an evaluation reads: windows to predict in, and prompts to continue.

Windows follow llama.cpp's perplexity tool: 512 tokens that start with the model's start token if it has one, the
first half of which is context only, while each token of the second half is predicted from all before it. They do not
overlap and are spread evenly over the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.errors import UsageError
from ...models.packing import logits_cache
from .. import context

WINDOW = 512  # tokens, or the model's own window where that is shorter
PROMPTS, PROMPT_TOKENS = 4, 64


def cut(ids: Sequence[int], config: Any, tokens: int) -> tuple[Tensor, int]:
    """The text in windows, (N, T) int64, and how many tokens at the end of each are predicted.

    Raises:
        UsageError: not enough tokens for one window, or more than the source's logits may take room.
    """
    start = _start(config)
    width = min(WINDOW, context.window(config))
    keep, text = width // 2, width - len(start)
    if tokens < width:
        raise UsageError(f"--tokens {tokens} is too small", f"One window takes {width}.", f"Give {width} or more.")
    if len(ids) < text:
        cause = f"It has {len(ids)} tokens; a window takes {text}."
        raise UsageError("The text is too short", cause, "Give a longer one: --text FILE.")
    room = logits_cache.LIMIT_BYTES // 2  # the other half is for the source's logits of continued prompts
    most = max(1, room // logits_cache.entry_bytes(keep, config.vocab_size))
    if tokens // width > most:
        limit = f"The source's logits may take {room / 1e9:.1f} GB."
        raise UsageError(f"--tokens {tokens} is too large", limit, f"Give {most * width} or fewer.")
    count = min(tokens // width, len(ids) // text)
    return _spread(ids, start, count, text), keep


def cut_prompts(ids: Sequence[int], config: Any) -> Tensor:
    """Prompts for the greedy gate, (P, T) int64, spread evenly over the text."""
    start = _start(config)
    return _spread(ids, start, PROMPTS, min(PROMPT_TOKENS, context.window(config) // 2) - len(start))


def _spread(ids: Sequence[int], start: list[int], count: int, text: int) -> Tensor:
    places = [row * (len(ids) - text) // max(1, count - 1) for row in range(count)]
    return torch.tensor([[*start, *ids[place : place + text]] for place in places])


def _start(config: Any) -> list[int]:
    return [config.bos_token_id] if isinstance(config.bos_token_id, int) else []
