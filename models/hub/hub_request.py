"""Requests to a hub and its redirect targets: one client, redirects followed here, and every answer bounded.

Nothing that the other side sends is trusted. Compressed bodies are refused: none was asked for, and 2.5 KB of one can
grow to 3 GB. Bodies of redirects and errors are read to 64 KB at most. A number in a header is a few ASCII digits.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import ssl
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib.metadata import version
from typing import Any, TypeVar

import httpx2

from ..errors import HubError, UsageError
from . import hub_errors

SILENCE_S = 20.0  # without a byte, after which a connection counts as broken
_CONNECT_S = 10.0
_SHORT = 64 << 10  # bytes read of a body for its message, or to reuse its connection
_SHORT_S = 10.0  # that such a body may take
_REDIRECTS = 10

_T = TypeVar("_T")


def new_client(endpoint: str, silence: float | None = None) -> httpx2.AsyncClient:
    """A client with the user's proxies and certificates; it follows no redirects, see `opened`.

    Args:
        endpoint: the hub's address, for errors. silence: seconds without a byte that end a request.

    Raises:
        UsageError: the certificates or the proxies in the environment cannot be used.
    """
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)  # below that they log addresses, also secret signed ones
    try:
        return httpx2.AsyncClient(
            verify=certificates(),
            follow_redirects=False,
            timeout=httpx2.Timeout(SILENCE_S if silence is None else silence, connect=_CONNECT_S),
            headers={"user-agent": f"floe-chat/{version('floe-chat')}", "accept-encoding": "identity"},
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # none are taken
        )
    except OSError as error:
        raise UsageError(
            "The certificates in SSL_CERT_FILE or SSL_CERT_DIR cannot be read",
            f"{error}.",
            "Check these variables.",
        ) from error
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise hub_errors.no_connection(error, endpoint) from error


def certificates() -> ssl.SSLContext:
    """The authorities that this system, SSL_CERT_FILE or SSL_CERT_DIR trusts. Raises OSError: they cannot be read."""
    return _certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _certificates(*_where: str | None) -> ssl.SSLContext:
    """Loaded once: loading takes long enough to be felt when a download is paused or cancelled meanwhile."""
    return httpx2.create_ssl_context()


def complete(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on a loop of its own and wait for it. Ctrl+C cancels it."""
    loop = asyncio.new_event_loop()
    try:
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
            raise
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()  # without waiting for the name server, which may take its time in a thread of the loop's


@asynccontextmanager
async def opened(
    client: httpx2.AsyncClient, url: str, headers: dict[str, str]
) -> AsyncGenerator[tuple[httpx2.Response, list[httpx2.Headers]]]:
    """The answer to a GET, its body not read yet, and the headers of the redirects that led to it.

    The token goes to the address asked and not to another host (httpx2 strips it on the way).

    Raises:
        httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError, ConnectionError: no answer.
    """
    request = client.build_request("GET", url, headers=headers)
    passed: list[httpx2.Headers] = []
    while True:
        try:
            _check_address(request.url)
            response = await client.send(request, stream=True)
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            if not passed:
                raise
            raise hub_errors.BadRedirectError("It redirects to an address that cannot be opened.") from error
        try:
            onward = response.next_request
            if onward is None:
                yield response, passed
                return
            await short_body(response)
        finally:
            await response.aclose()
        if len(passed) == _REDIRECTS:
            raise hub_errors.BadRedirectError(f"It redirects more than {_REDIRECTS} times.")
        passed.append(response.headers)
        request = onward


def _check_address(url: httpx2.URL) -> None:
    """Raises: httpx2.InvalidURL: the system cannot connect to it."""
    if not 0 < (url.port or 80) < 1 << 16:
        raise httpx2.InvalidURL(f"There is no port {url.port}.")


async def short_body(response: httpx2.Response) -> bytes:
    """A body of at most 64 KB; b"" if it is longer, compressed, or does not arrive within seconds."""
    if is_compressed(response) or (number(response.headers.get("content-length", "0")) or 0) > _SHORT:
        return b""
    content = bytearray()
    try:
        async with asyncio.timeout(_SHORT_S):
            async for part in response.aiter_raw():
                content += part
                if len(content) > _SHORT:
                    return b""
    except TimeoutError:
        return b""
    return bytes(content)


def check_plain(response: httpx2.Response, endpoint: str) -> None:
    """Raises: HubError: the body is compressed, which was not asked for."""
    if is_compressed(response):
        raise HubError(
            f"{endpoint} sends compressed data",
            "It was asked for the files as they are; a proxy in between may have compressed them.",
            "Try another network, or another mirror (HF_ENDPOINT).",
        )


def is_compressed(response: httpx2.Response) -> bool:
    """Whether the body is encoded in any way (RFC 9110, Content-Encoding)."""
    encodings = response.headers.get_list("content-encoding", split_commas=True)
    return any(encoding.strip().lower() not in ("", "identity") for encoding in encodings)


def number(text: str) -> int | None:
    """A whole number in a header; None if it is none, or too large for any file."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text, re.ASCII) else None
