"""The server's paths, as a Starlette application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...engine.events import Loaded, Sampling
from ...engine.quality_presets import PUBLISHED
from ..client.asking import apart
from . import openapi
from .connections import PAUSE_S, Stream, body, disconnected
from .guard import Guard
from .refusals import RefusedError
from .replies import Choice, Reply
from .requests import ChatRequest, CompletionRequest, Drawing, quality_of, read
from .scheduler import End, Likely, News, Request, Scheduler, Thought
from .spoken import Called, Text

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Counted(Collector):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        counts = self._scheduler.counts
        answers = CounterMetricFamily("floe_answers", "Answers, by how they ended.", labels=["reason"])
        for reason, number in counts.answers.copy().items():
            answers.add_metric([reason], number)
        yield answers
        for name, text, number in (
            ("floe_prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("floe_reused_tokens", "Tokens of prompts that were computed before.", counts.reused_tokens),
            ("floe_new_tokens", "Tokens of answers, thinking among them.", counts.new_tokens),
            ("floe_busy_seconds", "Seconds in which an answer was computed.", counts.seconds),
            ("floe_refused", "Requests that found the line full.", counts.refused),
        ):
            yield CounterMetricFamily(name, text, number)
        yield GaugeMetricFamily("floe_waiting", "Answers that wait.", self._scheduler.waiting)
        yield GaugeMetricFamily("floe_running", "Answers that the engine has.", self._scheduler.running)


def text(scheduler: Scheduler) -> bytes:
    """The figures of now."""
    registry = CollectorRegistry()
    registry.register(_Counted(scheduler))
    return generate_latest(registry)


_GONE = 499  # what nobody reads any more; a number that others use for it


def application(
    scheduler: Scheduler, sampling: Sampling, guard: Guard, origins: Sequence[str] = (), pause: float = PAUSE_S
) -> Starlette:
    """The application before a scheduler. sampling: where a request says nothing. origins: pages that browsers let ask.
    pause: see `PAUSE_S`.
    """
    serving = _Serving(scheduler, sampling, pause)
    cors = [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])]
    return Starlette(
        routes=[
            Route("/health", serving.health),
            Route("/v1/models", serving.models),
            Route("/v1/models/{name:path}", serving.model),
            Route("/v1/chat/completions", serving.chat, methods=["POST"]),
            Route("/v1/completions", serving.completions, methods=["POST"]),
            Route("/metrics", serving.metrics),
            Route("/openapi.json", serving.openapi),
        ],
        middleware=[*(cors if origins else []), Middleware(_Guarded, guard=guard)],
        exception_handlers={RefusedError: _refused, HTTPException: _http, ClientDisconnect: _gone, Exception: _failed},
    )


class _Guarded:
    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._guard.check(HttpRequest(scope))
            except RefusedError as refused:
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return error.response()


async def _http(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"There is no {request.scope['path'][:200]}.", 405: f"{request.method} is not for this path."}
    message = what.get(error.status_code, error.detail)
    return RefusedError(error.status_code, message, headers=error.headers).response()


async def _failed(_: HttpRequest, __: Exception) -> Response:
    return RefusedError(500, "The request failed. This is a bug in floe-chat; the log has the details.").response()


async def _gone(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=_GONE)


class _Serving:
    def __init__(self, scheduler: Scheduler, sampling: Sampling, pause: float) -> None:
        self._scheduler, self._sampling, self._pause = scheduler, sampling, pause

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_described(self._scheduler.loaded, self._scheduler.tools)]})

    async def model(self, request: HttpRequest) -> Response:
        self._need(request.path_params["name"])
        return JSONResponse(_described(self._scheduler.loaded, self._scheduler.tools))

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(text(self._scheduler), media_type=TYPE)

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(openapi.document())

    async def chat(self, request: HttpRequest) -> Response:
        asked = read(await body(request, self._pause), ChatRequest)
        return await self._answer(request, asked, [asked.turns], chat=True)

    async def completions(self, request: HttpRequest) -> Response:
        asked = read(await body(request, self._pause), CompletionRequest)
        return await self._answer(request, asked, asked.prompts, chat=False)

    async def _answer(self, request: HttpRequest, asked: Drawing, prompts: Sequence[Any], *, chat: bool) -> Response:
        loaded, floe = self._scheduler.loaded, asked.floe
        self._need(asked.model)
        sampling, peer = asked.sampling(self._sampling), request.client.host if request.client else ""
        think, client, extras = floe is None or floe.think, asked.user or peer, asked.extras(loaded.vocabulary)
        quality, form = quality_of(floe), (asked.schema, asked.tooling)
        wanted = [
            Request(given, drawn, asked.longest, asked.stops, quality, think, client, extras, *form)
            for given in prompts
            for drawn in (apart(sampling, number) for number in range(asked.n or 1))
        ]
        waiting = _Waiting(self._scheduler, wanted)
        reply = Reply(chat, loaded.model, floe is not None and floe.figures)
        if not asked.stream:
            return await waiting.whole(request, reply)
        first = await waiting.first(request)  # what cannot be answered is no stream yet
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        return Stream(waiting.pieces(reply, first, usage=usage), waiting.leave, self._pause)

    def _need(self, name: str) -> None:
        own = self._scheduler.loaded.model
        if name != own:
            message = f"There is no model {name[:200]!r} here. This server has {own!r}."
            raise RefusedError(404, message, "model", "model_not_found")


def _described(loaded: Loaded, tools: str) -> dict[str, Any]:
    return {
        "id": loaded.model,
        "object": "model",
        "created": 0,
        "owned_by": "floe-chat",
        "context_length": loaded.context_window,
        "max_model_len": loaded.context_window,
        "floe": {
            "source": loaded.source,
            "widths": loaded.widths,
            "presets": loaded.presets,
            "published": [rule.name for rule in PUBLISHED],
            "preset": loaded.preset,
            "device": loaded.device,
            "backend": loaded.backend,
            "tools": tools,
        },
    }


class _Waiting:
    """The answers to one HTTP request, as they come from the scheduler.

    Raises:
        RefusedError: the line is full.
    """

    def __init__(self, scheduler: Scheduler, wanted: Sequence[Request]) -> None:
        loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._left = len(wanted)

        def tell(number: int, news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._news.put_nowait, (number, news))

        self._choices = [Choice() for _ in wanted]
        self._scheduler, self._wanted = scheduler, wanted
        scheduler.take(wanted, tell)

    def leave(self) -> None:
        """Nobody wants the answers any more."""
        for request in self._wanted:
            self._scheduler.leave(request)

    async def whole(self, request: HttpRequest, reply: Reply) -> Response:
        """All of the answers at once. Raises RefusedError: one failed."""
        gone = asyncio.ensure_future(disconnected(request))
        collected = asyncio.ensure_future(self._collect())
        try:
            await asyncio.wait((gone, collected), return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=_GONE)
            collected.result()
            return _json(reply.whole(self._choices))
        finally:
            self.leave()
            gone.cancel()
            collected.cancel()

    async def _collect(self) -> None:
        while self._left:
            number, news = await self._news.get()
            self._take(number, news)

    def _take(self, number: int, news: News) -> None:
        choice = self._choices[number]
        match news:
            case Text() | Called():
                choice.add(news)
            case Thought(text):
                choice.thought += text
            case Likely():
                choice.coming.append(news)
            case End():
                choice.end, self._left = news, self._left - 1
            case RefusedError():
                raise news

    async def first(self, request: HttpRequest) -> tuple[int, News]:
        """The first news. Raises RefusedError: there is no answer. ClientDisconnect."""
        gone, first = asyncio.ensure_future(disconnected(request)), asyncio.ensure_future(self._news.get())
        try:
            await asyncio.wait((gone, first), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise ClientDisconnect
            if isinstance(news := first.result()[1], RefusedError):
                raise news
            return first.result()
        except BaseException:
            self.leave()
            raise
        finally:
            gone.cancel()
            first.cancel()

    async def pieces(self, reply: Reply, first: tuple[int, News], *, usage: bool) -> AsyncIterator[bytes]:
        """The answers as server-sent events."""
        begun = set[int]()
        number, news = first
        while True:
            if reply.chat and number not in begun:
                begun.add(number)
                yield _event(reply.begin(number))
            try:
                self._take(number, news)
            except RefusedError as error:
                yield _event(error.body)
                return
            match news:
                case Text(text):
                    yield _event(reply.more(number, text, likely=self._choices[number].added))
                case Thought(text):
                    if reply.chat:
                        yield _event(reply.more(number, text, "thought"))
                case Called() if news.number or news.arguments:
                    yield _event(reply.calls(number, news))
                case End():
                    yield _event(reply.last(number, news))
                case RefusedError() | Likely() | Called():
                    pass
            if not self._left:
                if usage:
                    yield _event(reply.used([choice.end for choice in self._choices if choice.end is not None]))
                break
            number, news = await self._news.get()
        yield b"data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _json(fields: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(fields), media_type="application/json")
