"""One model and its waiting line: a thread hands orders to the engine, some at a time, and tells what comes of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

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
class Order:
    """One answer that is wanted.

    Attributes:
        given: messages, or a text to continue. longest: tokens of the answer, thinking among them; None: what fits.
        quality: a preset's name, or a rule; None: the server's own. client: whom it is for: each has a turn. extras:
            see `Extras`. schema: of the JSON that the answer has to be, "" for any text. tools: that it may call.
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
    """What the desk has done so far. Of prompts, `reused_tokens` were not computed; in `seconds` answers were."""

    answers: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    refused: int = 0


class Ticket:
    """A place in the line. `tell` is called on the desk's thread, with an `End` or a `RefusedError` last."""

    def __init__(self, desk: Desk, order: Order, tell: Callable[[News], None]) -> None:
        self.order, self.tell = order, tell
        self.left = False
        self.request: int | None = None  # the client's, once it is handed over
        self._desk = desk

    def leave(self) -> None:
        """Nobody waits for the answer any more: it ends within a layer. Does nothing after its end."""
        self._desk.forget(self)


@dataclass(slots=True)
class _Served:
    """A ticket whose answer the client computes, or is going to. thought: tokens of its thinking so far."""

    ticket: Ticket
    spoken: Spoken
    preset: str
    thought: int = 0


