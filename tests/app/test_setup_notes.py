"""The note of a setup that was begun: what is continued and given up by it, and what is never used or deleted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from floe_chat.app.cli.main import cli
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.setups import Setups
from floe_chat.app.setup.wish import Wish, bad_notes, discard, forget, unfinished, wish, write_note
from floe_chat.models import catalog
from floe_chat.models.errors import UsageError

from ..models.fakehub import FakeHub, Fault
from .wizardry import IMPATIENT, REPO, ended, start_until


def len_of(content: bytes | None) -> str:
    return "pipe" if content is None else f"{len(content)} bytes"


def test_given_up_leaves_nothing(hub: FakeHub) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as running:
        start_until(running, "Packing layer 1")
    (begun,) = unfinished()
    forget(begun)
    assert unfinished() == [] and list(catalog.models_folder().iterdir()) == []


def test_the_command_goes_on_with_what_was_begun(hub: FakeHub) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as running:
        start_until(running, "Packing layer 1")
    runner = CliRunner()
    for widths in (["--up", "8"], ["--rows", "3"], ["--up", "3", "--rows", "4", "--dense", "8"]):
        other = runner.invoke(cli, ["setup", REPO, *widths], standalone_mode=False)
        assert isinstance(other.exception, UsageError) and "tiny --forget" in other.exception.hint
    pinned = f"https://huggingface.co/{REPO}/tree/" + "0123456789" * 4
    other = runner.invoke(cli, ["setup", pinned, "--name", "tiny"], standalone_mode=False)
    assert isinstance(other.exception, UsageError) and "another commit" in other.exception.title
    done = runner.invoke(cli, ["setup", REPO, "--up", "3", "--rows", "4", "--dense", "4"])
    assert done.exit_code == 0, done.stderr
    assert "Continuing the setup of tiny." in done.stderr and "tiny is ready" in done.stderr


def started(called: str, **fields: Any) -> Wish:
    """A note of a setup, and a folder with what a pack leaves."""
    begun = Wish(REPO, called)
    begun.folder.mkdir(parents=True)
    (begun.folder / "packing.json").write_text("{}")
    begun.note.write_text(json.dumps({"model": REPO, "name": called} | fields))
    return begun


def test_the_command_finds_the_setup_that_is_meant() -> None:
    first, second = started("first"), started("second")
    invoke = CliRunner().invoke
    several = invoke(cli, ["setup", REPO, "--forget"], standalone_mode=False)
    assert isinstance(several.exception, UsageError) and "first, second" in several.exception.cause
    taken = invoke(cli, ["setup", "floe/other", "--name", "first"], standalone_mode=False)
    assert isinstance(taken.exception, UsageError) and "first --forget" in taken.exception.hint
    assert invoke(cli, ["setup", REPO, "--name", "first", "--forget"]).exit_code == 0
    assert unfinished() == [second] and not first.folder.exists()
    absent = invoke(cli, ["setup", REPO, "--name", "third", "--forget"], standalone_mode=False)
    assert isinstance(absent.exception, UsageError)
    assert invoke(cli, ["setup", REPO, "--forget"]).exit_code == 0
    assert unfinished() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../../precious"},
        {"name": "a/b"},
        {"name": ""},
        {"name": "demo"},
        {"name": 5},
        {"home": "/"},
        {"model": 5},
        {"model": "../relative/path"},
        {"up": 5},
        {"up": "3"},
        {"commit": "../x"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_note_that_names_something_else_is_ignored_and_reported(
    fields: dict[str, Any], own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folders)
    precious = catalog.models_folder().parent.parent / "precious"
    precious.mkdir(parents=True)
    (precious / "packing.json").write_text("not yours")
    begun = started("bad", **fields)
    mine = begun.folder / "mine"
    mine.write_text("kept")
    assert unfinished() == []
    (bad,) = bad_notes()
    assert (bad.name, bad.path) == ("bad", begun.note) and str(bad.path) in str(bad)
    runner = CliRunner()
    for command in (["models"], ["models", "--json"]):
        assert "bad.setup.json is ignored" in runner.invoke(cli, command).stderr
    assert runner.invoke(cli, ["setup", "--forget", "bad"]).exit_code == 0
    assert bad_notes() == [] and not begun.note.exists()
    assert mine.exists() and precious.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b"{}" + b" " * (2 << 20), None], ids=len_of)
def test_a_note_that_is_no_note_is_ignored(content: bytes | None) -> None:
    begun = started("bad")
    begun.note.unlink()
    if content is None:
        os.mkfifo(begun.note)
    else:
        begun.note.write_bytes(content)
    assert unfinished() == [] and len(bad_notes()) == 1
    discard(bad_notes()[0])
    assert bad_notes() == [] and begun.folder.exists()


def test_folders_of_other_files_are_neither_used_nor_deleted(hub: FakeHub) -> None:
    catalog.models_folder().mkdir(parents=True)
    for name in ("tiny", "tiny.download"):
        folder = catalog.models_folder() / name
        folder.mkdir()
        (folder / "mine").write_text("kept")
        with pytest.raises(UsageError, match="name tiny is taken"):
            wish(REPO)
        with Setup(Wish(REPO, "tiny")) as running:  # as an old note says
            ended(running.start())
        assert running.error is not None and "other files" in running.error.cause
        write_note(running.wish)
        forget(running.wish)
        assert not running.wish.note.exists() and (folder / "mine").read_text() == "kept"
        shutil.rmtree(folder)


def test_of_a_link_only_the_link_is_deleted(tmp_path: Path) -> None:
    begun = started("linked")
    begun.folder.rename(tmp_path / "elsewhere")
    begun.folder.symlink_to(tmp_path / "elsewhere")
    forget(begun)
    assert not begun.folder.is_symlink() and (tmp_path / "elsewhere" / "packing.json").exists()


def test_a_failed_setup_can_be_given_up(hub: FakeHub, setups: Setups) -> None:
    hub.faults.append(Fault("GET /api", status=404, headers={"X-Error-Code": "RepoNotFound"}))
    running = ended(setups.start(wish(REPO)))
    assert running.error is not None and len(unfinished()) == 1
    setups.give_up(unfinished()[0])
    assert setups.setup is None and unfinished() == [] and list(catalog.models_folder().iterdir()) == []
