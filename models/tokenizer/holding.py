"""What an answer is held to: the form of its calls and of its JSON, after its thinking."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

from ..errors import FloeError
from .call_grammar import Grammars, check, closed
from .chat_format import ChatFormat, Prompt
from .chat_process import FORM, unfollowed
from .tokens import first_line


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
        # Few answers need these.
        from .constraint import CallsFirst, CallsWhenBegun, Constraint, ThinkingFirst, tokenizer

        self._opened.step("tokenizer")
        tokens = tokenizer(self._opened.folder, vocabulary, ends)
        self._opened.step(FORM)

        def made(form: str) -> Constraint:
            return Constraint(tokens, form)

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


@contextmanager
def following() -> Generator[None]:
    """Blames every failure inside on the form that was asked for. Raises UsageError."""
    try:
        yield
    except (FloeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code has no public type
        cause = "It needs more memory than it may use." if isinstance(error, MemoryError) else first_line(error)
        raise unfollowed(cause) from error


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
