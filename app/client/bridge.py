"""Between the engine and the screen: the only file that turns what the engine and the history report into Textual's
messages.

Nothing here waits: the engine's events wake the screen's thread, which posts them as messages. When nothing happens,
nothing runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from contextlib import suppress

from textual.message import Message
from textual.message_pump import MessagePump

from ...engine.events import Failed, Finished, Loaded, NewTokens, Stats, Unloaded
from ..background import later
from ..history import Answer, History, HistoryEvent
from ..text.plain_text import printable
from .interface import Client, Refused, TextDelta, ThoughtDelta, Update

_PERIOD = 0.1  # seconds between two looks; more frequent ones are not visible, and each takes time from the engine

News = Update | HistoryEvent


class Heard(Message):
    """Something happened in the engine or the history."""

    def __init__(self, news: News) -> None:
        super().__init__()
        self.news = news


class EngineBridge:
    """Starts a client, and posts what it and the history report to `target`."""

    def __init__(self, client: Client, history: History) -> None:
        self._client = client
        self._history = history
        self._recording: dict[int, Answer] = {}  # of each request that runs
        self._target: MessagePump | None = None
        self._due = False  # a look is on its way
        self._looked = -_PERIOD  # when the last one was, by `time.monotonic`

    def start(self, target: MessagePump) -> None:
        """Begin loading, and drain whenever there is something, as long as `target` exists."""
        self._target = target
        self._client.listen(self._hear)
        self._history.listen(self._hear)
        self._client.start()
        self._hear()  # the history may have been opened before

    def record(self, request: int, answer: Answer) -> None:
        """Write the text of the answer to `request` into the history as it comes."""
        self._recording[request] = answer

    def drain(self, target: MessagePump) -> None:
        """Post new events, and save the running answer's text, so that a crash does not lose it."""
        for update in merged(self._client.poll()):
            self._keep(update)
            target.post_message(Heard(update))
        for event in self._history.poll():
            target.post_message(Heard(event))

    def _keep(self, update: Update) -> None:
        match update:
            case TextDelta(request, text) if request in self._recording:
                self._recording[request].append(text)
            case ThoughtDelta(request, text, _tokens) if request in self._recording:
                self._recording[request].think(text)
            case Finished(request=request) | Failed(request=int(request)) | Refused(request=request):
                self._recording.pop(request, None)
            case _:
                pass

    def _hear(self) -> None:
        """There is something to drain; on any thread."""
        if not self._due and self._target is not None:
            self._due = True
            with suppress(RuntimeError):  # the screen's loop is closed: the program ends
                self._target.call_later(self._look_soon)

    def _look_soon(self) -> None:
        # One look at a time: they cannot pile up behind a slow paint.
        wait = self._looked + _PERIOD - time.monotonic()
        if wait > 0 and self._target is not None:
            later(self._target, wait, self._look)
        else:
            self._look()

    def _look(self) -> None:
        self._looked, self._due = time.monotonic(), False
        if self._target is not None:
            self.drain(self._target)


def merged(updates: Iterable[Update]) -> list[Update]:
    """One drain's updates in order, an answer's pieces of text joined and older figures left out.

    Token ids reach the screen as text, and nothing is shown of a model that was unloaded.
    """
    found: list[Update] = []
    for update in updates:
        match update, found[-1] if found else None:
            case ((NewTokens() | Unloaded()), _):
                pass
            case TextDelta(request, text), TextDelta(last, before) if request == last:
                found[-1] = TextDelta(request, before + text)
            case ThoughtDelta(request, text, tokens), ThoughtDelta(last, before, others) if request == last:
                found[-1] = ThoughtDelta(request, before + text, others + tokens)
            case Stats(), Stats():
                found[-1] = update
            case Loaded(), _:
                # A pack's name and source are untrusted text.
                named = {"model": printable(update.model), "source": printable(update.source)}
                found.append(dataclasses.replace(update, **named))
            case _:
                found.append(update)
    return found
