"""Between the engine and the screen: the only file that turns the engine's events into Textual's messages.

Nothing here waits: what the engine leaves wakes the screen's thread, which posts it as messages. When nothing happens,
nothing runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from textual.message import Message
from textual.message_pump import MessagePump

from ..engine.events import (
    Failed,
    Finished,
    Loaded,
    Loading,
    Notice,
    PrefillProgress,
    PresetChanged,
    Rule,
    Sampling,
    Stats,
)
from .chat_client import ChatClient, Cost, Submitted, TextDelta, Update
from .chat_client import Message as ChatMessage
from .history import Answer, History, HistoryEvent
from .widgets.plain import printable

_PERIOD = 0.1  # seconds between two looks; more frequent ones are not visible, and each takes time from the engine


class ModelLoading(Message):
    """One step of loading began; `fraction` of the whole is done."""

    def __init__(self, step: str, fraction: float) -> None:
        super().__init__()
        self.step = step
        self.fraction = fraction


class ModelReady(Message):
    """The model answers from now on."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self.loaded = loaded


class PromptRead(Message):
    """`done` of `total` prompt tokens were read."""

    def __init__(self, request: int, done: int, total: int) -> None:
        super().__init__()
        self.request = request
        self.done = done
        self.total = total


class AnswerText(Message):
    """More text of an answer: all that came since the last one."""

    def __init__(self, request: int, text: str) -> None:
        super().__init__()
        self.request = request
        self.text = text


class AnswerFinished(Message):
    """An answer ended; `reason` is the engine's."""

    def __init__(self, request: int, reason: str, stats: Stats) -> None:
        super().__init__()
        self.request = request
        self.reason = reason
        self.stats = stats


class StatsArrived(Message):
    """Newer figures."""

    def __init__(self, stats: Stats) -> None:
        super().__init__()
        self.stats = stats


