"""Plans for machines that are made up: what fits where and why, what is missing, and which model is recommended."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from itertools import pairwise
from typing import Any

import pytest
from floe_chat.engine.machine.gpus import Gpu
from floe_chat.engine.machine.hardware import HALF_PINNED, Hardware
from floe_chat.engine.offload import cards
from floe_chat.engine.planning import machine, plan, reasons
from floe_chat.engine.planning.machine import Described, Machine
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.memory_plan import KEPT_FREE
from floe_chat.engine.planning.options import DEFAULT, WIDTHS, SpeedRange, option, rounding
from floe_chat.engine.planning.rates import GPU_REACHED, Measured
from floe_chat.engine.planning.speed_estimate import Speeds
from floe_chat.engine.planning.worth import BEYOND, CLEARLY, DOWNLOAD, ENOUGH, NEWER, READING, WORTH, shorter_pays
from floe_chat.models.catalog import asset, described
from floe_chat.models.catalog_entry import GGUF_BITS, OFFERED
from floe_chat.models.errors import UsageError
from floe_chat.models.hub import gguf_files
from floe_chat.models.packing.pack import PackSpec
from floe_chat.models.published import PUBLISHED
from floe_chat.models.quantities import digits

from ..bench.plan_figures import of_frontier

GB = 1 << 30
FILE: dict[str, Any] = json.loads(asset("figures.json").read_text(encoding="utf-8"))
MIXTRAL, LARGE = described("mixtral-8x7b-instruct"), described("mixtral-8x22b-instruct")
SMALL = described("olmoe-1b-7b-instruct")
RANDOM = random.Random(11)
SPEEDS = Speeds(read=40e9, link=12e9, gpu=250e9, gpu_flops=2e13, disk=2e9)


def a_machine(*, ram: float = 28, vram: float = 0, disk: float | None = 500, speeds: Speeds = SPEEDS) -> Machine:
    free = None if disk is None else int(disk * GB)
    return Machine("made up", int(ram * GB), int(vram * GB), free, 8, speeds, 0.3)


class TestWhere:
    def test_a_large_card_holds_everything_with_no_fewer_bits(self) -> None:
        fast = dataclasses.replace(SPEEDS, gpu=4e12, gpu_flops=5e14)
        found = plan.make(a_machine(vram=48, speeds=fast), MIXTRAL).chosen
        assert found and found.place == "gpu" and found.pool_share == 1 and rounding(found.spec) <= rounding(DEFAULT)

    def test_a_common_card_gets_a_pool(self) -> None:
        found = plan.make(a_machine(vram=12), MIXTRAL)
        assert found.chosen and found.chosen.place == "pool" and found.chosen.spec == DEFAULT
        held = dict(found.chosen.vram)
        free = held.pop("free")
        assert sum(held.values()) + free == 12 * GB and free >= int(KEPT_FREE * 12 * GB)
        assert held["pool"] == found.chosen.pool_rows * 4352 and 0 < found.chosen.pool_share < 1
        assert any("The GPU holds part of it" in sentence for sentence in found.why)

    def test_a_card_too_small_for_the_dense_part_is_left_alone(self) -> None:
        found = plan.make(a_machine(vram=1.5), MIXTRAL)
        assert found.chosen and found.chosen.place == "cpu" and found.chosen.vram == {} and found.chosen.mix is None
        assert any("the GPU would need" in sentence for sentence in found.why)

    def test_smaller_widths_may_bring_a_small_card_in(self) -> None:
        """For where even the dense part needs fewer bits."""
        exact, usual = (option(a_machine(vram=2.9, ram=48), MIXTRAL, spec, 4096) for spec in WIDTHS[:2])
        assert exact.place == "cpu" and usual.place == "pool"

    def test_a_context_that_no_card_holds_is_granted_as_far_as_it_fits(self) -> None:
        found = plan.make(a_machine(vram=4, ram=64), MIXTRAL, context=2_000_000)
        assert found.chosen and found.chosen.mix is not None and found.chosen.vram["context"] < 4 * GB
        (said,) = (sentence for sentence in found.why if "tokens of context" in sentence)
        assert "of the 32,768 that were asked for" in said and f"{found.chosen.context:,} tokens" in said
        two = machine.described(Described(card="3050@2.5gb", others=("3050@2.5gb",)), a_machine(ram=64))
        divided = plan.make(two, MIXTRAL, context=32_768).chosen
        assert divided and divided.cards and 4096 <= divided.context < 32_768

    def test_little_ram_takes_smaller_widths_rather_than_the_disk(self) -> None:
        found = plan.make(a_machine(ram=22), MIXTRAL)
        assert found.chosen and found.chosen.in_memory and rounding(found.chosen.spec) > rounding(DEFAULT)
        assert any("would come from the disk" in sentence for sentence in found.why)

    def test_less_still_reads_from_the_disk(self) -> None:
        fast = dataclasses.replace(SPEEDS, disk=7e9)
        found = plan.make(a_machine(ram=12, speeds=fast), MIXTRAL)
        assert found.chosen and found.chosen.ram_share < 1 and not found.chosen.in_memory
        assert any("the rest is read from the disk" in sentence for sentence in found.why)

    def test_context_takes_memory_up_to_the_window(self) -> None:
        short, long = (plan.make(a_machine(vram=12), MIXTRAL, context=context) for context in (512, 10**9))
        assert short.chosen and long.chosen and long.context == MIXTRAL.sizes.window
        assert short.chosen.pool_rows > long.chosen.pool_rows
        assert short.chosen.vram["context"] == 512 * 2 * 32 * 1024 * 2
        assert short.chosen.kv_bits == 16
        coarse = plan.make(a_machine(vram=12), MIXTRAL, context=512, kv_bits=8).chosen
        assert coarse and coarse.vram["context"] == 512 * 32 * (2 * 1024 + 2 * 16)

    def test_the_demo_is_planned_as_it_is_packed(self) -> None:
        found = plan.make(a_machine(ram=8, disk=0.01), described("demo"))
        assert found.chosen and len(found.options) == 1 and found.chosen.spec == PackSpec(4, 4, 4, 8)
        assert found.chosen.disk == {"pack": 0, "peak": 0} and found.pack_s is None and found.download_s is None
        assert "already packed" in found.why[0]


class TestDisk:
    def test_the_peak_is_the_pack_and_two_shards_or_the_whole_checkpoint(self) -> None:
        one = option(a_machine(), MIXTRAL, DEFAULT, 4096)
        kept = option(a_machine(), MIXTRAL, DEFAULT, 4096, keep_source=True)
        assert one.disk["peak"] == one.disk["pack"] + 10**10
        assert kept.disk["peak"] == one.disk["pack"] + MIXTRAL.checkpoint_bytes

    def test_a_disk_too_small_takes_smaller_widths(self) -> None:
        smallest = option(a_machine(), MIXTRAL, WIDTHS[-1], 4096).disk["peak"] / GB
        found = plan.make(a_machine(disk=smallest + 1.5), MIXTRAL)
        assert found.chosen and found.chosen.spec == WIDTHS[-1]
        assert any("of disk space more" in sentence for sentence in found.why)

    def test_a_tiny_disk_fits_nothing_and_says_how_much_is_missing(self) -> None:
        found = plan.make(a_machine(disk=3), MIXTRAL)
        smallest = option(a_machine(), MIXTRAL, WIDTHS[-1], 4096).disk["peak"]
        assert found.chosen is None and found.missing == {"disk": smallest + GB - 3 * GB}
        assert "disk space is missing" in found.why[0] and "demo" in found.instead


class TestNothingFits:
    def test_a_model_far_too_large_names_a_smaller_one(self) -> None:
        found = plan.make(a_machine(ram=16), LARGE)
        assert found.chosen is None and found.missing["ram"] > 20 * GB
        assert "from the disk" in found.why[0] and "GB of RAM" in found.why[0]
        best = plan.recommended(plan.offers(a_machine(ram=16)))
        assert best and best.entry.name in found.instead and "tokens/s" in found.instead

    def test_not_even_the_dense_part(self) -> None:
        found = plan.make(a_machine(ram=1), MIXTRAL)
        assert found.chosen is None and 0 < found.missing["ram"] < 8 * GB and "demo" in found.instead

    def test_a_context_of_nothing_is_refused(self) -> None:
        with pytest.raises(UsageError, match="context"):
            plan.make(a_machine(), MIXTRAL, context=0)


class TestTime:
    def test_download_and_packing(self) -> None:
        found = plan.make(a_machine(), MIXTRAL, net_bytes_s=1e8)
        assert found.download_s == pytest.approx(MIXTRAL.checkpoint_bytes / 1e8)
        assert found.pack_s and 300 < found.pack_s < 1800
        assert plan.make(a_machine(), MIXTRAL).download_s is None

    def test_packing_takes_as_long_as_measured(self) -> None:
        many, one = described("qwen3.6-35b-a3b"), a_machine()
        times = [plan.make(one, entry).pack_s or 0.0 for entry in (many, MIXTRAL)]
        layer, mixtral = (seconds / e.sizes.layers for seconds, e in zip(times, (many, MIXTRAL), strict=True))
        assert layer * one.cores == pytest.approx(2 * 37, rel=0.1)  # measured by AVX2 on two cores
        assert mixtral * one.cores == pytest.approx(2 * 66, rel=0.1)


def perturbed(found: Machine, draw: random.Random) -> Machine:
    """The same machine measured again: every rate up to 5 % off, and 1 % of memory taken or given by firmware."""

    def near(value: float, by: float) -> float:
        return value * draw.uniform(1 - by, 1 + by)

    s = found.speeds
    rates = {name: near(getattr(s, name), 0.05) for name in ("read", "disk", "link", "gpu", "gpu_flops")}
    speeds = dataclasses.replace(s, **rates, cpu={name: near(rate, 0.05) for name, rate in s.cpu.items()})
    return dataclasses.replace(found, ram=int(near(found.ram, 0.01)), vram=int(near(found.vram, 0.01)), speeds=speeds)


def on(card: str, ram: int) -> Machine:
    """The host's own time is fixed: it is measured again as the engine changes, and no rule of plans hangs on it."""
    found = machine.described(Described(card=card, ram=ram * GB), a_machine(speeds=Speeds(read=30e9, disk=2e9)))
    return dataclasses.replace(found, speeds=dataclasses.replace(found.speeds, host_pool=2e-4, host_behind=0.0))


