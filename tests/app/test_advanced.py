"""Advanced settings: written in the file, in force in the engine of every kind of chat, shown where they differ."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from floe_chat.app.settings.file import change, settings_file
from floe_chat.app.widgets.panel import figures as draw
from floe_chat.app.widgets.panel.figures import PanelFigures
from floe_chat.engine.events import Advanced, Finished, Load, Loaded

from ..engine.driver import Engine, asking
from ..helpers import explained, run_cli
from .scripted import LOADED

OTHERS = Advanced("none", cpu_share=False, transfer="staged", kv_bits="8", context=600)
WORDS = ("predictor none", "no CPU share", "transfer staged", "8-bit context", "600 tokens of context reserved")
ON_A_TEST_DEVICE = ("--device", "throttled:1gb", "--vram", "64mb")


def test_the_engine_works_as_it_is_told(tiny_pack: Path) -> None:
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, "throttled:1gb", 1 << 28, OTHERS))
        assert engine.until(Loaded).advanced == WORDS
        engine.send(asking(1, [1, 40, 41, 42], tokens=4))
        rows = engine.until(Finished).stats.rows
        assert rows is not None and rows.on_cpu == 0 and rows.recall is None
        # Where all rows are in place little of it matters, which is said.
        engine.send(Load(str(tiny_pack), None, "cpu", None, OTHERS))
        loaded = engine.until(Loaded)
        useless = {f"{word} (no effect here)" for word in WORDS} - {"8-bit context (no effect here)"}
        assert {*loaded.advanced} == useless | {"8-bit context"} and "keys and values of 8 bits" in loaded.reason


@pytest.mark.parametrize("arguments", [("ask", "hi"), ("--plain",)], ids=" ".join)
def test_a_setting_reaches_the_engine(arguments: tuple[str, ...]) -> None:
    """No test device can read rows in place: the engine refuses, and names the setting."""
    change(settings_file(), {"advanced.transfer": "in place"})
    told = explained(run_cli(*arguments, *ON_A_TEST_DEVICE), 2)
    assert "in place" in told and "advanced.transfer" in told
    change(settings_file(), {"advanced.transfer": None})
    assert run_cli(*arguments, *ON_A_TEST_DEVICE).code == 0


def test_a_placement_can_be_chosen() -> None:
    """By the option or the setting; what cannot be is refused before anything answers."""
    arguments, on_a_card = ("ask", "hi"), ("--device", "sim:rtx3060-12gb", "--vram", "10mb")
    for mix in ("pool", "pool:1mb", "static", "cpu"):
        assert run_cli(*arguments, *on_a_card, "--mix", mix, "--max-tokens", "4").code == 0
    assert "does not suit" in explained(run_cli(*arguments, *on_a_card, "--mix", "pool:0.0625mb"), 2)
    assert "pool:SIZE" in explained(run_cli(*arguments, "--mix", "heap"), 2)
    assert "--mix" in run_cli(*arguments, "--device", "cpu", "--mix", "pool").err
    several = ("--devices", "sim:rtx3060-12gb,sim:rtx3060-12gb")
    assert "one card" in explained(run_cli(*arguments, *several, "--mix", "pool"), 2)
    change(settings_file(), {"advanced.placement": "pool:0.0625mb"})
    assert "does not suit" in explained(run_cli(*arguments, *on_a_card), 2)


def test_doctor_shows_them() -> None:
    assert json.loads(run_cli("doctor", "--json").out)["advanced"] == dataclasses.asdict(Advanced())
    change(settings_file(), {"advanced.cpu_share": False})
    assert json.loads(run_cli("doctor", "--json").out)["advanced"]["cpu_share"] is False
    lines = {words[0]: words[1:] for line in run_cli("doctor").out.splitlines() if (words := line.split())}
    assert lines["predictor"] == ["auto", "default"] and lines["transfer"] == ["auto", "default"]
    shares = [line for line in run_cli("doctor").out.splitlines() if "cpu share" in line]
    assert len(shares) == 1 and "false" in shares[0] and str(settings_file()) in shares[0]


def test_the_panel_shows_what_differs() -> None:
    assert "Advanced" not in draw.backend(PanelFigures(loaded=LOADED), 32).plain
    other = dataclasses.replace(LOADED, advanced=OTHERS.changed())
    assert f"Advanced: {', '.join(WORDS)}" in draw.backend(PanelFigures(loaded=other), 32).plain
