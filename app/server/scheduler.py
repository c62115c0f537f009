"""One model and its waiting line: a thread hands requests to the engine, some at a time, and passes on what comes."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...engine.events import (
    MOST_TOGETHER,
    Extras,
    Failed,
    Finished,
    Loaded,
    PresetChanged,
    Rule,
    Sampling,
    Stats,
)
from ...models.errors import FloeError
from ..client.chat_client import ChatClient
from ..client.interface import NO_TOOLS, CallDelta, Likely, PromptTurn, TextDelta, ThoughtDelta, Tools, Update
from ..client.loading import error_of
from .refusals import RefusedError, refusal
from .spoken import Called, Spoken, Text

_LOOK_S = 0.1  # between two looks at the line and at whether the server ends, while nothing happens
_log = logging.getLogger("floe_chat.app")


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The answer is complete.

    Attributes:
        reason: "stop", "length" or "tool_calls". thought: tokens of thinking. preset: by which it was computed.
    """

    reason: str
    stats: Stats
    thought: int
    preset: str


News = Text | Thought | Called | Likely | End | RefusedError


@dataclass(slots=True)
class Counts:
    """What the scheduler has done so far. Of prompts, `reused_tokens` were not computed; in `seconds` answers were."""

    answers: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    refused: int = 0


@dataclass(eq=False, slots=True)
class Request:
    """One answer that is wanted, from the line to its end.

    Attributes:
        given: messages, or a text to continue. longest: tokens of the answer, thinking among them; None: what fits.
        quality: a preset's name, or a rule; None: the server's own. client: whom it is for: each has a turn. extras:
            see `Extras`. schema: of the JSON that the answer has to be, "" for any text. tools: that it may call.
        tell: gets its news, on the scheduler's thread, with an `End` or a `RefusedError` last. left: nobody waits for
            it any more. number: the engine's, once it is handed over. spoken: what the answer says. preset: by which
            it is computed. thought: tokens of its thinking so far.
    """

    given: Sequence[PromptTurn] | str
    sampling: Sampling
    longest: int | None
    stops: tuple[str, ...] = ()
    quality: str | Rule | None = None
    think: bool = True
    client: str = ""
    extras: Extras | None = None
    schema: str = ""
    tools: Tools = NO_TOOLS
    tell: Callable[[News], None] = field(init=False)
    left: bool = field(default=False, init=False)
    number: int | None = field(default=None, init=False)
    spoken: Spoken = field(init=False)
    preset: str = field(default="", init=False)
    thought: int = field(default=0, init=False)


