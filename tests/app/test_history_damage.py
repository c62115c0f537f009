"""Damaged files and files of other versions: kept aside, carried over, mended or left alone, and always told."""

from __future__ import annotations

import random
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.app.cli.printing import history_lines
from floe_chat.app.history import (
    History,
    HistoryTrouble,
    Ready,
    Unsent,
    as_json,
    as_markdown,
    new_id,
    open_history,
    parse,
)
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.opening import open_unsaved
from floe_chat.app.history.database.salvage import salvage
from floe_chat.app.history.database.schema import MIGRATIONS, VERSION
from floe_chat.app.history.database.trouble import SQLITE_ERRORS, explaining
from floe_chat.engine.events import Rule
from floe_chat.models.errors import FloeError

from .histories import SETUP, filled, read_all

# Where the file says which versions of SQLite and of this program may write it: one that says "a later one" is refused.
_VERSIONS = (18, 19, *range(60, 64))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "private" / "history.db"


@pytest.mark.parametrize("seed", range(15))
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


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.5, 0.9, 0.97])
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
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE bookmark (address TEXT)")
    connection.close()
    before = file.read_bytes()
    with pytest.raises(FloeError, match="another program"):
        open_history(file)
    assert file.read_bytes() == before and {path.name for path in file.parent.iterdir()} == {file.name}


def test_something_else_under_its_name_is_kept_aside(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("these are my notes, not a database\n" * 50)
    history = History(file)
    history.begin(SETUP, "new")
    assert history.settle(10)
    events = history.poll()
    assert [type(event) for event in events[:2]] == [HistoryTrouble, Ready] and history.conversations()[
        0
    ].title == "new"
    (kept,) = file.parent.glob("history-damaged-*.db")
    assert kept.read_text().startswith("these are my notes")
    history.close()


def damage_search(file: Path) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("UPDATE message_text_data SET block = x'ff00ff00ff00ff00' WHERE id > 1")
    connection.close()


def test_a_damaged_search_index_is_made_anew_from_the_texts(file: Path) -> None:
    filled(file)
    damage_search(file)
    opened = open_history(file)
    assert [notice.title for notice in opened.notices] == ["The search index was damaged"]
    assert len(opened.store.search("lorem", 200)) > 50 and read_all(opened.store) == 120
    opened.store.close()
    assert open_history(file).notices == ()


def test_damage_that_shows_itself_later_is_told_and_dealt_with_at_the_next_start(file: Path) -> None:
    filled(file)
    open_history(file).store.close()
    damage_search(file)
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
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("UPDATE message_text_docsize SET sz = x'ffff'")
    connection.close()
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
    connection = sqlite3.connect(file, isolation_level=None)
    for statement in (statement for step in MIGRATIONS[:version] for statement in step):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.execute(
        "INSERT INTO conversation (id, title, created, updated, model, sampling, system_prompt, persona)"
        " VALUES (10, 'Ancient', 5, 6, 'demo', '{\"temperature\": 0.5, \"gone\": 1}', '', '')"
    )
    connection.execute(
        "INSERT INTO message (id, conversation, parent, depth, role, state, created, model, preset, text)"
        " VALUES (20, 10, NULL, 0, 'user', 'complete', 5, '', '', 'from long ago')"
    )
    connection.execute("UPDATE conversation SET head = 20")
    connection.close()
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
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.close()


def test_a_step_that_fails_leaves_the_older_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(file, 1, 2)
    broken = (*MIGRATIONS, ("CREATE TABLE extra (x)", "CREATE TABLE message (x)"))
    for name, value in (("schema.MIGRATIONS", broken), ("opening.VERSION", VERSION + 1)):
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
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
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


@pytest.mark.parametrize("version", [-1, -5])
def test_a_version_that_cannot_be_is_damage(file: Path, version: int) -> None:
    filled(file, 1, 2)
    connection = sqlite3.connect(file)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    opened = open_history(file)
    assert read_all(opened.store) == 2 and opened.notices
    opened.store.close()
    assert list(file.parent.glob("*damaged*"))


def test_columns_of_another_kind_are_read_as_what_they_should_be(file: Path) -> None:
    filled(file, conversations=1, messages=6)
    open_history(file).store.close()  # checked today: nothing is looked at again
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute("UPDATE conversation SET title = x'6869ff', created = 'x', updated = -5, model = 7")
        ids = [row[0] for row in connection.execute("SELECT id FROM message ORDER BY id")]
        connection.execute("UPDATE message SET state = 'x', preset = x'00', created = 1e300 WHERE id = ?", (ids[1],))
        connection.execute(
            "UPDATE message SET role = 5, depth = 'deep', stats = ? WHERE id = ?", ('{"tokens": []}', ids[2])
        )
        connection.execute("UPDATE attachment SET name = x'ff', text = 1 WHERE message = ?", (ids[4],))
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("UPDATE message SET parent = ? WHERE id = ?", (ids[5], ids[3]))  # a ring
    connection.close()
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
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE message SET thought = 'hm' WHERE role = 'assistant'")
        if version < VERSION:
            connection.execute("ALTER TABLE message DROP COLUMN thought")
    connection.close()
    store = open_unsaved()
    assert salvage(file, store).messages > 1
    (chat,) = store.conversations()
    expected = "hm" if version == VERSION else ""
    assert {message.thought for message in store.tree(chat.id).messages if message.role == "assistant"} == {expected}
    store.close()
