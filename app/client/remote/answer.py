"""One server over HTTP: its models, and its answers as updates."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib.metadata import version
from typing import Any
from urllib.request import getproxies_environment, proxy_bypass

import httpx2

from ....engine.events import Finished, Notice
from ....models.errors import AccessError, FloeError, TryAgainError, UsageError
from ....models.hub import hub_errors
from ....models.hub.hub_request import certificates, is_compressed, short_body
from ....models.private_file import loads
from ..interface import TextDelta, ThoughtDelta, Update
from .address import KEY_VARIABLE, Address, Key
from .meter import Meter
from .models import MOST_LIST, Offered, choose, offered
from .request import refused, without
from .stream import MOST_LINE, MOST_TEXT, NotAnAnswerError, Piece, SafeText, events, piece_of

# Requests to a server that answers chats, and a sentence for everything that can go wrong with one.
#
# Nothing that the server sends is trusted: compressed bodies are refused, short ones are read to 64 KB, redirects are
# not followed, so that key and chat go to the host that was named and to no other. No cookies, no .netrc.
#
# A proxy from the environment is used for https:// alone, where it sees the host's name and nothing else. Over http://
# it would read the whole chat, so none is used; and none for a server on this machine.


_CONNECT_S = 10.0
_TOO_LONG = re.compile(  # as vLLM, SGLang, llama-server (also older ones), Ollama, LM Studio and TGI say it
    r"context (length|size|window|shift)|maximum context|KV size|(is|are|prompt|input) too (long|big|large)"
    r"|too many tokens|tokens.{0,60} must be <=",
    re.IGNORECASE,
)
PASSING = (httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError, OSError)
"""What a request without an answer raises."""


def new_client(address: Address, key: Key, silence: float) -> httpx2.AsyncClient:
    """A client for this server. `silence`: seconds without a byte that end a request.

    Raises:
        UsageError: certificates or proxies in the environment cannot be used.
    """
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    headers = {"user-agent": f"floe-chat/{version('floe-chat')}", "accept-encoding": "identity"}
    if key.value:
        headers["authorization"] = f"Bearer {key.value}"
    try:
        return httpx2.AsyncClient(
            verify=certificates(),
            trust_env=False,
            proxy=proxy_for(address),
            follow_redirects=False,
            timeout=httpx2.Timeout(silence, connect=min(silence, _CONNECT_S)),
            limits=httpx2.Limits(max_keepalive_connections=0),  # a kept connection may be dead at the next question
            headers=headers,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        )
    except (OSError, ImportError, ValueError, httpx2.InvalidURL) as error:
        hint = "Check SSL_CERT_FILE, SSL_CERT_DIR, HTTPS_PROXY and ALL_PROXY; proxies must be http:// or https://."
        raise UsageError(f"{address.host} cannot be asked", hub_errors.plain(f"{error}."), hint) from error


def proxy_for(address: Address) -> str | None:
    """The proxy of the environment for this server; see above for which servers there is one."""
    if address.loopback or not address.encrypted:
        return None
    proxies = getproxies_environment()
    proxy = proxies.get("https") or proxies.get("all")
    return None if proxy is None or proxy_bypass(address.host) else proxy


async def refusal(response: httpx2.Response, address: Address, key: Key, model: str = "") -> FloeError:
    """The error for an answer whose status is not 2xx. `model`: what was asked for, "" for the list of models."""
    try:
        body = await short_body(response)
    except PASSING:
        body = b""
    said, status = said_in(body, key), response.status_code
    says = f"It says: {said}." if said else f"It answers with status {status}."
    host = address.host
    if 300 <= status < 400:
        where = hub_errors.plain(response.headers.get("location", ""))
        cause = f"It redirects to {where or 'another address'}; floe-chat does not follow, to keep key and chat here."
        return UsageError(f"{host} does not answer itself", cause, "If you trust that address, connect to it.")
    if status in (401, 403):
        hint = f"Save the server with its key, give --key-file FILE, or set {KEY_VARIABLE}."
        title = f"{host} refuses the key" if key.value else f"{host} wants a key"
        return AccessError(title, says, "Check the key and its rights." if key.value else hint)
    if status == 404:
        what = f"neither {model} nor this path" if model else "no such path"
        cause, hint = f"{address.base} has {what}. {said}".strip(), "Most servers' addresses end in /v1."
        return UsageError(f"{host} does not know what was asked for", cause, hint)
    if status == 429:
        wait = hub_errors.wait_asked(response)
        hint = f"Try again in {hub_errors.in_words(wait)}." if wait else "Try again in a while."
        return TryAgainError(f"{host} has too many requests", says, hint)
    if status == 413 or is_too_long(said):
        return too_long(address, says)
    if hub_errors.is_passing(response):
        return TryAgainError(f"{host} has a problem", says, "Try again later; its own log may say more.")
    return UsageError(f"{host} refuses the request", says, "Another model, or other sampling values, may work.")


def is_too_long(said: str) -> bool:
    """Whether a server's own words are that a chat does not fit its context."""
    return _TOO_LONG.search(said) is not None