class PresetInForce(Message):
    """The engine changed the quality preset."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        self.preset = preset


class EngineNotice(Message):
    """The engine dealt with something that a person should know."""

    def __init__(self, notice: Notice) -> None:
        super().__init__()
        self.title = notice.title
        self.cause = notice.cause


class EngineFailed(Message):
    """Something went wrong; `request` is None when it was not an answer."""

    def __init__(self, failure: Failed) -> None:
        super().__init__()
        self.title = failure.title
        self.cause = failure.cause
        self.hint = failure.hint
        self.request = failure.request
        self.exit_code = failure.exit_code


class ModelNotLoaded(Message):
    """The model in `pack` could not be loaded, and the chat does without it."""

    def __init__(self, pack: Path) -> None:
        super().__init__()
        self.pack = pack


class HistoryTold(Message):
    """Something happened to the history."""

    def __init__(self, event: HistoryEvent) -> None:
        super().__init__()
        self.event = event


class EngineBridge:
    """Starts a client, posts what it and the history report to `target`, and passes the screen's wishes on.

    `by_hand` is the last quality without a name.
    """

    def __init__(self, client: ChatClient, history: History) -> None:
        self._client = client
        self._history = history
        self._recording: tuple[int, Answer] | None = None
        self._target: MessagePump | None = None
        self._due = False  # a look is on its way
        self._looked = -_PERIOD  # when the last one was, by `time.monotonic`
        self.by_hand: Rule | None = None

    @property
    def pack(self) -> Path:
        """The pack that is loaded, or being loaded."""
        return self._client.pack

    def start(self, target: MessagePump) -> None:
        """Begin loading, and drain whenever there is something, for as long as `target` lives."""
        self._target = target
        self._client.listen(self._hear)
        self._history.listen(self._hear)
        self._client.start()
        self._hear()  # the history may have been opened before

    def _hear(self) -> None:
        """There is something to drain; on any thread."""
        if not self._due and self._target is not None:
            self._due = True
            with suppress(RuntimeError):  # the screen's loop is closed: the program ends
                self._target.call_later(self._look_soon)

    def _look_soon(self) -> None:
        # One look after the other: they cannot pile up behind a slow paint.
        wait = self._looked + _PERIOD - time.monotonic()
        if wait > 0 and self._target is not None:
            self._target.set_timer(wait, self._look)
        else:
            self._look()

    def _look(self) -> None:
        self._looked, self._due = time.monotonic(), False
        if self._target is not None:
            self.drain(self._target)

    def open(self, pack: Path) -> None:
        """Let another model answer from now on."""
        self.by_hand = None
        self._client.open(pack)

    def prepare(
        self, messages: Sequence[ChatMessage], sampling: Sampling, max_new_tokens: int, answer: str = ""
    ) -> Submitted:
        """Make a prompt for an answer, or for more of `answer`, which `begin` asks for.

        Raises:
            FloeError: as `ChatClient.prepare`.
        """
        return self._client.prepare(messages, sampling, max_new_tokens, answer)

    def begin(self) -> None:
        """Let the engine write the answer that was prepared."""
        self._client.begin()

    def record(self, request: int, answer: Answer) -> None:
        """Write the text of the answer to `request` into the history as it comes."""
        self._recording = (request, answer)

    def count(self, text: str) -> int | None:
        """How many tokens `text` takes; None while the model is not ready."""
        return self._client.count(text)

    def context_of(self, messages: Sequence[ChatMessage], max_new_tokens: int) -> tuple[int, int] | None:
        """As `ChatClient.context_of`."""
        return self._client.context_of(messages, max_new_tokens)

    def costs(self) -> tuple[Cost, ...]:
        """The presets with their measured costs. Raises FloeError as `ChatClient.costs`."""
        return self._client.costs()

    def cancel(self) -> None:
        """Stop the running answer, if there is one."""
        self._client.cancel()

    def set_preset(self, preset: str) -> None:
        """Ask for another quality preset."""
        self._client.set_preset(preset)

    def set_quality(self, rule: Rule) -> None:
        """Turn the quality dial by hand."""
        self.by_hand = rule
        self._client.set_quality(rule)

    def drain(self, target: MessagePump) -> None:
        """Post what has come, and keep the running answer's text: once it is here, a crash does not lose it."""
        for message in as_messages(self._client.poll()):
            if isinstance(message, AnswerText) and self._recording and message.request == self._recording[0]:
                self._recording[1].append(message.text)
            target.post_message(message)
        for event in self._history.poll():
            target.post_message(HistoryTold(event))


def as_messages(updates: Iterable[Update]) -> list[Message]:
    """One drain's updates in order, an answer's pieces of text joined and older figures left out."""
    messages: list[Message] = []
    for update in updates:
        message = _as_message(update)
        last = messages[-1] if messages else None
        if isinstance(message, AnswerText) and isinstance(last, AnswerText) and last.request == message.request:
            last.text += message.text
        elif isinstance(message, StatsArrived) and isinstance(last, StatsArrived):
            messages[-1] = message
        elif message is not None:
            messages.append(message)
    return messages


def _as_message(update: Update) -> Message | None:
    match update:
        case TextDelta(request, text):
            return AnswerText(request, text)
        case Stats():
            return StatsArrived(update)
        case Loading(step, fraction):
            return ModelLoading(step, fraction)
        case Loaded():
            return ModelReady(_printable(update))
        case PrefillProgress(request, done, total):
            return PromptRead(request, done, total)
        case Finished(request, reason, stats):
            return AnswerFinished(request, reason, stats)
        case PresetChanged(preset):
            return PresetInForce(preset)
        case Notice():
            return EngineNotice(update)
        case Failed():
            return EngineFailed(update)
        case _:
            # Token ids reach the screen as text, and nothing is shown of a model that was let go.
            return None


def _printable(loaded: Loaded) -> Loaded:
    # A pack's name and source are whatever its maker wrote.
    return dataclasses.replace(loaded, model=printable(loaded.model), source=printable(loaded.source))
