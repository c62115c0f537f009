"""One server over HTTP: its models, and its answers as updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from ....engine.events import Finished, Notice
from ....models.errors import FloeError
from ....models.hub import hub_errors
from ..interface import TextDelta, ThoughtDelta, Update
from .address import Address, Key
from .http import PASSING, body_of, is_too_long, need_plain, new_client, no_answer, not_spoken, refusal, too_long
from .meter import Meter
from .models import MOST_LIST, Offered, choose, offered
from .request import refused, without
from .stream import MOST_LINE, MOST_TEXT, NotAnAnswerError, Piece, SafeText, events, piece_of

_LIST_S = 20.0  # that a list of models may take
_FIGURES = 0.2  # seconds between two reports of figures
_TRIES = 4  # with fewer fields each time
_REASONS = {"length": "length", "max_tokens": "length"}
_GIVEN_UP = ("abort", "error")
Fields = tuple[dict[str, Any], dict[str, Any]]


class Server:
    """Asks one server, on one loop."""

    def __init__(self, address: Address, key: Key, silence: float) -> None:
        """Raises UsageError: see `new_client`."""
        self._address, self._key = address, key
        self._client = new_client(address, key, silence)
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._stopped: set[int] = set()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def stop(self, request: int) -> None:
        """Close the connection of this answer, which then ends as cancelled."""
        self._stopped.add(request)
        if request in self._running:
            self._running[request].cancel()

    async def find(self, wanted: str | None) -> Offered:
        """The model that answers. Raises FloeError: there is none, or the server cannot be asked."""
        try:
            async with self._client.stream("GET", f"{self._address.base}/models") as response:
                if response.status_code == 404 and wanted is not None:
                    return Offered(wanted)  # some servers have no list
                if not response.is_success:
                    raise await refusal(response, self._address, self._key)
                body = await body_of(response, self._address, MOST_LIST, _LIST_S)
        except PASSING as error:
            raise no_answer(error, self._address) from error
        try:
            models = offered(body)
        except ValueError as error:
            page = hub_errors.is_web_page(response)
            cause = "A web page came instead of a list of models." if page else f"To /models it answers: {error}."
            raise not_spoken(self._address, hub_errors.plain(cause)) from error
        return choose(models, wanted, self._address)

    async def answer(
        self,
        request: int,
        fields: Fields,
        meter: Meter,
        tell: Callable[[Update], None],
        refuse: Callable[[Sequence[str]], None],
    ) -> None:
        """Ask, and `tell` what comes up to `Finished`. `refuse` gets the fields that the server does not know.

        Raises:
            FloeError: no answer, or one that breaks off; what came before was told.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running[request] = task
        answer = _Answer(request, meter, tell, self._address, self._key)
        try:
            if request not in self._stopped:
                async with self._asked(fields, refuse) as response:
                    await answer.read(response)
        except asyncio.CancelledError:
            if request not in self._stopped:
                raise  # the program ends
            task.uncancel()
        except PASSING as error:
            answer.end()
            if not answer.reason:  # else nothing but the figures is missing
                raise _broken(no_answer(error, self._address), answer) from error
        except FloeError:
            answer.end()
            raise
        finally:
            del self._running[request]
        answer.end()
        reason = "cancelled" if request in self._stopped else answer.reason
        tell(Finished(request, reason, meter.stats()))

    @asynccontextmanager
    async def _asked(self, fields: Fields, refuse: Callable[[Sequence[str]], None]) -> AsyncGenerator[httpx2.Response]:
        """The response to a question; fields that the server names as unknown are left out, and it is asked again."""
        needed, others = fields
        for left in reversed(range(_TRIES)):
            url = f"{self._address.base}/chat/completions"
            async with self._client.stream("POST", url, json=needed | others) as response:
                if response.is_success:
                    need_plain(response, self._address)
                    yield response
                    return
                error = await refusal(response, self._address, self._key, str(needed["model"]))
            unknown = refused(error.cause, others) if response.status_code in (400, 422) else []
            if not unknown or not left:
                raise error
            refuse(unknown)
            others = without(others, unknown)