class TestRecommendation:
    @pytest.mark.parametrize(
        ("card", "ram"),
        [
            *(("none", 16), ("3080", 32)),
            *(
                pytest.param(*each, marks=pytest.mark.thorough)
                for each in (("3090", 64), ("4060", 16), ("4070", 64), ("4080", 32))
            ),
        ],
    )
    def test_it_is_stable_on_every_common_machine(self, card: str, ram: int) -> None:
        found = on(card, ram)
        draw = random.Random(ram)
        for entry in (SMALL, MIXTRAL)[ram // 64 :]:
            planned = plan.make(found, entry)
            chosen = planned.chosen
            # What fits RAM but for a hundredth or two may be chosen, or what is smaller: that much is what changes.
            edge = {option.spec for option in planned.options if 0.98 < option.ram_share < 1}
            for _ in range(2):
                again = plan.make(perturbed(found, draw), entry).chosen
                assert (again and again.spec) == (chosen and chosen.spec) or (again and again.spec in edge)

    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("card", "ram", "bits"),
        [
            ("none", 24, "2/3/4"),  # 3/4/4 would read a quarter from the disk
            ("none", 64, "3/4/4"),
            ("3070", 32, "3/4/4"),
            ("3060", 32, "3/4/4"),
            ("4080", 32, "3/4/4"),  # 2/2/4 would fit the GPU, and lose too much
            ("4090", 32, "3/4/4"),  # a tenth of it does not fit, which the CPU and the link make up for
            ("a6000", 64, "3/4/4"),
        ],
    )
    def test_what_a_person_would_choose(self, card: str, ram: int, bits: str) -> None:
        found = plan.make(on(card, ram), MIXTRAL)
        assert found.chosen and reasons.describe(found.chosen.spec) == bits

    @pytest.mark.thorough
    def test_a_faster_choice_is_faster_in_the_printed_figures_too(self) -> None:
        offered = 0
        for card in ("none", "3060", "4080"):
            for ram in (24, 64):
                found = plan.make(on(card, ram), MIXTRAL)
                for sentence in found.why:
                    if sentence.startswith("Faster: "):
                        offered += 1
                        assert found.chosen and f"about {digits(found.chosen.decode.mid, 2)} tokens/s" not in sentence
        assert offered

    def test_the_reasons_weigh_the_neighbours_and_state_the_rule(self) -> None:
        found = plan.make(on("4090", 32), MIXTRAL)
        said = " ".join(found.why)
        assert "More exact: 4/4/8" in said and "Faster: 3/3/4" in said and str(WORTH) in said
        assert not any(ugly in said for ugly in ("e+", "e-0", "nan"))

    def test_worth_follows_the_rule(self) -> None:
        found = plan.make(a_machine(ram=64), MIXTRAL).chosen
        assert found is not None
        slow = dataclasses.replace(found, decode=SpeedRange(1, 2, 3), kl=0.0)
        assert dataclasses.replace(slow, decode=SpeedRange(1, 4, 5)).worth == pytest.approx(slow.worth + 1)
        assert dataclasses.replace(slow, kl=WORTH).worth == pytest.approx(slow.worth - 1)
        fast = dataclasses.replace(slow, decode=SpeedRange(1, ENOUGH, 90))
        assert dataclasses.replace(fast, decode=SpeedRange(1, 2 * ENOUGH, 90)).worth == pytest.approx(
            fast.worth + BEYOND
        )
        assert dataclasses.replace(slow, ram_share=0.5).worth < slow.worth


