"""Which device a pack gets and how its memory is shared out, in words and in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import decoders
from floe_chat.engine.decoder.decoders import LibraryDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BLOCK, KvForm
from floe_chat.engine.events import Advanced
from floe_chat.engine.loader import LoadedModel, computed_type, load
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Gpu
from floe_chat.engine.offload.device_memory import RING
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning import device_choice, memory_plan, opened_pack, speed_estimate
from floe_chat.engine.planning.device_choice import DeviceChoice
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.memory_plan import HEAD, Needs
from floe_chat.engine.planning.opened_pack import Asked
from floe_chat.kernels import operations as kernels
from floe_chat.models.checkpoint import read_config
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.quantities import memory

from .driver import answer, silent
from .offloading import needs_of

Choose = Callable[..., DeviceChoice]
POOL, WHOLE = Mix(pool=2), Mix(gpu=2)
POOLED = Parts(mix=POOL)


@pytest.fixture
def choose(tiny_pack: Path) -> Choose:
    packed = PackedModel.open(tiny_pack)
    layers = [packed.layer(index) for index in range(2)]
    config = read_config(tiny_pack)

    def chosen(wanted: str, vram: int | None = None, mix: Mix | None = None, **asked: Any) -> DeviceChoice:
        return device_choice.choose(wanted, packed.manifest, layers, config, vram, asked=Asked(mix, **asked))

    return chosen


@pytest.fixture
def needs(tiny_pack: Path) -> Needs:
    return needs_of(tiny_pack)


def a_gpu(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """One that is named only: nothing is put on it."""
    gpu = Gpu("Test card", "8.6", 12 << 30, int(free), 0)
    monkeypatch.setattr(hardware, "_gpus", lambda: ((gpu,), ""))

    def memory(_place: str) -> tuple[int, int]:
        return int(free), 12 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    kernels_of(monkeypatch, ["triton"])


def kernels_of(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """The kernels that cards run; no card is touched to foresee it."""
    here = kernels.choose("cpu")

    def chosen(place: str) -> kernels.Backend:
        return here if place == "cpu" else replace(here, name=names[int(place.partition(":")[2])])

    def foreseen(index: int) -> tuple[str, str]:
        return names[index], ""

    monkeypatch.setattr(kernels, "choose", chosen)
    monkeypatch.setattr(kernels, "foreseen", foreseen)


def test_auto_takes_the_fastest_card_and_the_cpu_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    """By the published figures of cards of these names; this model is so small that launching kernels takes longest."""
    assert choose("auto").place == "cpu"
    names = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080")
    gpus = tuple(Gpu(name, "8.6", 12 << 30, 2 << 30, index) for index, name in enumerate(names))
    asked: list[str] = []

    def memory(place: str) -> tuple[int, int]:
        asked.append(place)
        return 2 << 30, 12 << 30

    monkeypatch.setattr(hardware, "_gpus", lambda: (gpus, ""))
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    here = kernels.choose("cpu")
    kernels_of(monkeypatch, ["triton", "triton", "reference"])
    declined = choose("auto")
    assert declined.place == "cpu" and "the CPU is faster" in declined.why and "tokens/s" in declined.why
    assert not asked  # a card that is not used gets no context
    slow = replace(figures(), host_s=1.0)
    monkeypatch.setattr(speed_estimate, "figures", lambda: slow)
    fastest = choose("auto")
    assert fastest.place == "cuda:1" and "the fastest of 2 GPUs" in fastest.why
    gpus = tuple(replace(gpu, vram_free=(1 if gpu.index == 1 else 2) << 30) for gpu in gpus)
    asked.clear()
    assert choose("auto").place == "cuda:0"
    assert asked == ["cuda:0"]
    # The first kernel is tried on the chosen card alone; where it does not run, the CPU computes.

    def failing(_place: str) -> kernels.Backend:
        return replace(here, name="reference")

    monkeypatch.setattr(kernels, "choose", failing)
    monkeypatch.setattr(device_choice.torch_build, "remedy", lambda: "Install a compiler.")
    without = choose("auto")
    assert (without.place, without.remedy) == ("cpu", "Install a compiler.") and here.reason in without.why
    assert (choose("cuda:0").place, choose("cuda:0").remedy) == ("cuda:0", "Install a compiler.")


def test_old_cards_compute_in_float16_where_the_models_values_fit_it(
    monkeypatch: pytest.MonkeyPatch, tiny_pack: Path
) -> None:
    capability = {"cuda:0": (8, 6), "cuda:1": (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability.__getitem__)
    manifest = Manifest.read(tiny_pack)
    assert manifest.float16 == torch.bfloat16
    architecture = replace(manifest.architecture, model_type="gpt_oss")
    for places, usual, wide in (
        (["cpu"], torch.float32, torch.float32),
        (["cuda:0"], torch.bfloat16, torch.bfloat16),
        (["cuda:1"], torch.float16, torch.bfloat16),
        (["cuda:0", "cuda:1"], torch.float16, torch.bfloat16),
    ):
        assert computed_type(places, manifest) == usual
        assert computed_type(places, replace(manifest, architecture=architecture)) == wide


def test_what_is_needed_is_what_the_files_hold(needs: Needs, tiny_pack: Path) -> None:
    packed = PackedModel.open(tiny_pack)
    layer = packed.layer(0)
    assert needs.dense == (tiny_pack / "dense.safetensors").stat().st_size
    assert needs.up == 2 * (layer.signal.q.nbytes + layer.signal.scale.nbytes + layer.signal.zero.nbytes)
    assert needs.row == layer.rows.data.shape[2]
    assert needs.kv.whole == 2 * 2 * 64 * 2  # two layers, keys and values of 4 heads of 16, float16
    working = needs.top_k * needs.neurons * needs.row
    graphs = needs.captured - 512 * 2 * 16 * 2  # rope's table: cosines and sines of a head of 16, in 16 bits
    assert 0 < graphs < 1 << 20
    buffers = RING * needs.neurons * needs.row
    assert needs.least() - working == needs.dense + needs.captured + needs.up + buffers + 512 * needs.kv.whole


@pytest.mark.parametrize("bits", [16, 8])
def test_a_token_takes_what_its_stores_do(bits: int, tiny_pack: Path) -> None:
    needs = needs_of(tiny_pack, 2, bits)
    loaded, told = load(tiny_pack, None, "cpu", silent, advanced=Advanced(kv_bits=str(bits)))
    kv = KVCache()
    loaded.decoder.forward([1, 2, 3], kv)
    assert kv.nbytes() == BLOCK * needs.kv.whole and needs.kv_bits == bits
    assert ("keys and values of 8 bits" in told.reason) == (bits == 8)


def test_a_conversation_may_use_all_but_one_tokens_rows(needs: Needs) -> None:
    long = replace(needs, context=100)
    least = long.share_out(long.every("pool"), long.least(), 512)
    assert (least.keys, least.most, least.window, least.reserved) == (
        100 * needs.kv.whole,
        100 * needs.kv.whole,
        512,
        100,
    )
    more = long.share_out(long.every("pool"), long.least() + 3 * needs.kv.whole, 512)
    assert more.keys < 101 * needs.kv.whole  # the pool took what came on top, and gives it back
    assert more.most == 103 * needs.kv.whole and (more.window, more.reserved) == (512, 100)
    all_of_it = long.share_out(long.every("pool"), 1 << 40, 512)
    assert (all_of_it.keys, all_of_it.window) == (512 * needs.kv.whole, 512)


def test_a_drafting_head_is_on_the_card_if_nothing_else_lacks_its_memory(needs: Needs) -> None:
    drafting = replace(needs, context=100, draft=5000)
    for more, head in ((4999, None), (5000, 5000)):
        shares = drafting.share_out(drafting.every("gpu"), drafting.whole() + more, 512)
        assert shares.uses.get(HEAD) == head and shares.reserved >= 100
    assert HEAD not in drafting.share_out(drafting.every("pool"), 1 << 40, 512).uses


def test_where_all_rows_are_on_the_device_a_chat_gets_the_memory_left_and_then_ram(needs: Needs) -> None:
    """There is no pool that could give way: what was not there ended an answer as "a bug in floe-chat"."""
    long = replace(needs, context=100)

    def longest(budget: int) -> int:
        shares = long.share_out(long.every("gpu"), budget, 512)
        assert (
            shares.window == 512
            and shares.most is not None
            and shares.reserved == min(512, shares.most // long.kv.whole)
        )
        return shares.reserved

    assert longest(long.whole()) == 100
    token = long.whole() - replace(long, context=99).whole()
    assert token >= long.kv.whole  # as keys and values grow, a part of them is there twice
    assert longest(long.whole() + 3 * token) == 103
    assert longest(1 << 40) == 512


def test_what_a_gpu_that_holds_all_reserves_follows_the_limit(
    monkeypatch: pytest.MonkeyPatch, choose: Choose, tiny_pack: Path
) -> None:
    a_gpu(monkeypatch, 2 << 30)
    short = needs_of(tiny_pack, 2, 16, 100)
    share = 1 - memory_plan.KEPT_FREE
    about = round(short.whole() / share)
    limit = next(vram for vram in range(about - 9, about + 9) if int(vram * share) >= short.whole())
    tight = choose("cuda", limit, WHOLE, context=100)
    assert (tight.shares.place, tight.shares.reserved, tight.shares.kv_bits) == ("gpu", 100, 16)
    assert choose("cuda", None, WHOLE).shares.reserved == 512
    # Where 16 bits do not fit, 8 do; who asks for 16 is told what is missing.
    coarse = choose("cuda", limit - 1, WHOLE, context=100).shares
    assert coarse.kv_bits == 8 and coarse.reserved > 150
    with pytest.raises(UsageError, match="too little"):
        choose("cuda", limit - 1, POOL, context=512, kv_bits=16)
    assert choose("cuda", None, WHOLE, kv_bits=8).shares.kv_bits == 8
    assert choose("cpu", kv_bits=8).shares.kv_bits == 8 and choose("cpu").shares.kv_bits == 16


def test_a_context_that_does_not_fit_is_granted_as_far_as_it_does(
    monkeypatch: pytest.MonkeyPatch, choose: Choose, tiny_pack: Path
) -> None:
    """The card was refused, or left alone, for tokens that RAM can hold too."""
    for module in (memory_plan, opened_pack):
        monkeypatch.setattr(module, "CONTEXT", 64)
    needs = needs_of(tiny_pack, 2, 8, 512)
    least, token = needs.least(POOL), needs.kv.whole
    budget = least - 100 * token - token // 2
    a_gpu(monkeypatch, budget + memory_plan.KEPT_LEAST)
    short = choose("cuda", None, POOL, context=512, kv_bits=8)
    assert short.shares.mix == POOL and short.shares.reserved == 512 - 101
    assert short.why.endswith("of 512 tokens of context, 411 have room there")
    a_gpu(monkeypatch, least + memory_plan.KEPT_LEAST)
    assert "have room" not in choose("cuda", None, POOL, context=512, kv_bits=8).why
    a_gpu(monkeypatch, least - 449 * token + memory_plan.KEPT_LEAST)  # not even the least
    with pytest.raises(UsageError, match="too little"):
        choose("cuda", None, POOL, context=512, kv_bits=8)


def test_a_choice_without_a_pool_says_how_fast_one_would_be(choose: Choose, tiny_pack: Path) -> None:
    needs = needs_of(tiny_pack)
    for budget in (needs.least(), needs.least() + needs.rows // 4, 2 * needs.whole()):
        choice = choose("sim:rtx3060-12gb", budget)
        assert choice.shares.mix is not None
        assert ("with a pool of rows" in choice.why and "against" in choice.why) == (choice.shares.mix.pool == 0)


def test_bits_and_tokens_that_cannot_be_are_refused(tiny_pack: Path) -> None:
    for wrong in (Advanced(kv_bits="4"), Advanced(context=0)):
        with pytest.raises(UsageError) as refused:
            load(tiny_pack, None, "cpu", silent, advanced=wrong)
        assert "advanced." in refused.value.hint


def test_a_limit_of_gpu_memory_is_enforced_also_where_the_whole_pack_fits(
    monkeypatch: pytest.MonkeyPatch, choose: Choose
) -> None:
    a_gpu(monkeypatch, 1 << 30)
    shares: list[tuple[float, str]] = []

    def note(share: float, place: str) -> None:
        shares.append((share, place))

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", note)
    for limit in (256 << 20, None):
        choice = choose("cuda", limit, WHOLE)
        assert choice.make is None and choice.budget is not None and choice.budget < (limit or 1 << 30)
        choice.enforce()
    assert shares == [((256 << 20) / (12 << 30), "cuda:0"), ((1 << 30) / (12 << 30), "cuda:0")]
    choose("cpu").enforce()
    choose("throttled:1gb", 64 << 20).enforce()
    assert len(shares) == 2


def test_the_librarys_cache_gets_the_reserved_context_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tiny_pack: Path, needs: Needs
) -> None:
    """It takes nothing from the pool, so that a longer window was promised memory that it could not get."""

    def library(model: Any, _window: int, _kv: KvForm) -> LibraryDecoder:
        return LibraryDecoder(model)

    monkeypatch.setattr(decoders, "choose", library)
    short = replace(needs, context=64)
    short_context = Advanced(context=64)
    loaded, told = load(
        tiny_pack, None, "throttled:1gb", silent, vram=short.least(), library=True, advanced=short_context
    )
    assert loaded.window == told.context_window == 64
    assert answer(loaded, [1, *range(40, 70)], max_new_tokens=200).reason == "context"
    loaded.close()


def test_a_gpu_holds_all_some_or_nothing(monkeypatch: pytest.MonkeyPatch, choose: Choose, needs: Needs) -> None:
    a_gpu(monkeypatch, 1 << 30)
    whole = choose("cuda")
    assert whole.place == "cuda:0" and whole.make is None and "whole pack fits" in whole.why
    assert whole.cap == 1 << 30 and whole.budget == (1 << 30) - memory_plan.KEPT_LEAST
    limit = round((needs.least() + 5.5 * needs.row) / (1 - memory_plan.KEPT_FREE))
    part = choose("cuda", limit, POOL)
    assert part.shares.rows == needs.top_k * needs.neurons + 5 and "pool" in part.why
    assert part.cap == limit and part.budget == int(limit * (1 - memory_plan.KEPT_FREE))
    # Too little for anything: by itself the CPU is taken, and says why; who asks for the GPU is told.
    least = needs.least(Mix(cpu=2))
    nothing = choose("auto", least - 1, kv_bits=16)
    assert nothing.place == "cpu" and nothing.make is None and "is needed" in nothing.why
    assert nothing.budget is None
    with pytest.raises(UsageError, match="too little") as refused:
        choose("cuda", least - 1, kv_bits=16)
    assert memory(least) in refused.value.cause and "--vram" in refused.value.hint
    some = choose("cuda", round(least / (1 - memory_plan.KEPT_FREE)) + 1)
    assert some.shares.mix == Mix(cpu=2) and "by the CPU" in some.why
    free = needs.least() + 5 * needs.row + memory_plan.KEPT_LEAST
    a_gpu(monkeypatch, free)
    more = choose("cuda", 24 << 30, POOL)  # of more than there is what there is, and it says so
    assert (more.cap, more.shares.rows) == (free, part.shares.rows) and f"of which {memory(free)} is free" in more.why


@pytest.mark.parametrize(
    ("wanted", "vram"),
    [
        ("tpu", None),
        ("sim:nothing", None),
        ("throttled:fast", 1 << 30),
        ("throttled:0gb", 1 << 30),
        ("throttled:", 1 << 30),
        ("throttled:8gb", None),
        ("throttled:8gb", 1000),
        ("sim:rtx3060-12gb", 1000),
        ("sim:rtx3060-12gb", 13 << 30),
        ("sim:rtx3060-12gb@8gb", 9 << 30),
    ],
)
def test_what_cannot_be_is_a_usage_error_with_a_way_out(choose: Choose, wanted: str, vram: int | None) -> None:
    with pytest.raises(UsageError) as refused:
        choose(wanted, vram)
    assert refused.value.title and refused.value.hint


@pytest.mark.parametrize(("idle", "code"), [(True, 1), (False, 2)], ids=["not usable", "not there"])
def test_a_card_that_cannot_compute_is_a_fault_of_the_machine(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, idle: bool, code: int
) -> None:
    def known(_library: object = None) -> tuple[tuple[Gpu, ...], str]:
        return (Gpu("Test card", "8.6", 12 << 30, 1 << 30, None),) if idle else (), ""

    monkeypatch.setattr(hardware, "_gpus", lambda: ((), "the driver is too old"))
    monkeypatch.setattr(hardware.gpus, "of_driver", known)
    with pytest.raises(FloeError) as refused:
        choose("cuda")
    assert refused.value.exit_code == code and "driver is too old" in refused.value.cause and refused.value.hint


def test_the_next_start_knows_the_rates_and_what_was_used(tiny_pack: Path, needs: Needs) -> None:
    def opened(device: str) -> LoadedModel:
        return load(tiny_pack, None, device, silent, vram=needs.least(), parts=POOLED)[0]

    first = opened("throttled:1gb")
    assert first.offload is not None
    link = first.offload.device.rates.link_bytes_s
    assert 0 < link <= 1e9 and first.offload.device.rates.cpu_bytes_s > 0  # both measured
    answer(first, [1, 40, 41, 42], max_new_tokens=12)
    first.offload.device.rates.cpu_bytes_s = 123e6
    used = first.offload.pool.heat()
    first.close()
    again, other = opened("throttled:1gb"), opened("throttled:2gb")
    assert again.offload is not None and again.offload.device.rates.cpu_bytes_s == 123e6
    assert torch.allclose(torch.from_numpy(again.offload.pool.heat().uses), torch.from_numpy(used.uses), atol=1e-3)
    assert other.offload is not None and other.offload.device.rates.cpu_bytes_s != 123e6
    again.close()
    other.close()
