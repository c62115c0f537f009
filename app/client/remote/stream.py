"""A server's streamed answer: server-sent events, and what each says.

Read as the HTML standard defines them (section 9.2, "Server-sent events"): lines of `data:` up to a blank line are one
event. Every line, the whole stream and the answer's text are bounded, for a server may send anything.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, TypeGuard

from ....models.private_file import loads
from ....models.visible import visible

MOST_LINE = 1 << 20  # bytes of a line: one token's event has some hundred
MOST_STREAM = 256 << 20  # bytes of an answer with everything around it
MOST_TEXT = 16 << 20  # characters of an answer and its thinking
_MOST_COUNT = 1 << 40  # tokens
_DONE = "[DONE]"
_HALF = re.compile("[\ud800-\udbff]\\Z")


class NotAnAnswerError(ValueError):
    """What came is not a streamed answer; its text says why, in a sentence."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted of an answer so far, in tokens; None where it does not say.

    Attributes:
        reused: of the prompt, those whose keys and values it had already. thought: of the new ones, for thinking.
    """

    prompt: int | None = None
    new: int | None = None
    reused: int | None = None
    thought: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of an answer. `error`: why the server gave up, or "". `reason`: why the answer ended, or ""."""

    text: str = ""
    thought: str = ""
    reason: str = ""
    usage: Usage | None = None
    error: str = ""


async def events(parts: AsyncIterable[bytes]) -> AsyncGenerator[str]:
    """The data of each event in a stream that comes in `parts`, up to [DONE]; comments are left out.

    Raises:
        NotAnAnswerError: a line or the whole is larger than any answer.
    """
    data, size = list[str](), 0
    async for line in _lines(parts):
        name, _colon, value = line.partition(":")
        if name in ("data", "error"):  # earlier llama-servers report errors by a field of their own
            data.append(value.removeprefix(" "))
            size += len(value)
            if size > MOST_LINE:
                raise NotAnAnswerError("It sends more in one event than any token has.")
        elif not line and data:
            event = "\n".join(data)
            data, size = [], 0
            if event.strip() == _DONE:
                return
            yield event
    if data and (event := "\n".join(data)).strip() != _DONE:
        yield event


async def _lines(parts: AsyncIterable[bytes]) -> AsyncGenerator[str]:
    # One growing buffer: a server may send a long line byte by byte.
    line, total = bytearray(), 0
    async for part in parts:
        total += len(part)
        *ended, rest = part.split(b"\n")
        for end in ended:
            line += end
            _need_bounded(line, total)
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
            line.clear()
        line += rest
        _need_bounded(line, total)
    if line:
        yield line.removesuffix(b"\r").decode("utf-8", "replace")


def _need_bounded(line: bytearray, total: int) -> None:
    if len(line) > MOST_LINE or total > MOST_STREAM:
        raise NotAnAnswerError("It sends more than any answer has.")


def piece_of(event: str | bytes) -> Piece:
    """What an event says, or a whole answer that came at once.

    Raises:
        NotAnAnswerError: it is not JSON, or has another form.
    """
    try:
        found: Any = loads(event)
    except ValueError as error:
        raise NotAnAnswerError("It sends something that is not JSON.") from error
    if not isinstance(found, dict):
        raise NotAnAnswerError("It sends JSON that is not an answer.")
    if (error := found.get("error")) or (found.get("object") == "error" and (error := found.get("message"))):
        return Piece(error=_words(error))
    choices = found.get("choices")
    usage = _usage(found)
    if not isinstance(choices, list):
        if usage is None and "id" not in found and not ("message" in found and "code" in found):
            raise NotAnAnswerError("It sends JSON that is not an answer.")
        return Piece(usage=usage, error=_words(found["message"]) if "message" in found else "")
    if not choices:
        return Piece(usage=usage)
    choice = choices[0]
    if not isinstance(choice, dict):
        raise NotAnAnswerError("It sends a choice without an answer.")
    said = choice.get("delta") or choice.get("message") or {}
    if not isinstance(said, dict):
        raise NotAnAnswerError("It sends a choice without an answer.")
    thought = _text(said.get("reasoning_content")) or _text(said.get("reasoning"))
    text = _text(said.get("content")) + _calls(said.get("tool_calls"))
    return Piece(text, thought, _text(choice.get("finish_reason")), usage)


def _calls(calls: object) -> str:
    """Calls of tools, which this program did not offer, as text: a name on a line of its own, and the arguments."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    found = ((_text(each.get("name")), _text(each.get("arguments"))) for each in functions if isinstance(each, dict))
    return "".join((f"\n{name} " if name else "") + arguments for name, arguments in found)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _words(error: object) -> str:
    """The words of an error object; never empty."""
    if isinstance(error, dict):
        error = error.get("message")  # pyright: ignore[reportUnknownMemberType]
    return error if isinstance(error, str) and error.strip() else "It gives no reason."


def _usage(found: dict[str, Any]) -> Usage | None:
    usage, timings = found.get("usage"), found.get("timings")
    if isinstance(usage, dict):
        before, after = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
        reused = before.get("cached_tokens") if isinstance(before, dict) else None
        thought = after.get("reasoning_tokens") if isinstance(after, dict) else usage.get("reasoning_tokens")
        return Usage(*map(_count, (usage.get("prompt_tokens"), usage.get("completion_tokens"), reused, thought)))
    if isinstance(timings, dict):  # llama-server's, with every token: `prompt_n` leaves out what was cached
        read, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
        prompt = None if read is None or cached is None else read + cached
        return Usage(prompt, _count(timings.get("predicted_n")), cached)
    return None


def _count(value: object) -> int | None:
    return value if is_count(value) else None


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a possible number of tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_COUNT


class SafeText:
    """Makes text that comes in pieces safe to show: what a piece cannot decide waits for the next one.

    Halves of a surrogate pair in two pieces become one character, halves alone U+FFFD; control characters are treated
    as the local engine does.
    """

    def __init__(self) -> None:
        self._held = ""

    def take(self, text: str, *, last: bool = False) -> str:
        """`text` after what was held, safe to show."""
        text = self._held + text
        half = None if last else _HALF.search(text)
        self._held = half[0] if half else ""
        text = text[: len(text) - len(self._held)]
        return visible(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
