"""What is left after a kill, a lock and an interrupt, and of two who write at once."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from floe_chat.app.history import Changed, History, HistoryTrouble, Ready, Recovered, adding, new_id, open_history
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.store import HistoryStore
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

BESIDE = """
import sys, time
from pathlib import Path
from floe_chat.app.history import ChatSetup, History
history = History(Path(sys.argv[1]))
chat = history.begin(ChatSetup("demo"))
question = history.ask(chat, None, "count")
answers = [history.answering(question, "demo", "Fast") for _ in range(4)]
answers[0].append("shown")
answers[0].finish(None)
history.switch(chat, answers[0].id)
answers[2].append("so far")
history.settle()
while not any(message.text == "so far" for message in history.tree(chat).messages):
    time.sleep(0.01)
print("written", flush=True)
import signal
signal.pause()
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


def test_a_killed_process_loses_what_came_after_its_last_commit_and_no_more(file: Path) -> None:
    writing = run(WRITING, file)
    assert writing.stdout is not None
    lines = [next(writing.stdout) for _ in range(random.randint(250, 450))]
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


def test_answers_beside_the_shown_one_are_left_if_they_have_text(file: Path) -> None:
    writing = run(BESIDE, file)
    assert writing.stdout is not None and writing.stdout.readline() == "written\n"
    writing.kill()
    writing.wait()
    opened = open_history(file)
    newest = opened.store.newest()
    assert newest is not None and newest.head is not None
    answers = [message for message in opened.store.tree(newest.id).messages if message.role == "assistant"]
    assert [(answer.text, answer.state) for answer in answers] == [("shown", "complete"), ("so far", "stopped")]
    assert opened.store.message(newest.head).text == "shown" and opened.interrupted == 1
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
    assert not history.settle(0.3) and not asyncio.run(history.settled(0.05))
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


def test_closing_waits_for_a_write_under_way(file: Path) -> None:
    history, closed = History(file), list[bool]()
    writer, writing, slow = history._writer, threading.Event(), threading.Event()  # pyright: ignore[reportPrivateUsage]

    def write(_store: HistoryStore) -> None:
        writing.set()
        assert slow.wait(60)

    writer.put(write)
    assert writing.wait(60)
    chat = history.begin(SETUP, "last")
    closing = threading.Thread(target=lambda: closed.append(history.close(0.0)))
    closing.start()
    while writer._until == 0:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.001)
    slow.set()
    closing.join()
    opened = open_history(file)
    assert closed == [True] and opened.store.conversation(chat).title == "last"
    opened.store.close()


@pytest.mark.parametrize("opened", [True, False], ids=["locked afterwards", "locked before"])
def test_closing_over_a_lock_says_that_something_was_not_saved(file: Path, impatient: None, opened: bool) -> None:
    filled(file)
    history = History(file) if opened else None
    assert history is None or history.settle(10)
    lock = sqlite3.connect(file, isolation_level=None)
    lock.execute(f"PRAGMA locking_mode = {'NORMAL' if opened else 'EXCLUSIVE'}")
    lock.execute(f"BEGIN {'IMMEDIATE' if opened else 'EXCLUSIVE'}")
    history = history or History(file)
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
    chat = history.begin(SETUP)
    question = history.ask(chat, None, "asked meanwhile")
    answer = history.answering(question, "demo", "Fast")
    answer.append("begun ")
    assert asyncio.run(history.settled(10)) and history.branch(answer.id) == (question, answer.id)
    assert history.conversation(chat).head == answer.id and len(history.conversations()) == 1
    told = history.poll()
    assert [type(event) for event in told] == [HistoryTrouble] and isinstance(history.failure(), TryAgainError)
    assert not history.settle(0.1)  # it is not saved yet
    lock.close()
    assert history.settle(20) and [type(event) for event in history.poll()] == [Recovered, Ready, Changed]
    assert history.failure() is None and len(history.conversations()) == 5
    answer.append("and ended")
    answer.finish(None)
    assert history.close(10)
    opened = open_history(file)
    assert [one.text for one in opened.store.messages([question, answer.id])] == ["asked meanwhile", "begun and ended"]
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
