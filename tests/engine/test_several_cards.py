"""A model on several cards of one machine: where its layers are changes times and memory, never tokens."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.divided import DividedPass, DividedStore
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_shelf import KVShelf
from floe_chat.engine.decoder.kv_stores import KvPart, Layout
from floe_chat.engine.events import Advanced
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Gpu
from floe_chat.engine.offload.cards import named
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.offload.pools import Pools
from floe_chat.engine.offload.virtual.virtual_device import Turns, VirtualDevice
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.memory_plan import KEPT_LEAST, Needs
from floe_chat.engine.planning.opened_pack import Asked
from floe_chat.engine.planning.several import placement
from floe_chat.engine.planning.several.division import part_needs
from floe_chat.engine.planning.several.placement import Placement
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.step import Stepped
from floe_chat.models.checkpoint import read_config
from floe_chat.models.errors import UsageError
from floe_chat.models.pack import usage_file
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from ..helpers import make_checkpoint, make_pack
from .driver import Answer, answer, open_model, silent
from .margins import clear_prompt
from .offloading import PLAIN, SKIPPING, needs_of
from .test_room import prompt_of, talk

LAYERS = 5
CARD = "sim:rtx3060-12gb"
TWO = f"{CARD},{CARD}"
POOL, MIXED = Mix(pool=LAYERS), Mix(gpu=2, pool=2, cpu=1)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    source = make_checkpoint(folder / "source", hidden=64, intermediate=98, experts=5, layers=LAYERS)
    make_pack(source, folder / "pack", PackSpec(up=3, gate=8, down=8))
    return folder / "pack"


@pytest.fixture(scope="module")
def needs(pack: Path) -> Needs:
    return needs_of(pack)


@pytest.fixture(scope="module")
def expected(pack: Path) -> tuple[list[int], dict[str, Answer]]:
    """A prompt in which no neuron is at its threshold, and its answers in RAM."""
    plain = open_model(pack)

    def run(prompt: list[int]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for preset in (SKIPPING, PLAIN):
            plain.control.preset = preset
            found[preset.name] = answer(plain, prompt, max_new_tokens=10)
        return found

    return clear_prompt(plain, run)


def least_of_parts(pack: Path, needs: Needs, context: int) -> int:
    """Bytes that are enough for each of two cards with two and three layers, and so many tokens."""
    takes = Footprint.of_pack(PackedModel.open(pack).manifest, read_config(pack))
    short = replace(needs, context=context)
    return max(part_needs(short, takes, count, first=count == 2).least() for count in (2, 3))


@contextmanager
def opened(
    pack: Path, device: str, vram: int | None, parts: Parts | None = None, advanced: Advanced | None = None
) -> Generator[tuple[LoadedModel, Pools]]:
    loaded, _ = load(pack, None, device, silent, vram=vram, parts=parts, advanced=advanced)
    assert loaded.pools is not None and loaded.offload is None
    try:
        yield loaded, loaded.pools
    finally:
        loaded.close()


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("device", "division", "mix", "predictor", "rows"),
    [
        (TWO, (2, 3), POOL, "none", 400),
        (TWO, (2, 3), POOL, "gate", 0),
        (TWO, (4, 1), MIXED, "partial", 400),
        (f"{CARD},sim:rtx4090-24gb,{CARD}", (1, 3, 1), POOL, "learned", 0),
        (f"{CARD},sim:rtx4090-24gb", (2, 3), Mix(gpu=LAYERS), "none", 0),
        (TWO, (3, 2), Mix(gpu=1, pool=3, cpu=1, order=(3, 1, 0, 4, 2)), "gate", 0),
        ("throttled:2gb,throttled:4gb", (), POOL, "gate", 400),
    ],
)
def test_tokens_do_not_depend_on_the_division(
    pack: Path,
    needs: Needs,
    expected: tuple[list[int], dict[str, Answer]],
    device: str,
    division: tuple[int, ...],
    mix: Mix,
    predictor: str,
    rows: int,
) -> None:
    prompt, want = expected
    vram = needs.whole() if mix.gpu == LAYERS else needs.least(mix) + rows * needs.row
    parts = Parts(mix=mix, division=division, predictor=predictor)
    with opened(pack, device, vram, parts) as (loaded, pools):
        counts = loaded.telemetry.layers
        for preset in (SKIPPING, PLAIN):
            loaded.control.preset = preset
            assert answer(loaded, prompt, max_new_tokens=10) == want[preset.name]
            counts = loaded.telemetry.layers
            for index, layer in enumerate(counts):
                placed = layer.ready + layer.coming + layer.copied + layer.on_cpu
                assert placed == layer.active > 0 or mix.places[index] == "cpu"
        assert len(pools.each) == device.count(",") + 1
        assert [layer for one in pools.each for layer in one.pooled] == mix.pooled
        if predictor != "none" and not rows and division == (2, 3):
            assert counts[2].guessed > 0  # the first layer of the second card, by the last one of the first


def test_each_card_has_its_own_layers_memory_and_link(pack: Path, needs: Needs) -> None:
    vram = needs.least() + 300 * needs.row
    with opened(pack, TWO, vram, Parts(mix=POOL, division=(2, 3))) as (loaded, pools):
        answer(loaded, prompt_of(1, 30))
        first, second = pools.each
        assert [*first.pooled] == [0, 1] and [*second.pooled] == [2, 3, 4]
        assert first.device.link is not second.device.link and first.memory is not second.memory
        one, other = pools.cards()
        assert (one.name, other.name) == (f"{CARD} (1 of 2)", f"{CARD} (2 of 2)")
        assert one.dense > other.dense > 0 and other.up == pytest.approx(1.5 * one.up)
        for use, count in pools.sizes().items():
            assert count == getattr(one, use) + getattr(other, use), use
        assert pools.moved() == (one.moved + other.moved, pytest.approx(one.busy + other.busy))
        stats = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1)
        assert stats.rows is not None and stats.vram_budget == 2 * vram
        for shown, card in zip(stats.rows.cards, pools.cards(), strict=True):  # of decode alone, in which nothing moved
            assert shown == replace(card, moved=0, busy=0.0, moved_per_token=shown.moved_per_token) and card.moved


def test_the_fastest_division_is_taken_where_none_is_asked_for(pack: Path, needs: Needs) -> None:
    limit = needs.least() + 200 * needs.row
    loaded, told = load(pack, None, f"{CARD},sim:rtx4090-24gb", silent, vram=limit)
    assert loaded.pools is not None
    assert told.device == f"{CARD},sim:rtx4090-24gb" and "the fastest division by our estimate" in told.reason
    loaded.close()


def test_keys_and_values_are_with_their_layers_and_take_room_there(pack: Path, needs: Needs) -> None:
    plain = open_model(pack)
    short = Advanced(context=32)
    vram = least_of_parts(pack, needs, 32) + 300 * needs.row
    with opened(pack, TWO, vram, Parts(mix=POOL, division=(2, 3)), short) as (loaded, pools):
        kv = KVCache()
        before = [one.pool.capacity for one in pools.each]
        prompt = prompt_of(3, 300)
        assert talk(loaded, kv, prompt, 12) == talk(plain, KVCache(), prompt, 12)
        assert isinstance(kv.store, DividedStore)
        assert kv.nbytes() + kv.spilled() == 512 * needs.kv.whole
        lent, spilled = [one.lent().numel() for one in pools.each], kv.spilled()
        # Two layers of five are the first card's, three the second's.
        assert lent[0] + kv.store.parts[0].spilled() == 512 * needs.kv.whole * 2 // 5
        assert lent[1] + kv.store.parts[1].spilled() == 512 * needs.kv.whole * 3 // 5
        assert any(one.pool.capacity < was for one, was in zip(pools.each, before, strict=True))
        follow = [*prompt, *range(10, 20)]
        assert talk(loaded, kv, follow, 12) == talk(plain, KVCache(), follow, 12)
        assert talk(loaded, kv, prompt_of(4, 20), 5) == talk(plain, KVCache(), prompt_of(4, 20), 5)
        assert kv.nbytes() + kv.spilled() == 256 * needs.kv.whole and kv.spilled() < spilled


def test_a_parked_conversation_comes_back_to_both_cards(pack: Path, needs: Needs) -> None:
    plain, shelf = open_model(pack), KVShelf(1 << 24)
    with opened(pack, TWO, needs.least() + 300 * needs.row, Parts(mix=POOL, division=(3, 2))) as (loaded, _):
        kv, first, second = KVCache(), prompt_of(6, 200), prompt_of(7, 150)
        for prompt in (first, second, first, [*second, 5, 6, 7]):
            shelf.turn_to(kv, prompt, loaded.control.preset)
            assert talk(loaded, kv, prompt, 6) == talk(plain, KVCache(), prompt, 6)
        assert shelf.nbytes() > 0 and kv.common([*second, 5, 6, 7], loaded.control.preset) >= len(second)


@pytest.mark.some(1)
@pytest.mark.parametrize("at", [1, 3], ids=["first card", "second card"])
@pytest.mark.parametrize("length", [1, 40], ids=["token", "prompt"])
def test_cancelled_on_any_card_it_answers_the_next_time(
    pack: Path, needs: Needs, expected: tuple[list[int], dict[str, Answer]], at: int, length: int
) -> None:
    with opened(pack, TWO, needs.least() + 100 * needs.row, Parts(mix=POOL, division=(2, 3))) as (loaded, _):
        loaded.control.preset = SKIPPING

        def stop(*_given: object) -> None:
            loaded.control.cancelled.set()

        handle = loaded.model.model.layers[at].mlp.experts.register_forward_pre_hook(stop)
        with pytest.raises(Cancelled):
            loaded.decoder.forward([*range(3, 3 + length)], KVCache())
        handle.remove()
        loaded.control.cancelled.clear()
        assert answer(loaded, expected[0], max_new_tokens=10) == expected[1]["Skipping"]


@pytest.mark.parametrize("card", [0, 1])
def test_the_card_that_ran_out_of_memory_makes_room(
    pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch, card: int
) -> None:
    plain = open_model(pack)
    with opened(pack, TWO, needs.least() + 900 * needs.row, Parts(mix=POOL, division=(2, 3))) as (loaded, pools):
        original, fails = loaded.decoder.forward, iter([True])

        def forward(ids: Sequence[int], kv: KVCache) -> Tensor:
            if len(ids) == 1 and next(fails, False):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 MiB. GPU {card} has a total")
            return original(ids, kv)

        def none(*_given: object) -> None:
            return None

        monkeypatch.setattr(loaded.decoder, "forward", forward)
        monkeypatch.setattr(loaded.decoder, "several", none)
        room = loaded.control.make_room
        assert room is not None

        def make_room() -> bool:
            for number, one in enumerate(pools.each):
                one.device.place = f"cuda:{number}"  # as the driver numbers them
            made = room()
            for one in pools.each:
                one.device.place = "cpu"
            return made

        loaded.control.make_room = make_room
        before, prompt = [one.pool.capacity for one in pools.each], prompt_of(8, 30)
        assert talk(loaded, KVCache(), prompt, 8) == talk(plain, KVCache(), prompt, 8)
        assert pools.each[card].pool.capacity < before[card]
        assert pools.each[1 - card].pool.capacity == before[1 - card]
        (notice,) = pools.notices
        assert f"({card + 1} of 2)" in notice.cause


def test_the_use_of_all_layers_is_saved(pack: Path, needs: Needs) -> None:
    usage_file.forget(pack)
    with opened(pack, TWO, needs.least() + 100 * needs.row, Parts(mix=POOL, division=(2, 3))) as (loaded, _):
        answer(loaded, prompt_of(2, 20), max_new_tokens=10)
    kept = usage_file.read(usage_file.file_of(pack), LAYERS, 5, 98)
    popular = usage_file.from_popularity(PackedModel.open(pack).profile()["popularity"].numpy(), 98)
    assert kept is not None
    for layer in range(LAYERS):
        assert abs(kept.scores[layer] - popular.scores[layer]).max() > 1e-4, layer
    usage_file.forget(pack)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (f"{CARD},cpu", "works beside the cards by itself"),
        (f"auto,{CARD}", "works beside the cards by itself"),
        (f"{CARD},", "'Nothing' is no card"),
        ("tpu,sim:3060", "no card that could share"),
        (f"{CARD},sim:rtx3065", "no card"),
        (f"{CARD},throttled:1gb", "unlike kinds"),
        ("cuda:0,cuda:1", "cannot be used"),
        (f"{CARD}," * 5 + CARD, "6 cards"),
    ],
)
def test_what_cannot_share_a_model_is_refused(pack: Path, device: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(pack, None, device, silent, vram=1 << 24)
    assert said in f"{refused.value.title} {refused.value.cause}"


def chosen(pack: Path, device: str, *, vram: int | None = None, asked: Asked | None = None) -> Placement:
    packed, preset = PackedModel.open(pack), SKIPPING
    layers = [packed.layer(index) for index in range(LAYERS)]
    given = packed.manifest, layers, read_config(pack), vram, preset, asked or Asked(), packed
    return placement.choose(device, *given)


def test_gpus_of_this_machine_share_a_model(pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named only: nothing is put on them."""
    room = {"cuda:0": 2 * needs.whole(), "cuda:1": needs.whole(), "cuda:2": 1 << 12}
    free = {place: nbytes + KEPT_LEAST for place, nbytes in room.items()}
    names = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060")
    gpus = tuple(Gpu(name, "8.6", 12 << 30, free[f"cuda:{n}"], n) for n, name in enumerate(names))
    monkeypatch.setattr(hardware, "_gpus", lambda: (gpus, ""))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (free[str(place)], 12 << 30))  # pyright: ignore[reportUnknownLambdaType]
    here = kernels.choose("cpu")
    monkeypatch.setattr(kernels, "choose", dict.fromkeys(free, here).__getitem__)
    found = chosen(pack, "cuda:0, cuda:1", asked=Asked(division=(2, 3)))
    assert found.places == ("cuda:0", "cuda:1") and [part.layers for part in found.parts] == [range(2), range(2, 5)]
    assert found.budget == sum(room[place] for place in found.places)
    assert [part.choice.cap for part in found.parts] == [free[place] for place in found.places]
    kv = found.kv(torch.device)
    assert [(str(part.device), part.layers) for part in kv.parts] == [("cuda:0", range(2)), ("cuda:1", range(2, 5))]
    assert [found.number(layer) for layer in range(LAYERS)] == [0, 0, 1, 1, 1]
    whole = found.parts[1].choice
    assert whole.shares.place == "gpu" and whole.make is None
    pooled = chosen(pack, "cuda:1,cuda:0", asked=Asked(POOL, division=(4, 1)))
    assert all(part.choice.make is not None and part.choice.shares.place == "pool" for part in pooled.parts)
    assert "4 on cuda:1, 1 on cuda:0" in pooled.why
    for device, said in (
        ("cuda,cuda:0", "cuda:0 is named twice"),
        ("cuda:0,cuda:7", "3 GPUs"),
        ("cuda:0,cpu", "by itself"),
        ("cuda:0,cuda:2", "cuda:2 has"),
    ):
        with pytest.raises(UsageError) as refused:
            chosen(pack, device)
        assert said in f"{refused.value.title} {refused.value.cause}".replace("There", "there"), refused.value


