"""An answer's text as it comes, in parts: what the model thinks, what it answers, and the tools that it calls.

Two conventions are known. With tags, thinking is one block at the front ("<think>…</think>"), and calls stand in the
answer. With channels (harmony), special tokens begin and end messages, and a message's header names its channel and
whom it is for. `convention.py` finds out which one a model has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from .calls import CallForm, Named, arguments_of

_LONGEST_GAP = 4_000  # characters; calls that begin otherwise are read when they are complete
_GAP = re.compile(r'(?:\[TOOL_CALLS\]|<｜tool▁call▁end｜>|[\s\[\]},`]|"id"\s*:\s*"[^"]*")*')
_STRUCTURE = re.compile(r'[{}\[\]"\\]')

Piece = tuple[str, str, str, bool, str]
"""Raw text, the function's name, more of its arguments, whether more of the call follows, and what is wrong with it."""


class LiveCalls:
    """The calls between a form's marks.

    Attributes:
        begun: whether a call's name is known.
    """

    def __init__(self, form: CallForm) -> None:
        self._form, self._lead = form, form.open
        self._told = 0  # characters of the text that pieces have
        self._name, self._arguments = "", ""
        self._object = _Object()
        self._count = 0
        self._new = list[Piece]()  # found, and not returned yet
        self.begun = False

    def feed(self, text: str) -> list[Piece]:
        """What is certain of all the text after the first mark so far."""
        pieces, self._new = self._new, []
        while len(text) > self._told:
            if not self._name or self._object.ended:
                found = self._form.head.match(text, self._gap(text))
                if found is None:
                    break
                before = text[self._told : found.start()]
                if ended := self._end(before):
                    pieces, before = pieces + ended, ""
                self._name, self._object, self._arguments = found[found.lastindex or 0], _Object(), ""
                self._count, self.begun = self._count + 1, True
                pieces.append((self._lead + before + found[0], self._name, "", True, ""))
                self._lead, self._told = "", found.end()
            else:
                end = self._object.feed(text, self._told)
                piece, self._told = text[self._told : end], end
                self._arguments += piece
                pieces.append((piece, self._name, piece, True, ""))
        return pieces

    def end(self, text: str, at: int) -> int:
        """Where the calls end in all the text so far, whose first closing mark is `at`: at the first one that is not
        in a quoted text; -1: nowhere.
        """
        if at >= 0:
            at = text.find(self._form.close, max(at, self._told))  # those before are quoted
        while at >= 0:
            self._new = self.feed(text[:at])
            if not (self.begun and self._object.quoted):
                break
            at = text.find(self._form.close, at + 1)
        return at

    def finish(self, text: str, close: str) -> tuple[list[Piece], str]:
        """The rest of all the text up to the mark `close`, "" for the answer's end, and what is no call at its end."""
        rest = text[self._told :]
        if not self._object.ended:
            return [(rest + close, self._name, "", False, "It ends inside of its arguments.")], ""
        others = self._others(text)
        after = "" if others or close else text[self._gap(text) :]
        pieces = self._end(rest.removesuffix(after) + close)
        return [*pieces, *(("", name, arguments, False, "") for name, arguments in others)], after

    def _gap(self, text: str) -> int:
        """Where what follows the last piece begins, after blanks, brackets and marks."""
        found = _GAP.match(text, self._told, self._told + _LONGEST_GAP)
        return found.end() if found is not None else self._told

    def _others(self, text: str) -> list[Named]:
        """Calls that began in another way."""
        try:
            return self._form.read(text)[self._count :]
        except (ValueError, RecursionError):
            return []

    def _end(self, raw: str) -> list[Piece]:
        """The end of the call before, if there is one."""
        if not self._name:
            return []
        return [(raw, self._name, "", False, wrong_with(self._arguments))]


def wrong_with(arguments: str) -> str:
    """Why these arguments are no JSON object, or ""."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return str(error).partition("\n")[0] or "It is nested too deeply."
    return "" if isinstance(found, dict) else "Its arguments are no JSON object."


class _Object:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth, self.quoted = 0, False
        self._skip = -1  # the place of an escaped character
        self.ended = False

    def feed(self, text: str, start: int) -> int:
        """Where it ends in `text`, looked through from `start`; the text's end if it goes on."""
        for found in _STRUCTURE.finditer(text, start):
            mark, at = found[0], found.start()
            if at == self._skip:
                continue
            if mark == "\\":
                self._skip = at + 1
            elif mark == '"':
                self.quoted = not self.quoted
            elif not self.quoted:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self.ended = True
                    return found.end()
        return len(text)


Kind = Literal["thinking", "answer", "call"]

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_LONGEST_HEADER = 300  # characters; a longer one is an answer whose header is missing
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")


class Mark(str):
    """A token of the model's own between pieces of text: text that spells the same is no mark."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    Attributes:
        text: as the model wrote it, a call with the marks around it.
        name, arguments: of a call; the arguments are a JSON object.
        trouble: why an answer's text that begins as a call is none, or a call in pieces is broken.
        more: whether more of the call follows. Where calls come in pieces, each has a part of the arguments.
    """

    kind: Kind
    text: str
    name: str = ""
    arguments: str = ""
    trouble: str = ""
    more: bool = False


