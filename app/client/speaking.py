"""What the tokens of a running answer say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...engine.events import Failed, NewTokens, Sampling
from ...models.errors import FloeError
from ...models.tokenizer.chat_process import ChatProcess
from .interface import Likely, Spelled, ThoughtDelta, Update
from .prompt import updates_of


def apart(sampling: Sampling, number: int) -> Sampling:
    """How the answer with this number of several to a question is drawn: each has a seed of its own."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + number) % (1 << 63))


@dataclass(slots=True)
class Speaking:
    """An answer.

    Attributes:
        calls: whether calls of tools come apart from the text. left: tokens that it may still have; None: the engine
            counts them. stop: lets the engine end it. failed: whether the model's tokenizer did.
    """

    request: int
    chat: ChatProcess
    stop: Callable[[], None]
    calls: bool = False
    left: int | None = None
    failed: bool = False

    def text(self, ids: Sequence[int], *, last: bool = False) -> list[Update]:
        """The text of its next tokens, or `Failed` if the model's tokenizer fails."""
        if self.failed or not (ids or last):
            return []
        try:
            pushed = self.chat.push(ids, last=last, most=self.left, request=self.request)
        except FloeError as error:
            self.stop()
            self.failed = True
            return [Failed(error.title, error.cause, error.hint, self.request, error.exit_code)]
        if self.left is not None and self.left > 0:
            self.left = max(0, self.left - (len(ids) - pushed.thought))
            if self.left == 0 and not last:
                self.stop()
        return updates_of(self.request, pushed, calls=self.calls)

    def likely(self, event: NewTokens) -> list[Update]:
        """The text of each of these tokens, and before it how likely that was, unless it is thinking."""
        found = list[Update]()
        for token, chance in zip(event.ids, event.chances, strict=True):
            text = self.text([token])
            if not any(isinstance(each, ThoughtDelta | Failed) for each in text):
                spelled = self.chat.spelled([token, *(number for number, _ in chance.likeliest)])
                logprobs = chance.logprob, *(logprob for _, logprob in chance.likeliest)
                mine, *others = map(Spelled, spelled, logprobs)
                found.append(Likely(event.request, mine, tuple(others)))
            found += text
        return found
