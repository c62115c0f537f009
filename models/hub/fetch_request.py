"""One request for a range of a file; tells apart the answers of a hub, its storage, and a proxy in between."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from ..errors import FloeError, HubError, TryAgainError
from . import hub_errors, hub_request
from .repository import Repo
from .repository_files import RepoFile


@dataclass(frozen=True, slots=True)
class RangeReply:
    """Bytes [start, end) of a file, as `chunks` that may end early. A server without ranges starts at 0."""

    start: int
    end: int
    chunks: AsyncIterator[bytes]


class Passing(Exception):  # noqa: N818 - not an error yet
    """A temporary failure. `wait`: seconds after which the server wants to be asked again, if it said so."""

    def __init__(self, error: FloeError, wait: float | None = None) -> None:
        super().__init__(error.title)
        self.error = error
        self.wait = wait


class Wrong(Passing):
    """A wrong answer: worth another try, but not many."""


@asynccontextmanager
async def asked(
    client: httpx2.AsyncClient, repo: Repo, file: RepoFile, start: int, end: int
) -> AsyncGenerator[RangeReply]:
    """Request bytes [start, end) of a file, always from the hub: the signed address that it redirects to soon expires.

    Raises:
        Passing: no connection, a broken one (also while chunks are read), a busy server, an expired address.
        Wrong: another file, size or range. FloeError: the hub refuses for good.
    """
    headers = repo.authorization() | {"range": f"bytes={file.start + start}-{file.start + end - 1}"}
    try:
        async with hub_request.opened(client, repo.url(file.whole.name), headers) as (response, redirects):
            await _check(response, redirects, repo, file.whole)
            first, last = _range(response, file, start, end)
            yield RangeReply(first, last, response.aiter_raw())
    except (httpx2.HTTPError, httpx2.InvalidURL, ssl.SSLError, ConnectionError) as error:
        raise Passing(hub_errors.no_connection(error, repo.endpoint)) from error


async def _check(response: httpx2.Response, redirects: list[httpx2.Headers], repo: Repo, file: RepoFile) -> None:
    if not response.is_success:
        if hub_errors.is_expired(response, repo.endpoint):
            expired = TryAgainError(
                f"The hub's storage refuses {file.name}", f"It answers with status {response.status_code}."
            )
            raise Passing(expired, hub_errors.wait_asked(response))
        body = await hub_request.short_body(response)
        error = repo.refusal(response, body)
        if hub_errors.is_passing(response):
            raise Passing(error, hub_errors.wait_asked(response))
        raise Wrong(error) if response.status_code == 416 else error
    if hub_errors.is_web_page(response):
        raise Passing(hub_errors.web_page(repo.endpoint))
    try:
        hub_request.check_plain(response, repo.endpoint)
    except HubError as error:
        raise Wrong(error) from error
    linked = next((r for r in (*redirects, response.headers) if "x-linked-etag" in r), response.headers)
    etag = linked.get("x-linked-etag", "").removeprefix("W/").strip('"')
    if etag and etag != file.hash:
        raise _wrong(repo, file, "It serves a different file from the one in its listing.")
    size = hub_request.number(linked.get("x-linked-size", ""))
    if size is not None and size != file.size:
        raise _wrong(repo, file, f"Its listing says {file.size:,} bytes, its address {size:,}.")


def _range(response: httpx2.Response, file: RepoFile, start: int, end: int) -> tuple[int, int]:
    """Which bytes the answer holds."""
    if response.status_code == 206:
        told = response.headers.get("content-range", "no range")
        held = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", told)
        first, last, size = (int(held[1]), int(held[2]) + 1, held[3]) if held else (-1, -1, "")
        first, last = first - file.start, last - file.start
        if first != start or not start < last <= end or size not in ("*", str(file.whole.size)):
            raise Wrong(_other_bytes(file, f"The answer holds {hub_errors.plain(told)}."))
        return first, last
    length = response.headers.get("content-length", str(file.whole.size))
    if response.status_code != 200 or length != str(file.whole.size):
        has = hub_errors.plain(length)
        raise Wrong(_other_bytes(file, f"The answer has {has} bytes, the file {file.whole.size:,}."))
    if file.of is not None:  # fetching all of it for each stretch would be no download
        raise Wrong(_other_bytes(file, f"All of {file.whole.name} came: {response.url.host} serves no parts of files."))
    return 0, file.size


def _wrong(repo: Repo, file: RepoFile, cause: str) -> Wrong:
    return Wrong(HubError(f"{repo.endpoint} contradicts itself about {file.name}", cause, "Try again later."))


def _other_bytes(file: RepoFile, cause: str) -> HubError:
    return HubError(
        f"The wrong bytes of {file.name} arrived",
        cause,
        "Try again later; the cause may be a proxy or a mirror in between.",
    )
