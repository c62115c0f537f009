"""The thread that writes the history to the disk. It owns the only writing connection."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....engine.mailbox import Mailbox
from ....models.errors import FloeError, TryAgainError
from ..answer import Answer
from ..events import HistoryEvent, HistoryTrouble, Ready, Recovered
from .opening import OpenedHistory, inode, open_history, open_unsaved
from .store import HistoryStore
from .trouble import SQLITE_ERRORS, DamagedError, explain, is_damage, is_passing

FLUSH_SECONDS = 0.4
"""Seconds between writes of a running answer's text: the most that a killed process loses."""

_RETRY_SECONDS = 1.0

_HANG_SECONDS = 60.0
"""How long a disk may take for one write at the end; a busy machine or a slow disk is no reason to lose text."""

_Failure = sqlite3.Error | UnicodeDecodeError | FloeError

Write = Callable[[HistoryStore], None]
"""A change; it may be called again after a failure, whose changes are rolled back."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A change. readable: called once reads see it. saved: called once it is as safe as it can be here."""

    write: Write
    readable: Callable[[], object] | None = None
    saved: Callable[[], object] | None = None


class Writer:
    """Takes changes in order, and commits all that are waiting together.

    A change that fails for a passing reason stays first in the queue and is retried every second. One that cannot be
    made (its conversation is gone) is reported and dropped. After damage, or when the file is gone, nothing more is
    written. While another program's lock keeps the file from being opened, changes are made in memory, and once more in
    the file when the lock is free.

    Attributes:
        events: to report, oldest first. commits: how many there were.
        opened: set when the next three may be looked at.
        memory: the history itself, where nothing is saved, or not yet; to be used only while `lock` is held. Else None.
        failure: why the file is not open, a TryAgainError while it is locked; None if it is, or where none was asked
            for.
    """

    def __init__(self, file: Path | None) -> None:
        self.events: Mailbox[HistoryEvent] = Mailbox()
        self.commits = 0
        self.opened = threading.Event()
        self.memory: HistoryStore | None = None
        self.failure: FloeError | None = None
        self.lock = threading.RLock()
        self._file = file
        self._inode: int | None = None
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._waiting: list[_Entry] = []
        self._in_memory: list[_Entry] = []  # made there, to be made in the file when its lock is free
        self._answers: dict[Answer, tuple[str, str]] = {}  # running ones, and what is written of each
        self._troubled = False
        self._damaged = False
        self._closing = False
        self._until = 0.0  # by `time.monotonic`: how long to try again after `close`
        self._ended = False
        self._unsaved = False  # whether something was written to memory only, though it should have been saved
        self._thread = threading.Thread(target=self._run, name="floe-history", daemon=True)
        self._thread.start()

    def put(self, write: Write) -> None:
        """Queue a change."""
        self._queue.put(_Entry(write))

    def follow(self, answer: Answer) -> None:
        """Write the text of `answer` as it grows; for changes."""
        self._answers.setdefault(answer, ("", ""))

    def leave(self, answer: Answer) -> None:
        """The text of `answer` is whole; for changes."""
        self._answers.pop(answer, None)

    def settle(self, timeout: float) -> bool:
        """Wait until all changes so far are saved; False if they are not by then."""
        done = threading.Event()
        self._queue.put(_Entry(lambda store: None, saved=done.set))
        return done.wait(timeout)

    def when_readable(self, then: Callable[[], object]) -> None:
        """Have `then` called, on this thread, once reads see all changes so far."""
        self._queue.put(_Entry(lambda store: None, then))

    def close(self, timeout: float) -> bool:
        """Write what is left and let the file go; False if something was not saved.

        A change that fails is tried again for `timeout` seconds. A write that is under way is waited for.
        """
        self._until = time.monotonic() + timeout
        self._queue.put(None)
        self._thread.join(max(timeout, _HANG_SECONDS))
        return self._ended and not self._waiting and not self._damaged and not self._unsaved

    def _run(self) -> None:
        try:
            store = self._open()
            self.opened.set()
            while not self._closing or ((self._waiting or self._locked) and time.monotonic() < self._until):
                self._take()
                if self._waiting or any(answer.collect() != text for answer, text in self._answers.items()):
                    self._write(store)
                if self._locked:
                    store = self._try_again(store)
            with self.lock:
                self._unsaved = self.failure is not None and bool(store.conversations(1))
                store.close()
            self._ended = True
        # The thread's border: the chat continues without its history, and the user is informed.
        except Exception as error:
            logging.getLogger("floe_chat").exception("the history failed")
            hint = "This is a bug in floe-chat. You can continue the chat; new messages are not saved."
            self.events.put(HistoryTrouble("The history failed", f"{type(error).__name__}: {error}.", hint))
        finally:
            self.opened.set()

    @property
    def _locked(self) -> bool:
        """Whether the file waits for another program's lock."""
        return isinstance(self.failure, TryAgainError)

    def _open(self) -> HistoryStore:
        if self._file is not None:
            try:
                return self._opened(open_history(self._file))
            except FloeError as error:
                self._refuse(error)
        self.memory = open_unsaved()
        if not self._locked:
            self.events.put(Ready(False, 0))
        return self.memory

    def _opened(self, opened: OpenedHistory) -> HistoryStore:
        assert self._file is not None
        for notice in opened.notices:
            self.events.put(HistoryTrouble(notice.title, notice.cause, ""))
        self.events.put(Ready(True, opened.interrupted))
        self._inode = inode(self._file)
        return opened.store

    def _refuse(self, error: FloeError) -> None:
        """Remember and report why the file cannot be opened."""
        self.failure = error
        remark = "This chat is kept in memory until it can be saved." if self._locked else "This chat is not saved."
        self.events.put(HistoryTrouble(error.title, f"{error.cause} {remark}", error.hint))

    def _try_again(self, memory: HistoryStore) -> HistoryStore:
        """Open the file if its lock is free, and make there what was made in memory. Returns the store in use."""
        assert self._file is not None
        try:
            opened = open_history(self._file, patience=0.0)
        except TryAgainError:
            return memory
        except FloeError as error:
            self._refuse(error)
            self._in_memory.clear()
            self.events.put(Ready(False, 0))
            return memory
        locked, self.failure = self.failure, None
        self._inode = inode(self._file)
        self._waiting, self._in_memory = self._in_memory, []
        self._answers.clear()  # their beginnings are among those changes
        self._troubled = True
        self._write(opened.store)
        if self._waiting:  # somebody has locked it again
            self._troubled = False
            self.failure, self._waiting, self._in_memory = locked, [], self._waiting
            opened.store.close()
            return memory
        self.memory = None
        return self._opened(opened)

    def _take(self) -> None:
        """Wait for changes, for the next retry, or until running answers have more text."""
        timeout = _RETRY_SECONDS if self._waiting or self._locked else FLUSH_SECONDS if self._answers else None
        try:
            entry = self._queue.get(timeout=timeout)
            while entry is not None:
                self._waiting.append(entry)
                entry = self._queue.get_nowait()
            self._closing = True
        except queue.Empty:
            pass

    def _write(self, store: HistoryStore) -> None:
        """Commit all waiting changes at once; if that fails, one by one."""
        error = self._commit(store, self._waiting)
        if error is None or is_passing(error) or is_damage(error):
            self._report(error)
            return
        for entry in tuple(self._waiting):
            error = self._commit(store, [entry])
            if error is not None and (is_passing(error) or is_damage(error)):
                self._report(error)
                return
            if error is not None:
                self._waiting.remove(entry)
                self._tell(error)

    def _commit(self, store: HistoryStore, entries: Sequence[_Entry]) -> _Failure | None:
        """Make the changes `entries`, and write the new text of running answers; returns what failed."""
        if self._damaged:
            self._forget(entries)
            return None
        try:
            self._need_same_file()
            with self.lock, store.transaction():
                for entry in entries:
                    entry.write(store)
                texts = {answer: answer.collect() for answer in self._answers}
                for answer, said in texts.items():
                    if said != self._answers[answer]:
                        store.write_answer(answer.id, *said)
        except (*SQLITE_ERRORS, FloeError) as error:
            return error
        self._answers.update(texts)
        self.commits += 1
        self._forget(entries)
        return None

    def _need_same_file(self) -> None:
        # SQLite would continue to write into a file that nobody can find any more.
        if self._file is not None and self.failure is None and inode(self._file) != self._inode:
            raise DamagedError(
                "The history was moved or deleted",
                f"{self._file} is not the file that was opened.",
                "New messages of this chat are not saved. The next start opens the file that is there then.",
            )

    def _report(self, error: _Failure | None) -> None:
        """Report a trouble when it begins and when it is over."""
        if error is not None and is_damage(error):
            self._damaged = True
            self._waiting.clear()
            self._tell(error)
        elif error is not None and not self._troubled:
            self._troubled = True
            self._tell(error)
        elif error is None and self._troubled:
            self._troubled = False
            self.events.put(Recovered())

    def _tell(self, error: _Failure) -> None:
        told = error if isinstance(error, FloeError) else explain(error, self._file or Path(":memory:"))
        self.events.put(HistoryTrouble(told.title, told.cause, told.hint))

    def _forget(self, entries: Sequence[_Entry]) -> None:
        for entry in tuple(entries):
            self._waiting.remove(entry)
            if entry.readable is not None:
                entry.readable()
            if self._locked:
                self._in_memory.append(replace(entry, readable=None))
            elif entry.saved is not None:
                entry.saved()
