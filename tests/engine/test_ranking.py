"""The order of models for machines that are made up, and which one is recommended."""

from __future__ import annotations

import dataclasses

import pytest
from floe_chat.engine.planning import plan
from floe_chat.engine.planning.options import SpeedRange
from floe_chat.engine.planning.worth import ENOUGH, NEWER, READING, WORTH
from floe_chat.models.catalog import described
from floe_chat.models.published import PUBLISHED

from .test_plan import a_machine

MIXTRAL, LARGE = described("mixtral-8x7b-instruct"), described("mixtral-8x22b-instruct")
SMALL = described("olmoe-1b-7b-instruct")


def names(found: list[plan.Plan], stands: str = "") -> list[str]:
    return [one.entry.name for one in found if not stands or plan.standing(one.entry, one.chosen) == stands]


@pytest.mark.parametrize(
    ("ram", "vram", "name"),
    [
        (3.5, 0, "granite-3.1-3b-a800m-instruct"),
        (28, 0, "glm-4.7-flash"),
        (28, 12, "gemma-4-26b-a4b-it"),
    ],
)
def test_a_model_that_answers_at_reading_speed_is_recommended(ram: float, vram: float, name: str) -> None:
    found = plan.offers(a_machine(ram=ram, vram=vram))
    first = plan.recommended(found)
    assert first and first is found[0] and first.entry.name == name
    assert first.chosen and first.chosen.decode.mid >= READING and first.entry.gated is False


def test_groups_follow_each_other() -> None:
    for machine in (a_machine(ram=24, disk=60), a_machine(ram=60, vram=12)):
        found = plan.offers(machine)
        stands = [plan.STANDINGS.index(plan.standing(one.entry, one.chosen)) for one in found]
        assert stands == sorted(stands) and sorted(names(found)) == sorted(entry.name for entry in PUBLISHED)
        slower = [one.chosen.decode.mid for one in found if one.chosen and one.entry.name in names(found, "slower")]
        assert slower == sorted(slower, reverse=True)
        rules = [
            plan.size_rule(one.entry, one.chosen.kl)
            for one in found
            if one.chosen and one.entry.name in names(found, "reading")
        ]
        assert rules == sorted(rules, reverse=True)


def test_what_makes_a_difference_between_equals() -> None:
    machine = a_machine()
    usual = dataclasses.replace(MIXTRAL, gated=False, name="usual")
    others = [
        dataclasses.replace(usual, name="asks", gated=True),
        dataclasses.replace(usual, name="codes", made_for="code"),
        dataclasses.replace(usual, name="old", released="2022-01"),
        dataclasses.replace(usual, name="base", chat=None),
        dataclasses.replace(usual, name="thinks", thinks=True),  # too slow for that
    ]
    order = names(plan.offers(machine, [*others, usual]))
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
