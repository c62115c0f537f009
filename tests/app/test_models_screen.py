"""The models screen: what there is, setups and checks in the background, deleting, choosing."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.leftovers import clear, leftovers
from floe_chat.app.setup.setups import Setups, first_run, remove
from floe_chat.app.setup.wish import Wish, unfinished, wish, write_note
from floe_chat.app.text import units
from floe_chat.models import catalog
from floe_chat.models.errors import FloeError, TryAgainError
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.workplace import locked
from textual.pilot import Pilot

from ..helpers import explained, run_cli
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
        await see(pilot, f"mine, {units.size(size)}", "with everything in it", "Y deletes")
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
        await see(pilot, "Model and bits per weight", "● 3/4/4", "Download: ")


async def test_a_failed_setup_can_be_deleted(hub: FakeHub, setups: Setups) -> None:
    hub.faults.append(Fault("GET /storage/.*model-00002", times=ALWAYS, flip=True))
    failed = setups.start(wish(REPO))
    async with around(WizardScreen(setups)) as pilot:
        await until(pilot, lambda: failed.progress().state == "failed", seconds=60)
        await see(pilot, "X deletes it")
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


# What failed and abandoned setups left is listed with its size, and deleted by one key or one command


def left(name: str, marker: str = "download.lock", size: int = 100_000) -> Path:
    """A folder as a killed download or pack leaves it."""
    folder = catalog.models_folder() / name
    folder.mkdir(parents=True)
    (folder / marker).write_text("{}")
    (folder / "layer_00.safetensors.part").write_bytes(bytes(size))
    return folder


def test_what_is_left_and_what_is_not(tiny_pack: Path, tmp_path: Path) -> None:
    downloads, packed = left("gone.download"), left("gone", "packing.json")
    for name in ("other", "other.download"):
        left(name)
    begun = Wish("floe/other", "other")
    write_note(begun)
    shutil.copytree(tiny_pack, catalog.models_folder() / "sound")
    (catalog.models_folder() / "sound" / "packing.json").write_text("{}")  # being repaired
    (catalog.models_folder() / "photos.download").mkdir()
    (catalog.models_folder() / "photos.download" / "sea.jpg").write_bytes(b"sea")
    shutil.copytree(packed, tmp_path / "elsewhere")
    (catalog.models_folder() / "linked").symlink_to(tmp_path / "elsewhere")
    (one,) = leftovers()
    assert (one.name, one.paths) == ("gone", (packed, downloads)) and one.bytes >= 200_000
    assert unfinished() == [begun]
    clear(one)
    assert leftovers() == [] and not packed.exists() and not downloads.exists()
    names = {"other", "other.download", "other.setup.json", "sound", "photos.download", "linked"}
    assert {path.name for path in catalog.models_folder().iterdir()} == names


def test_what_is_in_use_stays() -> None:
    folder = left("busy", "packing.json")
    with locked(folder / "packing.json", "test"), pytest.raises(TryAgainError, match="is using"):
        clear(leftovers()[0])
    assert folder.exists()
    clear(leftovers()[0])
    assert not folder.exists()


def test_the_commands() -> None:
    folder = left("gone.download")
    found = json.loads(run_cli("models", "--json").out)
    assert [(one["name"], one["paths"]) for one in found["left"]] == [("gone", [str(folder)])]
    assert found["left"][0]["bytes"] >= 100_000
    text = run_cli("models").out
    assert "Left over" in text and "gone" in text and "kB" in text and "did not end" in text
    assert "--yes" in explained(run_cli("models", "remove", "gone"), 2)
    assert run_cli("models", "remove", "gone", "--yes").code == 0
    assert not folder.exists() and "Left over" not in run_cli("models").out


async def test_one_key_deletes_it(published: Path, setups: Setups) -> None:
    folders = left("gone.download"), left("gone", "packing.json")
    note = catalog.models_folder() / "gone.setup.json"
    note.write_text("[]")
    async with around(screen(setups, published)) as pilot:
        await see(pilot, "Left over by setups")
        await to(pilot, "gone")
        await see(pilot, "is ignored", "X deletes it")
        await pilot.press("x")
        await see(pilot, "gone, 2", *map(str, (note.name,)), "Y deletes")
        await pilot.press("y")
        await until(pilot, lambda: not note.exists() and "Left over" not in shown(pilot))
    assert not any(folder.exists() for folder in folders)
