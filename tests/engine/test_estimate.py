"""The cost model: its curves, its bytes, that nothing better makes it worse; and the division of layers among cards."""

from __future__ import annotations

import dataclasses
import operator
import random
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.engine import quality_presets
from floe_chat.engine.bench.synthetic import sizes_of
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Gpu
from floe_chat.engine.offload.cards import LAUNCHES, named
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.planning import machine, memory_plan, speed_estimate
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.machine import Described, Machine
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.engine.planning.options import DEFAULT, option
from floe_chat.engine.planning.plan import make
from floe_chat.engine.planning.prompt_estimate import prefill
from floe_chat.engine.planning.running import DeviceLayers, Running
from floe_chat.engine.planning.several.division import CardRoom, Divided, Part, part_needs
from floe_chat.engine.planning.speed_estimate import Held, Speeds, TokenWork, at, decode
from floe_chat.engine.quality_presets import PRESETS
from floe_chat.models.catalog import described, find
from floe_chat.models.catalog_entry import Recurrent
from floe_chat.models.errors import UsageError
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.pack import PackSpec

MIXTRAL = described("mixtral-8x7b-instruct").sizes
TAKES = Footprint.of(MIXTRAL, PackSpec())
HITS = figures().hits
BALANCED = TokenWork.of(next(preset for preset in quality_presets.PRESETS if preset.name == "Balanced"))
CARD = Speeds(read=40e9, link=12e9, gpu=250e9, disk=2e9)
RANDOM = random.Random(7)


def some_speeds() -> Speeds:
    """A machine whose GPU is faster than its CPU and its link together, as GPUs are."""
    read = RANDOM.uniform(10e9, 150e9)
    link = RANDOM.uniform(1e9, 50e9)
    return Speeds(
        read=read,
        cores=RANDOM.choice([0, 2, 8]),
        disk=RANDOM.uniform(1e8, 1e10),
        link=link,
        gpu=(read + link) * RANDOM.uniform(1.5, 20),
        gpu_flops=RANDOM.uniform(5e12, 2e14),
        host=RANDOM.choice([0.0, 4e-4]),
        host_pool=RANDOM.choice([0.0, 1e-3]),
        host_behind=RANDOM.choice([0.0, 1e-3]),
    )


@pytest.mark.parametrize("where", ["demo", "tiny"])
def test_bytes_are_those_of_a_real_pack(where: str, tiny_pack: Path) -> None:
    folder = find("demo") if where == "demo" else tiny_pack
    manifest = Manifest.read(folder)
    w = manifest.widths
    takes = Footprint.of(described(folder).sizes, PackSpec(w.up, w.gate, w.down, w.dense, w.group, short=w.short))
    assert takes.row == manifest.row_layout().nbytes
    files = {name: entry.size for name, entry in manifest.files.items()}
    assert takes.dense == pytest.approx(files["dense.safetensors"], rel=0.02, abs=8192)
    layers = sum(size for name, size in files.items() if name.startswith("layer_"))
    assert takes.ups + takes.rows == pytest.approx(layers, rel=0.02, abs=8192 * MIXTRAL.layers)
    assert takes.disk == pytest.approx(sum(files.values()), rel=0.02, abs=1 << 18)


def test_sixteen_bits_are_the_checkpoints_own() -> None:
    takes = Footprint.of(MIXTRAL, PackSpec(16, 16, 16, 16))
    assert takes.dense + takes.ups + takes.rows == 2 * MIXTRAL.parameters


@pytest.mark.parametrize("curve", [HITS, figures().dropped])
def test_more_never_gives_less(curve: speed_estimate.Curve) -> None:
    values = [at(curve, x / 100) for x in range(101)]
    assert values == sorted(values)


def test_presets_leave_out_what_they_say() -> None:
    assert BALANCED.calls * BALANCED.active == pytest.approx(0.4)
    assert BALANCED.reached == pytest.approx(0.75) and BALANCED.read == pytest.approx(0.875)
    assert 0.8 < BALANCED.calls < 0.9
    exact = TokenWork.of(next(preset for preset in quality_presets.PRESETS if preset.exact))
    assert exact == TokenWork()


