"""A model's tokenizer and chat template in their own process (chat_worker.py), which can be killed at any time.

They come from the model's publisher. A template can loop for ever, a tokenizer can make its library panic or abort, and
either can allocate all memory; none of that must affect the screen, the engine or the terminal.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import errors
from ..errors import FloeError, PackError, TryAgainError, UsageError, verify_hint
from .parts import Part

_OPENING_S = 6.0  # of computing; the largest published tokenizers take two
_REQUEST_S, _CHARACTERS_PER_S = 2.0, 250_000  # of computing: at least, and for long texts
FORM = "answer's form"  # the step whose failures are blamed on who asked for a form, not on the pack
_LOOK_S = 1.0  # between two looks at how long a process has computed
_STOPPED_S = 0.05  # between two looks at whether the reply is still wanted
_SHORT = 1 << 16  # characters that are always tokenized, however short the model's tokens are
Stopped = Callable[[], bool]
"""Whether the reply is not wanted any more."""
_log = logging.getLogger("floe_chat.models")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt's token ids, and how many of the oldest messages it leaves out. `constrained`: the answer has a form,
    and `allowed` says which tokens may come.
    """

    ids: list[int]
    dropped: int
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Pushed:
    """The parts that some tokens complete, safe for a terminal, and how many of the tokens were thinking."""

    parts: tuple[Part, ...]
    thought: int


@dataclass(frozen=True, slots=True)
class TooLong:
    """Not even the last message fits, see `chat_format.TooLongError`."""

    tokens: int | None
    system: bool


@dataclass(frozen=True, slots=True)
class WrongSchema:
    """A tool's schema that cannot be followed, by the tool's number; -1: the answer's own."""

    tool: int
    why: str


