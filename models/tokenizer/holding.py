"""What an answer is held to: the form of its calls and of its JSON, after its thinking."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from .call_grammar import Grammars, check, closed
from .chat_format import ChatFormat, Prompt


class Held(Protocol):
    """The form of one answer."""

    def allowed(self, drawn: int | None) -> bytes:
        """See `Constraint.allowed`."""
        ...


class Holding:
    """What one request wants. tools, schema: see `ChatProcess.whole`.

    Attributes:
        needed: whether its answer is held to anything.
    """

    def __init__(self, opened: ChatFormat, tools: Mapping[str, Any], schema: str) -> None:
        self._opened, self._tools, self._style = opened, tools, opened.tool_talk.style
        convention = opened.convention
        thinks = convention.tags is not None
        grammars = Grammars(opened.tokens.added, channels=convention.channels, thinks=thinks)
        self._first = grammars.form(self._style, tools, schema)
        self._calls = grammars.begun(self._style, tools)
        self.needed = bool(self._first or self._calls)
        self._begin = opened.tokens.added.get(convention.tags[0]) if convention.tags else None

    def think(self, *, wanted: bool) -> bool:
        """Whether the model may think: not where that begins with several tokens, and then an answer of a form."""
        return wanted and (not self._first or self._opened.convention.tags is None or self._begin is not None)

    def begin(self, prompt: Prompt, vocabulary: int, ends: Sequence[int], *, think: bool) -> Held:
        """Of the answer to a prompt. Raises UsageError: the form cannot be followed. PackError: no tokenizer for it."""
        from .constraint import CallsFirst, CallsWhenBegun, Constraint, ThinkingFirst  # which few answers need

        def made(form: str) -> Constraint:
            return Constraint(self._opened.folder, form, vocabulary, ends)

        calls = CallsWhenBegun(made(self._calls), self._spelling(), self._style.trigger) if self._calls else None
        found: Constraint | CallsFirst | CallsWhenBegun | None = calls
        if self._first:
            found = made(self._first)
            if self._tools["choice"] == "required" and self._tools["parallel"] and self._style.repeats:
                found = CallsFirst(found, calls)
        assert found is not None, "it is needed"
        begin = self._begin if think and not (prompt.opened or prompt.closed) else None
        tags = self._opened.convention.tags
        if tags is None or not (prompt.opened or begin is not None):
            return found
        return ThinkingFirst(found, self._spelling(), begin, tags[1], ends if self._first else ())

    def _spelling(self) -> Callable[[int], str]:
        decoder = self._opened.decoder()
        return lambda token: "".join(decoder.pieces([token]))


def wrong_schema(listed: Sequence[Mapping[str, Any]], schema: str) -> tuple[int, str] | None:
    """Which tool's schema cannot be followed, -1 for the answer's own, and why; None: all can."""
    return _wrong(json.dumps([tool["function"]["parameters"] for tool in listed]), schema) if listed or schema else None


@lru_cache(maxsize=8)
def _wrong(schemas: str, schema: str) -> tuple[int, str] | None:
    from .constraint import wrong_with

    for number, each in [*enumerate(json.loads(schemas)), *([(-1, json.loads(schema))] if schema else ())]:
        if wrong := wrong_with(check(each)) or (number >= 0 and wrong_with(check(closed(each)))):
            return number, wrong
    return None