def test_a_card_with_too_little_memory_is_told_what_it_lacks(pack: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load(pack, None, TWO, silent, vram=50_000)
    assert "lacks" in refused.value.cause and "--vram" in refused.value.hint


class _Noted:
    """A pass that notes where it was given the stream."""

    def __init__(self, layers: range, device: torch.device, seen: list[tuple[int, str]]) -> None:
        self._layers, self._device, self._seen = layers, device, seen

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        assert added is None or added.device == x.device == self._device
        self._seen.append((self._layers[index], x.device.type))
        return Stepped(x, x, ())


def test_the_stream_is_on_the_card_whose_layer_is_next() -> None:
    parts = (KvPart(range(2), torch.device("cpu"), None), KvPart(range(2, 4), torch.device("meta"), None))
    store = DividedStore(Layout(((2, 4),) * 4, 512, torch.float32, torch.device("cpu")), parts, [None, None])
    store.reserve(3)
    assert [layer.device.type for layer in store.layers()] == ["cpu", "cpu", "meta", "meta"]
    seen = list[tuple[int, str]]()
    walked = DividedPass(store, parts, lambda layers, _own, device: _Noted(layers, device, seen))
    x: Tensor = torch.zeros(1, 8)
    for layer in range(4):
        x = walked.step(layer, x, x if layer else None).stream
    assert seen == [(0, "cpu"), (1, "cpu"), (2, "meta"), (3, "meta")]


def test_virtual_cards_take_turns() -> None:
    """The second begins when the host has got there, its GPU when the stream has arrived."""
    card, turns = named(CARD), Turns()
    first, second = (VirtualDevice(card, 4352, 4096, 23_000_000, turns=turns) for _ in range(2))
    with first.host("pool", prompt=False):
        first.dense(1)
    alone = first.clock.end("gpu")
    with second.host("pool", prompt=False):
        second.dense(1)
    crossing = 2 * (card.link_latency_s + 2 * 4096 / card.link_bytes_s)
    assert second.clock.end("gpu") == pytest.approx(2 * alone + crossing)
    assert first.clock.end("gpu") == alone
    second.finish()
    with first.host("pool", prompt=False):
        first.dense(1)
    assert first.clock.end("gpu") == pytest.approx(3 * alone + 2 * crossing)
    for device in (first, second):
        device.close()
