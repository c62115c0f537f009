"""`--devices`: several cards that share a model, from the command line to the answer."""

from __future__ import annotations

import json

import pytest
from floe_chat.app.settings.file import settings_file
from floe_chat.engine.planning import rates
from floe_chat.engine.planning.rates import Measured

from ..helpers import run_cli

CARD = "sim:rtx3060-12gb"
TWO = f"{CARD},{CARD}"
ASKED = ("ask", "--no-save", "--seed", "1", "--temperature", "0", "--max-tokens", "12", "What is an expert?")


def test_two_cards_answer_as_one_does() -> None:
    alone = run_cli(*ASKED, "--device", "cpu", "--json")
    both = run_cli(*ASKED, "--devices", TWO, "--vram", "9mb", "--json")
    assert (alone.code, both.code) == (0, 0), both.err
    one, two = json.loads(alone.out), json.loads(both.out)
    assert two["answer"] == one["answer"]
    cards = two["rows"]["cards"]
    assert [card["name"] for card in cards] == [f"{CARD} (1 of 2)", f"{CARD} (2 of 2)"]
    assert all(card["whole"] + card["pool"] + card["up"] > 0 for card in cards)


@pytest.mark.thorough
def test_device_takes_the_same_names() -> None:
    assert run_cli(*ASKED, "--device", f"{CARD},sim:rtx4060-8gb", "--vram", "9mb").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", TWO, "--device", "cpu"), "Give one of them"),
        (("--devices", f"{CARD},cpu"), "works beside the cards"),
        (("--devices", f"{CARD},sim:rtx3065"), "no card"),
        (("--devices", "cuda:0,cuda:1"), "cannot be used"),
        (("--devices", TWO, "--vram", "0.1mb"), "lacks"),
        (("--devices", TWO, "--vram", "99gb"), "cannot give"),
    ],
)
def test_what_cannot_be_shared_is_refused(options: tuple[str, ...], said: str) -> None:
    ran = run_cli(*ASKED, *options)
    assert ran.code == 2 and said in " ".join(ran.err.split()), ran.err
    assert not ran.out


def test_a_plan_for_cards_that_are_not_here() -> None:
    ran = run_cli("plan", "demo", "--devices", "cuda:0,cuda:1", "--card", "3060")
    assert ran.code == 2 and "about this machine" in ran.err


def test_cards_of_the_settings_that_are_gone_do_not_hinder_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_file().parent.mkdir(parents=True, exist_ok=True)
    settings_file().write_text('[chat]\ndevice = "cuda:0,cuda:1"\n', encoding="utf-8")
    measured = Measured({"memory read": 3e10, "disk read": 1e9}, {}, "2026-11-21T09:00:00")
    monkeypatch.setattr(rates, "reliable", lambda: measured)
    assert run_cli("plan", "demo").code == 0
    answered = run_cli(*ASKED)
    assert answered.code == 2 and "cannot be used" in answered.err
