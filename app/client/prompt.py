"""Makes a prompt from messages: as many of the latest as fit the model's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...models.errors import UsageError
from ...models.tokenizer.chat_process import ChatProcess, Fitted, TooLong, most_text
from .interface import PromptTurn


class TooLongPromptError(UsageError):
    """What is given does not fit the model's window."""


def fit(
    chat: ChatProcess,
    window: int,
    messages: Sequence[PromptTurn],
    max_new_tokens: int,
    answer: str = "",
    thought: str = "",
    *,
    think: bool = True,
    begin: bool = False,
) -> Fitted:
    """The prompt of as many of the latest messages as fit `window` tokens, with the beginning of the answer (`thought`,
    then `answer`).

    Raises:
        FloeError: the last message alone does not fit; the model's template refuses the turns, fails, or takes too
            long.
    """
    from ...engine import context

    limit = window - context.room_for_answer(window, max_new_tokens)
    offered = offered_turns(messages, most_text(limit, chat.longest))
    if isinstance(offered, TooLong):
        raise _too_long(offered, limit, window)
    kept, left_out = offered
    given = [{"role": m.role, "content": m.text, "thought": m.thought} for m in kept]
    fitted = chat.fit(given, limit, answer, thought, think=think, begin=begin)
    if isinstance(fitted, TooLong):
        raise _too_long(fitted, limit, window)
    return replace(fitted, dropped=fitted.dropped + left_out)


def whole(chat: ChatProcess, window: int, given: Sequence[PromptTurn] | str, *, think: bool = True) -> Fitted:
    """The prompt of all these messages, or of a text to continue: nothing is left out.

    Raises:
        TooLongPromptError: it does not fit the window with one token more. Otherwise as `fit`.
    """
    if isinstance(given, str):
        limit = window - 1
        fitted = TooLong(None, system=False) if len(given) > most_text(limit, chat.longest) else None
        fitted = fitted or chat.continued(given, limit)
    else:
        fitted = fit(chat, window, given, 1, think=think, begin=True)
    if isinstance(fitted, Fitted) and not fitted.dropped:
        return fitted
    counted = f"It takes {fitted.tokens:,} tokens. " if isinstance(fitted, TooLong) and fitted.tokens else ""
    raise TooLongPromptError(
        "The prompt is too long for the model's context window",
        f"{counted}The window holds {window:,} tokens, for prompt and answer.",
        "Send fewer messages, or shorter ones.",
    )


def _too_long(found: TooLong, limit: int, window: int) -> TooLongPromptError:
    what = "system prompt" if found.system else "message"
    needs = "It has more text than fits" if found.tokens is None else f"The prompt takes {found.tokens:,} tokens"
    return TooLongPromptError(
        f"The {what} is too long for the model's context window",
        f"{needs}. The window holds {window:,} tokens, and {window - limit:,} of them are reserved for the answer.",
        f"Shorten the {what}, or ask for a shorter answer (--max-tokens).",
    )


def offered_turns(messages: Sequence[PromptTurn], most: int) -> tuple[Sequence[PromptTurn], int] | TooLong:
    """The latest messages of no more than `most` characters, and how many older ones are left out.

    A system message at the front stays, and a question is left out together with its answer, as `ChatFormat.fit` does.
    """
    system = messages[:1] if messages and messages[0].role == "system" else ()
    turns, first = messages[len(system) :], len(messages) - len(system)
    left = most - sum(len(message.text) for message in system)
    if left < 0:
        return TooLong(None, system=True)
    while first > 0:
        earlier = max(0, first - (1 if first == len(turns) else 2))
        left -= sum(len(message.text) for message in turns[earlier:first])
        if left < 0:
            break
        first = earlier
    return TooLong(None, system=False) if first == len(turns) > 0 else ((*system, *turns[first:]), first)