class Parser(Protocol):
    """Splits one answer. The texts of all parts are the answer, without marks of thinking and blanks beside those."""

    @property
    def thinking(self) -> bool:
        """Whether the next text is likely to be thinking."""
        ...

    def feed(self, pieces: Iterable[str]) -> list[Part]:
        """The parts that are certain after more text."""
        ...

    def finish(self) -> list[Part]:
        """The rest: no more text comes."""
        ...


class TagParser:
    """The convention of tags. `tags` around thinking, or None; `opened`: the prompt ends inside of them. `live`: calls
    come in pieces.
    """

    def __init__(
        self,
        tags: tuple[str, str] | None,
        forms: Sequence[CallForm] = (),
        *,
        opened: bool = False,
        live: bool = False,
    ) -> None:
        self._open, self._close = tags or ("", "")
        self._state = "thinking" if opened else "begins" if tags else "answer"
        self._text = ""
        self._blank = True  # whether there was no thinking yet
        self._answer = _AnswerText(forms, live=live)

    @property
    def thinking(self) -> bool:
        return self._state == "thinking"

    def feed(self, pieces: Iterable[str]) -> list[Part]:
        self._text += "".join(pieces)
        parts: list[Part] = []
        if self._state == "begins":
            begun = self._text.lstrip()
            if begun.startswith(self._open):
                self._state, self._text = "thinking", begun[len(self._open) :]
            elif not self._open.startswith(begun):
                self._state = "answer"
        if self._state == "thinking":
            parts += self._think()
        if self._state == "ends" and self._text.strip():
            self._state, self._text = "answer", self._text.lstrip("\r\n")
        if self._state == "answer":
            text, self._text = self._text, ""
            parts += self._answer.feed(text)
        return parts

    def finish(self) -> list[Part]:
        text, self._text = self._text, ""
        if self._state == "thinking":
            return self._thought(text.rstrip())
        return ([] if self._state == "ends" else self._answer.feed(text)) + self._answer.finish()

    def _think(self) -> list[Part]:
        text = self._text.lstrip() if self._blank else self._text
        before, closed, after = text.partition(self._close)
        if closed:
            self._state, self._text = "ends", after
            return self._thought(before.rstrip())
        certain = text[: len(text) - _may_begin(text, (self._close,))].rstrip()
        self._text = text[len(certain) :]
        return self._thought(certain)

    def _thought(self, text: str) -> list[Part]:
        self._blank = self._blank and not text
        return [Part("thinking", text)] if text else []


class _AnswerText:
    """An answer's own text, and the calls in it. In a code block a call is text."""

    def __init__(self, forms: Sequence[CallForm], *, live: bool) -> None:
        self._forms, self._live = {form.open: form for form in forms}, live
        self._form: CallForm | None = None
        self._calls: LiveCalls | None = None  # of the open form
        self._text = ""  # not certain yet; of a call, all that follows its first mark
        self._line = ""  # the line so far
        self._fence = ""

    def feed(self, text: str) -> list[Part]:
        self._text += text
        parts: list[Part] = []
        while self._text and (more := self._in_call() if self._form else self._in_text()) is not None:
            parts += more
        if self._form is None or self._calls is None:
            return parts
        held = _may_begin(self._text, (self._form.close,))
        return parts + _pieces(self._calls.feed(self._text[: len(self._text) - held]))

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._form is not None:
            parts += self._read(self._text, "")
        text, self._text = self._text, ""
        return parts + self._plain(text)

    def _in_text(self) -> list[Part] | None:
        """The text up to the next call; None: more has to come."""
        found = self._next_call()
        if found is None:
            text = self._text[: len(self._text) - _may_begin(self._text, self._forms)]
            self._text = self._text[len(text) :]
            return self._plain(text) or None
        at, self._form = found
        self._calls = LiveCalls(self._form) if self._live else None
        text, self._text = self._text[:at], self._text[at + len(self._form.open) :]
        return self._plain(text)

    def _next_call(self) -> tuple[int, CallForm] | None:
        at = 0
        line, fence = self._line, self._fence
        for piece in self._text.splitlines(keepends=True):
            line += piece
            found = [] if _fence_after(fence, line) else [(piece.find(name), name) for name in self._forms]
            for place, name in sorted(each for each in found if each[0] >= 0):
                return at + place, self._forms[name]
            if piece.endswith("\n"):
                line, fence = "", _fence_after(fence, line)
            at += len(piece)
        return None

    def _in_call(self) -> list[Part] | None:
        form = self._form
        assert form is not None, "there is a call"
        at = self._text.find(form.close) if form.close else -1
        if self._calls is not None:
            at = self._calls.end(self._text, at)
        if at >= 0:
            body, rest = self._text[:at], self._text[at + len(form.close) :]
            parts = self._read(body, form.close)
            self._text = rest
            return parts
        if not (self._calls and self._calls.begun) and form.may_be.fullmatch(self._text) is None:
            return self._read(self._text, "", "It does not begin as a call.")
        return None

    def _read(self, body: str, closed: str, trouble: str = "") -> list[Part]:
        """The calls in `body`; without any it is text, and what follows it is looked through again."""
        form, self._form = self._form, None
        calls, self._calls = self._calls, None
        assert form is not None, "there is a call"
        pieces = calls.feed(body) if calls is not None and not trouble else []
        if calls is not None and calls.begun:
            ended, after = calls.finish(body, closed)
            self._text = ""
            return [*_pieces([*pieces, *ended]), *self._plain(after)]
        if not trouble and form.close and not closed:
            trouble = "The answer ends inside of it."
        if not trouble:
            self._text = ""
            raw = form.open + body + closed
            try:
                first, *others = form.read(body)
            except (ValueError, RecursionError) as error:
                return self._plain(raw, str(error).partition("\n")[0])
            self._line += raw.rpartition("\n")[2]
            return [Part("call", raw, *first), *(Part("call", "", *call) for call in others)]
        return self._plain(form.open, trouble)

    def _plain(self, text: str, trouble: str = "") -> list[Part]:
        for piece in text.splitlines(keepends=True):
            self._line += piece
            if piece.endswith("\n"):
                self._fence, self._line = _fence_after(self._fence, self._line), ""
        return [Part("answer", text, trouble=trouble)] if text else []