def too_long(address: Address, says: str) -> UsageError:
    """The error for a chat that does not fit the server's context, of which it may not have said how long it is."""
    hint = "Start a new chat, shorten the question, or ask for a shorter answer (--max-tokens)."
    return UsageError(f"The chat is too long for {address.host}", says, hint)


def said_in(body: bytes, key: Key) -> str:
    """The server's own words in the body of a refusal, if it has any; plain text, without the key."""
    found: Any
    try:
        found = loads(body)
    except ValueError:
        return ""
    if isinstance(found, dict):  # OpenAI and vLLM, llama.cpp, FastAPI
        found = found.get("error", found)
    if isinstance(found, dict):
        found = found.get("message", found.get("detail"))
    if isinstance(found, list):  # pydantic's, a field each
        found = "; ".join(f"{one.get('loc')}: {one.get('msg')}" for one in found if isinstance(one, dict))
    return hub_errors.plain(key.hidden_in(found)).strip().rstrip(".") if isinstance(found, str) else ""


def no_answer(error: Exception, address: Address) -> FloeError:
    """The error for a request that got no answer, or only a part of one."""
    host, causes = address.host, list(hub_errors.chain(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(cause) for cause in causes):
        why = next((cause.verify_message for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)), "")
        cause = f"Its certificate is not valid here{f': {hub_errors.plain(why)}' if why else ''}".rstrip(".") + "."
        hint = "For a certificate of your own, set SSL_CERT_FILE to it. Nothing was sent."
        return FloeError(f"{host} cannot prove that it is {address.name}", cause, hint)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return TryAgainError(f"There is no host {address.name}", "Its name cannot be resolved.", "Check the address.")
    if isinstance(error, httpx2.ProxyError):
        plain = hub_errors.plain(f"{error}")
        return TryAgainError(f"The proxy refuses {host}", plain, "Check HTTPS_PROXY, or set NO_PROXY.")
    if isinstance(error, httpx2.ConnectTimeout):
        return TryAgainError(f"{host} does not answer", "No connection was made in time.", "Check the address.")
    if isinstance(error, httpx2.TimeoutException):
        return TryAgainError(f"{host} is silent", "Nothing came for too long.", "Try again; the server may be busy.")
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        hint = "If the server does not encrypt, its address begins with http://."
        return TryAgainError(f"{host} cannot be reached", "It does not speak TLS as expected.", hint)
    if isinstance(error, httpx2.ConnectError | ConnectionRefusedError):
        hint = "Start the server, or check host and port."
        return TryAgainError(f"{host} cannot be reached", "No server listens there.", hint)
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return UsageError(f"{host} cannot be asked", hub_errors.plain(f"{error}."), "Check the address.")
    return TryAgainError(f"{host} broke the connection", "It ended in the middle of an answer.", "Ask again.")


def need_plain(response: httpx2.Response, address: Address) -> None:
    """Raises: FloeError: the body is compressed, which was not asked for."""
    if is_compressed(response):
        raise not_spoken(address, "It sends compressed data, which was not asked for.")


def not_spoken(address: Address, cause: str) -> FloeError:
    """The error for what is not an answer of this protocol."""
    hint = "Check the address: it must be of an OpenAI-compatible server, and most end in /v1."
    return FloeError(f"{address.host} does not answer as a model server", cause, hint)


async def body_of(response: httpx2.Response, address: Address, most: int, seconds: float) -> bytes:
    """A whole body of at most `most` bytes that comes within `seconds`.

    Raises:
        FloeError: it is longer, compressed, or slower. PASSING: the connection broke.
    """
    need_plain(response, address)
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in response.aiter_raw():
                content += part
                if len(content) > most:
                    raise not_spoken(address, f"It sends more than {most:,} bytes.")
    except TimeoutError as error:
        cause = f"The answer did not come within {seconds:.0f} seconds."
        raise TryAgainError(f"{address.host} is too slow", cause, "Try again later.") from error
    return bytes(content)


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
