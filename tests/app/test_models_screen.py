"""The models screen: what there is, setups and checks in the background, deleting, choosing."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups, first_run, remove
from floe_chat.app.setup.wish import wish
from floe_chat.app.text import units
from floe_chat.models import catalog
from floe_chat.models.errors import FloeError, TryAgainError
from floe_chat.models.pack.packed_model import PackedModel
from textual.pilot import Pilot

from ..models.fakehub import ALWAYS, FakeHub, Fault
from .scripted import until
from .wizardry import REPO, around, entry_of, lines, paste, results, see, shown, slowly, surveyor


@pytest.fixture
def mine(tiny_pack: Path) -> Path:
    """A model of the models folder."""
    folder = catalog.models_folder() / "mine"
    folder.parent.mkdir(parents=True)
    return Path(shutil.copytree(tiny_pack, folder))


def screen(setups: Setups, published: Path, current: str = catalog.DEMO) -> ModelsScreen:
    base = dataclasses.replace(entry_of(published, "base", "floe/base"), chat=None)
    return ModelsScreen(setups, current=current, entries=[entry_of(published), base], surveyor=surveyor())


async def to(pilot: Pilot[int], name: str) -> None:
    """Highlight the line of a model."""
    page = pilot.app.screen
    assert isinstance(page, ModelsScreen)
    await see(pilot, "Installed", name.partition("\x1b")[0])
    for _ in range(12):
        if page.highlighted is not None and page.highlighted.name == name:
            return
        await pilot.press("down")
    raise AssertionError(f"{name} is not listed:\n" + "\n".join(lines(pilot)))


async def test_what_there_is_and_a_choice(published: Path, setups: Setups, mine: Path) -> None:
    (catalog.models_folder() / "half\x1b[2J").mkdir()
    async with around(screen(setups, published)) as pilot:
        await see(
            pilot, "Installed", "● demo", "built in", "mine", "bits per weight", "Available", "tiny", "M parameters"
        )
        await see(pilot, "base model, no chat", "Another model", "Disk: ", "free")
        assert "\x1b" not in "".join(lines(pilot))
        await to(pilot, "half\x1b[2J")
        await pilot.press("enter")
        await see(pilot, "What to do: Press V to see which files")
        assert results(pilot) == []
        await to(pilot, "mine")
        await see(pilot, f"Folder: {mine}", "Enter chats with it")
        await pilot.press("enter")
        await until(pilot, lambda: results(pilot) == ["mine"])


async def test_models_that_may_not_be_read_are_told(
    published: Path, setups: Setups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.is_dir

    def denied(self: Path) -> bool:
        if self == catalog.models_folder():
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "is_dir", denied)  # who runs the tests as root may read everything
    assert not first_run(tmp_path / "none")
    async with around(screen(setups, published)) as pilot:
        await see(pilot, "The models folder cannot be read", "Permission denied")


async def test_checked_and_deleted(published: Path, setups: Setups, mine: Path) -> None:
    async with around(screen(setups, published)) as pilot:
        await to(pilot, "mine")
        await pilot.press("v")
        await see(pilot, "mine: all files are intact.")
        (size,) = (model.bytes for model in catalog.installed() if model.name == "mine")
        weights = mine / "layer_01.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
        await pilot.press("v")
        await see(pilot, "mine is damaged: layer_01.safetensors", "the sha256 differs")
        await pilot.press("x")
        await see(
            pilot,
            f"mine, {units.size(size)}",
            "with everything in it",
            "Y deletes",
        )
        await pilot.press("escape")
        await see(pilot, "Installed")
        assert mine.is_dir()
        await pilot.press("x", "y")
        await until(pilot, lambda: not mine.exists() and str(mine) not in shown(pilot))
        assert (catalog.asset("demo", "packed") / "manifest.json").exists()


async def test_what_stays(published: Path, setups: Setups, mine: Path) -> None:
    async with around(screen(setups, published, current="mine")) as pilot:
        await to(pilot, "mine")
        await pilot.press("x")
        await see(pilot, "mine answers this chat", "Choose another model first")
        await pilot.press("up")
        await to(pilot, "demo")
        await pilot.press("x")
        await see(pilot, "The demo model cannot be deleted")
        assert mine.is_dir()


async def test_set_up_in_the_background(published: Path, hub: FakeHub, setups: Setups) -> None:
    slowly(hub)
    async with around(screen(setups, published)) as pilot:
        await to(pilot, "tiny")
        await pilot.press("enter")
        await see(pilot, "This machine", "Enter continues")
        await pilot.press("enter")
        await see(pilot, "● 3/4/4", "Speed: ")
        await pilot.press("enter")
        await see(pilot, "Setting up tiny")
        await pilot.press("escape")
        await see(pilot, "Unfinished setups", "so far", "tiny: ", "Space pauses")
        await pilot.press("space")
        await see(pilot, "tiny: paused at")
        await pilot.press("s")
        await until(pilot, lambda: setups.setup is None and "paused" not in shown(pilot))
        hub.faults.clear()
        await to(pilot, "tiny")
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "tiny is ready", "Enter chats with it")
        await to(pilot, "tiny")
        await pilot.press("enter")
        await until(pilot, lambda: results(pilot) == ["tiny"])
    assert PackedModel.open(catalog.find("tiny"))


async def test_nothing_essential_is_cut_off(published: Path, hub: FakeHub, setups: Setups, mine: Path) -> None:
    slowly(hub)
    setups.start(wish(REPO))
    async with around(screen(setups, published), (60, 20)) as pilot:
        await see(pilot, "Installed", "demo", "mine", "Unfinished", "tiny: ", "Disk: ", "Enter", "V checks", "Esc back")
        await to(pilot, "mine")
        await see(pilot, "X deletes", "Folder: ", "S stops")


def test_the_first_run_is_known(tmp_path: Path, mine: Path) -> None:
    settings = tmp_path / "settings.toml"
    assert not first_run(settings)
    remove("mine")
    assert first_run(settings)
    settings.touch()
    assert not first_run(settings)


def test_only_models_of_the_models_folder_are_removed(tmp_path: Path, mine: Path) -> None:
    linked = Path(shutil.copytree(mine, tmp_path / "elsewhere"))
    (catalog.models_folder() / "linked").symlink_to(linked)
    remove("linked")
    assert (linked / "manifest.json").exists() and not (catalog.models_folder() / "linked").exists()
    (catalog.models_folder() / "photos").mkdir()
    (catalog.models_folder() / "photos" / "sea.jpg").write_bytes(b"sea")
    for name in (catalog.DEMO, "absent", "../models", str(linked), "photos"):
        with pytest.raises(FloeError, match="cannot be deleted"):
            remove(name)
    assert linked.is_dir() and mine.is_dir()


async def test_one_setup_at_a_time(hub: FakeHub, setups: Setups) -> None:
    slowly(hub)
    setups.start(wish(REPO))
    with pytest.raises(TryAgainError, match="tiny is being set up"):
        setups.start(wish(REPO, "second"))
    setups.stop()
    assert setups.words() == "" and not setups.busy


async def test_another_model_is_typed_where_it_is_listed(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(screen(setups, published)) as pilot:
        await see(pilot, "Another model: type a hub id")
        await pilot.press("end", "enter")
        await see(pilot, "Enter looks it up")
        paste(pilot, "no such model")
        await pilot.press("enter")
        await see(pilot, "What to do")
        await pilot.press("escape")
        await see(pilot, "Enter types its name")
        await pilot.press("enter")
        paste(pilot, f"https://huggingface.co/{REPO}")
        await pilot.press("enter")
        await see(pilot, "This machine", "Enter continues")
        await pilot.press("enter")
        await see(pilot, "Model and bits per weight", "● 3/4/4", "Disk: download")


@pytest.mark.parametrize("where", ["wizard", "list"])
async def test_a_failed_setup_can_be_deleted(published: Path, hub: FakeHub, setups: Setups, where: str) -> None:
    hub.faults.append(Fault("GET /storage/.*model-00002", times=ALWAYS, flip=True))
    failed = setups.start(wish(REPO))
    page = WizardScreen(setups) if where == "wizard" else screen(setups, published)
    async with around(page) as pilot:
        await until(pilot, lambda: failed.progress().state == "failed", seconds=60)
        await see(pilot, "X deletes it" if where == "wizard" else "tiny: the setup failed")
        if where == "list":
            await to(pilot, "tiny")
        await pilot.press("x")
        await see(pilot, "This will be deleted", "Y deletes")
        await pilot.press("y")
        await until(pilot, lambda: not failed.wish.note.exists() and setups.setup is None)
        assert not failed.wish.folder.exists() and not failed.wish.fetched.exists()


async def test_a_setup_whose_note_cannot_be_used_can_be_deleted(published: Path, setups: Setups) -> None:
    other = catalog.models_folder().parent / "precious"
    other.mkdir(parents=True)
    catalog.models_folder().mkdir(parents=True, exist_ok=True)
    note = catalog.models_folder() / "odd.setup.json"
    note.write_text('{"model": "floe/tiny", "name": "../precious"}')
    async with around(screen(setups, published)) as pilot:
        await to(pilot, "odd")
        await pilot.press("enter")
        await see(pilot, "This setup cannot be continued")
        await pilot.press("x")
        await see(pilot, "Y deletes")
        await pilot.press("y")
        await until(pilot, lambda: not note.exists() and "odd" not in shown(pilot))
    assert other.is_dir()
