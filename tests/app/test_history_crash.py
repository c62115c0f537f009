"""What is left after a kill, a lock, a full disk, a file taken away, and two who write at once."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from floe_chat.app.history import Changed, History, HistoryTrouble, Ready, Recovered, adding, new_id, open_history
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.opening import open_to_read
from floe_chat.app.history.database.writer import FLUSH_SECONDS
from floe_chat.app.history.processes import is_running, this_process
from floe_chat.app.history.records import now
from floe_chat.models.errors import FloeError, TryAgainError

from .histories import SETUP, filled, read_all

WRITING = """
import sys, time
from pathlib import Path
from floe_chat.app.history import ChatSetup, History
history = History(Path(sys.argv[1]))
question = history.ask(history.begin(ChatSetup("demo")), None, "count")
answer = history.answering(question, "demo", "Fast")
for number in range(100_000):
    answer.append(f"{number} ")
    print(number, history._writer.commits, flush=True)
    time.sleep(0.002)
"""

ADDING = """
import sys
from pathlib import Path
from floe_chat.app.history import ChatSetup, History
history = History(Path(sys.argv[1]))
for number in range(40):
    chat = history.begin(ChatSetup("demo"), f"{sys.argv[2]} {number}")
    with history.answering(history.ask(chat, None, "question"), "demo", "") as answer:
        answer.append("answer")
        answer.finish(None)
    history.rename(chat, f"{sys.argv[2]} {number}, renamed")
    if number % 10 == 0:
        assert history.settle(20)
assert history.close(20)
"""


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "private" / "history.db"


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_process_loses_what_came_after_its_last_commit_and_no_more(file: Path, seed: int) -> None:
    writing = run(WRITING, file)
    assert writing.stdout is not None
    stop_at = random.Random(seed).randint(250, 450)
    lines = [next(writing.stdout) for _ in range(stop_at)]
    writing.kill()
    writing.wait()
    printed = [(int(number), int(commits)) for number, commits in map(str.split, [*lines, *writing.stdout])]
    opened = open_history(file)
    (listed,) = opened.store.conversations()
    _question, answer = opened.store.messages(opened.store.branch(opened.store.conversation(listed.id).head))
    numbers: list[int] = [int(word) for word in answer.text.split()]
    assert opened.interrupted == 1 and answer.state == "stopped" and answer.stats is None
    assert numbers == list(range(len(numbers)))
    # A commit may have begun before a number was there; the one after it has it.
    safe = [number for number, commits in printed if commits <= printed[-1][1] - 2]
    assert safe and len(numbers) > safe[-1] and FLUSH_SECONDS < 0.5
    assert opened.store.search(str(len(numbers) - 1))
    opened.store.close()


def test_an_answer_that_another_process_is_writing_is_left_alone(file: Path) -> None:
    writing = run(WRITING, file)
    assert writing.stdout is not None
    while int(writing.stdout.readline().split()[0]) < 220:
        pass
    opened = open_history(file)
    newest = opened.store.newest()
    assert newest is not None
    branch = opened.store.branch(newest.head)
    assert opened.interrupted == 0 and opened.store.messages(branch)[-1].state == "streaming"
    opened.store.close()
    writing.kill()
    writing.wait()
    again = open_history(file)
    assert again.interrupted == 1
    again.store.close()


def test_who_writes_is_known_by_machine_number_and_birth() -> None:
    me = this_process()
    machine, number, born = me.rsplit(":", 2)
    assert is_running(me, now())
    assert not is_running(f"{machine}:{number}:{float(born) - 60:.0f}", now())
    assert not is_running(f"{machine}:999999999:{born}", now())
    assert is_running(f"elsewhere:{number}:{born}", now()) and not is_running(f"elsewhere:{number}:{born}", 0)
    assert not any(
        is_running(broken, 0) for broken in ("", ":", f"{machine}:x:y", f"{machine}:1:nan", f"{machine}:{'9' * 40}:1")
    )


def test_two_processes_write_at_once_and_nothing_is_lost(file: Path) -> None:
    both = [run(ADDING, file, name) for name in ("one", "two")]
    for process in both:
        _out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    store = open_history(file).store
    found = store.conversations(200)
    assert sorted(one.title for one in found) == sorted(f"{n} {i}, renamed" for n in ("one", "two") for i in range(40))
    assert sorted(one.number for one in found) == list(range(1, 81))
    assert read_all(store) == 160
    store.close()


def one_at_a_time(monkeypatch: pytest.MonkeyPatch, pause: Callable[[float], None]) -> None:
    """Let an import stop for `pause` after each conversation."""
    clock = SimpleNamespace(sleep=pause, monotonic=itertools.count(0, adding._TURN_SECONDS * 0.6).__next__)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(adding, "time", clock)


def test_a_large_import_lets_others_write_and_is_seen_as_a_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file)
    store, other = open_history(file).store, open_history(file).store
    trees, seen = [store.tree(each.id) for each in store.conversations()], list[int]()

    def write(_seconds: float) -> None:
        with other.transaction():
            other.add_conversation(new_id(), SETUP, "meanwhile")
        seen.append(len(other.conversations()))

    one_at_a_time(monkeypatch, write)
    assert len(adding.add_all(store, trees)) == 4
    assert seen == [5, 6, 7]
    assert read_all(other) == 240 and len(other.conversations()) == 11
    store.close()
    other.close()


def test_an_import_that_fails_in_its_middle_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file)
    store = open_history(file).store
    trees = [store.tree(each.id) for each in store.conversations()]

    def fail(_seconds: float) -> None:
        raise KeyboardInterrupt

    one_at_a_time(monkeypatch, fail)
    with pytest.raises(KeyboardInterrupt):
        adding.add_all(store, trees)
    store.close()
    with sqlite3.connect(file) as connection:
        counts = [connection.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("conversation", "message")]
    connection.close()
    assert counts == [4, 120]


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are waited for a moment only."""
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.05)


