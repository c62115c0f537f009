"""Makes a prompt of messages, as many of the latest as fit the model's window, and updates of the answer's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from ...models.errors import UsageError
from ...models.tokenizer.chat_process import ChatProcess, Fitted, Pushed, Stopped, TooLong, WrongSchema, most_text
from .interface import CallDelta, PromptTurn, Question, TextDelta, ThoughtDelta, Tools, Update


class TooLongPromptError(UsageError):
    """What is given does not fit the model's window."""


class FieldError(UsageError):
    """A field of a request is wrong; `field` is its name in OpenAI's protocol."""

    def __init__(self, field: str, title: str, cause: str = "", hint: str = "") -> None:
        super().__init__(title, cause, hint)
        self.field = field


def fit(chat: ChatProcess, window: int, question: Question, *, think: bool = True, begin: int | None = None) -> Fitted:
    """The prompt of as many of the latest messages as fit `window` tokens, with the beginning of the answer (`thought`,
    then `answer`).

    Raises:
        FloeError: the last message alone does not fit; the model's template refuses the turns, fails, or takes too
            long.
    """
    from ...engine import context

    limit = window - context.room_for_answer(window, question.max_new_tokens)
    offered = offered_turns(question.messages, most_text(limit, chat.longest))
    if isinstance(offered, TooLong):
        raise _too_long(offered, limit, window)
    kept, left_out = offered
    given = [{"role": m.role, "content": m.text, "thought": m.thought} for m in kept]
    fitted = chat.fit(given, limit, question.answer, question.thought, think=think, begin=begin)
    if isinstance(fitted, TooLong):
        raise _too_long(fitted, limit, window)
    return replace(fitted, dropped=fitted.dropped + left_out)


def whole(
    chat: ChatProcess,
    window: int,
    given: Sequence[PromptTurn] | str,
    tools: Tools,
    schema: str,
    vocabulary: int,
    *,
    think: bool = True,
    begin: int = 0,
    stopped: Stopped | None = None,
) -> Fitted:
    """The prompt of all these messages, or of a text to continue: nothing is left out. Others: see `ChatProcess.whole`.

    Raises:
        TooLongPromptError: it does not fit the window with one token more. FieldError: a schema cannot be followed.
            FloeError: as `fit`.
    """
    limit = window - 1
    most = most_text(limit, chat.longest)
    length = len(given) if isinstance(given, str) else sum(len(turn.text) for turn in given)
    if length > most:
        fitted = TooLong(None, system=False)
    elif isinstance(given, str):
        fitted = chat.continued(given, limit, begin, stopped)
    else:
        asked = [_message(turn) for turn in given], limit, asdict(tools), schema, vocabulary
        fitted = chat.whole(*asked, think=think, begin=begin, stopped=stopped)
    if isinstance(fitted, Fitted):
        return fitted
    if isinstance(fitted, WrongSchema):
        field = "response_format.json_schema.schema" if fitted.tool < 0 else f"tools[{fitted.tool}].function.parameters"
        raise FieldError(field, "The schema cannot be followed", f"{fitted.why.rstrip('.')}.", "Simplify it.")
    counted = f"It takes {fitted.tokens:,} tokens. " if fitted.tokens else ""
    raise TooLongPromptError(
        "The prompt is too long for the model's context window",
        f"{counted}The window holds {window:,} tokens, for prompt and answer.",
        "Send fewer messages, or shorter ones.",
    )


def updates_of(request: int, pushed: Pushed, *, calls: bool) -> list[Update]:
    """The updates about new parts of an answer. `calls`: those of tools come apart from the text."""
    thought = "".join(part.text for part in pushed.parts if part.kind == "thinking")
    found: list[Update] = [ThoughtDelta(request, thought, pushed.thought)] if thought or pushed.thought else []
    for called, parts in groupby(pushed.parts, lambda part: calls and part.kind == "call"):
        if called:
            found += (CallDelta(request, p.name, p.arguments, p.text, p.more, p.trouble) for p in parts)
        elif answer := "".join(part.text for part in parts if part.kind != "thinking"):
            found.append(TextDelta(request, answer))
    return found


def _message(turn: PromptTurn) -> dict[str, Any]:
    calls = [{"id": call.number, "name": call.name, "arguments": call.arguments} for call in turn.calls]
    return {"role": turn.role, "content": turn.text, "thought": turn.thought, "calls": calls, "answers": turn.answers}


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
