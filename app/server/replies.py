"""Answers as OpenAI's protocol writes them, whole and in pieces, for chats and for texts that are continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..client.interface import Likely, Spelled
from ..progress import rounded
from .scheduler import End
from .spoken import Called, Text


@dataclass(slots=True)
class Calling:
    """A call as far as it has come. `written`: as the model wrote it."""

    number: str
    name: str
    arguments: str = ""
    written: str = ""
    broken: bool = False


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come.

    Attributes:
        said: its texts and calls, in order. likely: its text's tokens, if they were asked for; added: of the text added
            last; coming: of text to come.
    """

    said: list[str | Calling] = field(default_factory=list)
    thought: str = ""
    end: End | None = None
    likely: list[Likely] = field(default_factory=list)
    added: list[Likely] = field(default_factory=list)
    coming: list[Likely] = field(default_factory=list)

    def add(self, news: Text | Called) -> None:
        """More text, of the tokens that were told before it, or more of a call."""
        self.added, self.coming = self.coming, []
        if isinstance(news, Text):
            self.likely += self.added
            self.said.append(news.text)
        elif news.number:
            self.said.append(Calling(news.number, news.name))
        else:
            call = self.said[-1]
            assert isinstance(call, Calling), "it has begun"
            call.arguments, call.written = call.arguments + news.arguments, call.written + news.written
            call.broken = news.broken

    @property
    def calls(self) -> list[Calling]:
        """The calls; those that are broken are text, unless the answer was cut there."""
        return [each for each in self.said if isinstance(each, Calling) and not self._text_of(each)]

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(each if isinstance(each, str) else self._text_of(each) for each in self.said)

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        reason = self.end and self.end.reason
        return "stop" if reason == "tool_calls" and not self.calls else reason

    def _text_of(self, call: Calling) -> str:
        cut = self.end is not None and self.end.reason == "length" and call is self.said[-1]
        return call.written if call.broken and not cut else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """How the answers to one request are written.

    Attributes:
        chat: whether they are messages, else texts. model: its name. figures: whether each has its own.
    """

    chat: bool
    model: str
    figures: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def _frame(self, choices: Sequence[dict[str, Any]], *, piece: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if piece else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        frame = {"id": f"{prefix}-{self.number}", "object": kind, "created": self.created, "model": self.model}
        return {**frame, "choices": list(choices)}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All of a request's answers."""
        written = [self._written(index, choice) for index, choice in enumerate(choices)]
        ends = [choice.end for choice in choices if choice.end is not None]
        return {**self._frame(written, piece=False), "usage": usage(ends)}

    def _written(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.likely)
        common = {"index": index, "finish_reason": choice.reason, "logprobs": logprobs}
        if not self.chat:
            return {**common, "text": choice.text, **self._figures(choice.end)}
        content = (choice.text or None) if choice.calls else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        if choice.calls:
            message["tool_calls"] = [_call(call.number, call.name, call.arguments) for call in choice.calls]
        if choice.thought:
            message["reasoning_content"] = choice.thought
        return {**common, "message": message, **self._figures(choice.end)}

    def begin(self, index: int) -> dict[str, Any]:
        """The first piece of a chat's answer, which says who speaks."""
        return self._piece(index, {"role": "assistant", "content": ""})

    def more(
        self, index: int, text: str, kind: Literal["text", "thought"] = "text", likely: Sequence[Likely] = ()
    ) -> dict[str, Any]:
        """A piece, and its tokens."""
        name = "content" if kind == "text" else "reasoning_content"
        written: dict[str, Any] = {"delta": {name: text}} if self.chat else {"text": text}
        choice = {"index": index, **written, "finish_reason": None, "logprobs": self._logprobs(likely)}
        return self._frame([choice], piece=True)

    def calls(self, index: int, news: Called) -> dict[str, Any]:
        """A piece of a call: its name, or more of its arguments."""
        more: dict[str, Any] = {"function": {"arguments": news.arguments}}
        call = _call(news.number, news.name, "") if news.number else more
        return self._piece(index, {"tool_calls": [{"index": news.index, **call}]})

    def _logprobs(self, likely: Sequence[Likely]) -> dict[str, Any] | None:
        if not likely:
            return None
        if self.chat:
            each = [{**_spelled(one.token), "top_logprobs": [*map(_spelled, one.likeliest)]} for one in likely]
            return {"content": each, "refusal": None}
        return {
            "tokens": [_text(one.token) for one in likely],
            "token_logprobs": [one.token.logprob for one in likely],
            "top_logprobs": [{_text(other): other.logprob for other in one.likeliest} for one in likely],
        }

    def last(self, index: int, end: End) -> dict[str, Any]:
        """The last piece, which says why there are no more."""
        if not self.chat:
            ended = {"index": index, "text": "", "finish_reason": end.reason, "logprobs": None}
            return self._frame([{**ended, **self._figures(end)}], piece=True)
        return self._piece(index, {}, end)

    def used(self, ends: Sequence[End]) -> dict[str, Any]:
        """The piece that counts tokens, after all others."""
        return {**self._frame([], piece=True), "usage": usage(ends)}

    def _piece(self, index: int, delta: dict[str, Any], end: End | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": end and end.reason, "logprobs": None}
        return self._frame([{**choice, **self._figures(end)}], piece=True)

    def _figures(self, end: End | None) -> dict[str, Any]:
        if end is None or not self.figures:
            return {}
        stats = end.stats
        figures = {
            "preset": end.preset,
            "first_token_s": stats.first_token_s,
            "prefill_tokens_per_s": stats.prefill_tps,
            "decode_tokens_per_s": stats.decode_tps_mean,
            "active_neurons": stats.active_neurons,
            "bytes_per_token": stats.bytes_per_token,
            "reused_tokens": stats.reused_tokens,
            "rows": None if stats.rows is None else asdict(stats.rows),
        }
        return {"floe": rounded(figures)}


def _call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(token: Spelled) -> str:
    return token.written.decode("utf-8", "replace")


def _spelled(token: Spelled) -> dict[str, Any]:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.written)}


def usage(ends: Sequence[End]) -> dict[str, Any]:
    """Tokens of a request: those of its prompt once, if all answers have the same."""
    prompt = (ends[0].stats.prompt_tokens if ends else None) or 0
    new, accepted = sum(end.stats.new_tokens for end in ends), sum(end.stats.accepted for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min((end.stats.reused_tokens for end in ends), default=0)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.thought for end in ends),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(end.stats.drafted for end in ends) - accepted,
        },
    }
