"""Layers placed one by one: all on the device, with a pool of rows there, or by the CPU. Tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import Advanced
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.experts.offloaded_layer import OffloadedLayer
from floe_chat.engine.experts.whole_layers import RamLayer, ResidentLayer
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.device_memory import RING
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.mix_choice import asked, pool_rows
from floe_chat.engine.ranges import Wanted
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.pack import usage_file
from floe_chat.models.pack.packed_model import PackedModel

from .driver import answer, open_model, silent
from .margins import clear_prompt, layers_of, prompt_of
from .offloading import EVERYTHING, SKIPPING, needs_of

MIXES = [Mix(*each, cpu=3 - sum(each)) for each in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (0, 3), (1, 1))] + [
    Mix(1, 2, 0),
    Mix(2, 1, 0),
    Mix(1, 1, 1, (2, 0, 1)),
    Mix(0, 2, 1, (1, 2, 0)),
]
KINDS = {"gpu": ResidentLayer, "pool": OffloadedLayer, "cpu": RamLayer}


@pytest.fixture(scope="module")
def pack(shape: Callable[[str], Path]) -> Path:
    return shape("mixtral")


@pytest.fixture(scope="module")
def whole(pack: Path) -> LoadedModel:
    return open_model(pack)


@pytest.fixture(scope="module")
def expected(whole: LoadedModel) -> tuple[list[int], dict[str, list[int]]]:
    """A prompt in which no neuron is at its threshold, and its answers by preset where all is in RAM."""

    def run(prompt: list[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for preset in (SKIPPING, EVERYTHING):
            whole.control.preset = preset
            found[preset.name] = answer(whole, prompt, max_new_tokens=12).tokens
        return found

    return clear_prompt(whole, run)


def opened(pack: Path, device: str, mix: Mix, spare: int = 7, **parts: object) -> LoadedModel:
    """With so many rows more than the least."""
    needs = needs_of(pack)
    vram = needs.least(mix) + spare * needs.row
    return load(pack, None, device, silent, vram=vram, parts=Parts(mix=mix, **parts))[0]  # type: ignore[arg-type]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("device", "mix"),
    [("throttled:1gb" if at in (1, 6, 10) else "sim:rtx3060-12gb", mix) for at, mix in enumerate(MIXES)],
    ids=str,
)
def test_tokens_do_not_depend_on_the_mix(
    pack: Path, expected: tuple[list[int], dict[str, list[int]]], device: str, mix: Mix
) -> None:
    prompt, want = expected
    loaded = opened(pack, device, mix)
    assert [type(layer) for layer in layers_of(loaded)] == [KINDS[place] for place in mix.places]
    for preset in (SKIPPING, EVERYTHING):
        loaded.control.preset = preset
        found = answer(loaded, prompt, max_new_tokens=12)
        assert found.tokens == want[preset.name]
        for layer, place in zip(loaded.telemetry.layers, mix.places, strict=True):
            assert layer.ready + layer.coming + layer.copied + layer.on_cpu == layer.active > 0 == layer.left_out
            assert {"gpu": layer.ready == layer.active, "cpu": layer.on_cpu == layer.active}.get(place, True)
    loaded.close()


@pytest.mark.some(2)
@pytest.mark.parametrize("mix", [Mix(cpu=3), Mix(1, 1, 1)], ids=str)
@pytest.mark.parametrize("cpu", [True, False])
def test_a_prompts_experts_stream_where_the_cpu_does_not_take_them(
    pack: Path, whole: LoadedModel, mix: Mix, cpu: bool
) -> None:
    whole.control.preset = EVERYTHING
    prompt = prompt_of(5, 300)
    want = answer(whole, prompt, max_new_tokens=6).tokens
    loaded = opened(pack, "sim:rtx3060-12gb", mix, cpu=cpu)
    shared = loaded.offload
    assert shared is not None
    loaded.control.preset = EVERYTHING
    before = shared.device.link.bytes_moved
    assert answer(loaded, prompt, max_new_tokens=6).tokens == want
    moved = shared.device.link.bytes_moved - before
    assert cpu or moved >= mix.cpu * needs_of(pack).rows // 3  # each expert of each layer in RAM crosses the link once
    loaded.close()


def test_a_mix_takes_the_memory_that_it_says(pack: Path) -> None:
    needs = needs_of(pack)
    up, rows = needs.up // 3, needs.rows // 3
    pooled = needs.least(Mix(pool=3))
    assert needs.least(Mix(pool=2, gpu=1)) == pooled + rows
    both = needs.up // (3 * needs.experts)
    assert needs.least(Mix(pool=2, cpu=1)) == pooled - up + RING * both
    assert needs.least(Mix(gpu=1, cpu=2)) == needs.least(Mix(cpu=3)) + up + rows
    shares = needs.share_out(Mix(1, 1, 1), needs.least(Mix(1, 1, 1)) + 3 * needs.row, 512)
    assert shares.rows == needs.top_k * needs.neurons + 3 and shares.place == "pool"
    assert shares.uses["rows"] == rows and shares.uses["up"] == 2 * up
    assert needs.share_out(Mix(1, 1, 1), 1 << 40, 512).rows == needs.experts * needs.neurons
    assert needs.share_out(Mix(1, 1, 1), 1 << 40, 512, rows=300).rows == 300
    static = needs.share_out(Mix(gpu=1, cpu=2), needs.least(Mix(gpu=1, cpu=2)), 512)
    assert static.rows == 0 and static.keys == needs.context * needs.kv.whole
    with pytest.raises(UsageError, match="too little"):
        needs.share_out(Mix(gpu=1, cpu=2), needs.least(Mix(gpu=1, cpu=2)) - 1, 512)


def test_a_kind_of_mix_can_be_asked_for(pack: Path) -> None:
    needs = needs_of(pack)
    vram = needs.least(Mix(pool=3)) + 5 * needs.row

    def mix_of(placement: str, vram: int = vram) -> Mix:
        advanced = Advanced(placement=placement, kv_bits="16")
        loaded = load(pack, None, "sim:rtx3060-12gb", silent, vram=vram, advanced=advanced)[0]
        kinds = [type(layer) for layer in layers_of(loaded)]
        loaded.close()
        return Mix(kinds.count(ResidentLayer), kinds.count(OffloadedLayer), kinds.count(RamLayer))

    assert (mix_of("pool"), mix_of("cpu")) == (Mix(pool=3), Mix(cpu=3))
    static = mix_of("static")
    assert static.pool == 0 and (not static.gpu or needs.fits(static, vram))
    assert not static.cpu or not needs.fits(Mix(static.gpu + 1, 0, static.cpu - 1), vram)
    assert mix_of("static", 1 << 30) == Mix(gpu=3)
    with pytest.raises(UsageError, match="too little"):
        mix_of("pool", min(needs.least(Mix(pool=count, cpu=3 - count)) for count in (1, 2, 3)) - 1)


def test_a_pool_has_the_rows_that_were_asked_for(pack: Path) -> None:
    needs = needs_of(pack)
    least, every = needs.top_k * needs.neurons, needs.experts * needs.neurons

    def rows(count: int, vram: int) -> tuple[Mix, int | None] | None:
        return asked(needs, vram, Wanted("pool", count * needs.row), ())

    vram = needs.least(Mix(pool=3)) + 5 * needs.row
    assert rows(least + 5, vram) == (Mix(pool=3), least + 5)
    for budget in (vram, needs.least(Mix(pool=1, cpu=2)), 1 << 40):
        found = pool_rows(needs, budget)
        assert found is not None and found[0] == least and rows(least, budget) and rows(found[1], budget)
        for more in (1, 9 * every) if budget < 1 << 40 else ():
            with pytest.raises(UsageError, match="does not suit"):
                rows(found[1] + more, budget)
    assert pool_rows(needs, needs.least(Mix(pool=1, cpu=2)) - 1) is None
    assert rows(9 * every, 1 << 40) == (Mix(pool=3), 9 * every)  # of which there are fewer: all are there
    for wrong in (least - 1, every + 1):
        with pytest.raises(UsageError, match="does not suit"):
            rows(wrong, needs.least(Mix(pool=1, cpu=2)) + 5 * needs.row)
    assert asked(needs, needs.least(Mix(pool=1, cpu=2)) - 1, Wanted("pool", 1 << 20), ()) is None


def test_the_panel_can_tell_what_the_memory_is_used_for(pack: Path) -> None:
    needs, mix = needs_of(pack), Mix(1, 1, 1)
    loaded = opened(pack, "sim:rtx3060-12gb", mix)
    answer(loaded, [1, 40, 41], max_new_tokens=4)
    stats = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=512)
    rows = stats.rows
    assert rows is not None and (rows.whole, rows.up) == (needs.rows // 3, 2 * (needs.up // 3))
    assert stats.vram_budget is not None and rows.pool + rows.whole + rows.up + rows.dense < stats.vram_budget
    shares = rows.ready, rows.coming, rows.copied, rows.on_cpu, rows.left_out, rows.in_place
    assert sum(share or 0.0 for share in shares) == pytest.approx(1)
    assert [layer.resident is not None for layer in rows.layers] == [place == "pool" for place in mix.places]
    for layer, place in zip(rows.layers, mix.places, strict=True):
        assert sum(part or 0.0 for part in (layer.ready, layer.coming, layer.copied, layer.on_cpu)) == pytest.approx(1)
        assert place != "pool" or (rows.hits == layer.ready and 0 < (layer.resident or 0) <= 1)
    assert not rows.static
    loaded.close()


def test_without_a_pool_keys_and_values_have_what_is_reserved(pack: Path) -> None:
    loaded = opened(pack, "throttled:1gb", Mix(gpu=1, cpu=2), spare=0)
    shared = loaded.offload
    assert shared is not None and shared.pool.capacity == shared.sizes()["pool"] == 0
    kv = KVCache()
    loaded.decoder.forward([1, *range(40, 60)], kv)
    assert shared.lent().numel() > 0 and not shared.make_room()
    with pytest.raises(FloeError, match="no longer fits"):
        shared.lend(1 << 30)
    loaded.close()


def test_use_is_saved_for_the_pools_layers_and_kept_for_others(pack: Path) -> None:
    path, a = usage_file.file_of(pack), PackedModel.open(pack).manifest.architecture
    shape = a.layers, a.experts, a.intermediate
    old = usage_file.Heat(np.full(shape[:2], 0.25, np.float32), np.full(shape, 0.5, np.float32))
    usage_file.write(path, old)
    loaded = opened(pack, "sim:rtx3060-12gb", Mix(1, 1, 1))
    answer(loaded, [1, 40, 41, 42], max_new_tokens=12)
    loaded.close()
    new = usage_file.read(path, *shape)
    usage_file.forget(pack)
    assert new is not None
    for layer, same in enumerate([True, False, True]):
        assert (new.uses[layer] == 0.5).all() == (new.scores[layer] == 0.25).all() == same


@pytest.mark.parametrize(("mix", "tokens"), [(Mix(gpu=2, cpu=1), 1), (Mix(cpu=3), 40)], ids=str)
def test_an_answer_stops_within_a_layer(pack: Path, mix: Mix, tokens: int) -> None:
    loaded = opened(pack, "throttled:1gb", mix)
    seen: list[int] = []

    def stop(layer: RamLayer | ResidentLayer, _given: object) -> None:
        seen.append(layer.index)
        if layer.index == 1:
            loaded.control.cancelled.set()

    for layer in layers_of(loaded):
        layer.register_forward_pre_hook(stop)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Cancelled):
        loaded.decoder.forward([1, *range(20, 19 + tokens)], KVCache())
    assert seen == [0, 1]
    loaded.control.cancelled.clear()
    loaded.close()


def test_time_on_a_virtual_card_is_that_of_each_kind(pack: Path) -> None:
    """A layer in RAM takes the CPU's lane and moves nothing; one on the card takes no other lane."""
    busy: dict[Mix, tuple[float, float, int]] = {}
    for mix in (Mix(gpu=3), Mix(cpu=3)):
        loaded = opened(pack, "sim:rtx3060-12gb", mix)
        shared = loaded.offload
        assert shared is not None
        answer(loaded, [1, 40, 41], max_new_tokens=4)
        clock = shared.device.clock  # type: ignore[attr-defined]
        busy[mix] = clock.busy("cpu"), clock.busy("gpu"), shared.device.link.bytes_moved
        loaded.close()
    (none, more, _), (cpu, less, moved) = busy[Mix(gpu=3)], busy[Mix(cpu=3)]
    assert none == 0 < cpu and less < more and moved == 0
