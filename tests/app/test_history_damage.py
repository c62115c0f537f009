"""Damaged files, files of other versions, full disks: kept aside, mended or left alone; reported, nothing lost."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from floe_chat.app.cli.printing import history_lines
from floe_chat.app.history import (
    AnswerStats,
    Attachment,
    Changed,
    ChatSetup,
    History,
    HistoryTrouble,
    Ready,
    Recovered,
    Unsent,
    adding,
    as_json,
    as_markdown,
    new_id,
    open_history,
    parse,
)
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.opening import MIGRATIONS, VERSION, open_to_read, open_unsaved
from floe_chat.app.history.database.salvage import salvage
from floe_chat.app.history.database.store import HistoryStore
from floe_chat.app.history.database.trouble import SQLITE_ERRORS, checked, explaining
from floe_chat.app.history.database.writer import FLUSH_SECONDS
from floe_chat.app.history.processes import is_running, this_process
from floe_chat.app.history.records import now
from floe_chat.engine.events import Rule
from floe_chat.models.errors import FloeError, TryAgainError

# Where the file says which versions of SQLite and of this program may write it: one that says "a later one" is refused.
_VERSIONS = (18, 19, *range(60, 64))
SETUP = ChatSetup("demo", "Fast")
_FILLED: dict[tuple[int, int], bytes] = {}


def filled(file: Path, conversations: int = 4, messages: int = 30) -> None:
    """A history with some texts in it, closed; the same bytes each time."""
    if (conversations, messages) in _FILLED:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_bytes(_FILLED[conversations, messages])
        return
    store = open_history(file).store
    with store.transaction():
        for number in range(conversations):
            store.add_conversation(chat := new_id(), SETUP, f"chat {number}")
            parent = None
            for place in range(messages):
                message = new_id(parent or 0)
                text = f"chat {number} message {place} " + "lorem ipsum " * (place % 17)
                if place % 2 and parent is not None:
                    store.begin_answer(message, parent, "demo", "Fast", "")
                    store.end_answer(message, text, "complete", AnswerStats(3, 1.0, 0.1, "stop"))
                else:
                    store.add_question(message, chat, parent, text, [Attachment("a.txt", text)])
                parent = message
    store.close()
    checked(file).unlink()
    _FILLED[conversations, messages] = file.read_bytes()


def read_all(store: HistoryStore) -> int:
    """Read everything there is; the number of messages."""
    page, count = store.conversations(), 0
    while page:
        for each in page:
            tree = store.tree(each.id)
            count += len(tree.messages)
            store.messages(store.branch(tree.conversation.head))
        page = store.conversations(before=page[-1])
    store.search("lorem message")
    return count


def sql(file: Path, *statements: str) -> None:
    """Change the file as another program would."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "private" / "history.db"


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_never_end_in_anything_but_a_readable_history(file: Path, seed: int) -> None:
    filled(file)
    content = bytearray(file.read_bytes())
    dice = random.Random(seed)
    for _ in range(dice.choice([1, 3, 30, 300])):
        place = dice.randrange(len(content))
        if place not in _VERSIONS:
            content[place] = dice.randrange(256)
    file.write_bytes(content)
    opened = open_history(file)
    try:
        read_all(opened.store)
    except SQLITE_ERRORS as error:
        # What only shows itself later is told, too, and found by the next start.
        assert isinstance(opening.explain(error, file), FloeError)
    kept = list(file.parent.glob("history-damaged-*.db"))
    assert len(kept) == sum(notice.title == "The history was damaged" for notice in opened.notices)
    if kept:
        assert kept[0].read_bytes() == content
        assert str(kept[0]) in opened.notices[0].cause
        with opened.store.transaction():
            opened.store.add_conversation(new_id(), SETUP)
    opened.store.close()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.97])
