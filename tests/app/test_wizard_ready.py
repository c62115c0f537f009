"""The wizard offers a ready pack first; packing the model here is a key away."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups
from floe_chat.app.setup.wish import unfinished
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import CatalogEntry, ReadyPack
from floe_chat.models.pack.manifest import Manifest
from textual.pilot import Pilot

from ..models.fakehub import ALWAYS, FakeHub, Fault
from .scripted import until
from .wizardry import REPO, around, entry_of, paste, results, see, shown, surveyor

PACK = "floe/tiny-floe"


@pytest.fixture
def hub(tiny_pack: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({PACK: tiny_pack, REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


def entry(published: Path, place: str = PACK) -> CatalogEntry:
    return dataclasses.replace(entry_of(published), ready=ReadyPack(place, 12_300_000_000, 3, 4, 4, 4))


def wizard(setups: Setups, published: Path, place: str = PACK, disk: int = 400 << 30) -> WizardScreen:
    return WizardScreen(setups, entries=[entry(published, place)], surveyor=surveyor(disk=disk))


async def to_choice(pilot: Pilot[int]) -> None:
    await see(pilot, "A test's processor", "Enter continues")
    await pilot.press("enter")
    await see(pilot, "Model and bits per weight", "Speed: ")


async def test_two_keys_from_the_plan_to_the_chat(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(wizard(setups, published)) as pilot:
        await to_choice(pilot)
        await see(pilot, "ready pack, 12.3 GB", "nothing has to be packed", "packs them here", "Enter sets it up")
        await pilot.press("enter")
        await see(pilot, "tiny is ready", "Enter chats with it", "A pack by floe, which says", "no presets of its own")
        assert " Pack " not in shown(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: results(pilot) == ["tiny"])
    assert hub.sent("model-0") == 0 and unfinished() == []
    assert (catalog.find("tiny") / "manifest.json").exists()


async def test_packing_it_here_is_the_next_line(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(wizard(setups, published), (60, 24)) as pilot:
        await to_choice(pilot)
        await see(pilot, "12.3 GB")
        await pilot.press("down")
        await see(pilot, "Disk: download")
        await pilot.press("enter")
        await see(pilot, "tiny is ready")
    assert Manifest.read(catalog.find("tiny")).source.name == REPO


async def test_a_full_disk_asks_for_the_folder(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(wizard(setups, published, disk=1 << 30)) as pilot:
        await see(pilot, "A test's processor", "Enter continues")
        await pilot.press("enter")
        await see(pilot, "more disk")
        await pilot.press("enter")
        await see(pilot, "Models folder", "Needs up to 12.3 GB during setup")


async def test_a_pack_that_is_gone_leaves_the_other_way(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(wizard(setups, published, "floe/gone")) as pilot:
        await to_choice(pilot)
        await pilot.press("enter")
        await see(pilot, "There is no model floe/gone", "Enter tries again")
        await pilot.press("escape")
        await see(pilot, "Model and bits per weight", "Speed: ")
    async with around(wizard(setups, published, REPO)) as pilot:
        await to_choice(pilot)
        await pilot.press("enter")
        await see(pilot, f"{REPO} is no pack", "Go back")
        assert setups.setup is None


async def test_a_pack_that_is_typed(tiny_pack: Path, published: Path, hub: FakeHub, setups: Setups) -> None:
    for place in (PACK, str(tiny_pack)):
        async with around(wizard(setups, published)) as pilot:
            await to_choice(pilot)
            await pilot.press("end", "enter")
            await see(pilot, "Enter looks it up")
            paste(pilot, place)
            await pilot.press("enter")
            await see(pilot, "made from", "It has no presets of its own", "ready pack, 2", "Enter sets it up")
            assert "packs them here" not in shown(pilot)
            hub.faults.append(Fault("GET /storage/.*layer_01", times=ALWAYS, rate=100_000))
            await pilot.press("enter")
            await see(pilot, "is ready and checked", "Enter chats with it")
            await pilot.press("enter")
            await until(pilot, lambda: bool(results(pilot)))
            (name,) = results(pilot)
        assert (catalog.models_folder() / name / "manifest.json").read_bytes() == (
            tiny_pack / "manifest.json"
        ).read_bytes()
