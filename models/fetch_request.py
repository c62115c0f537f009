"""One request for a range of a file: what a hub, its storage, or somebody in between may answer, told apart."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2

from . import hub_errors
from .errors import FloeError, HubError, TryAgainError
from .hub import Repo
from .hub_files import RepoFile


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes [start, end) of a file, as `chunks` that may end early. A server without ranges starts at 0."""

    start: int
    end: int
    chunks: AsyncIterator[bytes]


class Passing(Exception):  # noqa: N818 - not an error yet
    """It did not work this time. `wait` is after how many seconds the server wants to be asked again, if it said so."""

    def __init__(self, error: FloeError, wait: float | None = None) -> None:
        super().__init__(error.title)
        self.error = error
        self.wait = wait


class Wrong(Passing):
    """An answer that is not what was asked for: worth another try, but not many."""


@asynccontextmanager
async def asked(client: httpx2.AsyncClient, repo: Repo, file: RepoFile, start: int, end: int) -> AsyncGenerator[Answer]:
    """Ask for bytes [start, end) of a file, always at the hub: the signed address it leads to soon expires.

    Raises:
        Passing: no connection, a broken one (also while chunks are read), a busy server, an expired address.
        Wrong: another file, size or range. FloeError: the hub refuses for good.
    """
    headers = repo.authorization() | {"range": f"bytes={start}-{end - 1}"}
    try:
        async with client.stream("GET", repo.url(file.name), headers=headers) as response:
            await _check(response, repo, file)
            first, last = _range(response, file, start, end)
            yield Answer(first, last, response.aiter_raw())
    except (httpx2.HTTPError, ssl.SSLError, ConnectionError) as error:
        raise Passing(hub_errors.no_connection(error, repo.endpoint)) from error


async def _check(response: httpx2.Response, repo: Repo, file: RepoFile) -> None:
    if not response.is_success:
        if response.url.origin != httpx2.URL(repo.endpoint).origin and "x-error-code" not in response.headers:
            expired = TryAgainError(
                f"The hub's storage refuses {file.name}", f"It answers with status {response.status_code}."
            )
            raise Passing(expired, hub_errors.wait_asked(response))
        if int(response.headers.get("content-length") or 1 << 20) < 1 << 16:
            await response.aread()
        error = hub_errors.refusal(response, repo.name, repo.endpoint, token=repo.token is not None)
        if hub_errors.is_passing(response):
            raise Passing(error, hub_errors.wait_asked(response))
        raise Wrong(error) if response.status_code == 416 else error
    if hub_errors.is_web_page(response):
        raise Passing(hub_errors.web_page(repo.endpoint))
    told = next((r.headers for r in (*response.history, response) if "x-linked-etag" in r.headers), response.headers)
    linked = told.get("x-linked-etag", "").removeprefix("W/").strip('"')
    if linked and linked != file.hash:
        raise _wrong(repo, file, "It serves another file than its listing names.")
    if (size := told.get("x-linked-size", "")).isdigit() and int(size) != file.size:
        raise _wrong(repo, file, f"Its listing says {file.size:,} bytes, its address {int(size):,}.")


def _range(response: httpx2.Response, file: RepoFile, start: int, end: int) -> tuple[int, int]:
    """Which bytes the answer holds."""
    if response.status_code == 206:
        held = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("content-range", ""))
        first, last, size = (int(held[1]), int(held[2]) + 1, held[3]) if held else (-1, -1, "")
        if first != start or not start < last <= end or size not in ("*", str(file.size)):
            told = hub_errors.plain(response.headers.get("content-range", "no range"))
            raise Wrong(_other_bytes(file, f"The answer holds {told}."))
        return first, last
    length = response.headers.get("content-length", str(file.size))
    if response.status_code != 200 or length != str(file.size):
        raise Wrong(_other_bytes(file, f"The answer has {length} bytes, the file {file.size:,}."))
    return 0, file.size


def _wrong(repo: Repo, file: RepoFile, cause: str) -> Wrong:
    return Wrong(HubError(f"{repo.endpoint} contradicts itself about {file.name}", cause, "Try again later."))


def _other_bytes(file: RepoFile, cause: str) -> HubError:
    return HubError(
        f"Other bytes arrive than those of {file.name} that were asked for",
        cause,
        "Try again later; a proxy or mirror in between may be at fault.",
    )