def test_ranges_hold_what_is_expected() -> None:
    for vram in (0, 12, 48):
        for one in plan.make(a_machine(vram=vram, ram=64), MIXTRAL).options:
            for rate in (one.decode, one.prefill):
                assert 0 < rate.low < rate.mid < rate.high


def test_more_of_anything_is_never_worse(every_case: bool) -> None:
    """More memory may buy quality instead of speed; at the same widths it never costs speed."""
    for _ in range(4 if every_case else 1):
        entry = RANDOM.choice([MIXTRAL, LARGE])
        before = a_machine(
            ram=RANDOM.uniform(4, 100),
            vram=RANDOM.choice([0.0, RANDOM.uniform(4, 80)]),
            disk=RANDOM.choice([None, RANDOM.uniform(10, 300)]),
            speeds=dataclasses.replace(SPEEDS, disk=RANDOM.uniform(2e8, 7e9)),
        )
        more = [
            dataclasses.replace(before, ram=int(before.ram * RANDOM.uniform(1, 2))),
            dataclasses.replace(before, disk_free=before.disk_free and int(before.disk_free * RANDOM.uniform(1, 2))),
            dataclasses.replace(before, speeds=dataclasses.replace(before.speeds, read=60e9)),
            dataclasses.replace(before, speeds=dataclasses.replace(before.speeds, disk=8e9)),
            dataclasses.replace(before, speeds=dataclasses.replace(before.speeds, link=25e9, gpu=500e9)),
            dataclasses.replace(before, vram=int(before.vram * RANDOM.uniform(1, 2))),
        ]
        first = plan.make(before, entry)
        for after in more:
            second = plan.make(after, entry)
            for old, new in zip(first.options, second.options, strict=True):
                assert sum(new.missing.values()) <= sum(old.missing.values())
                assert new.decode.mid >= old.decode.mid * 0.9999
            if first.chosen:
                assert second.chosen and second.chosen.worth >= first.chosen.worth - CLEARLY


