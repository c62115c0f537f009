"""Keys and values of 8 bits: near those of 16 on every path, the same on all of them, through edits and in RAM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import kv_stores
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BLOCK, BorrowingStore, GrowingStore, KvForm
from floe_chat.engine.events import Advanced
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts

from ..helpers import relative_rms
from .driver import silent
from .fake_card import FakeCard
from .offloading import needs_of
from .step_models import EACH_HEAD, PRESET, WINDOW, Noting, blocks_of, feed, ids_of, make_model

# Of logits, with 8 bits against 16; and between two paths that round some number to the neighbouring code.
LOSS, SAME = 3e-2, 5e-3
PIECES = {"token by token": [1] * 24, "chunks": [9, 1, 1, 60, 1, 5, 1]}


def passing(model: Any, form: KvForm, *, compiled: bool = True) -> FusedDecoder:
    lean = choose(model, WINDOW, form)
    assert isinstance(lean, FusedDecoder) and lean.steps, lean.reason
    if not compiled:
        lean.steps = []
    return lean


@pytest.mark.parametrize("name", EACH_HEAD)
def test_logits_are_near_those_of_16_bits_on_every_path(name: str) -> None:
    model = make_model(name)
    for block in blocks_of(model):  # a router's near tie decides otherwise after any rounding
        block.experts = Noting()
    for pieces in PIECES.values():
        ids = ids_of(sum(pieces))
        exact = feed(LibraryDecoder(model), KVCache(), ids, pieces)
        caches = KVCache(), KVCache()
        ways = [passing(model, KvForm(8), compiled=compiled) for compiled in (True, False)]
        assert all("keys and values of 8 bits" in way.reason for way in ways)
        found = [feed(way, kv, ids, pieces) for way, kv in zip(ways, caches, strict=True)]
        assert 1e-5 < relative_rms(found[0], exact) <= LOSS
        assert relative_rms(found[0], found[1]) <= SAME
        assert caches[0].nbytes() == caches[1].nbytes()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("near", [0, 1, 2])
def test_entries_in_ram_change_nothing(bits: int, near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer chats move layers out, an edit brings them back, and another branch goes on from there."""
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    model, ids = make_model("mixtral"), ids_of(60)
    pieces = [20, *[1] * 20, 15, *[1] * 5]
    whole = feed(passing(model, KvForm(bits)), KVCache(), ids, pieces)
    one = passing(model, KvForm(bits))
    kv = KVCache()
    feed(one, kv, ids, [1])
    assert isinstance(kv.store, GrowingStore)
    for compiled in (True, False):
        most = near * kv.store.layout.nbytes(1, 40)
        lean, own = passing(model, KvForm(bits, most), compiled=compiled), KVCache()
        assert relative_rms(feed(lean, own, ids, pieces), whole) <= (SAME if bits == 8 else 1e-5)
        assert own.spilled() > 0 and own.nbytes() <= most
        long = own.spilled()
        branch = [*ids[:11], *ids_of(49)]
        assert own.keep(branch[:12], PRESET) == 11
        assert own.spilled() < long or not near
        again = feed(lean, own, branch, [1] * 49)
        other = feed(passing(model, KvForm(bits)), KVCache(), branch, [11, *[1] * 49])[1:]
        assert relative_rms(again, other) <= (SAME if bits == 8 else 1e-5)


def opened(pack: Path, device: str, **given: Any) -> LoadedModel:
    return load(pack, None, device, silent, **given)[0]


def test_a_graph_reads_codes_wherever_they_are(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 4)
    plain = opened(tiny_pack, "cpu", advanced=Advanced(kv_bits="8"))
    ids = [1 + 7 * i % 200 for i in range(40)]
    wanted = feed(plain.decoder, KVCache(), ids, [1] * 40)
    card = FakeCard(monkeypatch)
    loaded, kv = load(tiny_pack, None, "cpu", silent, library=True, advanced=Advanced(kv_bits="8"))[0], KVCache()
    assert "one graph per token" in loaded.decoder.reason and len(card.captures) == 1
    first = feed(loaded.decoder, kv, ids, [1] * 10)
    assert isinstance(kv.store, GrowingStore)
    kv.store.layout = replace(kv.store.layout, most=kv.store.layout.nbytes(1, 24))  # as of a small card
    found = torch.cat([first, feed(loaded.decoder, kv, ids, [1] * 30)])
    assert relative_rms(found, wanted) <= LOSS and kv.spilled() > 0 and len(card.captures) == 1


def test_a_pool_gives_way_and_then_ram_does(tiny_pack: Path) -> None:
    """A chat continues that is longer than what the device has room for at all."""
    needs = needs_of(tiny_pack, 2, 8, BLOCK)
    asked, whole = Advanced(kv_bits="8", context=BLOCK), opened(tiny_pack, "cpu", advanced=Advanced(kv_bits="8"))
    given = {"vram": needs.least() + 40 * needs.row, "advanced": asked, "parts": Parts(mix=Mix(pool=2))}
    loaded, kv = opened(tiny_pack, "throttled:1gb", **given), KVCache()
    assert loaded.offload is not None and loaded.window == 512
    for each in (loaded, whole):
        each.control.preset = PRESET
    ids, pieces = [1, *[40 + n % 200 for n in range(402)]], [200, *[1] * 100, 100, 1]
    found = feed(loaded.decoder, kv, ids, pieces)
    assert isinstance(kv.store, BorrowingStore) and 0 < kv.nbytes() <= (kv.store.layout.most or 0)
    assert kv.spilled() > 0 and kv.nbytes() + kv.spilled() == 2 * BLOCK * needs.kv
    assert loaded.offload.pool.capacity >= needs.top_k * needs.neurons
    assert relative_rms(found, feed(whole.decoder, KVCache(), ids, pieces)) <= SAME
    assert kv.keep(ids[:60], PRESET) == 59 and kv.spilled() == 0
    loaded.close()
