"""The same tokens as the CPU: the demo under every preset, and layers of full width, at pools from nothing to all rows.

The card computes in 16 bit and sums in another order, so where the CPU's two best tokens are close, either may be
drawn: the answers are compared up to such a place, and it is counted as a close call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.footprint import kv_element, sizes_of
from floe_chat.engine.planning.memory_plan import KEPT_FREE, Needs
from floe_chat.engine.quality_presets import available
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import read_config
from floe_chat.models.pack.packed_model import PackedModel

from ..engine.driver import answer, silent
from . import wide_pack
from .stages import Context

POOLS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Shares of the device memory between the least that works and all rows."""
POOLED = 0.1, 0.3
"""Those at which every layer has a pool."""
TOKENS = 24
CLOSE = 0.25
"""Nats between the two best tokens: 16-bit sums move a logit of the demo by a tenth of that."""
VIRTUAL = "sim:rtx3060-12gb"


@dataclass(frozen=True, slots=True)
class _Truth:
    """What the CPU answers, and how far its best token was ahead of the next at each place, in nats."""

    prompt: list[int]
    tokens: list[int]
    ahead: list[float]


def run(context: Context) -> None:
    """Compare; a row for each pack, preset and share of memory."""
    demo = asset("demo/packed")
    presets = available(PackedModel.open(demo).manifest)
    for preset in presets if context.real else presets[:1]:
        _compare(context, demo, "demo", preset, POOLS if context.real else POOLS[:2])
    wide = wide_pack.made(context, wide_pack.LAYERS)
    _compare(context, wide, f"{wide_pack.LAYERS} layers of full width", None, POOLS if context.real else POOLS[:3])


def memory(pack: Path, share: float) -> int:
    """Bytes of a card's memory between the least that the pack can do with and all of it."""
    model = PackedModel.open(pack)
    layers = [model.layer(index) for index in range(model.manifest.architecture.layers)]
    needs = Needs.of(
        model.manifest,
        layers,
        read_config(pack),
        kv_element(model.manifest.widths.dense, sizes_of(model.manifest, read_config(pack))),
    )
    return int((needs.least() + share * (needs.whole() - needs.least())) / (1 - KEPT_FREE)) + (1 << 20)


def _compare(context: Context, pack: Path, name: str, preset: str | None, shares: Sequence[float]) -> None:
    truth = _truth(pack, preset)
    for share in shares:
        if context.left() < 10:
            context.unfinished = "no time was left for all pools"
            return
        # Left to itself, whole layers go to the card or to RAM as long as that is faster.
        layers = PackedModel.open(pack).manifest.architecture.layers
        parts = Parts(mix=Mix(pool=layers)) if share in POOLED else Parts()
        place, vram = "cuda" if context.real else VIRTUAL, memory(pack, share)
        loaded, told = load(pack, preset, place, silent, vram=vram, parts=parts)
        try:
            same, close, total = 0, 0, 0
            for one in truth:
                got = answer(loaded, one.prompt, max_new_tokens=TOKENS).tokens
                alike, was_close = _alike(one, got)
                same, close, total = same + alike, close + was_close, total + 1
            pool = 1.0 if loaded.offload is None else _pool(loaded)
            context.row(
                pack=name, preset=told.preset, pool=pool, answers=total, same=same, close_calls=close,
                ok=same + close == total,
            )  # fmt: skip
        finally:
            loaded.close()


def _truth(pack: Path, preset: str | None) -> list[_Truth]:
    loaded, _ = load(pack, preset, "cpu", silent, library=True)
    found: list[_Truth] = []
    for seed in range(4):
        drawn = torch.randint(3, 500, (24,), generator=torch.Generator().manual_seed(seed))
        prompt = drawn.tolist()
        tokens = answer(loaded, prompt, max_new_tokens=TOKENS).tokens
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.float().topk(2).values
        found.append(_Truth(prompt, tokens, (best[:, 0] - best[:, 1]).tolist()))
    return found


def _alike(truth: _Truth, got: list[int]) -> tuple[bool, bool]:
    """Whether all tokens are the same, and if not, whether the first other one was a close call."""
    for place, (one, other) in enumerate(zip(truth.tokens, got, strict=False)):
        if one != other:
            return False, truth.ahead[place] < CLOSE
    return len(truth.tokens) == len(got), False


def _pool(loaded: LoadedModel) -> float:
    """Share of all rows that the pool has room for."""
    assert loaded.offload is not None
    a = loaded.packed.manifest.architecture
    return loaded.offload.pool.capacity / (a.layers * a.experts * a.intermediate)