def some_hardware(*, gpus: tuple[Gpu, ...] = (), wsl: bool = False, limit: int | None = None) -> Hardware:
    return Hardware(
        system="Linux",
        wsl=wsl,
        cpu="Some CPU",
        cores_physical=8,
        cores_usable=4,
        cpu_isa="avx2",
        ram_total=limit or 32 * GB,
        ram_available=limit or 24 * GB,
        ram_limit=limit,
        pinnable=None,
        gpus=gpus,
        gpu_reason="" if gpus else "torch sees no CUDA device",
        disk_folder="/models",
        disk_free=100 * GB,
        torch_version="2",
        torch_threads=4,
        sources={},
    )


class TestMachine:
    def test_this_machine_by_its_measured_rates(self) -> None:
        kept = Measured({"memory read": 2e10, "rows 4 bit": 8e9, "disk read": 3e9}, {}, "2026-11-21T00:00:00")
        found = machine.here(some_hardware(), kept)
        assert (found.ram, found.vram, found.cores, found.disk_free) == (29 * GB, 0, 4, 100 * GB)
        assert found.speeds.of_cpu("rows", 4) == 8e9 and found.speeds.disk == 3e9
        assert any("2026-11-21" in told for told in found.told.values()) and any(
            "no usable GPU" in told for told in found.told.values()
        )

    def test_what_was_not_measured_or_while_others_worked_is_doubted(self) -> None:
        kept = Measured({"memory read": 2e10, "disk read": 3e9}, {}, "2026-11-21T00:00:00")
        assumed, busy = (
            machine.here(some_hardware(), None),
            machine.here(some_hardware(), dataclasses.replace(kept, busy=1.4)),
        )
        assert sum("assumed" in told for told in assumed.told.values()) == 2
        assert any("1.4 cores" in told for told in busy.told.values())
        assert min(assumed.doubt, busy.doubt) > machine.here(some_hardware(), kept).doubt
        assert busy.doubt == machine.ASSUMED_DOUBT

    def test_its_gpu_and_link(self) -> None:
        kept = Measured({"memory read": 6e10, "link pinned": 24e9, "gpu": 8e11, "disk read": 1e9}, {}, "2026-11-21")
        found = machine.here(some_hardware(gpus=(Gpu("Card", "8.6", 12 * GB, 11 * GB, 0),)), kept)
        assert found.vram == 12 * GB and found.speeds.gpu == pytest.approx(8e11 * GPU_REACHED)
        assert found.speeds.link == pytest.approx(2e10)  # no faster than the CPU packs rows
        assert found.speeds.node < found.speeds.launch == SPEEDS.launch
        known = dataclasses.replace(kept, rates={**kept.rates, "gpu launches": 2e5, "in a graph": 5e5})
        there = some_hardware(gpus=(Gpu("Card", "8.6", 12 * GB, 11 * GB, 0), Gpu("Other", "8.6", GB, GB, 1)))
        speeds = machine.here(there, known).speeds
        assert (speeds.launch, speeds.node) == (5e-6, 2e-6)
        refuses = dataclasses.replace(known, rates={**kept.rates, "gpu launches": 1e5}, reasons={"in a graph": "no"})
        found = machine.here(there, refuses)
        assert found.speeds.node == found.speeds.launch == 1e-5 and found.told["graphs"].endswith("captured: no.")
        other = machine.here(there, refuses, 1)  # which is not measured
        assert other.speeds.node < other.speeds.launch == SPEEDS.launch and "graphs" not in other.told
        unused = Gpu("Old", "6.1", 8 * GB, 8 * GB)  # by this torch
        assert machine.here(some_hardware(gpus=(unused,)), None).vram == 0

    def test_wsl_and_containers_are_told(self) -> None:
        assert any("wslconfig" in told for told in machine.here(some_hardware(wsl=True), None).told.values())
        found = machine.here(some_hardware(limit=8 * GB), None)
        assert found.ram == 8 * GB - machine.reserve(8 * GB) and any(
            "container" in told for told in found.told.values()
        )

    def test_windows_takes_longer_to_start_work_on_a_card(self) -> None:
        card = Gpu("RTX 3090", "8.6", 24 * GB, 24 * GB, 0)
        windows = dataclasses.replace(some_hardware(gpus=(card,)), system="Windows 11 AMD64", pinnable=16 * GB)
        windows = dataclasses.replace(windows, sources={"pinnable": HALF_PINNED})
        found = machine.here(windows, None)
        assert "not counted here" in found.told["windows"] and f"{HALF_PINNED}, here 16 GB" in found.told["pinned"]
        assert not {"windows", "pinned"} & machine.described(Described(card="none"), found).told.keys()
        for other in (some_hardware(gpus=(card,)), dataclasses.replace(windows, gpus=())):
            assert "windows" not in machine.here(other, None).told

    @pytest.mark.parametrize(
        ("capability", "vram", "about"),
        [("6.1", 0, "need compute capability 7.5"), ("7.5", 8 * GB, "in float16"), ("8.6", 8 * GB, "")],
    )
    def test_what_an_old_card_cannot_is_told(self, capability: str, vram: int, about: str) -> None:
        found = machine.here(some_hardware(gpus=(Gpu("Some Card", capability, 8 * GB, 8 * GB, 0),)), None)
        assert (
            found.vram == vram and about in found.told["old" if vram else "gpu"] if about else "old" not in found.told
        )
        if vram:  # before 8.0 a prompt's experts are computed one by one, and launched so
            assert found.speeds.grouped == (capability == "8.6") == (not about)

    def test_what_is_said_replaces_what_is_here(self) -> None:
        base = machine.here(some_hardware(), None)
        said = Described(vram=12 * GB, ram=64 * GB, cpu_bytes_s=9e10, pcie=(4, 16), disk_bytes_s=5e9, disk_free=GB)
        found = machine.described(said, base)
        assert (found.vram, found.ram, found.disk_free) == (12 * GB, 61 * GB, GB)
        assert found.speeds.read == 9e10 and found.speeds.disk == 5e9
        assert found.speeds.link == pytest.approx(1.969e9 * 16 * 0.8)
        assert found.doubt == machine.ASSUMED_DOUBT and any("PCIe 4.0 x16" in told for told in found.told.values())
        less = machine.described(Described(ram=16 * GB), base)
        assert (less.vram, less.disk_free, less.speeds) == (base.vram, base.disk_free, base.speeds)
        assert Described().empty and not Described(ram=1).empty

    def test_kernels_measured_here_reach_the_same_share_of_another_memory(self) -> None:
        kept = Measured({"memory read": 2e10, "rows 4 bit": 8e9, "prompt 4 bit": 3e10}, {}, "2026-11-21")
        found = machine.described(Described(cpu_bytes_s=4e10), machine.here(some_hardware(), kept))
        assert found.speeds.of_cpu("rows", 4) == pytest.approx(16e9)
        assert found.speeds.of_cpu("prompt", 4) == 3e10  # bound by arithmetic

    def test_a_card_brings_its_own_machine(self) -> None:
        base = machine.here(some_hardware(), None)
        card = cards.named("rtx3060-12gb")
        found = machine.described(Described(card="rtx3060-12gb", ram=32 * GB), base)
        assert found.vram == card.vram_bytes and found.speeds.read == card.cpu_bytes_s
        assert found.name == "RTX 3060" and found.speeds.link <= card.pack_bytes_s
        with pytest.raises(UsageError, match="no card"):
            machine.described(Described(card="rtx9999"), base)