def test_a_truncated_file_is_kept_aside_and_what_can_be_read_carried_over(file: Path, share: float) -> None:
    filled(file, conversations=8, messages=60)
    content = file.read_bytes()[: int(file.stat().st_size * share)]
    file.write_bytes(content)
    opened = open_history(file)
    if not content:
        assert opened.notices == () and read_all(opened.store) == 0
    else:
        (kept,) = file.parent.glob("history-damaged-*.db")
        assert kept.read_bytes() == content and stat.S_IMODE(kept.stat().st_mode) == 0o600
        (notice,) = opened.notices
        saved = read_all(opened.store)
        assert ("were copied" in notice.cause) == bool(opened.store.conversations())
        assert saved >= 8 * 60 * (share - 0.35)
    opened.store.close()
    assert open_history(file).notices == ()


def test_what_followed_a_lost_page_follows_what_came_before_it(file: Path) -> None:
    filled(file, conversations=1, messages=400)
    content = bytearray(file.read_bytes())
    at = content.index(b"chat 0 message 201") // 4096 * 4096
    content[at : at + 4096] = bytes(4096)
    file.write_bytes(content)
    opened = open_history(file)
    (found,), (notice,) = opened.store.conversations(), opened.notices
    saved = read_all(opened.store)
    assert 350 < saved < 400 and found.messages == saved and found.name == "chat 0"
    assert f"{saved} messages of 1 chat could" in notice.cause and "1 chat lost messages" in notice.cause
    tree = opened.store.tree(found.id)
    assert [message.parent for message in tree.messages] == [None, *(message.id for message in tree.messages[:-1])]
    opened.store.close()


def test_a_history_that_was_emptied_is_told_once(file: Path) -> None:
    filled(file)
    open_history(file).store.close()
    file.write_bytes(b"")
    opened = open_history(file)
    assert [notice.title for notice in opened.notices] == ["The history was emptied"]
    opened.store.close()
    assert open_history(file).notices == ()


def test_a_database_of_another_program_is_refused_and_not_touched(file: Path) -> None:
    file.parent.mkdir()
    sql(file, "CREATE TABLE bookmark (address TEXT)")
    before = file.read_bytes()
    with pytest.raises(FloeError, match="another program"):
        open_history(file)
    assert file.read_bytes() == before and {path.name for path in file.parent.iterdir()} == {file.name}


_DAMAGED_SEARCH = "UPDATE message_text_data SET block = x'ff00ff00ff00ff00' WHERE id > 1"


def test_a_damaged_search_index_is_made_again_from_the_texts(file: Path) -> None:
    filled(file)
    sql(file, _DAMAGED_SEARCH)
    opened = open_history(file)
    assert [notice.title for notice in opened.notices] == ["The search index was damaged"]
    assert len(opened.store.search("lorem", 200)) > 50 and read_all(opened.store) == 120
    opened.store.close()
    assert open_history(file).notices == ()