def _pieces(pieces: Iterable[Piece]) -> list[Part]:
    return [Part("call", raw, name, arguments, trouble, more) for raw, name, arguments, more, trouble in pieces]


class ChannelParser:
    """The convention of channels: the prompt ends in an open header. `live`: calls come in pieces."""

    def __init__(self, *, live: bool = False) -> None:
        self._live = live
        self._header = ""
        self._kind: Kind | None = None  # None: in a header
        self._body, self._name = "", ""  # of a call
        self._said: dict[Kind, bool] = {}  # whether there was text of that kind; True: its message goes on

    @property
    def thinking(self) -> bool:
        return self._kind == "thinking"

    def feed(self, pieces: Iterable[str]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if isinstance(piece, Mark):
                parts += self._marked(piece)
            elif self._kind is None:
                self._header += piece
                parts += self._missing() if len(self._header) > _LONGEST_HEADER else []
            elif self._kind == "call":
                self._body += piece
                parts += [Part("call", piece, self._name, piece, more=True)] if self._live and piece else []
            else:
                parts += self._words(self._kind, piece)
        return parts

    def finish(self) -> list[Part]:
        unsaid = self._kind is None and not self._said and CHANNEL not in self._header
        return self._missing() if unsaid else self._end()

    def _marked(self, mark: Mark) -> list[Part]:
        if mark == MESSAGE and self._kind is None:
            channel = _CHANNEL_NAME.search(self._header)
            if (recipient := _RECIPIENT.search(self._header)) is not None:
                self._kind, self._body, self._name = "call", "", recipient[1].removeprefix("functions.")
                return [Part("call", self._head(), self._name, more=True)] if self._live else []
            self._kind = "thinking" if channel is not None and channel[1] == "analysis" else "answer"
            return []
        if mark in (CHANNEL, CONSTRAIN) and self._kind is None:
            self._header += mark
            return []
        return self._end()

    def _end(self) -> list[Part]:
        """The message has ended, and a header begins."""
        kind, self._kind = self._kind, None
        raw, self._header = self._head() + self._body, ""
        self._said = dict.fromkeys(self._said, False)
        if kind != "call":
            return []
        if self._live:
            return [Part("call", "", self._name, trouble=wrong_with(self._body))]
        try:
            return [Part("call", raw, self._name, arguments_of(self._body))]
        except (ValueError, RecursionError) as error:
            return [Part("answer", raw, trouble=str(error).partition("\n")[0])]

    def _head(self) -> str:
        """The header of a call."""
        header = self._header
        return f"{header[header.find(CHANNEL) :] if CHANNEL in header else header}{MESSAGE}"

    def _missing(self) -> list[Part]:
        """What looked like a header is an answer."""
        text, self._header, self._kind = self._header, "", "answer"
        return self._words("answer", text) if text.strip() else []

    def _words(self, kind: Kind, text: str) -> list[Part]:
        apart = "\n\n" if self._said.get(kind) is False else ""  # from an earlier message
        self._said[kind] = True
        return [Part(kind, apart + text)] if text else []


def _may_begin(text: str, tags: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `tags`."""
    most = min(len(text), max(map(len, tags), default=1) - 1)
    return next((size for size in range(most, 0, -1) if any(tag.startswith(text[-size:]) for tag in tags)), 0)


def _fence_after(fence: str, line: str) -> str:
    """The mark that ends the code block which is open after `line`, or ""."""
    found = _FENCE.match(line)
    if found is None or (fence and not found[1].startswith(fence)):
        return fence
    return "" if fence else found[1]