def names(found: list[plan.Plan], stands: str = "") -> list[str]:
    return [one.entry.name for one in found if not stands or plan.standing(one.entry, one.chosen) == stands]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("ram", "vram", "name"),
    [
        (3.5, 0, "granite-3.1-3b-a800m-instruct"),
        (28, 12, "qwen3.6-35b-a3b"),
    ],
)
def test_a_model_that_answers_at_reading_speed_is_recommended_and_groups_follow_each_other(
    ram: float, vram: float, name: str
) -> None:
    found = plan.offers(a_machine(ram=ram, vram=vram, disk=60))
    first = plan.recommended(found)
    assert first and first is found[0] and first.entry.name == name
    assert first.chosen and first.chosen.decode.mid >= READING and first.entry.gated is False
    stands = [plan.STANDINGS.index(plan.standing(one.entry, one.chosen)) for one in found]
    assert stands == sorted(stands) and sorted(names(found)) == sorted(entry.name for entry in PUBLISHED)
    for group in ("slower", "reading"):
        order = [
            (
                bool(one.entry.sizes.counted and one.entry.sizes.counted.library),
                -one.chosen.decode.mid if group == "slower" else -plan.size_rule(one.entry, one.chosen.kl),
            )
            for one in found
            if one.chosen and one.entry.name in names(found, group)
        ]
        assert order == sorted(order) and len(order) > 1


