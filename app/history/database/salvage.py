"""Recovers what can still be read of a damaged history, row by row."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ..records import (
    LATEST,
    Attachment,
    ChatSetup,
    Conversation,
    Message,
    MessageState,
    Role,
    Tree,
    as_text,
    new_id,
    now,
)
from .reading import forgiving
from .store import HistoryStore
from .trouble import SQLITE_ERRORS

_CONVERSATION = "number, id, title, created, updated, model, preset, system_prompt, persona, head, deleted"
_MESSAGE = "id, conversation, parent, role, state, created, model, preset, text, {}, deleted"
_ATTACHMENT = "rowid, message, name, text"

_Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Salvaged:
    """How many conversations and messages could be read, and how many conversations lost messages in between."""

    conversations: int
    messages: int
    gaps: int


def salvage(damaged: Path, store: HistoryStore) -> Salvaged:
    """Copy what can be read of the file `damaged` into `store`.

    Sampling values and the figures of answers are dropped. A message whose parent is lost follows the one before that;
    one whose conversation is lost gets a new conversation.

    Raises:
        sqlite3.Error: `store` cannot be written.
    """
    connection = sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True)
    connection.text_factory = forgiving
    connection.execute("PRAGMA writable_schema = ON")  # otherwise a truncated file is not read at all
    try:
        conversations = {row[1]: row for row in _rows(connection, "conversation", "number", _CONVERSATION)}
        messages = sorted(_rows(connection, "message", "id", _messages(connection)), key=lambda row: row[0])
        files = list(_rows(connection, "attachment", "rowid", _ATTACHMENT))
    finally:
        connection.close()
    deleted = {identity for identity, row in conversations.items() if row[-1] is not None}
    found: dict[Any, list[_Row]] = {identity: [] for identity in conversations if identity not in deleted}
    for row in messages:
        if row[-1] is None and row[1] not in deleted:
            found.setdefault(row[1], []).append(row)
    gaps = 0
    with store.transaction():
        for identity, rows in found.items():
            joined, has_gap = _joined(rows)
            store.add_tree(new_id(), _tree(conversations.get(identity), joined, files))
            gaps += has_gap
    return Salvaged(len(found), sum(len(rows) for rows in found.values()), gaps)


def _messages(connection: sqlite3.Connection) -> str:
    """The columns of messages; earlier versions had no thinking."""
    try:
        thinks = any(row[1] == "thought" for row in connection.execute("PRAGMA table_info(message)"))
    except SQLITE_ERRORS:
        thinks = False
    return _MESSAGE.format("thought" if thinks else "''")


def _rows(connection: sqlite3.Connection, table: str, key: str, columns: str) -> Iterator[_Row]:
    """The rows of `table` from the first one until one cannot be read, then from the last one back to there."""
    reached = None
    for order in ("ASC", "DESC"):
        try:
            for row in connection.execute(f"SELECT {columns} FROM {table} NOT INDEXED ORDER BY {key} {order}"):
                if order == "DESC" and row[0] == reached:
                    return
                reached = row[0] if order == "ASC" else reached
                if row[0] is not None or key != "id":  # by which messages are put in order
                    yield row
        except SQLITE_ERRORS:
            continue
        return


def _joined(rows: Sequence[_Row]) -> tuple[list[_Row], bool]:
    """The messages `rows` of a conversation, ids ascending, each with a parent among them, and whether any was lost."""
    ids = [row[0] for row in rows]
    known, joined = set(ids), list[_Row]()
    for identity, conversation, parent, *rest in rows:
        before = parent
        # A parent id above its child's would be a cycle, or a flipped bit.
        if parent is not None and (parent not in known or parent >= identity):
            place = bisect_left(ids, min(parent, identity) if isinstance(parent, int) else identity)
            before = ids[place - 1] if place else None
        joined.append((identity, conversation, before, *rest))
    return joined, any(row[2] != other[2] for row, other in zip(rows, joined, strict=True))


def _tree(row: _Row | None, rows: Sequence[_Row], files: Sequence[_Row]) -> Tree:
    ids = {row[0] for row in rows}
    attached: dict[Any, list[Attachment]] = {}
    for _rowid, message, name, text in files:
        if message in ids:
            attached.setdefault(message, []).append(Attachment(as_text(name), as_text(text)))
    messages = tuple(_message(row, tuple(attached.get(row[0], ()))) for row in rows)
    newest = messages[-1].id if messages else None
    if row is None:
        return Tree(Conversation(0, 0, "Recovered", now(), now(), ChatSetup(), newest), messages)
    _number, _id, title, created, updated, model, preset, system_prompt, persona, head, _deleted = row
    setup = ChatSetup(
        as_text(model),
        None if preset is None else as_text(preset),
        system_prompt=as_text(system_prompt),
        persona=as_text(persona),
    )
    shown = head if head in ids else newest
    return Tree(Conversation(0, 0, as_text(title), _time(created), _time(updated), setup, shown), messages)


def _message(row: _Row, attachments: tuple[Attachment, ...]) -> Message:
    identity, _conversation, parent, role, state, created, model, preset, text, thought, _deleted = row
    return Message(
        *(identity, 0, parent, 0, role if role in get_args(Role) else "assistant", as_text(text)),
        *(state if state in get_args(MessageState) else "stopped", _time(created), as_text(model), as_text(preset)),
        *(None, attachments, 1, 1, as_text(thought)),
    )


def _time(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= LATEST else now()
