"""Everything that changes the history, over one connection. Call it inside `transaction`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from ....models.errors import UsageError
from ..records import (
    AnswerStats,
    Attachment,
    ChatSetup,
    MessageState,
    Tree,
    Unsent,
    new_id,
    now,
    time_of,
)
from .reading import PATH, SUBTREE, Reader, forgiving

KEPT_AFTER_DELETION = 7 * 24 * 3600 * 1000
"""Milliseconds for which a deletion can be undone; the next start after that wipes what was deleted from the file."""


class HistoryStore(Reader):
    """Reads and writes over one connection.

    Every method raises one of `trouble.SQLITE_ERRORS` if the file cannot be read or written, and UsageError for what
    does not exist.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__()
        self._connection = connection
        connection.text_factory = forgiving

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        return self._connection.execute(sql, values)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Everything inside is committed, or nothing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def add_conversation(
        self, conversation: int, setup: ChatSetup, title: str = "", created: int | None = None
    ) -> None:
        """Begin an empty conversation under the id `conversation` (from `new_id`)."""
        at = now() if created is None else created
        sql = """INSERT INTO conversation
            (id, title, created, updated, model, preset, sampling, system_prompt, persona, quality)
            VALUES (?,?,?,?,?,?,?,?,?,?)"""
        self._connection.execute(sql, (conversation, _sound(title), at, at, *_columns(setup)))

    def add_question(
        self, message: int, conversation: int, parent: int | None, text: str, attachments: Sequence[Attachment]
    ) -> None:
        """Add the user's message, under the id `message`, and show the branch that ends in it."""
        self.insert(message, conversation, parent, "user", text)
        self.attach(message, attachments)
        self._show(conversation, message)

    def begin_answer(self, message: int, parent: int, model: str, preset: str, writer: str) -> None:
        """Add an empty answer to `parent` that `writer` will fill, and show the branch that ends in it."""
        conversation = self._conversation_of(parent)
        self.insert(message, conversation, parent, "assistant", "", "streaming", model, preset, writer=writer)
        self._show(conversation, message)

    def reopen_answer(self, message: int, model: str, preset: str, writer: str) -> None:
        """Let `writer` continue an answer."""
        sql = "UPDATE message SET state = 'streaming', model = ?, preset = ?, writer = ? WHERE id = ?"
        self._connection.execute(sql, (_sound(model), _sound(preset), writer, message))
        self._show(self._conversation_of(message), message)

    def write_answer(self, message: int, text: str, thought: str) -> None:
        """Set an answer's text and thinking so far."""
        values = (_sound(text), _sound(thought), message)
        self._connection.execute("UPDATE message SET text = ?, thought = ? WHERE id = ?", values)

    def end_answer(
        self, message: int, text: str, state: MessageState, stats: AnswerStats | None, thought: str = ""
    ) -> None:
        """Set an answer's whole text and thinking and how it ended; from now on a search finds the text."""
        self.write_answer(message, text, thought)
        sql = "UPDATE message SET state = ?, stats = ?, writer = NULL WHERE id = ?"
        self._connection.execute(sql, (state, _json(stats), message))
        self._connection.execute(
            "UPDATE conversation SET updated = ? WHERE id = (SELECT conversation FROM message WHERE id = ?)",
            (now(), message),
        )

    def switch(self, conversation: int, head: int | None) -> None:
        """Show another branch: the one that ends in `head`."""
        self._change("head = ?", conversation, head)

    def rename(self, conversation: int, title: str) -> None:
        """Give it a title; "" takes it away."""
        self._change("title = ?", conversation, _sound(title))

    def set_up(self, conversation: int, setup: ChatSetup) -> None:
        """Change the setup that answers it from now on."""
        sql = "model = ?, preset = ?, sampling = ?, system_prompt = ?, persona = ?, quality = ?"
        self._change(sql, conversation, *_columns(setup))

    def delete(self, conversation: int, mark: int) -> None:
        """Hide a conversation until it is wiped; `undo(mark)` brings it back."""
        self._connection.execute("INSERT INTO deletion (mark, conversation) VALUES (?, ?)", (mark, conversation))
        self._change("deleted = ?", conversation, mark)

    def delete_message(self, message: int, mark: int) -> None:
        """Hide a message and all that follow it; `undo(mark)` restores them.

        If the conversation shows one of them, it then shows the branch up to the message before, or another branch if
        there is none.
        """
        conversation = self.conversation(self._conversation_of(message))
        self._connection.execute(
            "INSERT INTO deletion (mark, conversation, head) VALUES (?, ?, ?)",
            (mark, conversation.id, conversation.head),
        )
        hidden = message in self.branch(conversation.head)
        self._connection.execute(
            f"{SUBTREE} UPDATE message SET deleted = ? WHERE id IN (SELECT id FROM below) AND deleted IS NULL",
            (message, mark),
        )
        if hidden:
            sql = """UPDATE conversation SET head = coalesce((SELECT parent FROM message WHERE id = ?),
                (SELECT max(id) FROM message WHERE conversation = ? AND deleted IS NULL)) WHERE id = ?"""
            self._connection.execute(sql, (message, conversation.id, conversation.id))

    def undo(self, mark: int) -> None:
        """Undo a deletion; nothing happens if it was wiped or undone already."""
        self._connection.execute("UPDATE conversation SET deleted = NULL WHERE deleted = ?", (mark,))
        if self._connection.execute("UPDATE message SET deleted = NULL WHERE deleted = ?", (mark,)).rowcount:
            sql = """UPDATE conversation SET head = deletion.head FROM deletion
                WHERE deletion.mark = ? AND conversation.id = deletion.conversation"""
            self._connection.execute(sql, (mark,))
        self._connection.execute("DELETE FROM deletion WHERE mark = ?", (mark,))

    def deletion_of(self, number: int) -> int | None:
        """The mark under which the conversation with this number was deleted, if it can still be restored."""
        sql = "SELECT deleted FROM conversation WHERE number = ?"
        return next((row[0] for row in self._connection.execute(sql, (number,))), None)

    def fork(self, conversation: int, message: int) -> None:
        """Begin another conversation, under the id `conversation`, with copies of the branch up to `message`."""
        source = self.conversation(self._conversation_of(message))
        branch = tuple(self.messages(self.branch(message)))
        self.add_tree(conversation, Tree(replace(source, created=now(), updated=now(), head=message), branch))

    def add_tree(self, conversation: int, tree: Tree) -> None:
        """Add a copy of `tree` under the id `conversation`. Its ids only link messages to parents; the copies get new
        ids. An unfinished answer is marked as stopped in the copy.
        """
        source = tree.conversation
        self.add_conversation(conversation, source.setup, source.title, source.created)
        ids: dict[int | None, int | None] = {None: None}
        for message in tree.messages:
            ids[message.id] = copy = new_id()
            self.insert(
                *(copy, conversation, ids[message.parent], message.role, message.text),
                *("stopped" if message.state == "streaming" else message.state, message.model, message.preset),
                thought=message.thought,
                stats=message.stats,
                created=message.created,
            )
            self.attach(copy, message.attachments)
        self._change("head = ?, updated = ?", conversation, ids[source.head], source.updated)

    def add_hidden(self, conversation: int, tree: Tree) -> None:
        """As `add_tree`, but marked as deleted now: hidden, and wiped later unless revealed."""
        self.add_tree(conversation, tree)
        self.delete(conversation, new_id())

    def reveal(self, conversation: int) -> None:
        """Show what `add_hidden` added."""
        sql = "DELETE FROM deletion WHERE mark = (SELECT deleted FROM conversation WHERE id = ?)"
        self._connection.execute(sql, (conversation,))
        self._change("deleted = NULL", conversation)

    def wipe(self, conversation: int) -> None:
        """Remove a conversation from the file, with all its messages."""
        self._connection.execute("DELETE FROM conversation WHERE id = ?", (conversation,))

    def insert(
        self,
        message: int,
        conversation: int,
        parent: int | None,
        role: str,
        text: str,
        state: MessageState = "complete",
        model: str = "",
        preset: str = "",
        *,
        thought: str = "",
        stats: AnswerStats | None = None,
        created: int | None = None,
        writer: str | None = None,
    ) -> None:
        """Add one message, without changing the branch that the conversation shows."""
        depth = 0
        if parent is not None:
            row = self._connection.execute("SELECT depth, conversation FROM message WHERE id = ?", (parent,)).fetchone()
            if row is None or row[1] != conversation:
                raise UsageError("There is no such message", "It was deleted, perhaps by another floe-chat.")
            depth = row[0] + 1
        sql = """INSERT INTO message
            (id, conversation, parent, depth, role, state, created, model, preset, stats, writer, text, thought)
            VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"""
        at = now() if created is None else created
        columns = (message, conversation, parent, depth, role, state, at, _sound(model), _sound(preset))
        self._connection.execute(sql, (*columns, _json(stats), writer, _sound(text), _sound(thought)))

    def attach(self, message: int, attachments: Sequence[Attachment]) -> None:
        """Add the attachments of a message."""
        rows = [(message, place, _sound(file.name), _sound(file.text)) for place, file in enumerate(attachments)]
        self._connection.executemany("INSERT INTO attachment (message, place, name, text) VALUES (?,?,?,?)", rows)

    def keep_unsent(self, writer: str, questions: Sequence[Unsent], instead: Sequence[str] = ()) -> None:
        """Save all unsent texts of `writer`, replacing its earlier ones and those of the writers `instead`."""
        self._connection.executemany("DELETE FROM unsent WHERE writer = ?", [(name,) for name in (writer, *instead)])
        rows = [
            (writer, place, now(), _sound(question.text), json.dumps([asdict(file) for file in question.files]))
            for place, question in enumerate(questions)
        ]
        sql = "INSERT INTO unsent (writer, place, written, text, files) VALUES (?,?,?,?,?)"
        self._connection.executemany(sql, rows)

    def purge(self, before: int) -> int:
        """Wipe what was deleted before the time `before`, in milliseconds since 1970; returns the number of deletions.

        SQLite overwrites freed pages (secure_delete), and the search index is rewritten without the deleted texts.
        """
        marks = [(row[0],) for row in self._connection.execute("SELECT mark FROM deletion") if time_of(row[0]) < before]
        for (mark,) in marks:
            self._connection.execute("DELETE FROM conversation WHERE deleted = ?", (mark,))
            sql = """WITH RECURSIVE below (id) AS (SELECT id FROM message WHERE deleted = ?
                    UNION SELECT m.id FROM below JOIN message m ON m.parent = below.id)
                DELETE FROM message WHERE id IN (SELECT id FROM below)"""
            self._connection.execute(sql, (mark,))
        self._connection.executemany("DELETE FROM deletion WHERE mark = ?", marks)
        if marks:
            self._connection.execute("INSERT INTO message_text (message_text) VALUES ('optimize')")
            self._connection.execute("INSERT INTO conversation_title (conversation_title) VALUES ('optimize')")
        return len(marks)

    def _show(self, conversation: int, message: int) -> None:
        """Show the branch that ends in `message`. Messages of it that another floe-chat deleted are restored, since it
        continues here.
        """
        sql = """SELECT 1 FROM message WHERE deleted IS NOT NULL
            AND (id = ?1 OR id = (SELECT parent FROM message WHERE id = ?1))"""
        if self._connection.execute(sql, (message,)).fetchone():
            self._connection.execute(f"UPDATE message SET deleted = NULL WHERE id IN ({PATH})", (message,))
        self._change("head = ?, updated = ?, deleted = NULL", conversation, message, now())

    def _change(self, what: str, conversation: int, *values: object) -> None:
        done = self._connection.execute(f"UPDATE conversation SET {what} WHERE id = ?", (*values, conversation))
        if not done.rowcount:
            raise UsageError("There is no such chat", "It was deleted, perhaps by another floe-chat.")

    def _conversation_of(self, message: int) -> int:
        row = self._connection.execute("SELECT conversation FROM message WHERE id = ?", (message,)).fetchone()
        if row is None:
            raise UsageError("There is no such message", "It was deleted, perhaps by another floe-chat.")
        return int(row[0])


def _columns(setup: ChatSetup) -> tuple[str | None, ...]:
    preset = None if setup.preset is None else _sound(setup.preset)
    texts = _sound(setup.system_prompt), _sound(setup.persona)
    return _sound(setup.model), preset, _json(setup.sampling), *texts, _json(setup.quality)


def _json(record: object) -> str | None:
    return None if record is None else json.dumps(asdict(record), separators=(",", ":"))  # type: ignore[arg-type]


def _sound(text: str) -> str:
    # Half a surrogate pair, which a terminal may deliver, cannot be stored as text.
    return text.encode("utf-8", "replace").decode("utf-8")
