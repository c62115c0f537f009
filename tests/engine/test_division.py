"""Layers of one model divided among several cards: the fastest division, its needs, its estimate, and its words."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.engine.bench.synthetic import sizes_of
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Gpu
from floe_chat.engine.offload.cards import named
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.planning import machine, memory_plan
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.machine import Described, Machine
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.engine.planning.options import DEFAULT, option
from floe_chat.engine.planning.plan import make
from floe_chat.engine.planning.running import Place, Running
from floe_chat.engine.planning.several.division import CardRoom, Divided, Part, part_needs
from floe_chat.engine.planning.speed_estimate import Held, TokenWork
from floe_chat.engine.quality_presets import PRESETS
from floe_chat.models.catalog import described
from floe_chat.models.errors import UsageError
from floe_chat.models.families import FAMILIES

MIXTRAL = Footprint.of(sizes_of("mixtral-8x7b"), DEFAULT)
WORK = TokenWork.of(next(preset for preset in PRESETS if preset.name == "Balanced"))
NEEDS = Needs.of_footprint(MIXTRAL, 4096)


def divided(*cards: str, takes: Footprint = MIXTRAL, needs: Needs = NEEDS) -> Divided:
    rooms = [
        CardRoom(name, machine.speeds_of(named(name), 1e9), memory_plan.budget(named(name).vram_bytes))
        for name in cards
    ]
    return Divided(takes, WORK, needs, tuple(rooms), memory_plan.room(1 << 40, takes))


def seconds(parts: tuple[Part, ...]) -> float:
    return sum(part.best.seconds for part in parts)


@pytest.mark.parametrize(
    "cards",
    [
        ("3060", "3060"),
        ("3060", "3090@8gb"),
        ("4060@4gb", "4060"),
    ],
    ids=" ".join,
)
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


def test_nor_among_three() -> None:
    cards = "4060", "3060@6gb", "3080"
    each = divided(*cards)
    every = [(a, b, 32 - a - b) for a, b in itertools.product(range(1, 31), range(1, 31)) if a + b < 32]
    assert seconds(each.parts()) == pytest.approx(min(seconds(each.given(counts)) for counts in every), rel=0.01)


def test_the_parts_need_what_the_whole_does() -> None:
    parts = [part_needs(NEEDS, MIXTRAL, count, first=first) for count, first in ((11, True), (21, False))]
    assert sum(part.layers for part in parts) == 32
    for name, spare in (("up", 0), ("rows", 0), ("dense", 2), ("kv.whole", 2), ("captured", 2)):
        of = operator.attrgetter(name)
        assert 0 <= sum(map(of, parts)) - of(NEEDS) <= spare, name
    ends = MIXTRAL.head + 2 * MIXTRAL.sizes.embedding
    assert parts[0].dense - ends == pytest.approx((NEEDS.dense - ends) * 11 / 32, abs=1)


def test_two_cards_that_hold_all_take_as_long_as_one_that_does_and_the_crossings() -> None:
    speeds = machine.speeds_of(named("3060"), 1e9)
    whole = Running.alone(MIXTRAL, speeds, Held(gpu=True, pool=1.0, mix=Mix(gpu=32)))
    places = [
        Place(layers, speeds, Held(gpu=True, mix=Mix(gpu=len(layers)), part=len(layers) / 32))
        for layers in (range(20), range(20, 32))
    ]
    two = Running(MIXTRAL, places)
    assert whole.crossings_s() == 0 < two.crossings_s() < 1e-4
    beside = two.crossings_s() + 2 * speeds.launch
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
