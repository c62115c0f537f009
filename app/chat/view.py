"""The little that the chat's parts need of a screen: a place for messages and a text field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from textual.message_pump import MessagePump

from ...engine.events import Failed, Loaded, Stats
from ...models.errors import FloeError
from ..history import Attachment, Message


class Waiting(Protocol):
    """A queued question among the messages."""

    async def withdraw(self) -> None:
        """Take it away."""


class AnswerView(Protocol):
    """Where an answer is shown while it is written."""

    def show_progress(self, words: str) -> None:
        """Show what happens before its first token."""

    def feed(self, text: str) -> None:
        """Show more of the answer."""

    def think(self, text: str, tokens: int) -> None:
        """Show more of what the model thinks before it answers."""

    def finish(self, answer: Message) -> None:
        """No more text comes."""

    async def explain(self, problem: FloeError | Failed) -> None:
        """Show what went wrong, why, and what to do."""


class Column(AnswerView, Protocol):
    """One of several answers side by side."""

    def begin(self, answer: Message) -> None:
        """This answer is shown here, with what came of it so far."""

    def count(self, tokens: int) -> None:
        """So many tokens were written."""

    def give_up(self) -> None:
        """No answer comes here."""


class Picking(Protocol):
    """What the person does with answers side by side."""

    async def pick(self, at: int) -> None:
        """Go on with answer number `at`, from 0."""

    async def escape(self) -> None:
        """Stop those that are being written; if there are none, go back to the chat."""


class Beside(Protocol):
    """A page above the chat with several answers to one question side by side."""

    def open(self, question: str, remark: str, count: int, picking: Picking) -> Sequence[Column]:
        """Show the page, with the question, a remark on it and `count` columns."""
        ...

    def close(self) -> None:
        """Take it away."""

    def remark(self, text: str) -> None:
        """Say something to the person there."""


class Messages(AnswerView, Protocol):
    """The messages of one branch, with remarks between them; what `AnswerView` says is about the live one."""

    @property
    def live(self) -> int | None:
        """The answer that is being written here."""
        ...

    @live.setter
    def live(self, message: int | None) -> None: ...

    def welcome(self, *, demo: bool, sent: str) -> None:
        """Say in an empty chat that the demo model answers, or another one."""

    async def show(self, ids: tuple[int, ...]) -> None:
        """Show the end of a branch, or the welcome where it is empty."""

    async def change(self, ids: tuple[int, ...], *, follow: bool = True) -> None:
        """Show another state of the same branch, or another branch; with `follow` the end comes into view."""

    async def go_to(self, message: int) -> None:
        """Bring a message of the branch into view and select it."""

    def select_at(self, position: int) -> None:
        """Select the message there, if the messages have the keys."""

    def mark_horizon(self, seen: Sequence[int] | None) -> None:
        """Mark the first of the messages that the model still sees; None: it sees all."""

    async def note(self, text: str) -> None:
        """Add a remark of the program."""

    async def queue(self, text: str, note: str, files: tuple[str, ...]) -> Waiting:
        """Add a question that waits."""
        ...

    def show_thinking(self, *, opened: bool) -> None:
        """Open what the models thought, or fold it, from now on."""

    def turn_thinking(self) -> bool:
        """Open or fold what the model thought before the last answer; False if there is none."""
        ...


class Field(Protocol):
    """Where the person writes."""

    @property
    def text(self) -> str:
        """What is written."""
        ...

    @property
    def files(self) -> tuple[Attachment, ...]:
        """What is attached."""
        ...

    def put(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Replace both."""

    def take_back(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Put `text` before what was written meanwhile, and `files` beside the others."""

    def remember(self, texts: Sequence[str]) -> None:
        """These are the questions that Up brings back, the newest last."""

    def title(self, name: str, remark: str = "") -> None:
        """Show the chat's name on the frame, and what Enter does if that is unusual."""

    def measure_again(self) -> None:
        """The model has changed: count tokens again."""

    def take_focus(self) -> None:
        """Let the person write here."""


class Gauges(Protocol):
    """The panel and the bottom row. `context_used`: the tokens of the window that are shown next time."""

    context_used: int | None

    def say(self, words: str, tone: str) -> None:
        """Show the state: a few words, with a dot in the style `tone`."""

    def remark(self, text: str) -> None:
        """Say something to the person for a few seconds."""

    def key(self, action: str) -> str:
        """The key of an action as people write it."""
        ...

    def show_remote(self, host: str) -> None:
        """Show that everything is sent to `host` from now on, or nothing ("")."""

    def show_loaded(self, loaded: Loaded) -> None:
        """Show the model that answers."""

    def show_preset(self, preset: str) -> None:
        """Show the quality in force."""

    def show_stats(self, stats: Stats, *, running: bool) -> None:
        """Show newer figures; while an answer is `running`, not more often than they can be read."""

    def show_context(self, used: int | None) -> None:
        """Show at once how many tokens of the window are used."""

    def stop(self) -> None:
        """No answer runs any more, and no last figures come."""


@dataclass(frozen=True, slots=True)
class View:
    """A screen as the chat's parts see it. pump: its loop, for what happens later."""

    messages: Messages
    beside: Beside
    field: Field
    gauges: Gauges
    pump: MessagePump
