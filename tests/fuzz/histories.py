"""Hostile histories: damaged SQLite files that are opened, read, written and exported, and exports that are imported.

What a damaged file still holds is carried over; whatever is read of it can be exported and imported again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

from floe_chat.app.cli.printing import history_lines
from floe_chat.app.history import (
    AnswerStats,
    Attachment,
    ChatSetup,
    Unsent,
    as_json,
    as_markdown,
    json_text,
    new_id,
    open_history,
    parse,
)
from floe_chat.app.history.adding import add_all
from floe_chat.app.history.database import opening
from floe_chat.app.history.database.opening import MIGRATIONS, open_to_read, open_unsaved
from floe_chat.app.history.database.store import HistoryStore
from floe_chat.app.history.database.trouble import SQLITE_ERRORS, explaining
from floe_chat.engine.events import Sampling
from floe_chat.models.errors import FloeError

_SETUP = ChatSetup("demo", "Fast", Sampling(0.5, 3, 0.9, 0.1, 1.1, 7), "Be brief.", "Tutor")
_WORDS = ("sea", "ice", '"', "\0", "\x1b[2J", "é", "漢", "\U0001f9ca", "\u202e", "'", "*", "-", "NEAR", "(", "a" * 300)
_TEXTS = ("", "\ud800", "\x00", "x" * 70, "\u2028", "```\n`", "demo", "../../x", "-inf", "a\r\nb", *_WORDS[4:8])
_LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, 10**30, -(10**30), 2**63, 2**62, "", "x", [], {}, [[]], {"a": 1}),
    *("stop", "user", "streaming", "2026-11-21T19:20:31.123Z", "9999-12-31T23:59:59+00:00", "0001-01-01", "NaN"),
)


def attempt(seed: int, scratch: Path) -> str:
    dice = random.Random(seed)
    opening.BUSY_SECONDS = 0.1
    kind = dice.choices((_import, _open), (5, 1))[0]
    try:
        return f"{kind.__name__[1:]}: {kind(dice, scratch)}"
    except FloeError as error:
        if "bug in floe-chat" in str(error) or len(str(error)) > 4000:
            raise
        return f"{kind.__name__[1:]}: refused"


def good(scratch: Path) -> None:
    """A history of four chats, opened, and its export, imported."""
    folder = scratch / "good"
    opened = open_history(folder / "history.db")
    _fill(opened.store)
    opened.store.close()
    opened = open_history(folder / "history.db")
    _look(random.Random(0), opened.store)
    trees = [opened.store.tree(each.id) for each in opened.store.conversations()]
    (scratch / "good.json").write_text(as_json(trees), encoding="utf-8")
    opened.store.close()
    shutil.copy(folder / "history.db", scratch / "good.db")


def _fill(store: HistoryStore) -> None:
    with store.transaction():
        for number in range(4):
            chat, parent = new_id(), None
            store.add_conversation(chat, _SETUP, f"chat {number}" if number else "")
            for place in range(12):
                message = new_id(parent or 0)
                text = f"sea ice {number} {place} " * (1 + place)
                if place % 2 and parent is not None:
                    store.begin_answer(message, parent, "demo", "Fast", "")
                    store.end_answer(message, text, "complete", AnswerStats(3, 1.0, 0.1, "stop"))
                else:
                    store.add_question(message, chat, parent, text, [Attachment("a.txt", text)])
                parent = message if place != 6 else parent
        store.keep_unsent("elsewhere:1:1", [Unsent("draft", (Attachment("a", "b"),))])


def _open(dice: random.Random, scratch: Path) -> str:
    folder = scratch / "history"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / "history.db"
    damage = dice.choice((_flip, _flip, _rows, _rows, _tables, _cut, _beside))
    content = damage(dice, file, (scratch / "good.db").read_bytes())
    if content is not None:
        file.write_bytes(content)
    if dice.random() < 0.5:
        with suppress(OSError):  # `_beside` may have put a link to itself there
            (folder / "history.db-checked").touch()  # then nothing is checked before it is used
    opened = (open_history if dice.random() < 0.8 else open_to_read)(file)
    assert all("bug in floe-chat" not in f"{notice.title} {notice.cause}" for notice in opened.notices)
    damaged = "damaged, " if opened.notices else ""
    try:
        with explaining(file):
            _look(dice, opened.store)
            _write(dice, opened.store)
    except FloeError:
        return f"{damaged}refused later"
    finally:
        opened.store.close()
    return f"{damaged}used"


def _flip(dice: random.Random, _file: Path, content: bytes) -> bytes:
    made = bytearray(content)
    for _ in range(dice.choice((1, 1, 3, 30, 300))):
        at = dice.randrange(100 if dice.random() < 0.1 else len(made))
        made[at] = dice.choice((0, 255, 128, made[at] ^ (1 << dice.randrange(8)), dice.randrange(256)))
    if dice.random() < 0.2:
        at = dice.randrange(len(made) // 4096) * 4096
        other = dice.randrange(len(made) // 4096) * 4096
        made[at : at + 4096] = made[other : other + 4096]
    return bytes(made)


def _cut(dice: random.Random, _file: Path, content: bytes) -> bytes:
    at = dice.randrange(len(content))
    return content[:at] + dice.choice((b"", bytes(4096), dice.randbytes(200), content[:at]))


def _rows(dice: random.Random, file: Path, content: bytes) -> None:
    """Values that no program of ours writes, in a file that is sound to SQLite."""
    file.write_bytes(content)
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for _ in range(dice.randrange(1, 8)):
        table = dice.choice(("conversation", "message", "message", "attachment", "deletion", "unsent"))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info ({table})")]
        value = dice.choice((*_LEAVES[:14], *_TEXTS, b"\xff\xfe", b"", json.dumps(dice.choice(_LEAVES)), "[" * 3000))
        value = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        some = dice.choice(("1", "rowid % 3 = 1", "rowid = (SELECT max(rowid) FROM {0})")).format(table)
        with suppress(sqlite3.Error, OverflowError):
            if dice.random() < 0.15:
                connection.execute(f"DELETE FROM {table} WHERE {some}")
            elif table == "message" and dice.random() < 0.3:  # rings, and parents in another chat
                other = f"(SELECT id FROM message ORDER BY id {dice.choice(('ASC', 'DESC'))} LIMIT 1)"
                connection.execute(
                    f"UPDATE message SET {dice.choice(('parent', 'conversation'))} = {other} WHERE {some}"
                )
            else:
                connection.execute(f"UPDATE {table} SET {dice.choice(columns)} = ? WHERE {some}", (value,))
    connection.close()


def _tables(dice: random.Random, file: Path, content: bytes) -> None:
    """Tables that are not ours, or not of this version."""
    file.write_bytes(content)
    connection = sqlite3.connect(file, isolation_level=None)
    names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
    name = dice.choice(names)
    for sql in dice.sample(
        (
            f"DROP TABLE {name}",
            f"DROP INDEX {name}",
            f"DROP TRIGGER {name}",
            f"PRAGMA user_version = {dice.choice((-1, 0, 1, 2, len(MIGRATIONS) + 1, 2**31 - 1))}",
            f"ALTER TABLE {name} RENAME TO other",
            f"CREATE TABLE {dice.choice(('other', 'conversations'))} (x)",
            "CREATE VIEW v AS SELECT * FROM conversation",
            "CREATE TRIGGER t AFTER INSERT ON message BEGIN SELECT RAISE(ABORT, 'no'); END",
            "CREATE TRIGGER u AFTER UPDATE ON conversation BEGIN DELETE FROM message; END",
            "PRAGMA journal_mode = DELETE",
            "PRAGMA application_id = 7",
            f"ALTER TABLE message DROP COLUMN {dice.choice(('stats', 'writer', 'text'))}",
        ),
        dice.randrange(1, 4),
    ):
        with suppress(sqlite3.Error):
            connection.execute(sql)
    connection.close()


def _beside(dice: random.Random, file: Path, content: bytes) -> bytes | None:
    """Strange files in the place of the history or beside it."""
    for ending in dice.sample(("", "-wal", "-shm", "-checked", "-journal"), dice.randrange(1, 3)):
        part = file.with_name(file.name + ending)
        kind = dice.randrange(5)
        if kind == 0:
            os.mkfifo(part)
        elif kind == 1:
            part.mkdir()
        elif kind == 2:
            part.symlink_to(dice.choice(("nowhere", part.name, ".")))
        else:
            part.write_bytes(dice.choice((b"", dice.randbytes(5000), content[:9000], bytes(32768))))
    return None if os.path.lexists(file) else content


def _look(dice: random.Random, store: HistoryStore) -> None:
    """All that the screen and the command line read."""
    found = store.conversations(10)
    for each in found:
        history_lines.line(each)
        json_text(history_lines.summary(each))
    store.newest()
    for each in found[:4]:
        tree = store.tree(each.id)
        as_markdown(tree)
        imported = parse(as_json([tree]), "again", lambda _note: None)
        assert len(imported[0].messages) == len(tree.messages)
        branch = store.branch(tree.conversation.head)
        for message in store.messages(branch):
            json_text(history_lines.message(message))
        for message in branch[:3]:
            store.siblings(message)
            store.newest_leaf(message)
    for hit in store.search(" ".join(dice.choices(_WORDS, k=3)), 5) + store.search("sea", 3):
        history_lines.hit_line(hit)
        json_text(history_lines.hit(hit))
    store.unsent(lambda _writer, _written: False)


def _write(dice: random.Random, store: HistoryStore) -> None:
    """All that the screen writes, after which the same is read again."""
    with store.transaction():
        chat = new_id()
        store.add_conversation(chat, _SETUP)
        question = new_id()
        store.add_question(question, chat, None, dice.choice(_TEXTS), [Attachment("\0", "x")])
        answer = new_id(question)
        store.begin_answer(answer, question, "demo", "", "me:1:1")
        store.end_answer(answer, dice.choice(_TEXTS), "complete", None)
    found = store.conversations(3)
    with store.transaction():
        if found:
            store.rename(found[-1].id, dice.choice(_TEXTS))
            mark = new_id()
            store.delete(found[-1].id, mark)
            store.undo(mark)
    _look(dice, store)


def _import(dice: random.Random, scratch: Path) -> str:
    text = (scratch / "good.json").read_text(encoding="utf-8")
    if dice.random() < 0.25:
        text = _broken(dice, text)
    else:
        document = json.loads(text)
        document["conversations"] = document["conversations"][: dice.randrange(1, 3)]
        for chat in document["conversations"]:
            del chat["messages"][dice.randrange(2, 5) :]
            chat["head"] = len(chat["messages"])
        for _ in range(dice.choice((1, 1, 2, 4))):
            _change(dice, document)
        text = json.dumps(document, ensure_ascii=dice.random() < 0.5)
    notes: list[str] = []
    trees = parse(text, "chats.json", notes.append)
    store = open_unsaved()
    try:
        ids = add_all(store, trees)
        _look(dice, store)
        again = parse(as_json([store.tree(each) for each in ids]), "again", notes.append)
    except SQLITE_ERRORS as error:
        raise AssertionError(f"an import that was accepted cannot be stored: {error}") from error
    finally:
        store.close()
    assert [len(tree.messages) for tree in again] == [len(tree.messages) for tree in trees]
    return "noted" if notes else "imported"


def _broken(dice: random.Random, text: str) -> str:
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(text))
        noise = dice.choice(("", *_TEXTS, "[", "{", '"', ",", "null", "1e999", "-", "\\u", "[" * 5000))
        text = text[:at] + noise + text[at + dice.randrange(40) :]
    return text


def _change(dice: random.Random, document: Any) -> None:
    """Another value at some place of a JSON document."""
    at, way = document, 0
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = dice.choice(keys)
        deeper = at[key]
        if isinstance(deeper, dict | list) and deeper and (way < 2 or dice.random() < 0.7):
            at, way = deeper, way + 1
            continue
        form = dice.randrange(6)
        if form == 0:
            del at[key]
        elif form == 1 and isinstance(at, list):
            at.append(deeper)
        elif form < 4 and isinstance(deeper, str):
            at[key] = dice.choice(_TEXTS)
        elif form < 4 and isinstance(deeper, int | float):
            at[key] = dice.choice((0, 1, 0.5, 2**63, 10**30, 1e308, -1, True))
        else:
            at[key] = dice.choice(_LEAVES)
        return
