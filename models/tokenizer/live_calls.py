"""Calls of tools in pieces, as the model writes them."""

from __future__ import annotations

import json
import re

from .calls import CallForm, Named

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