class _Answer:
    """Reads one answer. `reason`: why it ended."""

    def __init__(self, request: int, meter: Meter, tell: Callable[[Update], None], address: Address, key: Key) -> None:
        self._request, self._meter, self._tell = request, meter, tell
        self._address, self._key = address, key
        self._text, self._thought = SafeText(), SafeText()
        self._size = 0
        self._thoughts = 0  # tokens of thinking that were reported
        self._reported = 0.0
        self._any = False
        self.reason = ""

    @property
    def any(self) -> bool:
        """Whether a part of it came."""
        return self._any

    async def read(self, response: httpx2.Response) -> None:
        """Tell what comes, up to the end. Raises FloeError: it is no answer, or breaks off."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind == "application/json":  # it does not stream
                self._take(piece_of(await body_of(response, self._address, MOST_TEXT + MOST_LINE, 600.0)))
            elif kind == "text/event-stream":
                async for event in events(response.aiter_raw()):
                    self._take(piece_of(event))
            else:
                raise NotAnAnswerError(f"It sends {kind or 'something without a type'}.")
        except NotAnAnswerError as error:
            raise _broken(not_spoken(self._address, hub_errors.plain(f"{error}")), self) from error
        if not self.reason:
            cause = "The stream ended before the answer did: the server may have crashed."
            raise _broken(FloeError(f"{self._address.host} broke off the answer", cause, "Ask again."), self)
        if not self._meter.counted and self._any:
            cause = "The tokens of this answer are counted by its pieces, and its speed is not known."
            self._tell(Notice(f"{self._address.host} does not say how long its answer is", cause))

    def _take(self, piece: Piece) -> None:
        if piece.error:
            cause = f"It says: {hub_errors.plain(self._key.hidden_in(piece.error))}"
            if is_too_long(piece.error):
                raise _broken(too_long(self._address, cause), self)
            raise _broken(FloeError(f"{self._address.host} gave up the answer", cause, "Ask again."), self)
        before = self._meter.usage.new or 0
        self._meter.take(piece.usage)
        if piece.text or piece.thought:
            self._any = True
            self._meter.piece()
            self._size += len(piece.text) + len(piece.thought)
            if self._size > MOST_TEXT:
                raise NotAnAnswerError("It sends more text than any answer has.")
        if thought := self._thought.take(piece.thought):
            tokens = max(0, (self._meter.usage.new or 0) - before) if not piece.text else 0
            self._thoughts += tokens
            self._tell(ThoughtDelta(self._request, thought, tokens))
        if text := self._text.take(piece.text):
            self._tell(TextDelta(self._request, text))
        if piece.reason in _GIVEN_UP:
            error = FloeError(f"{self._address.host} gave up the answer", "It does not say why.", "Ask again.")
            raise _broken(error, self)
        if piece.reason == "content_filter":
            self._tell(Notice(f"{self._address.host} cut this answer", "Its filter does not let the rest pass."))
        if piece.reason:
            self.reason = _REASONS.get(piece.reason, "stop")
        self._report()

    def _report(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reported >= _FIGURES:
            self._reported = now
            self._tell(self._meter.stats())

    def end(self) -> None:
        """Tell what was held back, and how many tokens of thinking the server counted beyond those reported."""
        more = max(0, (self._meter.usage.thought or 0) - self._thoughts)
        if (thought := self._thought.take("", last=True)) or more:
            self._tell(ThoughtDelta(self._request, thought, more))
        if text := self._text.take("", last=True):
            self._tell(TextDelta(self._request, text))


def _broken(error: FloeError, answer: _Answer) -> FloeError:
    """`error`, which says so if a part of the answer came."""
    if answer.any:
        error.cause = f"{error.cause} What came so far is kept."
    return error