def test_on_the_cpu_it_is_bytes_over_rates() -> None:
    speeds = Speeds(read=1e9, cpu={"up 3 bit": 2e9, "rows 4 bit": 1e9, "dense 4 bit": 4e9}, host=0.0)
    token = decode(TAKES, TokenWork(active=0.5, reached=0.5), speeds, Held(gpu=False), context=0)
    assert token.up == pytest.approx(64 * TAKES.up / 2e9)
    assert token.rows == pytest.approx(64 * 14336 * 0.5 * 0.75 * TAKES.row / 1e9)
    assert token.disk == token.host == token.moved == 0


def test_the_cpu_and_the_link_share_what_is_absent() -> None:
    """With both lanes of the same rate, half as long as with one of them."""
    speeds = Speeds(
        read=1e12,
        cpu={"rows 4 bit": 1e9},
        link=1e9,
        link_latency=0,
        gpu=1e15,
        launch=0,
        host_pool=0.0,
        host_behind=0.0,
    )
    alone = decode(TAKES, TokenWork(), speeds, Held(gpu=True, pool=0.0, cpu=False), context=0)
    both = decode(TAKES, TokenWork(), speeds, Held(gpu=True, pool=0.0), context=0)
    assert alone.rows == pytest.approx(64 * 14336 * TAKES.row / 1e9, rel=0.01)
    assert both.rows == pytest.approx(alone.rows / 2, rel=0.01)
    assert both.moved == pytest.approx(alone.moved / 2, rel=0.01)


def test_on_a_gpu_a_state_is_read_and_written_and_sometimes_copied() -> None:
    sizes, seconds = described("qwen3.6-35b-a3b").sizes, list[float]()
    state = sizes.recurrent
    assert isinstance(state, Recurrent)
    for wide in (1, 3):
        wider = dataclasses.replace(sizes, recurrent=dataclasses.replace(state, key_dim=wide * state.key_dim))
        takes = Footprint.of(wider, PackSpec())
        seconds.append(decode(takes, BALANCED, CARD, Held(gpu=True, pool=1.0)).seconds)
    more = 4 * state.layers * 2 * state.key_dim * state.values / CARD.gpu
    assert 2 * more < seconds[1] - seconds[0] < 3.5 * more


def test_a_prompts_experts_one_by_one_take_longer() -> None:
    whole, old = Held(gpu=True, pool=1.0), dataclasses.replace(CARD, grouped=False)
    assert prefill(TAKES, BALANCED, old, whole) < prefill(TAKES, BALANCED, CARD, whole)


def test_nothing_better_makes_it_slower() -> None:
    for _ in range(60):
        speeds, gpu = some_speeds(), RANDOM.random() < 0.7
        held = Held(gpu=gpu, pool=RANDOM.choice([0.0, 0.02, 0.3, 0.8]), ram=RANDOM.choice([0.1, 0.7, 1.0]))
        before = decode(TAKES, BALANCED, speeds, held).seconds
        read = 1 / prefill(TAKES, BALANCED, speeds, held)
        for name in ("read", "disk", "link", "gpu", "gpu_flops"):
            better = dataclasses.replace(speeds, **{name: getattr(speeds, name) * RANDOM.uniform(1, 3)})
            assert decode(TAKES, BALANCED, better, held).seconds <= before * 1.0001, (name, speeds, held)
            assert 1 / prefill(TAKES, BALANCED, better, held) <= read * 1.0001, (name, speeds, held)
        more = dataclasses.replace(held, ram=min(1.0, held.ram * 1.3))
        assert decode(TAKES, BALANCED, speeds, more).seconds <= before * 1.0001
        assert 1 / prefill(TAKES, BALANCED, speeds, more) <= read * 1.0001


def test_a_larger_pool_costs_the_gpu_at_most_its_own_time() -> None:
    """Rows of the pool are the GPU's work, which the CPU might have done meanwhile: a few percent at the most."""
    for _ in range(100):
        speeds = some_speeds()
        pools = sorted(RANDOM.random() for _ in range(2))
        small, large = (decode(TAKES, BALANCED, speeds, Held(gpu=True, pool=pool)) for pool in pools)
        own = 64 * 14336 * TAKES.row / speeds.gpu
        assert large.seconds <= small.seconds + own * (large.hit - small.hit) * 1.0001
        assert large.moved <= small.moved * 1.0001


def test_other_widths_follow_from_those_measured() -> None:
    speeds = Speeds(read=1e9, cpu={"rows 4 bit": 9e9})
    table = figures().kernels["rows"]
    assert speeds.of_cpu("rows", 2) == pytest.approx(9e9 * table[2] / table[4])
    assert Speeds(read=1e9).of_cpu("rows", 2) == pytest.approx(1e9 * table[2])