def test_what_makes_a_difference_between_equals() -> None:
    usual = dataclasses.replace(MIXTRAL, gated=False, name="usual")
    others = [
        dataclasses.replace(usual, name="asks", gated=True),
        dataclasses.replace(usual, name="codes", made_for="code"),
        dataclasses.replace(usual, name="old", released="2022-01"),
        dataclasses.replace(usual, name="base", chat=None),
        dataclasses.replace(usual, name="thinks", thinks=True),  # too slow for that
    ]
    order = names(plan.offers(a_machine(), [*others, usual]))
    assert order == ["usual", "asks", "codes", "old", "thinks", "base"]


def test_a_model_that_thinks_needs_more_speed() -> None:
    entry = dataclasses.replace(MIXTRAL, thinks=True)
    chosen = plan.make(a_machine(), entry).chosen
    assert chosen and READING <= chosen.decode.mid < ENOUGH
    assert (plan.standing(MIXTRAL, chosen), plan.standing(entry, chosen)) == ("reading", "slower")
    fast = dataclasses.replace(chosen, decode=SpeedRange(1, ENOUGH, 90))
    assert plan.standing(entry, fast) == "reading"
    assert plan.standing(entry, dataclasses.replace(fast, ram_share=0.9)) == "slower"


def test_the_rule_of_thumb() -> None:
    newer = dataclasses.replace(MIXTRAL, released="2024-12")  # a year later
    assert plan.size_rule(newer) == plan.size_rule(MIXTRAL) + 1 / NEWER
    assert plan.size_rule(MIXTRAL, 2 * WORTH) == plan.size_rule(MIXTRAL) - 2
    assert plan.size_rule(LARGE) > plan.size_rule(MIXTRAL) > plan.size_rule(SMALL)
    assert plan.size_rule(dataclasses.replace(MIXTRAL, released="")) < plan.size_rule(MIXTRAL)


