"""Connections: nobody waits for a client that sends no request, or takes no answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .refusals import RefusedError
from .scheduler import Scheduler

MOST_BYTES = 32 << 20  # of a body
PAUSE_S = 30.0
"""Seconds: for a request's head, without any of its body, without taking any of an answer, and between requests."""
_SLOWEST = 10_000  # bytes of a body per second, beside one pause
_CUT = "cut"  # the name, in a request's state, of what cuts its connection off
_CLOSE = {"Connection": "close"}
_NO_STORE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_log = logging.getLogger("floe_chat")


class _Orderly:
    """A transport whose `close` ends what is sent, and leaves what still comes to `drain`, if that is true."""

    def __init__(self, transport: asyncio.Transport, drain: Callable[[], bool]) -> None:
        self._transport, self._drain = transport, drain
        self.draining = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """As a transport's."""
        return self.draining or self._transport.is_closing()

    def close(self) -> None:
        """As a transport's; a second call closes it at once."""
        if self.draining or self._transport.is_closing() or not self._drain():
            self._transport.close()
        else:
            self.draining = True
            self._transport.write_eof()


class Connection(H11Protocol):
    """Limits what uvicorn does not: how long a request's head may take, and how long a closed connection waits for a
    client to take what was sent. A refusal before the whole request came would be lost with the reset of the
    connection: the rest is read first, up to a limit, and thrown away.
    """

    _late: asyncio.TimerHandle | None = None
    _left = MOST_BYTES  # that are read after a refusal
    _ending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._orderly = _Orderly(transport, self._drain)
        super().connection_made(self._orderly)  # pyright: ignore[reportArgumentType]
        self.app_state = {**self.app_state, _CUT: transport.abort}
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self._orderly.draining:
            self._left -= len(data)
            if self._left < 0:
                self.transport.close()
            return
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect(nothing=True)
        if self._ending is not None:
            self._ending.cancel()

    def _drain(self) -> bool:
        """Whether the client may still be sending; it gets one pause for that."""
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        self.flow.resume_reading()
        self._ending = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
        return True

    def _expect(self, *, nothing: bool = False) -> None:
        """The rest of a head may take one pause, however often a piece of it comes."""
        idle = self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
        if nothing or not idle:
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_later()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._cut_later()

    def _cut_later(self) -> None:
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.timeout_keep_alive, self.transport.abort)


class Server(uvicorn.Server):
    """Ends the scheduler before it waits for connections: every answer hears that it ends. `pause`: see `PAUSE_S`."""

    def __init__(self, app: Starlette, scheduler: Scheduler, pause: float = PAUSE_S) -> None:
        for handler in _log.handlers:
            logging.getLogger("uvicorn").addHandler(handler)
        logging.getLogger("uvicorn").propagate = False
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="off",
                timeout_keep_alive=pause,  # pyright: ignore[reportArgumentType] - it goes to `call_later`
                timeout_graceful_shutdown=3,
                limit_concurrency=1000,
            )
        )
        self._scheduler = scheduler

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._scheduler.close)
        await super().shutdown(sockets)


async def body(request: Request, pause: float) -> bytes:
    """All of a request's body. Raises RefusedError: it is too long, or stops coming, or comes too slowly."""
    parts, size = list[bytes](), 0
    stream, begun = request.stream(), asyncio.get_running_loop().time()
    try:
        while True:
            async with asyncio.timeout_at(begun + pause + size / _SLOWEST):
                part = await anext(stream, None)
            if part is None:
                return b"".join(parts)
            size += len(part)
            if size > MOST_BYTES:
                raise RefusedError(413, f"The body has more than {MOST_BYTES >> 20} MiB.", headers=_CLOSE)
            parts.append(part)
    except TimeoutError:
        raise RefusedError(408, "The body did not come.", headers=_CLOSE) from None


async def disconnected(request: Request) -> None:
    """Return when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(Response):
    """Server-sent events. Whoever takes none of them for a `pause`, or goes, is left."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None], pause: float) -> None:
        super().__init__(media_type="text/event-stream", headers=_NO_STORE)
        del self.headers["content-length"]
        self._events, self._leave, self._pause = events, leave, pause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(Request(scope, receive)))
        sent = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
        except TimeoutError:
            # Closing it would wait for ever for the client to take what was sent.
            scope["state"][_CUT]()
            await asyncio.sleep(0)  # uvicorn learns of it before this response ends
        except OSError:
            pass  # the client is gone
        finally:
            self._leave()
            gone.cancel()
            sent.cancel()

    async def _send(self, send: Send) -> None:
        async def sending(message: dict[str, Any]) -> None:
            async with asyncio.timeout(self._pause):
                await send(message)

        await sending({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await sending({"type": "http.response.body", "body": event, "more_body": True})
        await sending({"type": "http.response.body", "body": b""})