class ChatProcess:
    """The tokenizer and chat template of one folder.

    A request that computes too long or ends the process raises PackError; the next one starts another process. Usable
    from several threads, one request at a time. Waiting has no limit: a machine may be busy. Where a request can be
    `stopped`, that ends its waiting with TryAgainError.

    Attributes:
        largest: the largest token id, and its text. stop_ids: tokens that end an answer. longest: characters of the
            longest token. thinking: see `chat_format.Thinking`. tools: see `ToolTalk.way`.

    Raises:
        PackError: the folder's tokenizer or template cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        try:
            opened = self._open()
            looked = self._look()
        except FloeError:
            self.close()
            raise
        self.largest: tuple[int, str] = (opened["largest"][0], opened["largest"][1])
        self.stop_ids: tuple[int, ...] = tuple(sorted({*opened["stop_ids"], *looked["ends"]}))
        self.thinking: str = looked["thinking"]
        self.tools: str = looked["tools"]
        self.longest: int = opened["longest"]
        if opened["reason"]:
            _log.info("transformers reads the tokenizer at %s: %s", folder, opened["reason"])

    def beside(self) -> ChatProcess:
        """The same in another process, which the first request starts: nothing asked there holds up an answer here."""
        other = copy.copy(self)
        other._lock, other._child = threading.Lock(), None
        return other

    def fit(
        self,
        messages: Sequence[Mapping[str, str]],
        limit: int,
        answer: str = "",
        thought: str = "",
        *,
        think: bool = True,
        begin: int | None = None,
    ) -> Fitted | TooLong:
        """As many of the latest messages as fit into `limit` tokens, see `ChatFormat.fit`.

        Args:
            messages: {"role", "content", "thought"}. answer: the beginning of the model's answer, after its `thought`.
            think: False asks for no thinking, or for less, where the template can.
            begin: the request whose answer this is: `push` decodes it from now on.

        Raises:
            UsageError: the template refuses these turns. PackError: it fails, or takes too long.
        """
        length = sum(len(text) for message in messages for text in message.values()) + len(answer) + len(thought)
        how: dict[str, Any] = {"limit": limit, "answer": answer, "thought": thought, "think": think, "begin": begin}
        return _fitted(self._ask(length, do="fit", messages=list(messages), **how))

    def whole(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        tools: Mapping[str, Any],
        schema: str,
        vocabulary: int,
        *,
        think: bool = True,
        begin: int = 0,
        stopped: Stopped | None = None,
    ) -> Fitted | TooLong | WrongSchema:
        """All of these messages, see `ChatFormat.whole`; `push` decodes their answer from now on.

        Args:
            begin: see `fit`.
            tools: "listed" as for the template; "choice": "auto", "required", or "named" with the function's name under
                "named"; "parallel": whether an answer may have several calls; "strict": names of functions whose
                arguments have to follow their schema.
            schema: of the JSON that the answer has to be; "" for any text. vocabulary: how many tokens the model has.
            think: False asks for no thinking.

        Raises:
            UsageError: the template refuses these turns, or the form cannot be followed. PackError: it fails, or takes
                too long.
        """
        length = (
            sum(len(str(value)) for message in messages for value in message.values()) + len(schema) + len(str(tools))
        )
        how = {"tools": tools, "schema": schema, "vocabulary": vocabulary, "ends": list(self.stop_ids), "think": think}
        reply = self._ask(length, stopped, do="whole", messages=list(messages), limit=limit, begin=begin, **how)
        return WrongSchema(*reply["wrong_schema"]) if "wrong_schema" in reply else _fitted(reply)

    def continued(self, text: str, limit: int, begin: int = 0, stopped: Stopped | None = None) -> Fitted | TooLong:
        """A text that the model continues, without turns: its control tokens are the model's. `push` decodes what
        follows. begin: see `fit`. Raises PackError as `fit`.
        """
        return _fitted(self._ask(len(text), stopped, do="continue", text=text, limit=limit, begin=begin))

    def count(self, text: str) -> int:
        """How many tokens a text takes. Raises PackError as `fit`."""
        return self._ask(len(text), do="count", text=text)["count"]

    def push(self, ids: Sequence[int], *, last: bool = False, most: int | None = None, request: int = 0) -> Pushed:
        """What these tokens of the answer to a request complete; with `last`, all that was held back too.

        Those that follow `most` tokens that are no thinking are left out. Raises PackError.
        """
        reply = self._ask(0, do="push", ids=list(ids), last=last, most=most, request=request)
        return Pushed(tuple(Part(**part) for part in reply["parts"]), reply["thought"])

    def spelled(self, ids: Sequence[int]) -> list[bytes]:
        """What each of these tokens writes, see `Tokens.spelled`. Raises PackError."""
        return [bytes.fromhex(each) for each in self._ask(0, do="spell", ids=list(ids))["bytes"]]

    def allowed(self, drawn: int | None, request: int = 0, stopped: Stopped | None = None) -> bytes:
        """Which tokens the answer to a request may have next, see `Constraint.allowed`.

        Raises:
            UsageError: the form cannot be followed. TryAgainError: the process that held the answer to it has ended.
        """
        return bytes.fromhex(self._ask(0, stopped, do="allow", drawn=drawn, request=request)["mask"])

    def close(self) -> None:
        """End the process; a request that runs in another thread raises."""
        self._closed = True
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def _open(self) -> dict[str, Any]:
        with self._lock:
            return self._asked(_OPENING_S, {"do": "open"})

    def _look(self) -> dict[str, Any]:
        """What trying the template out shows. Where that fails nothing is known, and the next question says why."""
        try:
            return self._ask(0, do="look")
        except FloeError as error:
            _log.info("the chat template at %s was not tried out: %s", self._folder, error)
            if self._child is None:
                self._open()
            return {"ends": (), "thinking": "never", "tools": "general"}

    def _ask(self, characters: int, stopped: Stopped | None = None, **request: Any) -> dict[str, Any]:
        while not self._lock.acquire(timeout=_LOOK_S if stopped is None else _STOPPED_S):
            if stopped is not None and stopped():
                raise _unwanted()
        try:
            if self._child is None:
                self._asked(_OPENING_S, {"do": "open"})
            return self._asked(_REQUEST_S + characters / _CHARACTERS_PER_S, request, stopped)
        finally:
            self._lock.release()

    def _asked(self, seconds: float, request: dict[str, Any], stopped: Stopped | None = None) -> dict[str, Any]:
        closed = PackError(f"The model at {self._folder} is closed", "Another one was opened.", "Ask that one.")
        if self._closed:
            raise closed
        child = self._child = self._child or _Child()
        try:
            if self._closed:  # since: `close` may not have seen this process
                raise _EndedError("tokenizer", "It was closed.")
            return child.ask(seconds, {**request, "folder": str(self._folder)}, stopped)
        except _EndedError as ended:
            self._child = None
            child.end()
            raise (closed if self._closed else ended.explained(self._folder)) from None
        except KeyboardInterrupt:  # half of the request may be in the pipe
            self._child = None
            child.end()
            raise


def _fitted(reply: Mapping[str, Any]) -> Fitted | TooLong:
    if "too_long" in reply:
        return TooLong(reply["tokens"], reply["system"])
    return Fitted(reply["ids"], reply["dropped"], reply.get("constrained", False))


def _unwanted() -> TryAgainError:
    return TryAgainError("The answer was stopped", "", "Ask again.")


def unfollowed(why: str) -> UsageError:
    """A form that no answer can be held to."""
    return UsageError("The form of the answer cannot be followed", why, "Simplify its schema.")


def most_text(limit: int, longest: int) -> int:
    """Characters beyond which no text can fit into `limit` tokens of at most `longest` characters: it need not be
    tokenized to know that."""
    return max(limit * longest, _SHORT)


def encode(folder: Path, text: str) -> list[int]:
    """Token ids of a text by the tokenizer in a folder, which may be of a base model.

    Raises:
        PackError: it has none, or one that cannot be used.
    """
    return _encoded(folder, text)["ids"]


def largest_token(folder: Path) -> tuple[int, str]:
    """The largest token id of the tokenizer in a folder, and its text. Raises PackError as `encode`."""
    number, text = _encoded(folder, "")["largest"]
    return number, text


def _encoded(folder: Path, text: str) -> dict[str, Any]:
    child = _Child()
    try:
        seconds = _OPENING_S + len(text) / _CHARACTERS_PER_S
        return child.ask(seconds, {"do": "encode", "folder": str(folder), "text": text})
    except _EndedError as ended:
        raise ended.explained(folder) from None
    finally:
        child.end()


class _EndedError(Exception):
    """The process ended instead of answering. step: what ran last. why: in words."""

    def __init__(self, step: str, why: str) -> None:
        super().__init__(why)
        self._step, self._why = step, why

    def explained(self, folder: Path) -> FloeError:
        if self._step == FORM:
            return unfollowed(self._why)
        return PackError(f"The {self._step} at {folder} cannot be used", self._why, verify_hint(folder))


class _Child:
    """One process, and a thread that reads what it answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: never import from the current folder, which may be a downloaded one.
            [sys.executable, "-P", "-W", "ignore", "-m", f"{__package__}.chat_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic would be drawn over the screen
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"},
            start_new_session=True,  # Ctrl+C is for the program, not for this
        )
        self.number = self._process.pid
        self._requests = 0
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="floe-chat-format", daemon=True).start()

    def ask(self, seconds: float, request: dict[str, Any], stopped: Stopped | None = None) -> dict[str, Any]:
        """The reply to a request, within a limit of computing time.

        Raises:
            FloeError: as the process says, or it is not wanted any more. _EndedError: it ended.
        """
        step, begun = "tokenizer", self._computed()
        self._requests += 1
        assert self._process.stdin is not None
        try:
            send(self._process.stdin, {**request, "number": self._requests, "seconds": seconds})
            while True:
                try:
                    reply = self._replies.get(timeout=_LOOK_S if stopped is None else _STOPPED_S)
                except queue.Empty:
                    if stopped is not None and stopped():
                        raise _unwanted() from None
                    # The process lets its kernel end it; this is for systems whose kernel cannot.
                    if self._computed() - begun > seconds + _LOOK_S:
                        self._process.kill()
                        raise _EndedError(step, _too_long(seconds)) from None
                    continue
                if reply is None:
                    raise _EndedError(step, self._why(seconds))
                if reply["number"] != self._requests:  # to an earlier request, which was not waited for
                    continue
                if "error" in reply:
                    raise getattr(errors, reply["error"])(reply["title"], reply["cause"], reply["hint"])
                if "step" not in reply:
                    return reply
                step = reply["step"]
        except (OSError, ValueError):  # a pipe whose reader is gone, or that `end` closed meanwhile
            raise _EndedError(step, self._why(seconds)) from None

    def end(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            while (reply := receive(replies)) is not None:
                self._replies.put(reply)
        self._replies.put(None)

    def _computed(self) -> float:
        """Seconds of computing time so far; 0 of a process that has ended."""
        import psutil

        try:
            times = psutil.Process(self.number).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    def _why(self, seconds: float) -> str:
        code = self._process.wait()
        if code == -getattr(signal, "SIGPROF", 0):
            return _too_long(seconds)
        if code < 0:
            return f"It ended with {signal.Signals(-code).name}."
        return f"It ended with exit code {code}."


def _too_long(seconds: float) -> str:
    return f"It computed for more than {seconds:.0f} s and was stopped."


def send(pipe: BinaryIO | Any, message: Mapping[str, Any]) -> None:
    """Write a message. Raises OSError: nothing reads any more."""
    encoded = json.dumps(message).encode()
    pipe.write(len(encoded).to_bytes(8, "little") + encoded)
    pipe.flush()


def receive(pipe: BinaryIO | Any) -> dict[str, Any] | None:
    """Read a message; None where there are no more."""
    size = pipe.read(8)
    if len(size) < 8:
        return None
    encoded = pipe.read(int.from_bytes(size, "little"))
    try:
        return json.loads(encoded)
    except ValueError:  # it ended in the middle
        return None
