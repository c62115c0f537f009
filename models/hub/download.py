"""Downloads that survive broken connections, expired addresses, kills and restarts; only bytes in transit are lost.

Other threads hold a `Download`; its own thread runs the loop of `fetch_loop`. Nothing here waits for the network, so
pausing and cancelling take effect at once, even on a stalled connection.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Self

from ..errors import FloeError, TryAgainError
from ..pack.manifest import FETCHING
from ..packing.workplace import locked
from .fetch_loop import Fetcher, FetchItem, Patience
from .fetch_part import bytes_here, delete
from .fetch_progress import DownloadProgress, FetchState, FileProgress
from .repository import Repo
from .repository_files import RepoFile


class Download:
    """Fetches files of a repository into a folder; use as a context manager, or `close` it.

    Verified files in the folder or in the user's hub cache are used where they are. A damaged one is fetched again,
    and `progress().notices` says why.

    Args:
        files: in the order in which they are fetched. folder: made if needed; parts of files are stored there too.
        ahead: how many fetched files may exist before they are `release`d, or None for all of them.

    Raises:
        TryAgainError: another process downloads into this folder. FloeError: the folder cannot be written, or the
        repository has no such file.
    """

    def __init__(
        self,
        repo: Repo,
        files: Sequence[str],
        folder: Path,
        *,
        ahead: int | None = None,
        tuning: Patience | None = None,
    ) -> None:
        self.folder = folder
        self._repo = repo
        self._hold = _held(folder)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._wish: Literal["run", "pause", "cancel"] = "pause"
        self._pauses = 0
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._fetcher = Fetcher(
            repo,
            folder,
            [],
            tuning or Patience(),
            ahead=ahead,
            places=lambda file: _places(repo, file, folder),
            changed=self._notify,
            stop=self._stop.is_set,
        )
        try:
            self._put_in_order(files)
        except BaseException:
            self._hold.close()
            raise

    def start(self) -> Self:
        """Start, or continue after `pause`, `cancel` or an error."""
        if self._wish == "cancel" and self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._changed:
            self._wish, self._error = "run", None
            self._stop.clear()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="download", daemon=True)
                self._thread.start()
        self._nudge()
        return self

    resume = start

    def pause(self) -> None:
        """Close the connections; everything that arrived stays."""
        self._wish_for("pause")

    def cancel(self) -> None:
        """Stop it. Everything that arrived stays; waiting callers get an error."""
        self._wish_for("cancel")

    def close(self) -> None:
        """Stop it and unlock the folder."""
        self.cancel()
        if self._thread is not None:
            self._thread.join()
        self._hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def order(self, files: Sequence[str]) -> None:
        """From now on fetch these files, in this order, and no others.

        Raises:
            FloeError: the repository has no such file.
        """
        self._put_in_order(files)
        self._nudge()

    def wait(self, file: str) -> Path:
        """The path of the file; waits until all of it is here and verified. Files that are waited for come first.

        Raises:
            FloeError: it cannot be fetched, or the download was cancelled.
        """
        with self._changed:
            item = next((item for item in self._fetcher.items if item.file.name == file), None)
            if item is None:
                item = self._new_item(file)
                self._fetcher.items = [*self._fetcher.items, item]
            item.want()
            item.asked = True
        self._nudge()
        with self._changed:
            self._wait_until(lambda: item.path is not None)
            assert item.path is not None
            return item.path

    def release(self, file: str) -> None:
        """The file will not be read again: delete what was fetched of it, now or in an earlier run."""
        with self._changed:
            item = next((item for item in self._fetcher.items if item.file.name == file), None)
            if item is not None:
                item.released, item.asked, item.path = True, False, None
            if item is None or item.part is None:
                delete(self.folder, file)
        self._nudge()

    def progress(self) -> DownloadProgress:
        """The progress now; cheap enough to read many times a second."""
        fetcher = self._fetcher
        items = [item for item in fetcher.items if not item.released or item.state == "done"]
        files = tuple(FileProgress(item.file.name, item.have, item.file.size, item.state) for item in items)
        done, total = sum(file.done for file in files), sum(file.total for file in files)
        rate = fetcher.meter.rate() if self._wish == "run" else 0.0
        left = (total - done) / rate if rate > 0 else None
        return DownloadProgress(self._state(), done, total, rate, left, files, fetcher.note, tuple(fetcher.notices))

    def _state(self) -> FetchState:
        if self._fetcher.is_idle():
            return "done"
        if self._wish == "cancel":
            return "cancelled"
        if self._error is not None:
            return "failed"
        if self._wish == "pause":
            return "paused"
        states = {item.state for item in self._fetcher.items}
        return "fetching" if "fetching" in states else "checking" if "checking" in states else "waiting"

    def _put_in_order(self, files: Sequence[str]) -> None:
        known = {item.file.name: item for item in self._fetcher.items}
        items = [known.get(name) or self._new_item(name) for name in files]
        rest = [item for item in known.values() if item not in items]
        with self._changed:
            for item in items:
                item.want()
            for item in rest:
                item.released = item.path is None and not item.asked
            self._fetcher.items = items + rest

    def _new_item(self, name: str) -> FetchItem:
        file = self._repo.file(name)
        if file is None:
            raise FloeError(f"{self._repo.name} has no file {name}", "", "Use another revision.")
        in_cache = self._repo.cached(file) is not None
        return FetchItem(file, file.size if in_cache else bytes_here(self.folder, file))

    def _wish_for(self, wish: Literal["pause", "cancel"]) -> None:
        with self._changed:
            if self._wish != "cancel":
                self._wish = wish
            self._pauses += 1
            self._stop.set()
            self._changed.notify_all()
        self._nudge()

    def _nudge(self) -> None:
        """Wake the loop to handle changes from outside."""
        with self._changed:
            if self._loop is not None and self._nudged is not None:
                self._loop.call_soon_threadsafe(self._nudged.set)
                self._loop.call_soon_threadsafe(self._fetcher.wake)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """With the lock held."""
        while not ready():
            if self._error is not None:
                raise self._error
            if self._wish == "cancel":
                raise TryAgainError("The download was cancelled", "", "Everything downloaded so far is saved.")
            self._changed.wait(1.0)  # with a limit: Ctrl+C would not be seen on Windows

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        with self._changed:
            self._loop, self._nudged = loop, asyncio.Event()
        try:
            loop.run_until_complete(self._follow_wishes(self._nudged))
        finally:
            with self._changed:
                self._loop = None
                self._changed.notify_all()
            loop.close()  # does not wait for the name server, which may take its time in a thread of the loop's

    async def _follow_wishes(self, nudged: asyncio.Event) -> None:
        work: asyncio.Task[None] | None = None
        pauses = 0  # counted: a pause that is resumed at once closes the connections too
        while self._wish != "cancel":
            nudged.clear()
            if work is None:
                pauses = self._pauses
            if work is None and self._wish == "run" and self._error is None and not self._fetcher.is_idle():
                work = asyncio.create_task(self._fetcher.run())
            wake = asyncio.create_task(nudged.wait())
            await asyncio.wait([task for task in (work, wake) if task is not None], return_when=asyncio.FIRST_COMPLETED)
            wake.cancel()
            if work is not None and (work.done() or self._pauses != pauses):
                await self._end(work)
                work = None
        if work is not None:
            await self._end(work)

    async def _end(self, work: asyncio.Task[None]) -> None:
        work.cancel()
        (result,) = await asyncio.gather(work, return_exceptions=True)
        with self._changed:
            if isinstance(result, InterruptedError) or self._wish != "run":
                return
            if isinstance(result, OSError):
                self._error = disk_error(result, self.folder)
            elif isinstance(result, Exception):
                self._error = result
            self._changed.notify_all()


def room(folder: Path) -> int:
    """Bytes free on the disk where `folder` is, or would be."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed: int) -> None:
    """Raises: FloeError: fewer than `needed` bytes are free where `folder` is, or would be; it says how many more."""
    free = room(folder)
    if free < needed:
        raise FloeError(
            f"The disk of {folder} is too small",
            f"It needs {needed / 1e9:.1f} GB at the peak and has {free / 1e9:.1f} GB free.",
            f"Free {(needed - free) / 1e9:.1f} GB or choose a folder on another disk.",
        )


def disk_error(error: OSError, folder: Path) -> FloeError:
    """The error for a disk that fails under a download."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FloeError(
            f"The disk of {folder} is full",
            f"{error.strerror}.",
            "Everything downloaded so far is saved. Free some space, then continue.",
        )
    return FloeError(f"{folder} cannot be used", f"{error.strerror or error}.", "Choose a folder that you can write.")


def _places(repo: Repo, file: RepoFile, folder: Path) -> list[Path]:
    found = repo.cached(file)
    return [path for path in (folder / file.name, found) if path is not None and path.is_file()]


def _held(folder: Path) -> ExitStack:
    hold = ExitStack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold.enter_context(locked(folder / FETCHING, f"Another floe-chat is downloading into {folder}"))
    except OSError as error:
        raise disk_error(error, folder) from error
    return hold
