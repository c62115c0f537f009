"""Prompt ids in, answer ids out: prefill in chunks, then one decode step per token. A plain generator."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .events import Sampling
from .moe import Control
from .sampling import Sampler
from .telemetry import Telemetry

PREFILL_CHUNK = 256  # tokens: bounds activations, and sets how often progress is told


@dataclass(frozen=True, slots=True)
class Step:
    """One advance: `token` is None while the prompt is read; `done` prompt tokens are in the KV cache."""

    token: int | None
    done: int


class KVCache:
    """The keys and values of one sequence, on the model's device."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.cache: Any = DynamicCache()

    def nbytes(self) -> int:
        """Bytes that the cached keys and values take."""
        layers = (layer for layer in self.cache.layers if getattr(layer, "is_initialized", False))
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def generate(
    model: Any,
    kv: KVCache,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    window: int,
    control: Control,
    telemetry: Telemetry,
) -> Generator[Step, None, str]:
    """Yield a step for every prefill chunk and every new token; the generator's return value says why it ended.

    Returns (through StopIteration):
        "stop": a stop id was drawn (it is not yielded); "length": max_new_tokens; "context": the window is full.

    Raises:
        ValueError: an empty prompt, or one that leaves no room in the window.
        Cancelled: `control.cancelled` was set; seen at the next layer.
    """
    if not 0 < len(prompt) < window:
        raise ValueError(f"a prompt of {len(prompt)} tokens for a window of {window}")
    device = model.get_input_embeddings().weight.device
    sampler = Sampler(sampling)
    stop = frozenset(stop_ids)
    ids = torch.tensor([list(prompt)], dtype=torch.long)
    started = time.perf_counter()
    control.counting = False
    logits = torch.empty(0)
    for start in range(0, len(prompt), PREFILL_CHUNK):
        chunk = ids[:, start : start + PREFILL_CHUNK]
        logits = _forward(model, kv, chunk.to(device))
        yield Step(None, start + chunk.shape[1])
    telemetry.prefill_done(time.perf_counter() - started)
    control.counting = True
    for step in range(max_new_tokens):
        began = time.perf_counter()
        if step:
            logits = _forward(model, kv, ids[:, -1:].to(device))
        token = sampler.draw(ids, logits)
        if step:
            telemetry.decoded(time.perf_counter() - began)
        if token in stop:
            return "stop"
        telemetry.token()
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        yield Step(token, len(prompt))
        if ids.shape[1] >= window:
            return "context"
    return "length"


def _forward(model: Any, kv: KVCache, ids: torch.Tensor) -> torch.Tensor:
    """ids (1, T) -> logits of the last position (1, V)."""
    with torch.inference_mode():
        return model(input_ids=ids, past_key_values=kv.cache, use_cache=True, logits_to_keep=1).logits[:, -1]