class Desk:
    """Takes orders from any thread. `most`: orders that may wait. `together`: those that the engine has at once.

    A preset is in force for all that is computed, so only orders of one quality are handed over together.

    Attributes:
        loaded: the model. counts: see `Counts`.
    """

    def __init__(self, client: ChatClient, loaded: Loaded, most: int, together: int = MOST_TOGETHER) -> None:
        self.loaded, self.counts = loaded, Counts()
        self._client, self._most, self._together = client, most, together
        self._quality: str | Rule = loaded.preset
        self._lock = threading.Condition()
        self._lines: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the client whose turn it is first
        self._served: dict[int, _Served] = {}  # by request
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="floe-desk", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Orders in the line."""
        return sum(map(len, self._lines.values()))

    @property
    def tools(self) -> str:
        """See `ChatClient.tools`."""
        return self._client.tools

    @property
    def running(self) -> int:
        """Orders that the engine has."""
        return len(self._served)

    def take(self, orders: Sequence[Order], tell: Callable[[int, News], None]) -> list[Ticket]:
        """Take orders that belong together, all or none; `tell` gets their news with their number.

        Raises:
            RefusedError: too many wait already.
        """
        with self._lock:
            waiting, free = self.waiting, self._together - len(self._served)
            if self._closed:
                raise RefusedError(503, "The server is ending.")
            if waiting + len(orders) > self._most + free:
                self.counts.refused += 1
                message = f"{waiting} answers are waiting, and at most {self._most} may. Try again later."
                raise RefusedError(429, message, None, "queue_full", {"Retry-After": str(self._until_free(waiting))})
            tickets = [Ticket(self, order, _numbered(tell, number)) for number, order in zip(count(), orders)]
            for ticket in tickets:
                self._lines.setdefault(ticket.order.client, deque()).append(ticket)
            self._lock.notify()
        return tickets

    def _until_free(self, waiting: int) -> int:
        """Whole seconds until the line is likely to be half as long."""
        done = sum(self.counts.answers.values())
        return max(1, round(waiting / 2 * self.counts.seconds / done)) if done else 5

    def forget(self, ticket: Ticket) -> None:
        """See `Ticket.leave`."""
        with self._lock:
            ticket.left = True
            if ticket.request in self._served:
                self._client.cancel(ticket.request)
            elif ticket in (line := self._lines.get(ticket.order.client, deque())):
                line.remove(ticket)
                if not line:
                    del self._lines[ticket.order.client]

    def close(self) -> None:
        """Refuse all that waits, end the running answers, and the engine."""
        with self._lock:
            self._closed = True
            waiting = [ticket for line in self._lines.values() for ticket in line]
            self._lines.clear()
            self._client.cancel()
            self._lock.notify()
        for ticket in waiting:
            ticket.tell(RefusedError(503, "The server is ending."))
        self._thread.join(2.0)
        self._client.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._lines and not self._served and not self._closed:
                    self._lock.wait()
                if self._closed and not self._served:
                    return
            began = time.monotonic()
            try:
                while (ticket := self._next()) is not None:
                    self._begin(ticket)
                if self._served:
                    for update in self._client.poll(_LOOK_S):
                        self._hear(update)
            # The thread's border: whoever waits is told, and the next orders must not suffer.
            except Exception as error:  # noqa: BLE001
                self._client.cancel()
                self._fail(_refused(error))
            self.counts.seconds += time.monotonic() - began

    def _next(self) -> Ticket | None:
        """The next client's first ticket, whose turn comes again after all others'; None while it has to wait: another
        quality is in force, or the engine has enough.
        """
        with self._lock:
            if self._closed or not self._lines or len(self._served) >= self._together:
                return None
            client, line = next(iter(self._lines.items()))
            if self._served and self._wanted(line[0]) != self._quality:
                return None
            ticket = line.popleft()
            self._lines.move_to_end(client)
            if not line:
                del self._lines[client]
            return ticket

    def _wanted(self, ticket: Ticket) -> str | Rule:
        return ticket.order.quality or self.loaded.preset

    def _begin(self, ticket: Ticket) -> None:
        """Hand an order to the client, or say why not."""
        order = ticket.order
        try:
            if not self._served:
                self._client.poll()  # what is left of answers before
            preset = self._set_quality(self._wanted(ticket))
            how = order.sampling, order.longest or self.loaded.context_window, order.extras, order.schema, order.tools
            submitted = self._client.submit_whole(
                order.given, *how, think=order.think, stopped=lambda: ticket.left or self._closed
            )
            ticket.request = submitted.request
            with self._lock:
                self._served[ticket.request] = _Served(ticket, Spoken(order.stops, order.tools), preset)
                if ticket.left or self._closed:
                    self._client.cancel(ticket.request)
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._end(ticket, _refused(error))

    def _hear(self, update: Update) -> None:
        """Pass on what came of one answer."""
        request = getattr(update, "request", None)
        if isinstance(update, Failed) and request is None:
            self._client.cancel()
            self._fail(refusal(error_of(update)))
        if request is None or (served := self._served.get(request)) is None:
            return
        ticket, spoken = served.ticket, served.spoken
        match update:
            case ThoughtDelta(text=text, tokens=tokens):
                served.thought += tokens
                ticket.tell(Thought(text)) if text else None
            case Likely() if not spoken.over:
                ticket.tell(update)
            case TextDelta() | CallDelta():
                over = spoken.over
                for news in spoken.take(update):
                    ticket.tell(news)
                if spoken.over and not over:
                    self._client.cancel(request)
            case Finished(reason=reason, stats=stats):
                for news in spoken.end():
                    ticket.tell(news)
                if reason == "cancelled" and not spoken.over:
                    self._end(ticket, RefusedError(503, "The answer was stopped: the server is ending."))
                else:
                    self._end(ticket, End(spoken.reason(reason), stats, served.thought, served.preset))
            case Failed():
                self._end(ticket, refusal(error_of(update)))
            case _:
                pass

    def _fail(self, error: RefusedError) -> None:
        """None of those that the engine has will come."""
        for served in [*self._served.values()]:
            self._end(served.ticket, error)

    def _end(self, ticket: Ticket, last: End | RefusedError) -> None:
        with self._lock:
            if ticket.request is not None:
                self._served.pop(ticket.request, None)
            outcome = last.reason if isinstance(last, End) else "failed"
            self.counts.answers[outcome] = self.counts.answers.get(outcome, 0) + 1
            if isinstance(last, End):
                self.counts.prompt_tokens += last.stats.prompt_tokens or 0
                self.counts.reused_tokens += last.stats.reused_tokens
                self.counts.new_tokens += last.stats.new_tokens
        ticket.tell(last)

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
    """What is told of an answer that cannot be computed."""
    match error:
        case RefusedError():
            return error
        case FloeError():
            return refusal(error)
        case _:
            _log.error("an answer failed", exc_info=error)
            return RefusedError(500, "The answer failed. This is a bug in floe-chat; the log has the details.")


def _numbered(tell: Callable[[int, News], None], number: int) -> Callable[[News], None]:
    return lambda news: tell(number, news)
