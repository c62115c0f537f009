"""A small program around one screen, a machine as a test wants it, a tiny model on a fake hub, and its setup's end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.setups import Survey
from floe_chat.app.widgets.common.themes import THEMES
from floe_chat.engine.machine import hardware
from floe_chat.engine.machine.hardware import Hardware
from floe_chat.engine.planning import machine
from floe_chat.engine.planning.rates import Measured
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import CatalogEntry
from floe_chat.models.hub.fetch_loop import Patience
from textual import events
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

from ..models.fakehub import ALWAYS, FakeHub, Fault
from .scripted import drawn_lines, until

REPO = "floe/tiny"
IMPATIENT = Patience(first_wait=0.01, longest_wait=0.05, sync=0.01)
RATES = {"memory read": 33.1e9, "rows 4 bit": 14e9, "disk read": 1.2e9}
ROOMY = 400 << 30
DEADLINE_S = 120.0


class Around(App[int]):
    """Pushes the screen that a test looks at; `results` are what screens were left with."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def on_mount(self) -> None:
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = "floe"

    def open(self, screen: Screen[Any]) -> None:
        self.push_screen(screen, self.results.append)


@asynccontextmanager
async def around(screen: Screen[Any], size: tuple[int, int] = (100, 34)) -> AsyncGenerator[Pilot[int]]:
    """The screen in a program of its own."""
    app = Around()
    async with app.run_test(size=size) as pilot:
        app.open(screen)
        await until(pilot, lambda: app.screen is screen)
        yield pilot


def results(pilot: Pilot[int]) -> list[Any]:
    """What screens were left with so far."""
    assert isinstance(pilot.app, Around)
    return pilot.app.results


def surveyor(ram: int = 48 << 30, disk: int = ROOMY, measured: list[bool] | None = None) -> Callable[..., Survey]:
    """A machine with so much memory and disk, and no GPU; `measured` gets a line for each look."""

    def survey(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
        found = hardware.probe(catalog.models_folder())
        found = dataclasses.replace(found, cpu="A test's processor", gpus=(), disk_free=disk)
        found = dataclasses.replace(found, ram_total=ram, ram_available=ram, ram_limit=None)
        told(found)
        told("rows 4 bit")
        if measured is not None:
            measured.append(again)
        return Survey(found, machine.here(found, Measured(RATES, {}, "2026-11-21")), RATES)

    return survey


def machine_of(ram: int) -> machine.Machine:
    """That machine, as plans need it."""

    def told(_news: Hardware | str) -> None:
        """Nobody looks on."""

    return surveyor(ram=ram)(told, again=False).machine


def entry_of(source: Path, name: str = "tiny", repo: str = REPO) -> CatalogEntry:
    """What the catalog would know of a checkpoint on a hub."""
    return dataclasses.replace(catalog.described(source), name=name, repo=repo, folder=None, chat="turns")


def slowly(hub: FakeHub) -> None:
    """Let the shards' headers come at once, and all else of them at 20 kB/s from then on."""
    hub.faults += [Fault("GET /storage/", times=2), Fault("GET /storage/", times=ALWAYS, rate=20_000)]


def lines(pilot: Pilot[int]) -> list[str]:
    """The text of the screen's rows."""
    return [strip.text for strip in drawn_lines(pilot)]


def shown(pilot: Pilot[int]) -> str:
    """All of the screen, each run of white space as one space."""
    return " ".join(" ".join(lines(pilot)).split())


def paste(pilot: Pilot[int], text: str) -> None:
    """Put `text` into the field that has the focus, as a terminal does."""
    assert pilot.app.screen.focused is not None
    pilot.app.screen.focused.post_message(events.Paste(text))


async def see(pilot: Pilot[int], *words: str, absent: str = "") -> None:
    """Wait until the screen shows all of these, and no longer what shall be `absent`."""

    def seen() -> bool:
        text = shown(pilot)
        return all(word in text for word in words) and (not absent or absent not in text)

    await until(pilot, seen)


def ended(running: Setup) -> Setup:
    assert running.wait(DEADLINE_S), running.progress()
    return running


def start_until(running: Setup, begins: str) -> Setup:
    """Start it; it is paused where a step of packing begins like that."""
    reported, there = running._reported, threading.Event()  # pyright: ignore[reportPrivateUsage]

    def stopping(step: str, share: float, left: float | None = None) -> None:
        if step.startswith(begins) and not there.is_set():
            running.pause()
            there.set()
        reported(step, share, left)

    running._reported = stopping  # pyright: ignore[reportPrivateUsage]
    running.start()
    assert there.wait(DEADLINE_S), (running.progress(), running.error)
    return running
