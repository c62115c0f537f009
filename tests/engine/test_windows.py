"""Layers that see a window keep little more than that: answers are the same as with all keys and values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import fused_pass, kv_stores
from floe_chat.engine.decoder.decoders import FusedDecoder, choose
from floe_chat.engine.decoder.divided import DividedStore
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BorrowingStore, GrowingStore, KvForm, KvPart, Layout
from floe_chat.engine.decoder.ways import Compiled, Way
from floe_chat.engine.events import Load, Loaded
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK
from floe_chat.engine.loader import load
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.footprint import KvBytes, kv_bytes
from floe_chat.models import catalog
from floe_chat.models.packing.pack import EXACT
from torch import Tensor

from .. import families
from ..helpers import make_pack, relative_rms
from .driver import Engine, open_model, silent
from .fake_card import FakeCard
from .offloading import needs_of
from .step_models import PRESET, WINDOW, make_model
from .test_kv import Lender, put
from .test_states import Chat, converse

CPU = torch.device("cpu")
SLACK = 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    monkeypatch.setattr(fused_pass, "SLACK", SLACK)


def own(layout: Layout) -> GrowingStore:
    return GrowingStore(layout)


def spilled(layout: Layout) -> GrowingStore:
    return GrowingStore(replace(layout, most=layout.nbytes(3, 100)))


def borrowed(layout: Layout) -> GrowingStore:
    return BorrowingStore(layout, Lender(layout.nbytes(layout.layers, layout.window)))


def borrowed_and_spilled(layout: Layout) -> GrowingStore:
    most = layout.nbytes(3, 150)
    return BorrowingStore(replace(layout, most=most), Lender(most))


def divided(layout: Layout) -> GrowingStore:
    parts = KvPart(range(1), CPU, None), KvPart(range(1, 4), CPU, None), KvPart(range(4, 6), CPU, None)
    room = Lender(layout.nbytes(layout.layers, layout.window))
    return DividedStore(layout, parts, [None, room, None])


@pytest.mark.parametrize("past", [0, 70, 1000])
@pytest.mark.parametrize("make", [own, spilled, borrowed, borrowed_and_spilled, divided])
def test_what_is_seen_is_there(make: Callable[[Layout], GrowingStore], past: int) -> None:
    """Texts that grow, are gone back in, parked and brought back, against all that was ever stored."""
    dice, sees, window = random.Random(past), 9, 600
    windowed = (False, True, True, False, True, True)
    entries = tuple((4, 3) if one else (2, 5) for one in windowed)
    layout = Layout(entries, window, torch.float32, CPU, None, windowed, sees, SLACK, past)
    store, held = make(layout), [torch.empty(0, *entry) for entry in entries]
    most, back, lost, parked = layout.kept, 0, 0, list[tuple[Any, list[Tensor]]]()
    for _ in range(150):
        way = dice.choice(["on", "on", "on", "back", "far", "park", "bring"])
        length = store.length
        if way in ("back", "far") and length:
            to = dice.randrange(max(0, length - (10 if way == "back" else length)), length + 1)
            kept = store.keeps(to)
            assert kept == (to if max(0, to + 1 - sees) >= store.reach() else 0)
            back, lost = back + (0 < kept < length), lost + (kept < to)
            store.crop(to)
            store.trim(to)
            assert store.length == kept
            held = [one[:kept] for one in held]
        elif way == "park" and (copy := store.copied(1 << 30)) is not None:
            parked = [*parked[-2:], (copy, held)]
        elif way == "bring" and parked:
            copy, all_of_it = dice.choice(parked)
            to = copy.keeps(len(all_of_it[0]) - dice.choice([0, 1, 5, 60, 150]))
            if to > 0 and store.fits(copy, to):
                store.put(copy, to)
                held = [one[:to] for one in all_of_it]
        elif length < window:
            more = min(dice.choice([1, 1, 5, 40, SLACK]), window - length)
            part = [torch.randn(more, *entry) for entry in entries]
            put(store, part)
            held = [torch.cat([one, new]) for one, new in zip(held, part, strict=True)]
        assert store.length == len(held[0]) and 0 <= store.first - store.reach() <= past
        assert_there(store, held, sees)
        on_windows = sum(layer.nbytes for layer, one in zip(store.layers(), windowed, strict=True) if one)
        assert on_windows <= 4 * most * 12 * 4
    assert back > 3 and (lost > 3 or past > window)


def assert_there(store: GrowingStore, held: Sequence[Tensor], sees: int) -> None:
    end, layout = store.length, store.layout
    begin = max(0, end + 1 - sees)
    whole = [layer for group in store.seen(0, end) for layer in group]
    seen = [layer for group in store.seen(begin, end) for layer in group]
    firsts = store.firsts() or [0] * layout.layers
    for number, (layer, one) in enumerate(zip(store.layers(), held, strict=True)):
        first = firsts[number]
        assert first <= begin if layout.windowed[number] else first == 0
        assert torch.equal(whole[number], one[first:]) and torch.equal(layer[: end - first], one[first:])
        assert torch.equal(seen[number], one[begin:])
        assert store.addresses()[number] == layer.data_ptr() - first * one[:1].numel() * 4 or not len(one)


def test_a_text_can_be_gone_back_in_as_far_as_ram_has_it() -> None:
    for past in (0, 30, 200, 900):
        store = GrowingStore(Layout(((2, 2),), 900, torch.float32, CPU, None, (True,), 9, SLACK, past))
        for more in (SLACK, 1, 40, 1) * 8:
            put(store, torch.zeros(1, more, 2, 2))
            assert store.reach() == max(0, store.first - past)
        there = store.nbytes()
        assert there == (9 + 8 + SLACK + store.first - store.reach()) * 4 * 4 and store.first > 700
        nearest = store.reach() + 8
        assert store.keeps(nearest) == nearest and (store.keeps(nearest - 1) == 0) == (nearest > 8)


def test_more_at_once_than_there_is_room_for_is_refused() -> None:
    store = GrowingStore(Layout(((2, 2),), 900, torch.float32, CPU, None, (True,), 9, SLACK))
    put(store, torch.zeros(1, 50, 2, 2))
    with pytest.raises(ValueError, match=f"{SLACK + 40} tokens at once for layers that take {SLACK}"):
        store.reserve(50 + SLACK + 40)
    put(store, torch.zeros(1, SLACK, 2, 2))


class Pair:
    """One text in two stores: one keeps windows, the other one everything."""

    def __init__(self, decoder: FusedDecoder, kv: KVCache | None = None) -> None:
        self.decoder, self.kv, self.whole = decoder, kv or KVCache(), KVCache()

    def feed(self, ids: Sequence[int]) -> None:
        found, kept = self.decoder.forward(ids, self.kv).clone(), self.kv.store
        assert isinstance(kept, GrowingStore) and any(kept.layout.windowed)
        layout = replace(kept.layout, windowed=(), device=CPU)
        self.whole.store_of(GrowingStore, lambda: GrowingStore(layout))
        assert torch.equal(found, self.decoder.forward(ids, self.whole))
        for kv in (self.kv, self.whole):
            kv.computed(ids, PRESET)

    def read(self, text: Sequence[int], pieces: Iterator[int]) -> int:
        """All of it, in such pieces; returns how many of its tokens were there."""
        kept = self.kv.keep(text, PRESET)
        self.whole.cut(kept)
        while left := text[self.kv.length :]:
            self.feed(left[: next(pieces)])
        return kept


def compiled(model: Any, _patch: pytest.MonkeyPatch, form: KvForm) -> FusedDecoder:
    decoder = choose(model, WINDOW, form)
    assert isinstance(decoder, FusedDecoder) and isinstance(decoder.way, Compiled)
    return decoder


def by_torch(model: Any, patch: pytest.MonkeyPatch, form: KvForm) -> FusedDecoder:
    decoder = compiled(model, patch, form)
    decoder.way = Way(decoder)
    return decoder


def on_a_card(model: Any, patch: pytest.MonkeyPatch, form: KvForm) -> FusedDecoder:
    FakeCard(patch)
    decoder = choose(model, WINDOW, form)
    assert isinstance(decoder, FusedDecoder) and "one graph per layer and token" in decoder.reason
    return decoder


def of_several(model: Any, patch: pytest.MonkeyPatch, form: KvForm) -> FusedDecoder:
    parts = KvPart(range(1), CPU, None), KvPart(range(1, model.config.num_hidden_layers), CPU, None)
    return compiled(model, patch, replace(form, parts=parts))


def room(_ram: int) -> int:
    return 40_000


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("way", "name", "bits"),
    [
        (compiled, "gemma4_text", 16),
        (by_torch, "mixtral-sliding", 16),
        (on_a_card, "qwen2_moe-mixed", 16),
        (of_several, "gemma4_text", 8),
        *((way, "gemma4_text", 16) for way in (by_torch, on_a_card, of_several)),  # with all others only
    ],
)
def test_logits_are_those_of_all_keys_and_values(
    name: str, bits: int, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of any length, edits near and far, to the last bit."""
    monkeypatch.setattr(fused_pass, "room_for_past", room)
    dice = random.Random(len(name) + bits)
    pair = Pair(way(make_model(name), monkeypatch, KvForm(bits)))
    moved, sizes, kept = 0, (dice.choice([1, 1, 1, 2, 17, SLACK]) for _ in iter(int, 1)), list[tuple[int, int]]()
    for turn in range(12):
        before = pair.kv.tokens
        cut = dice.choice([len(before), len(before), max(0, len(before) - 9), dice.randrange(len(before) + 1)])
        more = [dice.randrange(101) for _ in range(dice.choice([1, 20, 90]))]
        text = [*before[: cut if turn != 9 else 12], *more][:WINDOW]
        kept.append((min(cut, len(text) - 1), pair.read(text, sizes)))
        store = pair.kv.store
        assert isinstance(store, GrowingStore)
        moved += store.first > 0
    assert moved and any(0 < there == cut for cut, there in kept), "of what has left a window, some came back"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("way", "name"), [(compiled, "gemma4_text"), (by_torch, "mixtral-sliding"), (compiled, "qwen2_moe-mixed")]
)
def test_texts_go_on_together(name: str, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = way(make_model(name), monkeypatch, KvForm())
    dice, pairs = random.Random(1), [Pair(decoder, kv) for kv in (KVCache(), decoder.beside(), decoder.beside())]
    for pair, length in zip(pairs, (30, 200, 117), strict=True):
        pair.read([dice.randrange(101) for _ in range(length)], itertools.repeat(50))
    for _ in range(SLACK + 10):
        tokens = [dice.randrange(101) for _ in pairs]
        both = [decoder.together(tokens, kvs) for kvs in zip(*((pair.kv, pair.whole) for pair in pairs), strict=True)]
        assert both[0] is not None and torch.equal(*both)
        for pair, token in zip(pairs, tokens, strict=True):
            for kv in (pair.kv, pair.whole):
                kv.computed([token], PRESET)


@pytest.fixture(
    scope="module",
    params=["gemma4", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("gpt_oss", "mixtral"))],
)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    given: dict[str, Any] = {"sliding_window": 9} if request.param == "mixtral" else {}
    source = families.make(request.param, folder / "source", num_experts_per_tok=5, **given)  # all of them
    make_pack(source, folder / "pack", EXACT)
    return folder / "pack"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_a_chat_computes_next_to_nothing_again(pack: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = open_model(pack, "Exact")
    monkeypatch.setattr(fused_pass, "SLACK", PREFILL_CHUNK)
    with Engine() as engine:
        engine.send(Load(str(pack), "Exact", "cpu", parked=1 << 30))
        engine.until(Loaded)
        converse(Chat(engine, alone), random.Random(seed))


@pytest.mark.parametrize("name", [pytest.param("gpt_oss", marks=pytest.mark.thorough), "gemma4"])
def test_plans_count_what_is_set_aside(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is computed, and of what has left windows, in RAM: at most what may follow at once is not counted."""
    monkeypatch.undo()
    source = families.make(name, tmp_path / "source", max_position_embeddings=8192, sliding_window=40)
    make_pack(source, tmp_path / "pack", EXACT)
    needs = needs_of(tmp_path / "pack", 4)
    kv = needs.kv
    assert kv.windowed and kv.sees == 40
    given: dict[str, Any] = {"vram": needs.least() + 4 * kv.of(4000), "parts": Parts(mix=Mix(pool=needs.layers))}
    device, alone = (
        load(tmp_path / "pack", "Exact", "throttled:1gb", silent, **given)[0],
        open_model(tmp_path / "pack", "Exact"),
    )
    found = list[Tensor]()
    for loaded in (device, alone):
        text, cache = [5 + at % 90 for at in range(2400)], KVCache()
        for start in range(0, len(text), 300):
            found.append(loaded.decoder.forward(text[start : start + 300], cache))
            cache.computed(text[start : start + 300], PRESET)
        store = cache.store
        assert isinstance(store, GrowingStore) and store.first > 500
        assert isinstance(store, BorrowingStore) == (loaded is device)
        assert sum(layer.nbytes for layer in store.layers()) == kv.of(store.capacity)
        past = store.nbytes() - kv.of(store.capacity)  # this device's memory is RAM
        assert (
            past == kv.windowed * store.first
            and 0 <= past - kv.past(len(text), 1 << 40) <= kv.windowed * kv_stores.SLACK
        )
        loaded.close()
    both = torch.stack(found).chunk(2)
    assert relative_rms(*both) <= 1e-5


def test_a_budget_has_room_for_so_many_tokens() -> None:
    for kv in (KvBytes(7), KvBytes(7, 31, 100), KvBytes(0, 31, 100)):
        for tokens in (0, 1, 100, kv_stores.kept(100), kv_stores.kept(100) + 1, 9000):
            there = kv.tokens(kv.of(tokens), 9000)
            assert kv.of(there) <= kv.of(tokens) < kv.of(there + 1) or there == 9000
            assert kv.seen(tokens) <= kv.of(tokens) and kv.past(tokens, 1 << 40) <= kv.windowed * tokens
    long = kv_bytes(catalog.described("gemma-4-26b-a4b-it").sizes, 16)
    assert long.of(32_768) < 1.4e9 < 7e9 < (long.whole + long.windowed) * 32_768