def test_cores_add_up_until_memory_is_the_limit() -> None:
    alone, shares = figures().core_bytes_s["rows"], figures().kernels["rows"]
    assert Speeds(read=1e12, cores=3).of_cpu("rows", 4) == pytest.approx(3 * alone[4])
    assert Speeds(read=1e9, cores=64).of_cpu("rows", 4) == pytest.approx(1e9 * shares[8])
    for kind, widths in figures().core_bytes_s.items():
        for bits in widths:
            rates = [Speeds(read=40e9, cores=cores).of_cpu(kind, bits) for cores in range(1, 9)]
            assert rates == sorted(rates) and rates[-1] <= 40e9
    slow, fast = (Speeds(read=1e12, cores=3).times(factor).of_cpu("rows", 4) for factor in (0.5, 2.0))
    assert (slow, fast) == (pytest.approx(1.5 * alone[4]), pytest.approx(6 * alone[4]))
    measured = Speeds(read=1e9, cores=64, cpu={"rows 4 bit": 9e9})
    assert measured.of_cpu("rows", 4) == 9e9 and measured.of_cpu("rows", 3) == pytest.approx(9e9)


WHOLE = Footprint.of(sizes_of("mixtral-8x7b"), DEFAULT)
WORK = TokenWork.of(next(preset for preset in PRESETS if preset.name == "Balanced"))
NEEDS = Needs.of_footprint(WHOLE, 4096)


def divided(*cards: str, takes: Footprint = WHOLE, needs: Needs = NEEDS) -> Divided:
    rooms = [
        CardRoom(name, machine.speeds_of(named(name), 1e9), memory_plan.budget(named(name).vram_bytes))
        for name in cards
    ]
    return Divided(takes, WORK, needs, tuple(rooms), memory_plan.room(1 << 40, takes))


def seconds(parts: tuple[Part, ...]) -> float:
    return sum(part.best.seconds for part in parts)


@pytest.mark.some(1)
@pytest.mark.parametrize("cards", [("3060", "3090@8gb"), ("4060@5gb", "4060")], ids=" ".join)
def test_no_other_division_is_faster(cards: tuple[str, ...]) -> None:
    found = divided(*cards).parts()
    assert [layer for part in found for layer in part.layers] == [*range(32)] and all(part.layers for part in found)
    others: list[float] = []
    for first in range(1, 32):
        try:
            others.append(seconds(divided(*cards).given((first, 32 - first))))
        except UsageError:
            continue
    assert seconds(found) == pytest.approx(min(others), rel=1e-9)


def test_the_parts_need_what_the_whole_does() -> None:
    parts = [part_needs(NEEDS, WHOLE, count, first=first) for count, first in ((11, True), (21, False))]
    assert sum(part.layers for part in parts) == 32
    for name, spare in (("up", 0), ("rows", 0), ("dense", 2), ("kv.whole", 2), ("captured", 2)):
        of = operator.attrgetter(name)
        assert 0 <= sum(map(of, parts)) - of(NEEDS) <= spare, name
    ends = WHOLE.head + 2 * WHOLE.sizes.embedding
    assert parts[0].dense - ends == pytest.approx((NEEDS.dense - ends) * 11 / 32, abs=1)


def test_two_cards_that_hold_all_take_as_long_as_one_that_does_and_the_crossings() -> None:
    speeds = machine.speeds_of(named("3060"), 1e9)
    whole = Running.alone(WHOLE, speeds, Held(gpu=True, pool=1.0, mix=Mix(gpu=32)))
    places = [
        DeviceLayers(layers, speeds, Held(gpu=True, mix=Mix(gpu=len(layers)), part=len(layers) / 32))
        for layers in (range(20), range(20, 32))
    ]
    two = Running(WHOLE, places)
    assert whole.crossings_s() == 0 < two.crossings_s() < 1e-4
    # One card has one graph; of two, each layer has one, and its experts are launched kernel by kernel.
    each = speeds.launch + LAUNCHES["experts_step"] * (speeds.launch - speeds.node)
    beside = two.crossings_s() + 2 * speeds.launch + 32 * each
    assert two.token(WORK).seconds - beside == pytest.approx(whole.token(WORK).seconds, rel=1e-9)
    assert two.token(WORK).hit == pytest.approx(1.0)
    assert two.prefill(WORK) == pytest.approx(whole.prefill(WORK), rel=1e-9)
    # Keys and values of a part are read by its card alone.
    dense = [
        running.token(WORK, context=9000).dense - running.token(WORK, context=1000).dense for running in (two, whole)
    ]
    assert dense[0] == pytest.approx(dense[1], rel=1e-6)


