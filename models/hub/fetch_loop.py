"""The download loop: a few workers, each with one request at a time, on one thread.

Files are fetched in order and cut into pieces, so that several connections work on one file. A worker whose request
breaks requests the rest of its piece; bytes that arrived stay.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from ..errors import FloeError, HubError, TryAgainError
from . import hub_errors, hub_request
from .fetch_part import PartFile, Ranges, is_intact
from .fetch_progress import FetchState, RateMeter
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


_MOST_WRONG = 8  # wrong answers in a row


@dataclass(frozen=True, slots=True)
class Patience:
    """How patient a download is.

    Attributes:
        connections: requests at a time. piece: bytes per request. first_wait, longest_wait: seconds between tries.
        give_up: seconds without a byte after which the download fails. silence: seconds without a byte after which a
        connection counts as broken. longest_asked: seconds that the hub may ask it to wait. sync: seconds between two
        entries in a journal.
    """

    connections: int = 4
    piece: int = 64 << 20
    first_wait: float = 0.5
    longest_wait: float = 30.0
    give_up: float = 120.0
    silence: float = 20.0
    longest_asked: float = 900.0
    sync: float = 2.0


@dataclass(eq=False, slots=True)
class Piece:
    """Bytes [start, end) that one worker fetches; `start` advances as they arrive.

    came: bytes of the current answer that arrived. new: how many of them were not here yet.
    """

    start: int
    end: int
    came: int = 0
    new: int = 0


@dataclass(eq=False, slots=True)
class FetchItem:
    """One file of a download.

    Attributes:
        have: bytes of it that are here. path: the whole, verified file, or None. ours: whether we fetched it.
        asked: a caller waits for it. released: it is not needed any more.
    """

    file: RepoFile
    have: int
    state: FetchState = "waiting"
    path: Path | None = None
    ours: bool = False
    asked: bool = False
    released: bool = False
    part: PartFile | None = None
    pieces: list[Piece] = field(default_factory=list[Piece])
    wrong: int = 0
    refetched: bool = False
    unranged: bool = False

    def want(self) -> None:
        """Request the file, also if it was released and deleted."""
        self.released = False
        if self.state == "done" and self.path is None:
            self.state, self.have = "waiting", 0

    def claim(self, most: int) -> Piece | None:
        """The first bytes that are neither here nor on their way, or None."""
        assert self.part is not None
        if self.unranged:  # its one connection reads from the start to the end
            most = self.file.size
            if self.pieces:
                return None
        taken = Ranges([(piece.start, piece.end) for piece in self.pieces])
        for gap in self.part.done.gaps(0, self.file.size):
            for start, end in taken.gaps(*gap):
                piece = Piece(start, min(end, start + most))
                self.pieces.append(piece)
                return piece
        return None


class Fetcher:
    """Brings `items` into `folder`, in order.

    Runs on one thread. Other threads may read and change the items, then `wake` it.

    Args:
        ahead: how many unreleased files of ours may be on the disk, or None. places: where a file may be already.
        changed: called when a file has become ready. stop: true when hashing a file should end.
    """

    def __init__(
        self,
        repo: Repo,
        folder: Path,
        items: list[FetchItem],
        tuning: Patience,
        *,
        ahead: int | None,
        places: Callable[[RepoFile], list[Path]],
        changed: Callable[[], None],
        stop: Callable[[], bool],
    ) -> None:
        self.items = items
        self.meter = RateMeter()
        self.note = ""
        self.notices: list[str] = []
        self._repo, self._folder, self._tuning, self._ahead = repo, folder, tuning, ahead
        self._places, self._changed, self._stop = places, changed, stop
        self._news, self._journals = asyncio.Event(), asyncio.Lock()
        self._hold = 0.0  # the hub asked for no request before then
        self._last_byte = self._asked = 0.0  # when the last byte came; how long the hub has made us wait since

    def is_idle(self) -> bool:
        return all(item.path is not None or item.released for item in self.items)

    def wake(self) -> None:
        """Wake waiting workers to look at the items again."""
        self._news.set()
        self._news.clear()

    async def run(self) -> None:
        """Work until every file is ready. Cancelling it closes the connections and leaves the journals in order.

        Raises:
            FloeError: it cannot continue. OSError: of the disk. Everything that arrived stays.
        """
        self._news, self._journals = asyncio.Event(), asyncio.Lock()  # of this run's loop
        self._hold, self._last_byte, self._asked = 0.0, time.monotonic(), 0.0
        self.meter.restart()
        client = hub_request.new_client(self._repo.endpoint, self._tuning.silence)
        workers = [asyncio.create_task(self._work(client)) for _ in range(self._tuning.connections)]
        keeper = asyncio.create_task(self._keep_journals())
        waiting = {keeper, *workers}
        try:
            async with client:
                while waiting != {keeper}:
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(keeper, *workers, return_exceptions=True)
            self.note = ""
            for item in self.items:
                self._lay_down(item)

    def _lay_down(self, item: FetchItem) -> None:
        if item.part is not None:
            with suppress(OSError):  # the error that ended the run is reported; an old journal costs a few bytes only
                item.part.close()
            item.part = None
        item.pieces.clear()
        if item.state != "done":
            item.state = "waiting"

    async def _keep_journals(self) -> None:
        while True:
            await asyncio.sleep(self._tuning.sync)
            for item in self.items:
                async with self._journals:
                    if item.part is not None and item.state == "fetching":
                        await asyncio.to_thread(item.part.sync)

    async def _work(self, client: httpx2.AsyncClient) -> None:
        while not self.is_idle():
            for item in self._wanted():
                if item.state == "waiting":
                    await self._prepare(item)
                    break
                if item.state == "fetching" and (piece := item.claim(self._tuning.piece)):
                    try:
                        await self._fetch(client, item, piece)
                    finally:
                        if piece in item.pieces:
                            item.pieces.remove(piece)
                    await self._finish_if_whole(item)
                    break
            else:
                await self._news.wait()
        self.wake()

    def _wanted(self) -> list[FetchItem]:
        """Files to fetch now, the urgent ones first, as long as there is room for unread ones."""
        open_items = [item for item in self.items if item.path is None and not item.released]
        if self._ahead is None:
            return open_items
        room = self._ahead - sum(item.path is not None and item.ours and not item.released for item in self.items)
        urgent = [item for item in open_items if item.asked]
        return urgent + [item for item in open_items if not item.asked][: max(0, room - len(urgent))]

    async def _prepare(self, item: FetchItem) -> None:
        """Use the file if it is on the disk already, else open its part."""
        item.state = "checking"
        for place in self._places(item.file):
            try:
                intact = await asyncio.to_thread(is_intact, place, item.file, self._stop)
            except InterruptedError:
                raise
            except OSError as error:
                self.notices.append(f"{place} cannot be read ({error.strerror}): {item.file.name} is downloaded again.")
                continue
            if intact:
                self._ready(item, place)
                return
            self.notices.append(f"{place} is damaged: {item.file.name} is downloaded again.")
        item.part = PartFile(self._folder, item.file)
        if item.part.news:
            self.notices.append(item.part.news)
        item.have = item.part.done.total
        item.state = "fetching"
        self.wake()
        await self._finish_if_whole(item)

    async def _finish_if_whole(self, item: FetchItem) -> None:
        part = item.part
        if part is None or item.state != "fetching" or item.pieces or item.have < item.file.size:
            self.wake()
            return
        item.state = "checking"
        async with self._journals:
            pass  # nothing else uses the part from here on
        if await asyncio.to_thread(is_intact, part.written, item.file, self._stop):
            path = await asyncio.to_thread(part.finish)
            item.part = None
            self._ready(item, path)
            return
        part.discard()
        item.have = 0
        if item.refetched:
            item.part = None
            raise HubError(
                f"{item.file.name} of {self._repo.name} arrived damaged",
                "It was downloaded twice and had the wrong hash both times.",
                "Try again later, or from another network or mirror.",
            )
        self.notices.append(f"{item.file.name} arrived damaged: it is downloaded again.")
        item.refetched = True
        item.part = PartFile(self._folder, item.file)
        item.state = "fetching"
        self.wake()

    def _ready(self, item: FetchItem, path: Path) -> None:
        item.have, item.state = item.file.size, "done"
        item.ours = path.parent == self._folder
        item.path = path
        self._changed()
        self.wake()

    async def _fetch(self, client: httpx2.AsyncClient, item: FetchItem, piece: Piece) -> None:
        """Request the rest of `piece` until all of it is here."""
        failures = 0
        while piece.start < piece.end and not item.released and not (item.unranged and len(item.pieces) > 1):
            await asyncio.sleep(max(0.0, self._hold - time.monotonic()))
            piece.came = piece.new = 0
            try:
                async with asked(client, self._repo, item.file, piece.start, piece.end) as answer:
                    await self._receive(item, piece, answer)
                if not piece.came and not item.unranged:
                    raise Wrong(
                        HubError(f"{item.file.name} cannot be downloaded", "The answers are empty.", "Try again later.")
                    )
            except Passing as trouble:
                failures = 1 if piece.new else failures + 1
                item.wrong += isinstance(trouble, Wrong) or bool(piece.came and not piece.new)
                wait = trouble.wait
                if wait is not None and (later := time.monotonic() + wait) > self._hold:
                    self._asked += later - max(self._hold, time.monotonic())
                    self._hold = later
                self._give_up_if_hopeless(item, trouble)
                if wait is None:
                    wait = hub_errors.backoff(failures, self._tuning.first_wait, self._tuning.longest_wait)
                self.note = f"{trouble.error.title}: trying again."
                await asyncio.sleep(wait)

    async def _receive(self, item: FetchItem, piece: Piece, answer: RangeReply) -> None:
        """Write the answer's bytes, except those that are here already."""
        assert item.part is not None
        if answer.end > piece.end or answer.start < piece.start:  # the server knows no ranges: one request for all
            item.unranged = True
            if len(item.pieces) > 1:
                return
            piece.end = item.file.size
        offset = answer.start
        async for chunk in answer.chunks:
            self._last_byte, self._asked = time.monotonic(), 0.0
            data = memoryview(chunk)[: answer.end - offset]
            piece.came += len(data)
            for start, end in item.part.done.gaps(offset, offset + len(data)):
                item.part.write(start, data[start - offset : end - offset])
                self.meter.add(end - start)
                piece.new += end - start
                item.have, item.wrong, self.note = item.part.done.total, 0, ""
            offset += len(data)
            piece.start = max(piece.start, offset)
            if offset == answer.end:
                break

    def _give_up_if_hopeless(self, item: FetchItem, trouble: Passing) -> None:
        error = trouble.error
        if item.wrong >= _MOST_WRONG:
            raise error
        why = " ".join(part for part in (f"{error.title}.", error.cause) if part)
        hint = f"Everything downloaded so far is saved. {error.hint}".strip()
        if self._asked > self._tuning.longest_asked:
            raise TryAgainError("The hub asks for a long pause", why, hint)
        silence = time.monotonic() - self._last_byte - self._asked
        if silence > self._tuning.give_up:
            raise TryAgainError(f"Nothing has arrived for {self._tuning.give_up:.0f} seconds", why, hint)
