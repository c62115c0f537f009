"""A card that torch does not use: doctor, plan, the wizard and the panel say how to mend that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups, Survey
from floe_chat.app.widgets.panel import figures as draw
from floe_chat.app.widgets.panel.figures import PanelFigures
from floe_chat.engine.loader import load
from floe_chat.engine.machine import hardware, torch_build
from floe_chat.engine.machine.hardware import Hardware
from floe_chat.engine.planning import machine
from floe_chat.engine.planning.rates import Measured
from floe_chat.models.errors import FloeError

from ..engine.driver import silent
from ..engine.fake_nvml import device, library
from ..helpers import run_cli
from .wizardry import RATES, around, see


@pytest.fixture(autouse=True)
def idle_card(monkeypatch: pytest.MonkeyPatch) -> str:
    """An RTX 3090 beside a torch without CUDA; what there is to say."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", library([device(capability=(8, 6))], cuda=13000))
    said = torch_build.remedy()
    assert "to use the NVIDIA GeForce RTX 3090" in said
    return said


def test_doctor_and_plan(idle_card: str) -> None:
    said = run_cli("doctor").out
    assert said.count(idle_card) == 1 and "NVIDIA GeForce RTX 3090" in said.replace(idle_card, "")
    assert " ".join(run_cli("plan", "mixtral-8x7b").out.split()).count(idle_card) == 1
    assert idle_card not in run_cli("plan", "mixtral-8x7b", "--vram", "12").out


async def test_the_wizard(idle_card: str, tmp_path: Path, setups: Setups) -> None:
    def survey(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
        found = hardware.probe(tmp_path)
        return Survey(found, machine.here(found, Measured(RATES, {}, "2026-11-21")), RATES)

    wizard = WizardScreen(setups, surveyor=survey)
    async with around(wizard, size=(160, 40)) as pilot:
        await see(pilot, "NVIDIA GeForce RTX 3090, not usable (this torch is built without CUDA)")
        await see(pilot, *idle_card.split()[:20])


def test_the_panel(idle_card: str, tiny_pack: Path) -> None:
    loaded = load(tiny_pack, None, "auto", silent)[1]
    assert loaded.remedy == idle_card
    assert load(tiny_pack, None, "cpu", silent)[1].remedy == ""
    assert idle_card in draw.backend(PanelFigures(loaded), 32).plain
    assert idle_card[:40] in draw.strip(PanelFigures(loaded), 120).plain


def test_a_device_that_was_asked_for(idle_card: str, tiny_pack: Path) -> None:
    with pytest.raises(FloeError) as refused:
        load(tiny_pack, None, "cuda", silent)
    assert refused.value.hint == idle_card and refused.value.exit_code == 1
