"""A history that may not be written, on a full disk, behind a link or taken away is told of, and nothing is lost."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from floe_chat.app.history import Changed, History, HistoryTrouble, Ready, Recovered, new_id, open_history
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.opening import open_to_read
from floe_chat.models.errors import FloeError

from .histories import SETUP, filled, read_all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "private" / "history.db"


def test_only_the_owner_may_read_it(file: Path) -> None:
    before = os.umask(0)
    try:
        history = History(file)
        history.ask(history.begin(SETUP), None, "private")
        assert history.settle(10)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
        assert modes == {f"history.db{ending}": 0o600 for ending in ("", "-wal", "-shm", "-checked")}
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        history.close()
        file.parent.chmod(0o755)
        file.chmod(0o644)
        open_history(file).store.close()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (file.parent, file)] == [0o700, 0o600]
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "part", ["history.db", "history.db-journal", "history.db-wal", "history.db-shm", "history.db-checked"]
)
@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_a_pipe_or_folder_in_its_place_is_refused_at_once(file: Path, part: str, what: str) -> None:
    if part != "history.db":
        filled(file, 1)
    strange = file.with_name(part)
    strange.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(strange) if what == "pipe" else strange.mkdir()
    os.utime(strange, (1, 1))
    with pytest.raises(FloeError, match="The history cannot be") as caught:
        open_history(file)
    if part != "history.db-checked":
        with pytest.raises(FloeError, match="The history cannot be"):
            open_to_read(file)
    assert "it is a folder" in caught.value.cause or "not an ordinary file" in caught.value.cause
    assert part in caught.value.cause


def test_what_a_link_points_to_keeps_its_mode(file: Path, tmp_path: Path) -> None:
    filled(tmp_path / "theirs" / "chats.db", 1)
    real = tmp_path / "theirs" / "chats.db"
    real.parent.chmod(0o755)
    real.chmod(0o644)
    file.parent.mkdir()
    file.symlink_to(real)
    opened = open_history(file)
    (notice,) = opened.notices
    assert notice.title == "Other users can read the history" and str(real) in notice.cause
    assert read_all(opened.store) == 30
    opened.store.close()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (real.parent, real)] == [0o755, 0o644]


def test_a_folder_that_cannot_be_made_is_told_once_and_chats_go_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    history = History(tmp_path / "file" / "history" / "history.db")
    chat = history.begin(SETUP)
    with history.answering(history.ask(chat, None, "hi"), "demo", "") as answer:
        answer.append("hello")
        answer.finish(None)
    assert history.settle(10)
    assert [type(event) for event in history.poll()] == [HistoryTrouble, Ready]
    assert [m.text for m in history.messages(history.branch(answer.id))] == ["hi", "hello"]
    history.rename(chat, "still")
    assert history.settle(10) and not any(isinstance(event, HistoryTrouble) for event in history.poll())
    history.close()


@pytest.mark.parametrize("part", ["file", "folder"])
def test_a_history_that_may_only_be_read_is_told_once(file: Path, part: str) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("this user may write anywhere")
    filled(file)
    (file if part == "file" else file.parent).chmod(0o400 if part == "file" else 0o500)
    history = History(file)
    history.begin(SETUP, "unsaved")
    assert history.settle(10) and history.conversations()[0].title == "unsaved"
    assert [type(event) for event in history.poll() if not isinstance(event, Changed)] == [HistoryTrouble, Ready]
    history.close()
    file.parent.chmod(0o700)
    file.chmod(0o600)
    opened = open_history(file)
    assert opened.notices == () and read_all(opened.store) == 120
    opened.store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("part", ["file", "folder", "disk"])
def test_what_may_only_be_read_is_read(small_disk: Path, part: str) -> None:
    if part != "disk" and os.geteuid() == 0:
        pytest.skip("this user may write anywhere")
    file = small_disk / "history" / "history.db"
    filled(file)
    if part == "disk":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    else:
        (file if part == "file" else file.parent).chmod(0o400 if part == "file" else 0o500)
    opened = open_to_read(file)
    (notice,) = opened.notices
    assert read_all(opened.store) == 120 and "opened read-only" in notice.cause
    opened.store.close()


def test_reading_leaves_nothing_that_stands_in_the_way_of_writing_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    filled(file)
    file.chmod(0o400)
    with monkeypatch.context() as patched:
        patched.setattr(opening, "_make_private", refuse)  # as it is for who may not write everywhere
        opened = open_to_read(file)
        assert read_all(opened.store) == 120
        opened.store.close()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_full_disk_is_told_and_what_waited_for_room_is_written_afterwards(small_disk: Path) -> None:
    history = History(small_disk / "history" / "history.db")
    chat = history.begin(SETUP, "before")
    assert history.settle(10)
    history.poll()
    fill_up(small_disk)
    text = "lorem ipsum " * 20_000
    question = history.ask(chat, None, text)
    assert not history.settle(0.3)
    (trouble,) = [event for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert trouble.title == "The disk is full"
    assert history.conversation(chat).title == "before"
    (small_disk / "ballast").unlink()
    assert history.settle(10) and history.messages([question])[0].text == text
    assert Recovered() in history.poll()
    assert history.close()


def fill_up(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as out, suppress(OSError):
        while out.write(b"x" * 4096):
            pass


@pytest.mark.parametrize("log", [False, True], ids=["closed", "killed"])
def test_on_a_full_disk_the_history_is_read_again_and_again(small_disk: Path, log: bool) -> None:
    file = small_disk / "history" / "history.db"
    filled(file, 1)
    if log:  # what a killed program leaves: its last chat is in the log alone, which has no index
        opened = open_history(file)
        with opened.store.transaction():
            opened.store.add_conversation(new_id(), SETUP, "in the log")
        content = {path.name: path.read_bytes() for path in file.parent.iterdir()}
        opened.store.close()
        for name in ("history.db", "history.db-wal"):
            (file.parent / name).write_bytes(content[name])
    fill_up(small_disk)
    for time in range(3):
        opened = open_to_read(file)
        if time == 0 or not log:  # closing the first one brings the log into the file
            assert [notice.title for notice in opened.notices] == ["The disk is full"]
        assert read_all(opened.store) == 30
        assert [each.name for each in opened.store.conversations(1)] == ["in the log" if log else "chat 0"]
        opened.store.close()
    (small_disk / "ballast").unlink()
    opened = open_history(file)
    assert opened.notices == () and read_all(opened.store) == 30 and len(opened.store.conversations()) == 1 + log
    opened.store.close()


def test_a_chat_that_a_full_disk_does_not_take_is_reported_at_the_end(small_disk: Path) -> None:
    file = small_disk / "history" / "history.db"
    filled(file, 1)
    fill_up(small_disk)
    looked = History(file)
    assert looked.failure() is not None and looked.close()  # nothing was written
    history = History(file)
    with history.answering(history.ask(history.begin(SETUP), None, "Hello?"), "demo", "High") as answer:
        answer.append("Hello.")
    assert not history.close()


@pytest.mark.parametrize("room", [0, 1, 4, 6, 8, 12])
def test_a_disk_with_hardly_any_room_counts_as_full(small_disk: Path, room: int) -> None:
    with (small_disk / "ballast").open("wb", buffering=0) as out:
        out.write(bytes((256 - room) * 4096))
    with pytest.raises(FloeError, match="The disk is full"):
        open_history(small_disk / "history" / "history.db")


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a_file_that_is_taken_away_is_told_once_and_not_made_again(file: Path, how: str) -> None:
    history = History(file)
    chat = history.begin(SETUP, "before")
    assert history.settle(10)
    history.poll()
    for path in list(file.parent.iterdir()):
        path.unlink()
    if how == "replaced":
        filled(file)
    for _ in range(3):
        history.rename(chat, "after")
        history.settle(0.2)
    troubles = [event.title for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert troubles == ["The history was moved or deleted"]
    with pytest.raises(FloeError):
        history.conversation(chat)
    assert not history.close() and file.exists() == (how == "replaced")
    opened = open_history(file)
    assert opened.notices == () and read_all(opened.store) == (120 if how == "replaced" else 0)
    opened.store.close()


def test_programs_that_start_at_the_same_moment_share_a_new_history(tmp_path: Path) -> None:
    """One of them could not switch to the write-ahead log, and went on with a history that was not saved."""
    for turn in range(30):
        file, together = tmp_path / str(turn) / "history.db", threading.Barrier(4)

        def opened(_starter: int, file: Path = file, together: threading.Barrier = together) -> None:
            together.wait()
            open_history(file).store.close()

        with ThreadPoolExecutor(4) as starters:
            list(starters.map(opened, range(4)))