def test_a_card_that_is_too_small_is_named_with_what_it_lacks() -> None:
    with pytest.raises(UsageError) as refused:
        divided("3060", "4060@0.2gb").given((16, 16))
    assert "4060@0.2gb has" in refused.value.cause and "lacks" in refused.value.cause
    assert "3060 has" not in refused.value.cause and "--vram" in refused.value.hint
    with pytest.raises(UsageError, match="too little"):
        divided("3060@0.1gb", "4060@0.1gb").parts()
    with pytest.raises(UsageError, match="33 cards"):
        divided(*33 * ("3060",)).parts()
    for counts in ((0, 32), (16, 15), (32,)):
        with pytest.raises(UsageError, match="cannot be divided"):
            divided("3060", "3060").given(counts)


def several(*cards: str) -> Machine:
    base = Machine("here", 32 << 30, 0, None, 8, machine.speeds_of(named("3060"), 1e9), 0.2)
    return machine.described(Described(cards[0], others=cards[1:]), base)


def test_two_cards_hold_more_and_answer_faster_than_one() -> None:
    two, one = (
        option(several(*cards), described("mixtral-8x7b-instruct"), DEFAULT, 4096)
        for cards in (2 * ("3060",), ("3060",))
    )
    assert two.decode.mid > 1.6 * one.decode.mid and one.cards == ()
    assert [card.first for card in two.cards] == [0, two.cards[0].layers] and sum(c.layers for c in two.cards) == 32
    for use in two.vram:
        assert two.vram[use] == sum(card.vram.get(use, 0) for card in two.cards)
    for card in two.cards:
        assert sum(card.vram.values()) == 12 << 30 and card.vram["free"] > 0.05 * (12 << 30)
    assert two.mix is not None and two.mix.layers == 32
    assert two.static is not None and two.static <= two.decode.mid * (1 + 1e-9)


def test_a_plan_for_two_cards_says_what_they_are_worth() -> None:
    made = make(several("3060", "3060"), described("mixtral-8x7b-instruct"))
    told = next(why for why in made.why if why.startswith("The cards have"))
    assert "times as fast as one of them alone" in told and made.machine.called == "2 x RTX 3060"
    assert several("3090", "3060").called == "RTX 3090 and RTX 3060"
    small = make(several("3090", "3060"), described("olmoe"))
    assert any("One card alone is faster" in why for why in small.why)


def test_layers_that_keep_a_state_stay_on_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "mixtral", replace(FAMILIES["mixtral"], states=True))
    made = make(several("3060", "3090"), described("mixtral-8x7b-instruct"))
    assert made.chosen is not None and made.chosen.cards == ()
    assert any("cannot be divided" in why for why in made.why)


def test_cards_of_one_machine_share_its_processor() -> None:
    both = several("3060", "4090")
    (other,) = both.others
    assert both.speeds.read == other.speeds.read and both.speeds.cpu == other.speeds.cpu
    assert other.speeds.gpu > 2 * both.speeds.gpu and other.vram == 24 << 30
    assert other.speeds.link <= machine.PACKED * other.speeds.read
    assert "8 each" in both.told["links"]
    with pytest.raises(UsageError, match="none"):
        several("none", "3060")
    with pytest.raises(UsageError, match="no card"):
        several("3060", "3065")


def test_several_gpus_of_this_machine_are_mentioned_and_planned_with() -> None:
    names = ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090")
    gpus = tuple(Gpu(name, "8.6", 12 << 30, 11 << 30, number) for number, name in enumerate(names))
    found = replace(hardware.probe(Path()), gpus=gpus)
    assert "--devices cuda:0,cuda:1" in machine.here(found, None).told["gpus"]
    assert "gpus" not in machine.here(replace(found, gpus=gpus[:1]), None).told
    both = machine.here_with(found, None, [1, 0])
    assert both.called.startswith("NVIDIA GeForce RTX 4090") and len(both.each) == 2 and "gpus" not in both.told
    assert both.speeds.gpu > both.others[0].speeds.gpu
