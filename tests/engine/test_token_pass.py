"""A token through all layers in one call is a token through layer after layer: to the last bit, and as counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import token_pass
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import GrowingStore
from floe_chat.engine.decoder.token_pass import TokenPass
from floe_chat.engine.events import Sampling
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.cpu import native
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from ..helpers import make_checkpoint, make_pack
from .driver import GREEDY, Answer, a_preset, answer, layer_by_layer, open_model

MODELS: dict[str, tuple[dict[str, Any], PackSpec]] = {
    "mixtral": ({}, PackSpec(up=3)),
    "odd": ({"hidden": 36, "intermediate": 50, "experts": 7}, PackSpec(up=2, dense=8)),
    "16-bit": ({"family": "olmoe", "top_k": 3, "experts": 5}, PackSpec(up=16, gate=16, down=16, dense=16)),
    "olmoe": ({"family": "olmoe", "top_k": 3, "experts": 7}, PackSpec(up=4, dense=4)),
    "one layer": ({"layers": 1, "experts": 2, "top_k": 1}, PackSpec(up=8, dense=16)),
}
PRESETS = {
    "nothing": a_preset("", 0.0, lossless=True),
    "neurons": a_preset("", 0.5, 0.8),
    "halves": a_preset("", 0.4, 0.7, drop=0.7, major=0.97, coarse=True),
    "experts": a_preset("", 0.3, drop=0.95, major=0.95),
    "weighed": a_preset("", 0.6, 0.8, drop=0.5, major=0.9, coarse=True, weighed=True),
    "all left out": a_preset("", 0.3, drop=1.0, major=1.0),
}
IDS = [1, 5, 9, 200, 17, 17, 3, 42]


@pytest.fixture(scope="module", params=MODELS)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape, spec = MODELS[request.param]
    folder = tmp_path_factory.mktemp("token")
    make_pack(make_checkpoint(folder / "source", **shape), folder / "pack", spec)
    return folder / "pack"


def read(loaded: LoadedModel, ids: list[int] = IDS) -> tuple[Tensor, list[Any]]:
    """Logits after each of `ids`, and what was counted."""
    kv = KVCache()
    loaded.telemetry.begin(0, 0, 0.0)
    loaded.control.counting = True
    logits: list[Tensor] = []
    for one in ids:
        logits.append(loaded.decoder.forward([one], kv))
        kv.computed([one], loaded.control.preset)
    loaded.control.counting = False
    return torch.cat(logits), [dataclasses.asdict(layer) for layer in loaded.telemetry.layers]


@pytest.mark.some(6)
@pytest.mark.parametrize("isa", native.ISAS[::-1])  # the first runs on every CPU
@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_it_is_layer_after_layer(pack: Path, preset: Preset, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        native.select_isa(isa)
    except native.NativeUnavailableError as why:
        pytest.skip(str(why))  # this CPU lacks the instruction set
    try:
        loaded = open_model(pack)
        assert "one compiled call per token" in loaded.decoder.reason
        loaded.control.preset = preset
        found, counted = read(loaded)
        with monkeypatch.context() as patch:
            layer_by_layer(patch)
            wanted, as_counted = read(loaded)
    finally:
        native.select_isa(None)
    assert torch.equal(found, wanted) and found.isfinite().all()
    assert counted == as_counted and sum(counted[0]["calls"]) > 0


WARM = Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5)


@pytest.mark.some(3)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("preset", ["nothing", "weighed"])
def test_several_tokens_of_a_call_are_those_of_a_call_each(
    pack: Path, preset: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, calls = open_model(pack), list[int]()
    loaded.control.preset = PRESETS[preset]
    decode = TokenPass.decode

    def noted(self: TokenPass, *given: Any, **named: Any) -> Any:
        drawn = decode(self, *given, **named)
        calls.append(len(drawn[0]))
        return drawn

    def answered() -> tuple[Answer, list[Any], KVCache]:
        kv = KVCache()
        found = answer(loaded, IDS, sampling=sampling, max_new_tokens=101, kv=kv)
        return found, [dataclasses.asdict(layer) for layer in loaded.telemetry.layers], kv

    monkeypatch.setattr(TokenPass, "decode", noted)
    found = dict[str, tuple[Answer, list[Any], KVCache]]()
    for name, seconds, wanted in (("some", 1e9, [64, 36]), ("one", 0.0, [1] * 100)):
        monkeypatch.setattr(token_pass, "_SECONDS", seconds)
        found[name] = answered()
        assert calls == wanted
        calls.clear()
    layer_by_layer(monkeypatch)
    found["layers"] = answered()
    assert not calls
    answers, counts, caches = zip(*found.values(), strict=True)
    assert answers[0] == answers[1] == answers[2] and len(answers[0].tokens) == 101
    assert counts[0] == counts[1] == counts[2] and sum(counts[0][0]["calls"]) > 0
    stores = [kv.store_of(GrowingStore, pytest.fail) for kv in caches]
    assert [kv.length for kv in caches] == [len(IDS) + 100] * 3 == [store.length for store in stores]
    for some, layers in zip(stores[0].layers(), stores[2].layers(), strict=True):
        assert torch.equal(some[: len(IDS) + 100], layers[: len(IDS) + 100])


@pytest.mark.some(1)
def test_another_preset_holds_from_the_next_token(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(loaded: LoadedModel) -> Tensor:
        kv, logits = KVCache(), list[Tensor]()
        for preset in (PRESETS["nothing"], PRESETS["weighed"], PRESETS["nothing"]):
            loaded.control.preset = preset
            logits.append(loaded.decoder.forward([7], kv))
            kv.computed([7], preset)
        return torch.cat(logits)

    loaded = open_model(pack)
    found = both(loaded)
    layer_by_layer(monkeypatch)
    assert torch.equal(found, both(loaded))


def test_a_stop_is_seen_in_the_layer_and_leaves_whole_tokens(tiny_pack: Path) -> None:
    loaded, kv = open_model(tiny_pack), KVCache()
    control = loaded.control
    expected, _ = read(loaded, [4, 5])
    loaded.decoder.forward([4], kv)
    kv.computed([4], control.preset)
    control.cancelled.set()
    with pytest.raises(Cancelled):
        loaded.decoder.forward([5], kv)
    assert kv.length == 1
    control.cancelled.clear()
    assert torch.equal(loaded.decoder.forward([5], kv), expected[1:])
