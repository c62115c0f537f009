"""The process in which a model's tokenizer and chat template run: requests in on stdin, replies out on stdout.

Both are untrusted programs. Here they may loop, panic, abort or allocate all memory; the kernel ends this process
when it has computed for longer than a request allows, or refuses it memory. chat_process.py is the other end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import FloeError, TryAgainError
from ..visible import visible
from .calls import FORMS
from .chat_format import ChatFormat, TooLongError
from .chat_process import FORM, receive, send
from .holding import Held, Holding, following, wrong_schema
from .parts import Parser, Part, TagParser
from .tokens import Detokenizer, Tokens, contained

MEMORY = 1 << 30  # bytes; the largest published tokenizers take half of that
_PRIMING = 8  # tokens before an answer's rest; more than any character takes bytes
_ANSWERS = 16  # whose texts are kept; more than are computed at once


@dataclass(slots=True)
class _Answer:
    """One answer, whose tokens come. held: what it may be."""

    decoder: Detokenizer
    parser: Parser
    held: Held | None = None


class Worker:
    """Answers requests about one folder; see the methods of `ChatProcess` of the same names."""

    def __init__(self, replies: BinaryIO) -> None:
        self._replies = replies
        self._format: ChatFormat | None = None
        self._answers: dict[int, _Answer] = {}  # by request
        self._number = 0  # of what is asked, for whoever waits for its reply

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; failures are replies too."""
        self._number = request.pop("number", 0)
        return {**self._reply(request), "number": self._number}

    def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            _arm(request.pop("seconds"))
            try:
                # Any other failure here comes from the folder's files: floe-chat's own part is a few lines.
                with contained(f"The tokenizer at {request['folder']} fails", Path(request["folder"])):
                    return getattr(self, "do_" + request.pop("do"))(**request)
            finally:
                _arm(0)
        except FloeError as error:
            return {"error": type(error).__name__, "title": error.title, "cause": error.cause, "hint": error.hint}

    def do_open(self, folder: str) -> dict[str, Any]:
        self._format, self._answers = None, {}
        self._format = opened = ChatFormat(Path(folder), self._step)
        return {
            "largest": opened.tokens.largest,
            "longest": opened.tokens.longest,
            "stop_ids": opened.stop_ids,
            "reason": opened.reason,
        }

    def do_look(self, folder: str) -> dict[str, Any]:
        opened = self._opened(folder)
        return {"ends": opened.ends(), "thinking": opened.thinking(), "tools": opened.tool_talk.way}

    def do_fit(
        self,
        folder: str,
        messages: list[dict[str, str]],
        limit: int,
        answer: str,
        thought: str,
        think: bool,
        begin: int | None,
    ) -> dict[str, Any]:
        opened = self._opened(folder)
        try:
            prompt = opened.fit(messages, limit, answer, thought, think=think)
        except TooLongError as error:
            return {"too_long": True, "tokens": error.tokens, "system": error.system}
        if begin is not None:
            begun = self._begin(begin, opened.decoder(), opened.convention.parser(opened=prompt.opened))
            if answer or thought:
                begun.decoder.push(prompt.ids[-_PRIMING:])  # a decoder drops the space before its very first word
                begun.parser.feed(opened.begun(answer, thought, opened=prompt.opened))
        return {"ids": prompt.ids, "dropped": prompt.dropped}

    def do_continue(self, folder: str, text: str, limit: int, begin: int) -> dict[str, Any]:
        opened = self._opened(folder)
        self._step("tokenizer")
        ids = opened.tokens.encode(text.encode("utf-8", "replace").decode(), begun=True)
        if len(ids) > limit:
            return {"too_long": True, "tokens": len(ids), "system": False}
        self._begin(begin, opened.tokens.decoder(), TagParser(None, (), opened=False)).decoder.push(ids[-_PRIMING:])
        return {"ids": ids, "dropped": 0}

    def do_count(self, folder: str, text: str) -> dict[str, Any]:
        return {"count": len(self._opened(folder).encode_text(text))}

    def do_whole(
        self,
        folder: str,
        messages: list[dict[str, Any]],
        limit: int,
        think: bool,
        tools: dict[str, Any],
        begin: int,
        **form: Any,
    ) -> dict[str, Any]:
        opened = self._opened(folder)
        self._step("chat template")
        talk = opened.tool_talk
        self._step(FORM)
        with following():
            if (wrong := wrong_schema(tools["listed"], form["schema"])) is not None:
                return {"wrong_schema": wrong}
            holding = Holding(opened, tools, form["schema"])
        think = holding.think(wanted=think)
        try:
            prompt = opened.whole(messages, limit, tools["listed"], think=think)
        except TooLongError as error:
            return {"too_long": True, "tokens": error.tokens, "system": error.system}
        calls = talk.style.form or FORMS[0] if tools["listed"] else None
        parser = opened.convention.parser(opened=prompt.opened, calls=calls)
        begun = self._begin(begin, opened.decoder(), parser)
        if holding.needed:
            with following():
                begun.held = holding.begin(prompt, form["vocabulary"], form["ends"], think=think)
        return {"ids": prompt.ids, "dropped": 0, "constrained": holding.needed}

    def do_allow(self, folder: str, drawn: int | None, request: int) -> dict[str, Any]:
        self._step(FORM)
        if (answer := self._answers.get(request)) is None:
            cause = "The process that held it to its form has ended: another answer's form took too long."
            raise TryAgainError("The answer was interrupted", cause, "Ask again.")
        assert answer.held is not None, "the answer is free"
        with following():
            return {"mask": answer.held.allowed(drawn).hex()}

    def do_spell(self, folder: str, ids: list[int]) -> dict[str, Any]:
        tokens = self._opened(folder).tokens
        return {"bytes": [tokens.spelled(number).hex() for number in ids]}

    def do_push(self, folder: str, ids: list[int], last: bool, most: int | None, request: int) -> dict[str, Any]:
        self._step("tokenizer")
        if (answer := self._answers.get(request)) is None:  # it began in a process that has ended
            opened = self._opened(folder)
            answer = self._begin(request, opened.decoder(), opened.convention.parser(opened=False))
        parts, thought = list[Part](), 0
        for number, piece in enumerate(answer.decoder.pieces(ids)):
            if most is not None and number - thought >= most:
                break
            parts += answer.parser.feed([piece])
            thought += answer.parser.thinking
        if last:
            parts += answer.parser.finish()
            del self._answers[request]
        return {"parts": [asdict(part) for part in _joined(parts)], "thought": thought}

    def do_encode(self, folder: str, text: str) -> dict[str, Any]:
        self._step("tokenizer")
        tokens = Tokens(Path(folder))
        return {"ids": tokens.encode(text), "largest": tokens.largest}

    def _begin(self, request: int, decoder: Detokenizer, parser: Parser) -> _Answer:
        """From now on `do_push` decodes the answer to this request."""
        self._answers.pop(request, None)
        self._answers = dict([*self._answers.items()][1 - _ANSWERS :])
        self._answers[request] = begun = _Answer(decoder, parser)
        return begun

    def _opened(self, folder: str) -> ChatFormat:
        assert self._format is not None, f"{folder} is not open"
        return self._format

    def _step(self, name: str) -> None:
        send(self._replies, {"step": name, "number": self._number})


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of a kind in one, and everything safe for a terminal."""
    joined: list[Part] = []
    for part in parts:
        safe = replace(part, text=visible(part.text), name=visible(part.name), trouble=visible(part.trouble))
        if joined and joined[-1] == replace(safe, text=joined[-1].text) and part.kind != "call":
            joined[-1] = replace(safe, text=joined[-1].text + safe.text)
        else:
            joined.append(safe)
    return joined


def _arm(seconds: float) -> None:
    """Let the kernel end this process after this much computing time of all its threads; 0: never."""
    if hasattr(signal, "setitimer"):  # elsewhere the other end looks
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _confine() -> None:
    """No more memory than MEMORY, no large file written, no core dumped."""
    with suppress(ImportError):
        import resource

        for limit, most in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_FSIZE, 1 << 20),
            (resource.RLIMIT_CORE, 0),
        ):
            with suppress(OSError, ValueError):  # a system that does not know it, or a limit that is lower already
                resource.setrlimit(limit, (most, most))


def main() -> None:
    """Answer requests until stdin ends."""
    # Library output must not mix with the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _confine()
    worker = Worker(replies)
    while (request := receive(sys.stdin.buffer)) is not None:
        send(replies, worker.answer(request))


if __name__ == "__main__":
    main()
