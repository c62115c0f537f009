"""Graphs of layers whose rows are in a pool, compared with the same layers launched one by one, and what they cost.

The answers of the stage "tokens" would be right without any graph, since what cannot be captured is launched one by
one: here that is a failure, with the reason. Without a GPU a capture is work that is repeated and looked at
(tests/engine/fake_card.py).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.ways import Way
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.quality_presets import available, get
from floe_chat.models.catalog import asset
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from ..engine.driver import silent
from ..engine.fake_card import Calls, FakeCard
from ..engine.offloading import offloaded
from ..helpers import relative_rms
from . import wide_pack
from .same_tokens import memory
from .stages import Context

PACKS = ("demo", "wide")
POOLS = (0.05, 0.5)
TOKENS, WARM = 32, 8
FAR = 0.1
"""Relative RMS of the logits: sums in 16 bit, in another order, and neurons that fall to the other side of a limit."""


def run(context: Context) -> None:
    """Compare; a row for each pack, preset and pool."""
    for name in PACKS if context.real else PACKS[:1]:
        pack = asset("demo/packed") if name == "demo" else wide_pack.made(context, wide_pack.LAYERS)
        presets = available(PackedModel.open(pack).manifest)
        for preset in presets if context.real and name == "demo" else presets[-1:]:
            for pool in POOLS:
                if context.left() < 15:
                    context.unfinished = "no time was left for all presets and pools"
                    return
                with opened(context, pack, preset, pool) as loaded:
                    _compare(context, loaded, pack=name, preset=preset, pool=pool)


@contextmanager
def opened(context: Context, pack: Path, preset: str, pool: float) -> Generator[LoadedModel]:
    """A model whose layers all have their rows in a pool, of this share of the memory."""
    if context.real:
        layers = PackedModel.open(pack).manifest.architecture.layers
        parts = Parts(predictor="none", mix=Mix(pool=layers))
        loaded, _ = load(pack, preset, "cuda", silent, vram=memory(pack, pool), parts=parts)
        try:
            yield loaded
        finally:
            loaded.close()
        return
    loaded, _ = load(pack, preset, "cpu", silent, library=True)
    patch = pytest.MonkeyPatch()
    FakeCard(patch)
    try:
        with offloaded(loaded, get(preset, loaded.packed.manifest), pool, predict=False):
            loaded.decoder.prepare()
            yield loaded
    finally:
        patch.undo()
        loaded.close()


def _compare(context: Context, loaded: LoadedModel, *, pack: str, preset: str, pool: float) -> None:
    decoder = loaded.decoder
    assert isinstance(decoder, FusedDecoder)
    ids = torch.randint(3, 500, (TOKENS if context.real else 10,), generator=torch.Generator().manual_seed(1)).tolist()
    layers = len(loaded.telemetry.layers)
    captured = "with the experts in the pool" in decoder.reason
    logits, by_graphs = fed(loaded, ids)
    calls = Calls()
    kv = KVCache()
    decoder.forward(ids[:1], kv)
    kv.computed(ids[:1], loaded.control.preset)
    with calls:
        decoder.forward(ids[1:2], kv)
    reserved = torch.cuda.memory_reserved() if context.real else 0
    without_graphs(decoder)
    expected, one_by_one = fed(loaded, ids)
    error = relative_rms(logits, expected)
    context.row(
        pack=pack, preset=preset, pool=pool, captured=captured, error=error,
        ms_a_layer=1e3 * by_graphs / layers, one_by_one_ms=1e3 * one_by_one / layers,
        calls_a_token=len(calls.names), reserved_MiB=reserved / 2**20,
        ok=captured and error <= FAR,
    )  # fmt: skip
    if not captured:
        context.notes.append(decoder.reason)


def without_graphs(decoder: FusedDecoder) -> None:
    """Launch everything one by one from now on."""
    decoder.way = Way(decoder)


@torch.inference_mode()
def fed(loaded: LoadedModel, ids: Sequence[int]) -> tuple[Tensor, float]:
    """Logits after each token, and the seconds that one takes, those at the beginning left out."""
    kv, found, began = KVCache(), list[Tensor](), 0.0
    for number, token in enumerate(ids):
        if number == min(WARM, len(ids) // 2):
            began = time.perf_counter()
        found.append(loaded.decoder.forward([token], kv).float().cpu())
        kv.computed([token], loaded.control.preset)
    return torch.cat(found), (time.perf_counter() - began) / (len(ids) - min(WARM, len(ids) // 2))