def test_damage_that_shows_itself_later_is_told_and_dealt_with_at_the_next_start(file: Path) -> None:
    filled(file)
    open_history(file).store.close()
    sql(file, _DAMAGED_SEARCH)
    history = History(file)  # checked a moment ago, so not again
    with pytest.raises(FloeError, match="damaged"):
        history.search("lorem")
    chat = history.begin(SETUP)
    for _ in range(3):
        history.ask(chat, None, "lost")
    history.settle(0.5)
    troubles = [event.title for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert troubles == ["The history is damaged"]
    assert not history.close()
    opened = open_history(file)
    assert [notice.title for notice in opened.notices] == ["The search index was damaged"]
    assert opened.store.search("lorem") and read_all(opened.store) == 120
    opened.store.close()


def test_damage_that_no_check_sees_is_mended_once_it_was_met(file: Path) -> None:
    filled(file)
    sql(file, "UPDATE message_text_docsize SET sz = x'ffff'")
    opened = open_history(file)
    assert opened.notices == ()
    with pytest.raises(FloeError, match="damaged"), explaining(file):
        opened.store.search("lorem")
    opened.store.close()
    again = open_history(file)
    assert [notice.title for notice in again.notices] == ["The search index was damaged"]
    assert again.store.search("lorem")
    again.store.close()


@pytest.mark.parametrize("version", range(1, VERSION))
def test_a_file_of_an_older_version_is_brought_up_to_ours(file: Path, version: int) -> None:
    file.parent.mkdir()
    sql(
        file,
        *(statement for step in MIGRATIONS[:version] for statement in step),
        f"PRAGMA user_version = {version}",
        "INSERT INTO conversation (id, title, created, updated, model, sampling, system_prompt, persona)"
        " VALUES (10, 'Ancient', 5, 6, 'demo', '{\"temperature\": 0.5, \"gone\": 1}', '', '')",
        "INSERT INTO message (id, conversation, parent, depth, role, state, created, model, preset, text)"
        " VALUES (20, 10, NULL, 0, 'user', 'complete', 5, '', '', 'from long ago')",
        "UPDATE conversation SET head = 20",
    )
    opened = open_history(file)
    setup = opened.store.conversation(10).setup
    assert opened.notices == () and (setup.sampling.temperature, setup.quality) == (0.5, None)
    with opened.store.transaction():
        opened.store.set_up(10, replace(setup, quality=Rule(0.5)))
        opened.store.keep_unsent("me:1:1", [Unsent("a thought")])
    assert opened.store.conversation(10).setup.quality == Rule(0.5)
    assert opened.store.unsent(lambda _writer, _at: False) == {"me:1:1": [Unsent("a thought")]}
    assert [hit.message for hit in opened.store.search("long ago")] == [20]
    assert [hit.message for hit in opened.store.search("ancient")] == [None]
    opened.store.close()
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_a_step_that_fails_leaves_the_older_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file, 1, 2)
    broken = (*MIGRATIONS, ("CREATE TABLE extra (x)", "CREATE TABLE message (x)"))
    for name, value in (("opening.MIGRATIONS", broken), ("opening.VERSION", VERSION + 1)):
        monkeypatch.setattr(f"floe_chat.app.history.database.{name}", value)
    monkeypatch.setattr(opening.migrate, "__defaults__", (VERSION + 1,))
    with pytest.raises(FloeError):
        open_history(file)
    monkeypatch.undo()
    opened = open_history(file)
    assert read_all(opened.store) == 2
    opened.store.close()


def test_a_file_of_a_newer_version_is_refused_and_not_touched(file: Path) -> None:
    filled(file)
    sql(file, f"PRAGMA user_version = {VERSION + 1}")
    before = file.read_bytes()
    with pytest.raises(FloeError, match="newer floe-chat") as refused:
        open_history(file)
    assert "Update floe-chat" in refused.value.hint
    history = History(file)
    history.begin(SETUP, "unsaved")
    assert history.settle(10) and history.conversations()[0].title == "unsaved"
    trouble, ready = history.poll()[:2]
    assert isinstance(trouble, HistoryTrouble) and "not saved" in trouble.cause and ready == Ready(False, 0)
    history.close()
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*damaged*"))


def test_a_version_that_cannot_be_is_damage(file: Path) -> None:
    filled(file, 1, 2)
    sql(file, "PRAGMA user_version = -1")
    opened = open_history(file)
    assert read_all(opened.store) == 2 and opened.notices
    opened.store.close()
    assert list(file.parent.glob("*damaged*"))


