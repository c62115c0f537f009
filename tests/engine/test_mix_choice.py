"""The planner's mixes: never slower than static placement or with more memory; what the engine opens."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from floe_chat.engine import quality_presets
from floe_chat.engine.loader import load
from floe_chat.engine.offload import cards
from floe_chat.engine.offload.mix import ExpertsPlace, Mix
from floe_chat.engine.planning import machine, memory_plan, mix_choice, prompt_estimate, speed_estimate
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.machine import Machine
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.engine.planning.mix_choice import STEPS, Costs, Placed
from floe_chat.engine.planning.opened_pack import OpenedPack
from floe_chat.engine.planning.options import WIDTHS, option
from floe_chat.engine.planning.speed_estimate import ANSWER, PROMPT, Held, Speeds, TokenWork
from floe_chat.engine.planning.worth import CLEARLY
from floe_chat.engine.ranges import ANY_PLACE
from floe_chat.kernels.rule import Rule
from floe_chat.models.catalog import described, find
from floe_chat.models.configuration import read
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec

from .driver import silent

GB = 1 << 30
MIXTRAL, LARGE = described("mixtral-8x7b-instruct"), described("mixtral-8x22b-instruct")
OLMOE = described("olmoe-1b-7b-instruct")
BALANCED = TokenWork.of(next(preset for preset in quality_presets.PRESETS if preset.name == "Balanced"))
CARDS = [card for series in cards.by_series().values() for card in series]
BASE = Machine("made up", 28 * GB, 0, None, 8, Speeds(read=30e9, disk=2e9), 0.3)


def placed(costs: Costs, vram: float, ram: float) -> tuple[Placed, Placed] | None:
    budget = memory_plan.budget(int(vram * GB))
    return mix_choice.choose(costs, Needs.of_footprint(costs.takes, 4096), budget, int(ram * GB))


def decode(takes: Footprint, speeds: Speeds, held: Held) -> float:
    return speed_estimate.decode(takes, BALANCED, speeds, held).seconds


def seconds(takes: Footprint, speeds: Speeds, held: Held, work: TokenWork = BALANCED) -> float:
    """Of a token, with its part of a prompt."""
    prompt = PROMPT / prompt_estimate.prefill(takes, work, speeds, held)
    return speed_estimate.decode(takes, work, speeds, held).seconds + prompt / ANSWER


@pytest.mark.some(1)
@pytest.mark.parametrize("ram", [28, 14, 60])
def test_no_card_is_slower_than_static_placement_or_slower_with_more_memory(ram: int) -> None:
    """Cards of the list with 4 to 26 GB of their memory, at widths that turn from card to card."""
    used = set[Mix]()
    for card, spec in zip(CARDS[ram % 4 :: 8], itertools.cycle(WIDTHS)):
        takes, before, token_before = Footprint.of(MIXTRAL.sizes, spec), float("inf"), float("inf")
        speeds = machine.of_card(card, BASE).speeds
        costs = Costs(takes, BALANCED, speeds)
        for vram in range(4, 27, 4):
            if (found := placed(costs, vram, ram)) is None:
                assert before == float("inf")
                continue
            took, static = (seconds(takes, speeds, each.held) for each in found)
            assert took <= static * (1 + 1e-12) and found[1].mix.pool == 0
            assert took <= before * (1 + 1e-12), (card.name, vram)
            token, static = (decode(takes, speeds, each.held) for each in found)
            assert token <= static * 1.01 and token <= token_before * 1.01, (card.name, vram)
            used.add(found[0].mix)
            before, token_before = took, token
    assert any(mix.pool and mix.cpu for mix in used) and any(mix.gpu == mix.layers for mix in used)


@pytest.mark.some(1)
@pytest.mark.parametrize("vram", [12, 6, 20])
def test_more_ram_is_never_slower(vram: int) -> None:
    for card in CARDS[::18]:
        takes, speeds = Footprint.of(MIXTRAL.sizes, PackSpec()), machine.of_card(card, BASE).speeds
        costs, times = Costs(takes, BALANCED, speeds), list[float]()
        for ram in range(6, 40, 4):
            if found := placed(costs, vram, ram):
                times.append(seconds(takes, speeds, found[0].held))
        assert times == pytest.approx(sorted(times, reverse=True)) and len(times) > 5


@pytest.mark.some(1)
@pytest.mark.parametrize("entry", [MIXTRAL, LARGE, OLMOE], ids=lambda entry: entry.name)
def test_no_mix_that_fits_is_faster(entry: object) -> None:
    """Beside each mix of a random draw, with all the rows that fit, counted by the cost model one by one."""
    draw = random.Random(3)
    takes = Footprint.of(entry.sizes, PackSpec())  # type: ignore[attr-defined]
    needs, layers = Needs.of_footprint(takes, 4096), takes.sizes.layers
    for _ in range(6):
        speeds = machine.of_card(draw.choice(CARDS), BASE).speeds
        speeds = dataclasses.replace(
            speeds, host_pool=draw.choice([5e-5, 1.1e-3]), host_behind=draw.choice([0.0, 1e-3])
        )
        vram, ram = draw.uniform(5, 30), draw.uniform(6, 90)
        found = placed(Costs(takes, BALANCED, speeds), vram, ram)
        if found is None:
            continue
        best, budget = seconds(takes, speeds, found[0].held), memory_plan.budget(int(vram * GB))
        for _ in range(60):
            gpu = draw.randint(0, layers)
            mix = Mix(gpu, pool := draw.randint(0, layers - gpu), layers - gpu - pool)
            if needs.fits(mix, budget):
                share = mix_choice.share(needs, needs.share_out(mix, budget, 4096))
                there = memory_plan.share_ram(int(ram * GB), takes, mix, share, 4096).share
                assert best <= seconds(takes, speeds, Held(True, share, there, mix=mix)) * (1 + 1e-9)


def test_what_is_chosen_fits_and_counts_no_more_rows_than_there_are() -> None:
    for card, vram in itertools.product(CARDS[::18], (5, 9, 13, 25)):
        takes = Footprint.of(MIXTRAL.sizes, PackSpec())
        needs, budget = Needs.of_footprint(takes, 4096), memory_plan.budget(vram * GB)
        found = placed(Costs(takes, BALANCED, machine.of_card(card, BASE).speeds), vram, 28)
        assert found is not None
        for each in found:
            shares = needs.share_out(each.mix, budget, 4096, each.rows)
            assert sum(shares.uses.values()) <= budget
            assert each.mix.pool == 0 or shares.rows == each.rows
            pooled = each.mix.pool * needs.experts * needs.neurons
            assert each.share * pooled <= each.rows + 1e-6
            assert not pooled or mix_choice.share(needs, shares) == pytest.approx(each.share, abs=1 / STEPS)


class _Mixtral(OpenedPack):
    """Without its files."""

    def __init__(self, context: int) -> None:
        self.layers, self.mix, self.wanted, self.work = (), None, ANY_PLACE, BALANCED
        self.takes, self.window = Footprint.of(MIXTRAL.sizes, PackSpec()), MIXTRAL.sizes.window
        self.forms = [Needs.of_footprint(self.takes, context, bits) for bits in (16, 8)]
        self.needs = self.forms[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("context", [4096, 16384])
def test_opening_divides_memory_as_planned(context: int) -> None:
    pack = _Mixtral(context)
    for card, vram in itertools.product(CARDS[::30], (4, 8, 12, 24)):
        there, budget = dataclasses.replace(machine.of_card(card, BASE), vram=vram * GB), memory_plan.budget(vram * GB)
        planned = option(there, MIXTRAL, PackSpec(), context)
        if planned.mix is None:  # the CPU is faster
            continue
        shares = pack.shares(there, budget)
        found = shares.mix, shares.rows if planned.mix.pool else planned.pool_rows, shares.kv_bits
        assert found == (planned.mix, planned.pool_rows, planned.kv_bits)
        assert shares.reserved >= context and sum(shares.uses.values()) <= budget
        assert pack.tokens_s(there, shares) == pytest.approx(planned.decode.mid)


def test_keys_and_values_get_8_bits_where_that_is_clearly_worth_it() -> None:
    for vram, context in itertools.product((4, 12, 24), (1024, 4096, 32768)):
        there = dataclasses.replace(machine.of_card(cards.named("RTX 4060"), BASE), vram=vram * GB)
        exact, coarse = (option(there, MIXTRAL, PackSpec(), context, kv_bits=bits) for bits in (16, 8))
        found = option(there, MIXTRAL, PackSpec(), context)
        assert coarse.kl > exact.kl and found in (exact, coarse)
        if exact.works:
            assert (found.kv_bits == 8) == (coarse.worth >= exact.worth + CLEARLY)
        assert context > 1024 or found.kv_bits == 16
        # The longer a chat, the slower, first as its entries are read, then as it takes memory.
        assert found.decode.mid * 1.001 >= found.full[0] >= found.full[1] > 0
        assert context > 4096 or vram < 24 or found.kv_bits == 16


def test_layers_that_skip_less_are_placed_as_what_they_cost() -> None:
    """Against random assignments of the same memory, and against counting all layers alike."""
    draw, takes = random.Random(11), Footprint.of(MIXTRAL.sizes, PackSpec())
    for card, vram in itertools.product(CARDS[::30], (8, 12, 20)):
        rule = Rule(0.4, 0.6, 0.2, 0.4, True, layers=tuple(draw.choice([0.0, 0.5, 1.0, 1.6]) for _ in range(32)))
        work = TokenWork.of(quality_presets.Preset("made up", rule))
        assert len(work.layers) == 32 and len({one.active for one in work.layers}) == 4
        assert work.active == pytest.approx(sum(one.active for one in work.layers) / 32)
        needs, budget = Needs.of_footprint(takes, 4096), memory_plan.budget(vram * GB)
        speeds = machine.of_card(card, BASE).speeds
        found = mix_choice.choose(Costs(takes, work, speeds), needs, budget, 60 * GB)
        assert found is not None
        best, mix = seconds(takes, speeds, found[0].held, work), found[0].mix
        assert sorted(mix.order) == list(range(32)) and len(mix.of("cpu")) == mix.cpu
        rows = [one.active * one.calls for one in work.layers]
        kinds: tuple[ExpertsPlace, ...] = ("cpu", "pool", "gpu")
        for less, more in itertools.combinations(kinds, 2):
            if mix.of(less) and mix.of(more):
                assert max(rows[layer] for layer in mix.of(less)) <= min(rows[layer] for layer in mix.of(more)) + 1e-9
        for _ in range(10):
            other = dataclasses.replace(found[0].held, mix=dataclasses.replace(mix, order=draw.sample(range(32), 32)))
            # The cost of a kind is that of its layers' mean, which is nearly the mean of their costs.
            assert best <= seconds(takes, speeds, other, work) * 1.02


@pytest.mark.some(1)
@pytest.mark.parametrize("vram", [20 << 20, 24 << 20, 14 << 20])
def test_the_engine_opens_what_is_planned(vram: int) -> None:
    """The demo on a virtual card: the same mix as by the cost model, from the pack's own files."""
    folder = find("demo")
    packed, config = PackedModel.open(folder), read(folder)
    takes = Footprint.of_pack(packed.manifest, config)
    assert takes == Footprint.of(described("demo").sizes, takes.spec)
    loaded, told = load(folder, None, "sim:rtx3060-12gb", silent, vram=vram)
    layers = [packed.layer(index) for index in range(packed.manifest.architecture.layers)]
    needs = Needs.of(packed.manifest, layers, config, 2)
    speeds = machine.of_card(cards.named("sim:rtx3060-12gb", study=True), BASE).speeds
    found = mix_choice.choose(Costs(takes, BALANCED, speeds), needs, vram, 20 * GB)
    assert found is not None and found[0].mix.describe() in told.reason
    loaded.close()