class Scheduler:
    """Takes requests from any thread. `most`: that may wait. `together`: that the engine has at once.

    A preset is in force for all that is computed, so only requests of one quality are handed over together.

    Attributes:
        loaded: the model. counts: see `Counts`.
    """

    def __init__(self, client: ChatClient, loaded: Loaded, most: int, together: int = MOST_TOGETHER) -> None:
        self.loaded, self.counts = loaded, Counts()
        self._client, self._most, self._together = client, most, together
        self._quality: str | Rule = loaded.preset
        self._lock = threading.Condition()
        self._lines: OrderedDict[str, deque[Request]] = OrderedDict()  # the client whose turn it is first
        self._running: dict[int, Request] = {}  # by number
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="floe-scheduler", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return sum(map(len, self._lines.values()))

    @property
    def tools(self) -> str:
        """See `ChatClient.tools`."""
        return self._client.tools

    @property
    def running(self) -> int:
        """Requests that the engine has."""
        return len(self._running)

    def take(self, requests: Sequence[Request], tell: Callable[[int, News], None]) -> None:
        """Take requests that belong together, all or none; `tell` gets their news with their index.

        Raises:
            RefusedError: too many wait already.
        """
        with self._lock:
            waiting, free = self.waiting, self._together - len(self._running)
            if self._closed:
                raise RefusedError(503, "The server is ending.")
            if waiting + len(requests) > self._most + free:
                self.counts.refused += 1
                message = f"{waiting} answers are waiting, and at most {self._most} may. Try again later."
                raise RefusedError(429, message, None, "queue_full", {"Retry-After": str(self._until_free(waiting))})
            for index, request in enumerate(requests):
                request.tell, request.spoken = partial(tell, index), Spoken(request.stops, request.tools)
                self._lines.setdefault(request.client, deque()).append(request)
            self._lock.notify()

    def _until_free(self, waiting: int) -> int:
        """Whole seconds until the line is likely to be half as long."""
        done = sum(self.counts.answers.values())
        return max(1, round(waiting / 2 * self.counts.seconds / done)) if done else 5

    def leave(self, request: Request) -> None:
        """Nobody waits for the answer any more: it ends within a layer. Does nothing after its end."""
        with self._lock:
            request.left = True
            if request.number in self._running:
                self._client.cancel(request.number)
            elif request in (line := self._lines.get(request.client, deque())):
                line.remove(request)
                if not line:
                    del self._lines[request.client]

    def close(self) -> None:
        """Refuse all that waits, end the running answers, and the engine."""
        with self._lock:
            self._closed = True
            waiting = [request for line in self._lines.values() for request in line]
            self._lines.clear()
            self._client.cancel()
            self._lock.notify()
        for request in waiting:
            request.tell(RefusedError(503, "The server is ending."))
        self._thread.join(2.0)
        self._client.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._lines and not self._running and not self._closed:
                    self._lock.wait()
                if self._closed and not self._running:
                    return
            began = time.monotonic()
            try:
                while (request := self._next()) is not None:
                    self._begin(request)
                if self._running:
                    for update in self._client.poll(_LOOK_S):
                        self._hear(update)
            # The thread's border: whoever waits hears of it, and the next requests must not suffer.
            except Exception as error:  # noqa: BLE001
                self._client.cancel()
                self._fail(_refused(error))
            self.counts.seconds += time.monotonic() - began

    def _next(self) -> Request | None:
        """The next client's first request, whose turn comes again after all others'; None while it has to wait: another
        quality is in force, or the engine has enough.
        """
        with self._lock:
            if self._closed or not self._lines or len(self._running) >= self._together:
                return None
            client, line = next(iter(self._lines.items()))
            if self._running and self._wanted(line[0]) != self._quality:
                return None
            request = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            return request

    def _wanted(self, request: Request) -> str | Rule:
        return request.quality or self.loaded.preset

    def _begin(self, request: Request) -> None:
        """Hand a request to the client, or say why not."""
        try:
            if not self._running:
                self._client.poll()  # what is left of answers before
            request.preset = self._set_quality(self._wanted(request))
            longest = request.longest or self.loaded.context_window
            how = request.sampling, longest, request.extras, request.schema, request.tools
            submitted = self._client.submit_whole(
                request.given, *how, think=request.think, stopped=lambda: request.left or self._closed
            )
            request.number = submitted.request
            with self._lock:
                self._running[request.number] = request
                if request.left or self._closed:
                    self._client.cancel(request.number)
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._end(request, _refused(error))

    def _hear(self, update: Update) -> None:
        """Pass on what came of one answer."""
        number: int | None = getattr(update, "request", None)
        if isinstance(update, Failed) and number is None:
            self._client.cancel()
            self._fail(refusal(error_of(update)))
        if number is None or (request := self._running.get(number)) is None:
            return
        spoken = request.spoken
        match update:
            case ThoughtDelta(text=text, tokens=tokens):
                request.thought += tokens
                request.tell(Thought(text)) if text else None
            case Likely() if not spoken.over:
                request.tell(update)
            case TextDelta() | CallDelta():
                over = spoken.over
                for news in spoken.take(update):
                    request.tell(news)
                if spoken.over and not over:
                    self._client.cancel(number)
            case Finished(reason=reason, stats=stats):
                for news in spoken.end():
                    request.tell(news)
                if reason == "cancelled" and not spoken.over:
                    self._end(request, RefusedError(503, "The answer was stopped: the server is ending."))
                else:
                    self._end(request, End(spoken.reason(reason), stats, request.thought, request.preset))
            case Failed():
                self._end(request, refusal(error_of(update)))
            case _:
                pass

    def _fail(self, error: RefusedError) -> None:
        """None of those that the engine has will come."""
        for request in [*self._running.values()]:
            self._end(request, error)

    def _end(self, request: Request, last: End | RefusedError) -> None:
        with self._lock:
            if request.number is not None:
                self._running.pop(request.number, None)
            outcome = last.reason if isinstance(last, End) else "failed"
            self.counts.answers[outcome] = self.counts.answers.get(outcome, 0) + 1
            if isinstance(last, End):
                self.counts.prompt_tokens += last.stats.prompt_tokens or 0
                self.counts.reused_tokens += last.stats.reused_tokens
                self.counts.new_tokens += last.stats.new_tokens
        request.tell(last)

    def _set_quality(self, quality: str | Rule) -> str:
        """Put a preset or rule in force; the name of what is.

        Raises:
            RefusedError: this model cannot run it.
        """
        if quality == self._quality:
            return quality if isinstance(quality, str) else "Custom"
        if isinstance(quality, str):
            self._client.set_preset(quality)
        else:
            self._client.set_quality(quality)
        while True:
            for update in self._client.poll(_LOOK_S):
                match update:
                    case PresetChanged(preset):
                        self._quality = quality
                        return preset
                    case Failed():
                        field_name = "floe.preset" if isinstance(quality, str) else "floe.rule"
                        text = " ".join(filter(None, (f"{update.title}.", update.cause, update.hint)))
                        raise RefusedError(400, text, field_name, "invalid_value")
                    case _:
                        pass


def _refused(error: Exception) -> RefusedError:
    """What is said of an answer that cannot be computed."""
    match error:
        case RefusedError():
            return error
        case FloeError():
            return refusal(error)
        case _:
            _log.error("an answer failed", exc_info=error)
            return RefusedError(500, "The answer failed. This is a bug in floe-chat; the log has the details.")
