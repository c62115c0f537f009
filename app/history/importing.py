"""Conversations from the JSON that `exporting.py` writes; nothing in it is trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, TypeVar, get_args

from ...engine import ranges
from ...engine.events import LATE, Rule, Sampling
from ...models.catalog import short_name
from ...models.errors import UsageError
from .exporting import FORMAT, FORMAT_VERSION
from .records import LATEST, MOST, AnswerStats, Attachment, ChatSetup, Conversation, Message, MessageState, Role, Tree

_Value = TypeVar("_Value")
_KINDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


def parse(text: str, source: str, tell: Callable[[str], None]) -> list[Tree]:
    """The conversations in `text`, with ids that only link messages to parents; `source` is its name for people.

    Sampling values that no model takes are left out, each reported to `tell`: earlier versions could export them.

    Raises:
        UsageError: it is not such a file, or damaged; names the line or the place, and the reason.
    """
    try:
        document: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(source, f"Line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise _refused(source, f"{error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _refused(source, f'It has no "format": "{FORMAT}".')
    version = document.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        cause = f"It has version {str(version)[:20]}; this program reads version {FORMAT_VERSION}."
        raise UsageError(f"{source} cannot be imported", cause, "Update floe-chat.")
    try:
        return [_tree(item, tell) for item in _Object(document, "").objects("conversations")]
    except _BadFieldError as error:
        raise _refused(source, f"{error}.") from error


def _refused(source: str, cause: str) -> UsageError:
    hint = "Give a file that `floe-chat history export --format json` wrote."
    return UsageError(f"{source} cannot be imported", cause, hint)


class _BadFieldError(Exception):
    """What is wrong, and where."""


@dataclass(frozen=True)
class _Object:
    """A JSON object and its path, such as "conversations[0].messages[3]"."""

    values: dict[str, Any]
    way: str

    def bad(self, name: str, what: str) -> _BadFieldError:
        return _BadFieldError(f"{self.way}.{name}".lstrip(".") + f" {what}")

    def get(self, name: str, kind: type[_Value]) -> _Value:
        value = self.values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.bad(name, f"is not {_KINDS[kind]}" if name in self.values else "is missing")
        return value

    def maybe(self, name: str, kind: type[_Value]) -> _Value | None:
        return None if self.values.get(name) is None else self.get(name, kind)

    def one_of(self, name: str, choices: tuple[Any, ...]) -> Any:
        value = self.get(name, str)
        if value not in choices:
            raise self.bad(name, f"is not one of {', '.join(choices)}")
        return value

    def number(self, name: str, most: float) -> float | None:
        value = self.values.get(name)
        if value is not None and type(value) not in (int, float):
            raise self.bad(name, "is not a number")
        if value is not None and not 0 <= value <= most:
            raise self.bad(name, f"is not a number from 0 to {most:g}")
        return value

    def time(self, name: str) -> int:
        try:
            at = datetime.fromisoformat(self.get(name, str))
            milliseconds = round(at.timestamp() * 1000)
        except (ValueError, OverflowError) as error:
            raise self.bad(name, "is not a time such as 2026-11-21T19:20:31.123Z") from error
        if at.tzinfo is None or not 0 <= milliseconds <= LATEST:
            raise self.bad(name, "is not a time such as 2026-11-21T19:20:31.123Z")
        return milliseconds

    def objects(self, name: str) -> list[_Object]:
        found: list[_Object] = []
        for at, item in enumerate(self.get(name, list)):
            if not isinstance(item, dict):
                raise self.bad(f"{name}[{at}]", "is not an object")
            found.append(_Object(item, f"{self.way}.{name}[{at}]".lstrip(".")))
        return found


def _tree(item: _Object, tell: Callable[[str], None]) -> Tree:
    messages: dict[int, Message] = {}
    for each in item.objects("messages"):
        message = _message(each, messages)
        messages[message.id] = message
    head = item.maybe("head", int)
    if head is not None and head not in messages:
        raise item.bad("head", f"is message {head}, which is not in the file")
    drawn = _Object(item.get("sampling", dict), f"{item.way}.sampling")
    setup = ChatSetup(
        short_name(item.get("model", str)),  # a file must not name a folder: opening the chat would read it
        item.maybe("preset", str),
        _sampling(drawn, tell),
        item.get("system_prompt", str),
        item.get("persona", str),
        None if (dialled := item.maybe("quality", dict)) is None else _quality(_Object(dialled, f"{item.way}.quality")),
    )
    at = item.time("created"), item.time("updated")
    title = item.get("title", str)
    # A blank title counts as none: the first question names the conversation.
    return Tree(Conversation(0, 0, title if title.strip() else "", *at, setup, head), tuple(messages.values()))


def _message(item: _Object, before: dict[int, Message]) -> Message:
    identity, parent = item.get("id", int), item.maybe("parent", int)
    if identity in before:
        raise item.bad("id", f"{identity} appears twice")
    if parent is not None and parent not in before:
        raise item.bad("parent", f"is message {parent}, which is not before it")
    stats = item.maybe("stats", dict)
    files = [Attachment(file.get("name", str), file.get("text", str)) for file in item.objects("attachments")]
    return Message(
        *(identity, 0, parent, 0, item.one_of("role", get_args(Role)), item.get("text", str)),
        *(
            item.one_of("state", get_args(MessageState)),
            item.time("created"),
            item.get("model", str),
            item.get("preset", str),
        ),
        *(None if stats is None else _stats(_Object(stats, f"{item.way}.stats")), tuple(files), 1, 1),
        item.maybe("thought", str) or "",  # earlier exports have none
    )


def _stats(item: _Object) -> AnswerStats:
    rates = item.number("tokens_per_s", MOST), item.number("first_token_s", MOST)
    counts = {"tokens": item.get("tokens", int), "thought_tokens": item.maybe("thought_tokens", int) or 0}
    for name, count in counts.items():
        if not 0 <= count <= MOST:
            raise item.bad(name, f"is not a number from 0 to {MOST:g}")
    virtual = item.values.get("virtual") is True
    return AnswerStats(counts["tokens"], *rates, item.get("stop_reason", str), virtual, counts["thought_tokens"])


def _quality(item: _Object) -> Rule:
    names = [field.name for field in fields(Rule) if field.name not in ("weighed", "layers")]
    given: dict[str, Any] = {name: value for name in names if (value := item.number(name, 1)) is not None}
    if "sparsity" not in given:
        raise item.bad("sparsity", "is missing")
    if item.values.get("lenient") is True:  # the name in earlier exports
        given["late"] = LATE
    return Rule(**given)


def _sampling(item: _Object, tell: Callable[[str], None]) -> Sampling:
    given: dict[str, Any] = {}
    for field in fields(Sampling):
        value = item.values.get(field.name)
        whole = ranges.SAMPLING[field.name].whole
        if value is not None and type(value) not in ((int,) if whole else (int, float)):
            raise item.bad(field.name, "is not a whole number" if whole else "is not a number")
        if value is not None and not ranges.may_be(field.name, value):
            tell(f"{item.way}.{field.name} cannot be {str(value)[:20]}; it was left out")
        elif value is not None:
            given[field.name] = value
    return Sampling(**given)
