"""A model whose pack is stored on another disk: the models folder has a link to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.setups import Setups, remove
from floe_chat.app.setup.wish import forget, unfinished, wish
from floe_chat.models import catalog
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.pack.packed_model import PackedModel

from ..helpers import explained, run_cli
from ..models.fakehub import ALWAYS, FakeHub, Fault
from .scripted import until
from .test_models_screen import screen, to
from .wizardry import IMPATIENT, REPO, around, ended, machine_of, see

PACK = "floe/tiny-floe"


@pytest.fixture
def hub(tiny_pack: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))
    with FakeHub({PACK: tiny_pack, REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.some(1)
@pytest.mark.parametrize("model", [PACK, REPO])
def test_set_up_there_and_removed(hub: FakeHub, disk: Path, model: str) -> None:
    done = run_cli("setup", model, "--yes", "--name", "tiny", "--to", str(disk))
    assert done.code == 0 and f"{model} into {disk / 'tiny'}" in done.err, done.err
    link = catalog.models_folder() / "tiny"
    assert link.is_symlink() and link.readlink() == disk / "tiny" and names(disk) == ["tiny"]
    assert names(catalog.models_folder()) == ["tiny"]
    PackedModel.open(catalog.find("tiny"))
    assert f"{link} → {disk / 'tiny'}" in run_cli("models").out
    assert ("tiny", None) in [(one.name, one.trouble) for one in catalog.installed()]
    removed = run_cli("models", "remove", "tiny", "--yes")
    assert removed.code == 0 and f"{disk / 'tiny'} stays" in removed.err and not link.is_symlink()
    again = explained(run_cli("setup", model, "--yes", "--name", "tiny", "--to", str(disk)), 2)
    assert "already a model called tiny" in again and f"floe-chat --model {disk / 'tiny'}" in again
    link.symlink_to(disk / "tiny")
    assert run_cli("models", "remove", "tiny", "--yes", "--linked").code == 0
    assert names(disk) == names(catalog.models_folder()) == []


def interrupted(hub: FakeHub, disk: Path) -> None:
    hub.faults.append(Fault("GET /storage/", times=ALWAYS, rate=20_000))
    with Setup(wish(PACK, "tiny", to=disk), tuning=IMPATIENT) as running:
        running.start()
        while not list(disk.glob("tiny/*.part")):
            assert not running.wait(0.005)
    hub.faults.clear()


def test_taken_up_again_once_the_disk_is_there(hub: FakeHub, disk: Path) -> None:
    interrupted(hub, disk)
    assert "another folder" in explained(run_cli("setup", PACK, "--name", "tiny", "--to", "/elsewhere", "--yes"), 2)
    disk.rename(disk.with_name("unplugged"))
    told = explained(run_cli("setup", "--yes"), 1)
    assert f"{disk} is not there" in told and "Connect its disk" in told
    assert not disk.exists()
    disk.with_name("unplugged").rename(disk)
    assert run_cli("setup", "--yes").code == 0
    assert names(disk) == ["tiny"] and PackedModel.open(catalog.find("tiny"))
    disk.rename(disk.with_name("unplugged"))
    (lost,) = (one for one in catalog.installed() if one.name == "tiny")
    assert lost.trouble is not None and "its disk may not be connected" in lost.trouble
    remove("tiny")
    assert names(catalog.models_folder()) == []
    interrupted(hub, disk)
    (begun,) = unfinished()
    assert begun.taken > 0 and begun.to == str(disk)
    forget(begun)  # given up: nothing is left there
    assert names(disk) == names(catalog.models_folder()) == [] and unfinished() == []


def test_a_forged_note_deletes_nothing_elsewhere(disk: Path) -> None:
    precious = disk / "tiny"
    precious.mkdir(parents=True)
    (precious / "manifest.json").write_text("mine")
    catalog.models_folder().mkdir(parents=True)
    note = catalog.models_folder() / "tiny.setup.json"
    note.write_text(f'{{"model": "{PACK}", "name": "tiny", "to": "{disk}"}}')
    forget(unfinished()[0])
    assert (precious / "manifest.json").read_text() == "mine" and not note.exists()
    note.write_text(f'{{"model": "{PACK}", "name": "tiny", "to": "relative"}}')
    assert unfinished() == []


def test_what_is_refused(hub: FakeHub, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "tiny").mkdir(parents=True)
    (disk / "tiny" / "mine").write_text("kept")
    with pytest.raises(UsageError, match="name tiny is taken"):
        wish(PACK, "tiny", to=disk)
    (catalog.models_folder() / "other").mkdir(parents=True)
    with pytest.raises(UsageError, match="name other is taken"):
        wish(PACK, "other", to=disk)
    assert wish(PACK, "third", to=catalog.models_folder()).to == ""

    def cannot(*_given: Any, **_named: Any) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", cannot)
    with Setup(wish(PACK, "linked", to=disk), tuning=IMPATIENT) as running:
        ended(running.start())
    error = running.error
    assert isinstance(error, FloeError) and "cannot be a link" in error.title and "developer mode" in error.hint
    assert hub.sent() == 0
    forget(running.wish)
    file = disk / "file"
    file.touch()
    with Setup(wish(PACK, "filed", to=file), tuning=IMPATIENT) as running:
        ended(running.start())
    assert running.error is not None and not (catalog.models_folder() / "filed").is_symlink()


@pytest.mark.some(2)
@pytest.mark.parametrize(("key", "stays"), [("y", True), ("d", False), ("escape", True)])
async def test_the_screen_asks(
    published: Path, tiny_pack: Path, setups: Setups, disk: Path, key: str, stays: bool
) -> None:
    shutil.copytree(tiny_pack, disk / "mine")
    link = catalog.models_folder() / "mine"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / "mine")
    async with around(screen(setups, published)) as pilot:
        await to(pilot, "mine")
        await pilot.press("x")
        await see(pilot, "This is a link to", "Y deletes the link", "D the pack too")
        await pilot.press(key)
        await see(pilot, "Installed")
        await until(pilot, lambda: os.path.lexists(link) == (key == "escape"))
    assert (disk / "mine").exists() == stays