def test_columns_of_another_kind_are_read_as_what_they_should_be(file: Path) -> None:
    filled(file, conversations=1, messages=6)
    open_history(file).store.close()  # checked today: nothing is looked at again
    with closing(sqlite3.connect(file)) as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM message ORDER BY id")]
    sql(
        file,
        "PRAGMA ignore_check_constraints = ON",
        "UPDATE conversation SET title = x'6869ff', created = 'x', updated = -5, model = 7, preset = x''",
        f"UPDATE message SET state = 'x', preset = x'00', created = 1e300 WHERE id = {ids[1]}",
        f"UPDATE message SET role = 5, depth = 'deep', stats = '{{\"tokens\": []}}' WHERE id = {ids[2]}",
        f"UPDATE attachment SET name = x'ff', text = 1 WHERE message = {ids[4]}",
        "PRAGMA foreign_keys = OFF",
        f"UPDATE message SET parent = {ids[5]} WHERE id = {ids[3]}",  # a ring
    )
    opened = open_history(file)
    assert opened.notices == ()
    (found,) = opened.store.conversations()
    assert (found.name, found.model, found.created) == ("hi\ufffd", "7", 0) and "1970" in history_lines.line(found)
    tree = opened.store.tree(found.id)
    assert [message.parent for message in tree.messages] == [None, *ids[:5]]
    (again,) = parse(as_json([tree]), "again", print)
    assert [message.text for message in again.messages] == [message.text for message in tree.messages]
    assert as_markdown(tree).startswith("# hi\ufffd") and opened.store.search("chat")
    opened.store.close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION])
def test_what_models_thought_is_carried_over(file: Path, tmp_path: Path, version: int) -> None:
    filled(file, 1, 2)
    sql(file, "UPDATE message SET thought = 'hm' WHERE role = 'assistant'")
    if version < VERSION:
        sql(file, "ALTER TABLE message DROP COLUMN thought")
    store = open_unsaved()
    assert salvage(file, store).messages > 1
    (chat,) = store.conversations()
    expected = "hm" if version == VERSION else ""
    assert {message.thought for message in store.tree(chat.id).messages if message.role == "assistant"} == {expected}
    store.close()


# A history that may not be written, on a full disk, behind a link or taken away is reported, and nothing is lost


def test_messages_whose_numbers_cannot_be_read_are_left(file: Path) -> None:
    filled(file, 1, 2)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'id INTEGER PRIMARY KEY', 'id INTEGER') WHERE name = 'message'"
        )
    store = open_unsaved()
    assert salvage(file, store).messages == 0
    store.close()


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
    for start in range(3):
        opened = open_to_read(file)
        if start == 0 or not log:  # closing the first one brings the log into the file
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


@pytest.mark.parametrize("room", [0, 6, 12])
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
    for turn in range(12):
        file, together = tmp_path / str(turn) / "history.db", threading.Barrier(4)

        def opened(_starter: int, file: Path = file, together: threading.Barrier = together) -> None:
            together.wait()
            open_history(file).store.close()

        with ThreadPoolExecutor(4) as starters:
            list(starters.map(opened, range(4)))


# What is left after a kill, a lock and an interrupt, and of two who write at once


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
for number in range(15):
    chat = history.begin(ChatSetup("demo"), f"{sys.argv[2]} {number}")
    with history.answering(history.ask(chat, None, "question"), "demo", "") as answer:
        answer.append("answer")
        answer.finish(None)
    history.rename(chat, f"{sys.argv[2]} {number}, renamed")
    if number % 5 == 0:
        assert history.settle(20)
assert history.close(20)
"""


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_process_loses_what_came_after_its_last_commit_and_no_more(file: Path) -> None:
    """Before that, another one that opens the history leaves the answer alone."""
    writing = run(WRITING, file)
    assert writing.stdout is not None
    lines = [next(writing.stdout) for _ in range(220)]
    opened = open_history(file)
    newest = opened.store.newest()
    assert newest is not None and opened.interrupted == 0
    assert opened.store.messages(opened.store.branch(newest.head))[-1].state == "streaming"
    opened.store.close()
    lines += [next(writing.stdout) for _ in range(random.randint(30, 230))]
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


@pytest.mark.thorough
def test_two_processes_write_at_once_and_nothing_is_lost(file: Path) -> None:
    both = [run(ADDING, file, name) for name in ("one", "two")]
    for process in both:
        _out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    store = open_history(file).store
    found = store.conversations(200)
    assert sorted(one.title for one in found) == sorted(f"{n} {i}, renamed" for n in ("one", "two") for i in range(15))
    assert sorted(one.number for one in found) == list(range(1, 31))
    assert read_all(store) == 60
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
    release = threading.Timer(0.3, lock.execute, ["ROLLBACK"])
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
