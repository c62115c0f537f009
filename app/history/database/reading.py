"""Everything that reads the history."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar, get_args

from ....engine import ranges
from ....engine.events import LATE, Rule, Sampling
from ....models.errors import UsageError
from ..records import (
    AnswerStats,
    Attachment,
    ChatSetup,
    Conversation,
    Hit,
    Message,
    MessageState,
    Role,
    Summary,
    Tree,
    Unsent,
    as_text,
    as_whole,
    first_line,
)

_AT_ONCE = 500  # placeholders in one statement
_OPEN, _CLOSE = "\x02", "\x03"  # around matches in a snippet; control characters are removed from texts first

_Record = TypeVar("_Record", Sampling, Rule, AnswerStats)

_CONVERSATION = """SELECT id, number, title, created, updated, head, model, preset, sampling, system_prompt, persona,
        quality
    FROM conversation WHERE deleted IS NULL"""

_SUMMARY = """SELECT c.id, c.number, c.title, c.model, c.created, c.updated,
        coalesce((SELECT depth + 1 FROM message WHERE id = c.head), 0),
        coalesce((SELECT substr(text, 1, 400) FROM message WHERE parent IS NULL AND conversation = c.id
            AND deleted IS NULL ORDER BY id DESC LIMIT 1), '')
    FROM conversation c WHERE c.deleted IS NULL"""

_MESSAGE = """SELECT m.id, m.conversation, m.parent, m.depth, m.role, m.text, m.state, m.created, m.model, m.preset,
        m.stats,
        (SELECT count(*) FROM message s WHERE s.parent IS m.parent AND s.conversation = m.conversation
            AND s.deleted IS NULL AND s.id <= m.id),
        (SELECT count(*) FROM message s WHERE s.parent IS m.parent AND s.conversation = m.conversation
            AND s.deleted IS NULL),
        m.thought
    FROM message m WHERE m.id IN ({})"""

# UNION, not UNION ALL: a ring of parents in a damaged file ends there.
PATH = """WITH RECURSIVE path (id, parent) AS (
        SELECT id, parent FROM message WHERE id = ?
        UNION SELECT m.id, m.parent FROM path JOIN message m ON m.id = path.parent)
    SELECT id FROM path"""

SUBTREE = """WITH RECURSIVE below (id) AS (
        SELECT ? UNION SELECT m.id FROM below JOIN message m ON m.parent = below.id)"""

_FOUND = f"""SELECT c.id, c.number, c.title, c.updated, c.head, m.id, m.depth,
        snippet(message_text, 0, '{_OPEN}', '{_CLOSE}', '…', 16)
    FROM message_text JOIN message m ON m.id = message_text.rowid JOIN conversation c ON c.id = m.conversation
    WHERE message_text MATCH ? AND m.deleted IS NULL AND c.deleted IS NULL ORDER BY rank LIMIT ?"""

_FOUND_TITLE = f"""SELECT c.id, c.number, c.title, c.updated,
        snippet(conversation_title, 0, '{_OPEN}', '{_CLOSE}', '…', 16)
    FROM conversation_title JOIN conversation c ON c.number = conversation_title.rowid
    WHERE conversation_title MATCH ? AND c.deleted IS NULL ORDER BY rank LIMIT ?"""


class Reader(ABC):
    """Queries over one open history. Deleted chats are never returned.

    Methods that take an id raise UsageError where there is no such conversation or message.

    Attributes:
        left_out: the numbers of conversations read so far whose saved sampling values no model takes, as an earlier
            version could save; defaults replace them.
    """

    def __init__(self) -> None:
        self.left_out: set[int] = set()

    @abstractmethod
    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        """What one statement finds."""

    def conversations(self, limit: int = 50, before: Summary | None = None) -> list[Summary]:
        """The newest conversations, or those that follow `before` in the list."""
        page, values = "", [limit]
        if before is not None:
            page = " AND (c.updated, c.number) < (?, ?)"
            values = [before.updated, before.number, limit]
        rows = self.rows(f"{_SUMMARY}{page} ORDER BY c.updated DESC, c.number DESC LIMIT ?", values)
        return [_summary(row) for row in rows]

    def conversation(self, conversation: int) -> Conversation:
        """One conversation by its id."""
        return self._one_conversation("id = ?", conversation)

    def numbered(self, number: int) -> Conversation:
        """One conversation by its short number."""
        return self._one_conversation("number = ?", number, f"There is no chat {number}")

    def newest(self) -> Conversation | None:
        """The last used conversation."""
        rows = self.rows(f"{_CONVERSATION} ORDER BY updated DESC, number DESC LIMIT 1")
        return next((self._conversation(row) for row in rows), None)

    def branch(self, head: int | None) -> tuple[int, ...]:
        """The ids of the messages from the beginning to `head`; pass a window of them to `messages`.

        It touches one row per message, and none of the texts.
        """
        return () if head is None else tuple(row[0] for row in self.rows(PATH, [head]))[::-1]

    def newest_leaf(self, message: int) -> int:
        """The end of the last used branch through `message`: the head to switch to."""
        # A message's id is greater than its parent's, so the highest id is a leaf.
        sql = f"{SUBTREE} SELECT max(id) FROM message WHERE id IN (SELECT id FROM below) AND deleted IS NULL"
        ((leaf,),) = self.rows(sql, [message])
        if leaf is None:
            raise _no_message()
        return int(leaf)

    def messages(self, ids: Sequence[int]) -> list[Message]:
        """The messages `ids`, in this order; those that do not exist (any more) are left out."""
        found: dict[int, Message] = {}
        for start in range(0, len(ids), _AT_ONCE):
            part = list(ids[start : start + _AT_ONCE])
            places = ",".join("?" * len(part))
            attached: dict[int, list[Attachment]] = {}
            sql = f"SELECT message, name, text FROM attachment WHERE message IN ({places}) ORDER BY message, place"
            for message, name, text in self.rows(sql, part):
                attached.setdefault(message, []).append(Attachment(as_text(name), as_text(text)))
            for row in self.rows(f"{_MESSAGE.format(places)} AND m.deleted IS NULL", part):
                found[row[0]] = _message(row, tuple(attached.get(row[0], ())))
        return [found[identity] for identity in ids if identity in found]

    def message(self, message: int) -> Message:
        """One message."""
        found = self.messages([message])
        if not found:
            raise _no_message()
        return found[0]

    def siblings(self, message: int) -> tuple[int, ...]:
        """The messages that follow the same parent, `message` among them, oldest first."""
        sql = """SELECT s.id FROM message m JOIN message s ON s.parent IS m.parent AND s.conversation = m.conversation
            WHERE m.id = ? AND s.deleted IS NULL ORDER BY s.id"""
        return tuple(row[0] for row in self.rows(sql, [message]))

    def tree(self, conversation: int) -> Tree:
        """A conversation with all its branches."""
        sql = "SELECT id FROM message WHERE conversation = ? AND deleted IS NULL ORDER BY id"
        ids = [row[0] for row in self.rows(sql, [conversation])]
        return Tree(self.conversation(conversation), tuple(_linked(self.messages(ids))))

    def search(self, words: str, limit: int = 50) -> list[Hit]:
        """Titles, then messages, that contain all `words`, best first.

        The last word may be a prefix; "words in quotes" are a phrase. Case and accents do not matter.
        """
        wanted = _match_expression(words)
        if not wanted:
            return []
        hits: list[Hit] = []
        for id_, number, title, updated, snippet in self.rows(_FOUND_TITLE, [wanted, limit]):
            hits.append(Hit(id_, number, as_text(title), as_whole(updated), None, 0, True, *_marked(as_text(snippet))))
        branches: dict[int, frozenset[int]] = {}
        names: dict[int, str] = {}
        found = list(self.rows(_FOUND, [wanted, limit - len(hits)]))
        for id_, number, title, updated, head, message, depth, snippet in found:
            if id_ not in branches:
                branches[id_] = frozenset(self.branch(head))
                names[id_] = as_text(title) or next((s.name for s in self._summary(id_)), "")
            shown = message in branches[id_]
            where = names[id_], as_whole(updated), message, as_whole(depth), shown
            hits.append(Hit(id_, number, *where, *_marked(as_text(snippet))))
        return hits

    def unsent(self, is_running: Callable[[str, int], bool]) -> dict[str, list[Unsent]]:
        """Unsent texts of programs that have ended, by program, oldest first; `is_running` gets a program's name and
        when it saved them.
        """
        found: dict[str, list[Unsent]] = {}
        for writer, written, text, files in self.rows(
            "SELECT writer, written, text, files FROM unsent ORDER BY written, writer, place"
        ):
            if writer in found or not is_running(as_text(writer), as_whole(written)):
                found.setdefault(writer, []).append(Unsent(as_text(text), _files(files)))
        return found

    def _summary(self, conversation: int) -> Iterator[Summary]:
        yield from map(_summary, self.rows(f"{_SUMMARY} AND c.id = ?", [conversation]))

    def _one_conversation(self, which: str, value: int, none: str = "There is no such chat") -> Conversation:
        row = next(iter(self.rows(f"{_CONVERSATION} AND {which}", [value])), None)
        if row is None:
            raise UsageError(none, "", "`floe-chat history list` shows the chats.")
        return self._conversation(row)

    def _conversation(self, row: tuple[Any, ...]) -> Conversation:
        id_, number, title, created, updated, head, model, preset, sampling, system_prompt, persona, quality = row
        kept = asdict(_record(Sampling, sampling) or Sampling())
        usable = {name: value for name, value in kept.items() if ranges.may_be(name, value)}
        if len(usable) < len(kept):
            self.left_out.add(number)
        texts = as_text(system_prompt), as_text(persona)
        chosen = None if preset is None else as_text(preset)
        setup = ChatSetup(as_text(model), chosen, Sampling(**usable), *texts, _quality(quality))
        return Conversation(id_, number, as_text(title), as_whole(created), as_whole(updated), setup, head)


def forgiving(raw: bytes) -> str:
    """A text as stored, for `sqlite3.Connection.text_factory`: a flipped bit can make it invalid UTF-8, and the rest
    of it is still worth reading."""
    return raw.decode("utf-8", "replace")


def _no_message() -> UsageError:
    return UsageError("There is no such message", "It was deleted, perhaps by another floe-chat.")


def _message(row: tuple[Any, ...], attachments: tuple[Attachment, ...]) -> Message:
    id_, conversation, parent, depth, role, text, state, created, model, preset, stats, *rest = row
    sibling, siblings, thought = rest
    return Message(
        *(id_, conversation, parent, as_whole(depth), role if role in get_args(Role) else "assistant", as_text(text)),
        *(state if state in get_args(MessageState) else "stopped", as_whole(created), as_text(model), as_text(preset)),
        *(_stats(stats), attachments, sibling, siblings, as_text(thought)),
    )


def _linked(messages: Sequence[Message]) -> list[Message]:
    """The messages, ids ascending, each with a parent before it: in a damaged file a parent may be lost, or be a child
    of the message.
    """
    linked: list[Message] = []
    known: set[object] = {None}
    for message in messages:
        if message.parent not in known:
            message = replace(message, parent=linked[-1].id if linked else None)
        known.add(message.id)
        linked.append(message)
    return linked


def _summary(row: tuple[Any, ...]) -> Summary:
    id_, number, title, model, created, updated, count, text = row
    name = as_text(title), first_line(as_text(text)), as_text(model)
    return Summary(id_, number, *name, as_whole(created), as_whole(updated), as_whole(count))


def _quality(text: str | None) -> Rule | None:
    found = _record(Rule, text)
    if found is None:
        return None
    if isinstance(values := json.loads(text or "null"), dict) and values.get("lenient") is True:  # of earlier versions
        found = replace(found, late=LATE)
    return None if found.wrong else found


def _stats(text: str | None) -> AnswerStats | None:
    found = _record(AnswerStats, text)
    return found if found is not None and found.is_sound else None


def _files(text: str) -> tuple[Attachment, ...]:
    try:
        return tuple(Attachment(str(file["name"]), str(file["text"])) for file in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()


def _record(kind: type[_Record], text: str | None) -> _Record | None:
    """The fields that `kind` knows of a JSON object; a newer version may have written others."""
    try:
        values = json.loads(text or "null")
        named: dict[str, Any] = {field.name: values[field.name] for field in fields(kind) if field.name in values}
        listed: dict[str, Any] = {name: tuple(value) for name, value in named.items() if type(value) is list}
        return kind(**{**named, **listed})
    except (ValueError, TypeError, RecursionError):
        return None


def _match_expression(words: str) -> str:
    """The user's words as an FTS5 query: every word or phrase quoted, the last one a prefix."""
    parts = [
        (phrase or word).replace('"', "").replace("\0", "")
        for phrase, word in re.findall(r'"([^"]*)"|(\S+)', words.encode(errors="replace").decode())
    ]
    # Words without a letter or digit are not in the index, and would match nothing.
    kept = [f'"{part}"' for part in parts if any(char.isalnum() for char in part)]
    return " ".join(kept) + ("" if not kept or words.rstrip().endswith('"') else "*")


def _marked(snippet: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """FTS5's snippet as one line, and the positions of its marks."""
    text, marks, start = "", [], -1
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", re.sub(r"[^\S\x02\x03]+", " ", snippet)):
        if piece == _OPEN:
            start = len(text)
        elif piece == _CLOSE:
            marks += [(start, len(text))] if 0 <= start < len(text) else []
            start = -1
        else:
            text += piece
    return text, tuple(marks)
