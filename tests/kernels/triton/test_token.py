"""A whole token by the kernels of a GPU, as one graph where there is one: as the CPU computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder import graphs
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.ways import Graphs
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.kernels import operations, triton
from floe_chat.kernels.operations import Backend
from floe_chat.kernels.rule import Rule
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import EXACT, PackSpec
from torch import Tensor

from ... import families
from ...engine.offloading import offloaded
from ...helpers import make_checkpoint, make_pack, relative_rms
from .conftest import INTERPRETED

OPERATIONS = (
    *("route", "select", "moe_step", "experts_step", "linear", "linear_joined", "plain", "list_active", "add_listed"),
    *("attend_one", "latent_one", "delta_one", "convolve_one"),
)
TOKENS = [1, 5, 200, 17]
RULE = Rule(sparsity=0.3, product=0.3, drop=0.6, major=0.97, weighed=True)


def silent(_step: str, _share: float) -> None:
    """Progress that nobody looks at."""


def feed(loaded: LoadedModel) -> tuple[Tensor, list[int]]:
    """Logits of some tokens in a row, and how many neurons each layer computed."""
    kv, logits = KVCache(), list[Tensor]()
    loaded.control.counting = True
    for token in TOKENS:
        logits.append(loaded.decoder.forward([token], kv).float().cpu())
        kv.computed([token], loaded.control.preset)
    loaded.telemetry.settle()
    return torch.cat(logits), [layer.active for layer in loaded.telemetry.layers]


@torch.inference_mode()
def both(loaded: LoadedModel) -> Tensor:
    """Logits of the second and the third token, computed in one pass."""
    kv, decoder = KVCache(), loaded.decoder
    decoder.forward([TOKENS[0]], kv)
    kv.computed(TOKENS[:1], loaded.control.preset)
    assert isinstance(decoder, FusedDecoder) and isinstance(decoder.way, Graphs) and decoder.way.fits(2) == 2
    store = decoder._room_for(2, kv)  # pyright: ignore[reportPrivateUsage]
    text, card = decoder._text(store, 2, kv), decoder.way._token  # pyright: ignore[reportPrivateUsage]
    assert card is not None
    return card.run(TOKENS[1:3], text.rope, text.start, text.store).clone()


@pytest.fixture(scope="module", params=["skips", "skips nothing", "qwen3_next", "lfm2_moe", "glm4_moe_lite"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A pack, and whether to skip anything. Made before a test's memory is poisoned."""
    name, skips = request.param, request.param == "skips"
    if not INTERPRETED:  # a machine with a GPU may not have what makes the small models
        if "skips" not in name:
            pytest.skip("its pack is a file of the program's")
        return asset("demo", "packed"), skips
    folder = tmp_path_factory.mktemp("token")
    if "skips" in name:
        source = make_checkpoint(folder / "source", hidden=32, intermediate=24, experts=3, layers=1)
    else:
        source = families.make(name, folder / "source", moe_intermediate_size=10)
    make_pack(source, folder / "pack", PackSpec() if skips else EXACT)
    return folder / "pack", skips


def interpreted(device: torch.device, patch: pytest.MonkeyPatch) -> None:
    """Let the kernels compute on a CPU as on a card, where there is no other device."""
    if device.type != "cpu":
        return
    kernels = replace(operations.choose(device), name="triton", **{name: getattr(triton, name) for name in OPERATIONS})

    def choose(_device: torch.device | str) -> Backend:
        return kernels

    def possible(_device: torch.device) -> bool:
        return True

    patch.setattr(operations, "choose", choose)
    patch.setattr(graphs, "possible", possible)


def test_a_token_is_the_cpus(pack: tuple[Path, bool], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    small, skips = pack
    here = load(small, None, "cpu", silent)[0]
    with monkeypatch.context() as patch:
        interpreted(device, patch)
        there = load(small, None, str(device), silent)[0]
        assert "one graph per token" in there.decoder.reason
        preset = here.control.preset
        preset = replace(preset, rule=RULE if skips else Rule(), x_bits=22)
        here.control.preset = there.control.preset = preset
        found, active = feed(there)
        together = both(there)
    expected, as_active = feed(here)
    assert found.isfinite().all() and torch.equal(together, found[1:3]), "two at once are not what each is alone"
    assert relative_rms(found, expected) <= (1e-3 if device.type == "cpu" else 0.1)
    assert active == pytest.approx(as_active, rel=0.1)


@pytest.mark.parametrize("pack", ["skips", "skips nothing", "qwen3_next"], indirect=True)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_token_with_rows_in_a_pool_is_the_cpus(
    pack: tuple[Path, bool], share: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("make card compares every size of a real pool")
    small, skips = pack
    loaded = load(small, None, "cpu", silent)[0]
    preset = replace(loaded.control.preset, rule=RULE if skips else Rule(), x_bits=22)
    loaded.control.preset = preset
    expected, active = feed(loaded)
    with monkeypatch.context() as patch:
        interpreted(device, patch)
        with offloaded(loaded, preset, share, predict=False, cpu=1e12):
            loaded.decoder.prepare()
            assert loaded.decoder.reason.endswith("with the experts in the pool")
            found, as_active = feed(loaded)
    assert relative_rms(found, expected) <= 1e-3
    assert as_active == pytest.approx(active, rel=0.1)
    assert loaded.telemetry.layers[0].on_cpu > 0 or share == 1.0