def test_what_does_not_fit_is_last_and_never_recommended() -> None:
    found = plan.offers(a_machine(ram=0.5, disk=3), [SMALL, MIXTRAL, LARGE])
    assert plan.recommended(found) is None and plan.recommended([]) is None
    fitting = plan.make(a_machine(ram=30, disk=None), MIXTRAL)
    unfit = dataclasses.replace(plan.make(a_machine(ram=30, disk=None), SMALL), chosen=None)
    assert plan.ranked([unfit, fitting]) == [fitting, unfit]


def test_what_tune_measured_is_in_the_file() -> None:
    points = json.loads(asset("demo", "packed", "frontier.json").read_text(encoding="utf-8"))["points"]
    for name, values in of_frontier(points).items():
        assert values == FILE[name]["values"], "run tests/bench/plan_figures.py"


def test_one_core_is_known_at_all_widths_and_two_reach_no_more_than_memory_gives() -> None:
    alone, shares = figures().core_bytes_s, figures().kernels
    assert set(alone) == set(shares) - {"prompt"}
    for kind, widths in alone.items():
        assert set(widths) == set(shares[kind]) and max(shares[kind].values()) <= 1


def test_figures_make_sense() -> None:
    found = figures()
    for curve in (found.dropped, found.hits):
        assert all(x0 < x1 for (x0, _), (x1, _) in pairwise(curve)) and min(y for _, y in curve) >= 0
        values = [y for _, y in curve]
        assert values in (sorted(values), sorted(values, reverse=True)) and max(values) <= 1
    for losses in found.quantization.values():
        assert [losses[bits] for bits in sorted(losses)] == sorted(losses.values(), reverse=True)
    assert 0 < found.host_s < found.host_gpu_s < found.host_behind_s + found.host_pool_s
    assert Speeds(read=1e9).host_pool == found.host_pool_s
    assert all(entry["command"] and re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]) for entry in FILE.values())


def test_rounded_files_are_taken_in_the_order_of_their_loss_for_their_bytes() -> None:
    loss, known = figures().gguf_kl, [label for label in gguf_files.BEST if label in GGUF_BITS]
    assert sorted(known) == sorted(GGUF_BITS)
    assert known == sorted(known, key=lambda label: loss[label] / WORTH + DOWNLOAD * math.log2(GGUF_BITS[label]))


def test_a_shorter_download_comes_first_where_it_is_worth_its_loss() -> None:
    """And what the rounding loses is counted: the goal for the first choice of 24 GB is 20 GB to download."""
    qwen, laptop = described("qwen3-30b-a3b-instruct-2507"), a_machine(ram=21)
    first, other = plan.two_plans(laptop, qwen)
    assert other is not None and first.chosen is not None and other.chosen is not None
    assert (first.entry.rounding, other.entry) == (OFFERED, qwen) and first.entry.download_bytes < 20e9 < 61e9
    assert first.chosen.kl == pytest.approx(other.chosen.kl + figures().gguf_kl[OFFERED])
    assert first.chosen.disk["peak"] < other.chosen.disk["peak"] and first.chosen.spec == other.chosen.spec
    assert f"floe-chat setup {qwen.gguf}:{OFFERED}" in reasons.shorter_file(qwen)
    assert "counted in" in reasons.rounded_before(first.entry, "3/4/4")
    assert "was not measured" in reasons.rounded_before(dataclasses.replace(first.entry, rounding="Q2_K"), "3/4/4")
    assert plan.two_plans(laptop, described("gpt-oss-20b"))[1] is None
    assert not shorter_pays(2, 0.006) and shorter_pays(2, 0.004) and not shorter_pays(1.0, 0.0)