def test_a_lock_is_told_and_what_waited_for_it_is_written_afterwards(file: Path, impatient: None) -> None:
    history = History(file)
    chat = history.begin(SETUP, "before")
    assert history.settle(10)
    history.poll()
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    history.rename(chat, "after")
    assert not history.settle(0.3)
    (trouble,) = [event for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert trouble.title == "The history is locked"
    assert history.conversation(chat).title == "before"  # reading goes on
    lock.execute("ROLLBACK")
    lock.close()
    assert history.settle(10) and history.conversation(chat).title == "after"
    assert [type(event) for event in history.poll() if isinstance(event, Recovered | HistoryTrouble)] == [Recovered]
    assert history.close()


def test_a_history_that_is_written_to_from_the_start_is_read_and_what_waits_is_written_at_the_end(
    file: Path, impatient: None
) -> None:
    filled(file)
    lock = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN IMMEDIATE")
    history = History(file)
    chat = history.begin(SETUP, "new")
    assert not history.settle(0.3) and len(history.conversations()) == 4
    assert [type(event) for event in history.poll()] == [Ready, HistoryTrouble]
    release = threading.Timer(1.0, lock.execute, ["ROLLBACK"])
    release.start()
    assert history.close(20)
    release.join()
    lock.close()
    opened = open_history(file)
    assert opened.store.conversation(chat).title == "new"
    opened.store.close()


def test_closing_over_a_lock_says_that_something_was_not_saved(file: Path, impatient: None) -> None:
    history = History(file)
    assert history.settle(10)
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    history.begin(SETUP)
    assert not history.close(0.5)
    lock.close()


def test_a_history_that_is_locked_from_the_start_is_told_and_chats_go_on(file: Path, impatient: None) -> None:
    filled(file)
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute("PRAGMA locking_mode = EXCLUSIVE")
    lock.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TryAgainError, match="locked"):
        open_history(file)
    history = History(file)
    history.ask(history.begin(SETUP), None, "unsaved")
    assert history.settle(10) and history.poll()[1] == Ready(False, 0)
    history.close()
    lock.close()


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
    ballast = small_disk / "ballast"
    history = History(small_disk / "history" / "history.db")
    chat = history.begin(SETUP, "before")
    assert history.settle(10)
    history.poll()
    with ballast.open("wb", buffering=0) as out:
        try:
            while out.write(b"x" * 4096):
                pass
        except OSError:
            pass
    text = "lorem ipsum " * 20_000
    question = history.ask(chat, None, text)
    assert not history.settle(0.3)
    (trouble,) = [event for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert trouble.title == "The disk is full"
    assert history.conversation(chat).title == "before"
    ballast.unlink()
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


def test_a_python_without_full_text_search_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "has_search", lambda: False)
    with pytest.raises(FloeError, match="full-text search"):
        open_history(file)
    history = History(file)
    chat = history.begin(SETUP, "works")
    assert history.settle(10) and history.conversation(chat).title == "works"
    with pytest.raises(FloeError):
        history.search("works")
    history.close()


def test_an_interrupt_in_the_middle_of_a_change_keeps_nothing_of_it(file: Path) -> None:
    store = open_history(file).store
    with pytest.raises(KeyboardInterrupt), store.transaction():
        store.add_conversation(new_id(), SETUP)
        raise KeyboardInterrupt
    assert store.conversations() == []
    store.close()
