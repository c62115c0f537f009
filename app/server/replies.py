"""Answers as OpenAI's protocol writes them, whole and in pieces, for chats and for texts that are continued."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..client.interface import Likely, Spelled
from ..progress import rounded
from .desk import End


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come.

    Attributes:
        likely: its tokens, if they were asked for; added: of the text added last; coming: of text to come.
    """

    text: str = ""
    thought: str = ""
    end: End | None = None
    likely: list[Likely] = field(default_factory=list)
    added: list[Likely] = field(default_factory=list)
    coming: list[Likely] = field(default_factory=list)

    def add(self, text: str) -> None:
        """More text, of the tokens that were told before it."""
        self.text += text
        self.added, self.coming = self.coming, []
        self.likely += self.added


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
        common = {"index": index, "finish_reason": choice.end and choice.end.reason, "logprobs": logprobs}
        if not self.chat:
            return {**common, "text": choice.text, **self._figures(choice.end)}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
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


def _text(token: Spelled) -> str:
    return token.written.decode("utf-8", "replace")


def _spelled(token: Spelled) -> dict[str, Any]:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.written)}


def usage(ends: Sequence[End]) -> dict[str, Any]:
    """Tokens of a request: those of its prompt once, if all answers have the same."""
    prompt = (ends[0].stats.prompt_tokens if ends else None) or 0
    new = sum(end.stats.new_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": min((end.stats.reused_tokens for end in ends), default=0)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.thought for end in ends)},
    }
