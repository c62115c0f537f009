"""Continuing a saved conversation: which part of it the model gets, and where question and answer are saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...models.catalog import short_name
from ...models.errors import UsageError
from ..client.interface import PromptTurn
from ..history.answer import Answer
from ..history.live import History
from ..history.records import Attachment, ChatSetup, Message


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, and where it belongs.

    Attributes:
        turns: the whole conversation for `Client.submit`, this question last.
        keep: saves the question in the history. The result takes the answer's text as it comes; `finish` it (or leave
            its context) at the end.
    """

    turns: tuple[PromptTurn, ...]
    keep: Callable[[], Answer]


def ask_in(
    history: History, number: int | None, text: str, setup: ChatSetup, attachments: Sequence[Attachment] = ()
) -> Exchange:
    """A question at the end of conversation `number`, or of the last used one (None).

    `setup` says what answers: its model and preset are saved with the answer, and its system prompt replaces the
    conversation's own unless it is "". `floe-chat ask --continue` does this, then `submit(turns)`, then saves the
    answer.

    Raises:
        UsageError: there is no such conversation, or none at all. FloeError: the history cannot be read.
    """
    found = history.newest() if number is None else history.numbered(number)
    if found is None:
        raise UsageError("There is nothing to continue", "No chat is saved here yet.", "Ask without --continue.")
    branch = history.messages(history.branch(found.head))
    asked = [*turns(branch, setup.system_prompt or found.setup.system_prompt), _turn("user", text, attachments)]

    def keep() -> Answer:
        question = history.ask(found.id, found.head, text, attachments)
        return history.answering(question, short_name(setup.model), setup.preset or "")

    return Exchange(tuple(asked), keep)


def ask_anew(history: History, text: str, setup: ChatSetup, attachments: Sequence[Attachment] = ()) -> Exchange:
    """A question that begins a conversation. Never fails."""

    def keep() -> Answer:
        question = history.ask(history.begin(setup), None, text, attachments)
        return history.answering(question, short_name(setup.model), setup.preset or "")

    return Exchange((*turns((), setup.system_prompt), _turn("user", text, attachments)), keep)


def turns(branch: Sequence[Message], system_prompt: str) -> list[PromptTurn]:
    """A branch as the model gets it: the system prompt if there is one, then user and assistant in turn.

    A question without an answer, or with a blank one, is left out: chat templates require the roles to alternate.
    """
    kept: list[PromptTurn] = [PromptTurn("system", system_prompt)] if system_prompt else []
    question: Message | None = None
    for message in branch:
        if message.role == "user":
            question = message
        elif question is not None and message.text.strip():
            kept.append(_turn("user", question.text, question.attachments))
            kept.append(PromptTurn("assistant", message.text, message.thought))
            question = None
    return kept


def _turn(role: str, text: str, attachments: Sequence[Attachment]) -> PromptTurn:
    # The files first, so that the question stands next to where the answer begins.
    return PromptTurn(role, "\n\n".join([*(f"{file.name}:\n{file.text}" for file in attachments), text]))
