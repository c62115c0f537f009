"""A token through the graphs of several cards is the token of one processor, wherever experts are."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from floe_chat.engine.decoder import fused_pass, layers
from floe_chat.engine.decoder.card.card_parts import CardParts
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.ways import Graphs
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.quality_presets import Preset
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from .. import families
from ..helpers import make_pack, relative_rms
from .driver import open_model, silent
from .fake_card import FakeCard
from .margins import clear_prompt, prompt_of
from .offloading import EVERYTHING, PLAIN, SKIPPING, needs_of
from .step_models import feed
from .test_card_layers import as_computed

LAYERS = 3
TEXTS = [prompt_of(seed, 8) for seed in range(3, 103)]
TWO = "throttled:4gb,throttled:4gb"
MIXES = {
    "pools": Mix(pool=LAYERS),
    "a pool and whole layers": Mix(gpu=1, pool=2),
    "whole layers": Mix(gpu=LAYERS),
    "all kinds": Mix(gpu=1, pool=1, cpu=1),
}


@pytest.fixture(scope="module", autouse=True)
def as_they_are() -> Generator[None]:
    """Keys and values are kept as computed: in 16 bits, a sum in another order may round one the other way."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (layers, fused_pass):
            patch.setattr(module, "kept_dtype", as_computed)
        yield


@pytest.fixture(scope="module")
def pack(shape: Callable[[str], Path]) -> Path:
    return shape("mixtral")


def opened(pack: Path, mix: Mix, *, predictor: str = "none", division: tuple[int, ...] = (1, 2)) -> LoadedModel:
    needs = needs_of(pack)
    vram = needs.whole() if mix.gpu == sum(division) else needs.least(mix) + 40 * needs.row
    parts = Parts(mix=mix, division=division, predictor=predictor)
    return load(pack, None, TWO, silent, vram=vram, parts=parts)[0]


def fed(loaded: LoadedModel, ids: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Logits after each token, and how often each expert was called."""
    loaded.telemetry.begin(0, 0, 0.0)
    loaded.control.counting = True
    logits = feed(loaded.decoder, KVCache(), ids, [1] * len(ids))
    loaded.control.counting = False
    loaded.telemetry.settle()
    return logits, [layer.calls for layer in loaded.telemetry.layers]


def as_one(pack: Path, mix: Mix, division: tuple[int, ...], preset: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of one processor."""
    plain = open_model(pack)
    plain.control.preset = preset
    ids, (expected, calls) = clear_prompt(plain, lambda ids: fed(plain, ids), TEXTS)
    card = FakeCard(monkeypatch)
    loaded = opened(pack, mix, division=division)
    assert "on each card" in loaded.decoder.reason and isinstance(loaded.decoder, FusedDecoder)
    assert isinstance(loaded.decoder.way, Graphs)
    assert isinstance(loaded.decoder.way.by_layer, CardParts)
    assert (", with the experts in the pool" in loaded.decoder.reason) == (mix.pool > 0)
    loaded.control.preset = preset
    found, as_called = fed(loaded, ids)
    loaded.close()
    assert card.replays >= len(ids) * (sum(division) + 1)
    assert relative_rms(found, expected) <= 1e-5 and as_called == calls


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("division", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("preset", [SKIPPING, EVERYTHING], ids=lambda preset: preset.name)
def test_logits_are_those_of_one_processor(
    pack: Path, mix: Mix, division: tuple[int, ...], preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_one(pack, mix, division, preset, monkeypatch)


def test_heads_of_two_kinds_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms behind each part, which the next card closes."""
    make_pack(families.make("gemma4", tmp_path / "source"), tmp_path / "pack", PackSpec(up=3))
    as_one(tmp_path / "pack", Mix(gpu=1, pool=2, cpu=1), (1, 3), PLAIN, monkeypatch)


def test_latent_vectors_are_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pack(families.make("deepseek_v2", tmp_path / "source"), tmp_path / "pack", PackSpec(up=3))
    as_one(tmp_path / "pack", Mix(gpu=1, pool=1), (1, 1), PLAIN, monkeypatch)


def test_a_text_passes_the_length_that_rope_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = families.MODELS["phimoe"]["rope_parameters"] | {"original_max_position_embeddings": 5}
    make_pack(families.make("phimoe", tmp_path / "source", rope_parameters=rope), tmp_path / "pack", PackSpec(up=3))
    as_one(tmp_path / "pack", MIXES["pools"], (1, 2), PLAIN, monkeypatch)


@pytest.fixture(scope="module")
def everything(pack: Path) -> Tensor:
    """The logits of one processor with nothing left out."""
    plain = open_model(pack)
    plain.control.preset = EVERYTHING
    return fed(plain, TEXTS[0])[0]


def test_rows_are_looked_for_ahead_across_the_cards(
    pack: Path, everything: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(monkeypatch)
    loaded = opened(pack, MIXES["pools"], predictor="gate")
    loaded.control.preset = EVERYTHING
    found, _ = fed(loaded, TEXTS[0])
    assert relative_rms(found, everything) <= 1e-5
    assert all(layer.guessed > 0 for layer in loaded.telemetry.layers[1:])
    loaded.close()


def test_a_predictor_that_attends_goes_without_graphs(
    pack: Path, everything: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCard(monkeypatch)
    loaded = opened(pack, MIXES["pools"], predictor="partial")
    loaded.control.preset = EVERYTHING
    assert "runs a layer before its turn" in loaded.decoder.reason
    assert relative_rms(fed(loaded, TEXTS[0])[0], everything) <= 1e-5
    loaded.close()
