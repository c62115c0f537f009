"""The thread that writes the history to the disk. It owns the only writing connection."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....engine.mailbox import Mailbox
from ....models.errors import FloeError
from ..answer import Answer
from ..events import HistoryEvent, HistoryTrouble, Ready, Recovered
from .opening import inode, open_history, open_unsaved
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
    write: Write
    done: threading.Event | None = None


class Writer:
    """Takes changes in order, and commits all that are waiting together.

    A change that fails for a passing reason stays first in the queue and is retried every second. One that cannot be
    made (its conversation is gone) is reported and dropped. After damage, or when the file is gone, nothing more is
    written.

    Attributes:
        events: to report, oldest first. commits: how many there were.
        opened: set when the next three may be looked at.
        memory: the history itself, where nothing is saved; to be used only while `lock` is held. Else None.
        failure: why the file could not be opened; None if it was, or where none was asked for.
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
        """Wait until all changes so far are committed; False if they are not by then."""
        done = threading.Event()
        self._queue.put(_Entry(lambda store: None, done))
        return done.wait(timeout)

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
            while not self._closing or (self._waiting and time.monotonic() < self._until):
                self._take()
                if self._waiting or any(answer.collect() != text for answer, text in self._answers.items()):
                    self._write(store)
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

    def _open(self) -> HistoryStore:
        if self._file is not None:
            try:
                opened = open_history(self._file)
            except FloeError as error:
                self.failure = error
                self.events.put(HistoryTrouble(error.title, f"{error.cause} This chat is not saved.", error.hint))
            else:
                for notice in opened.notices:
                    self.events.put(HistoryTrouble(notice.title, notice.cause, ""))
                self.events.put(Ready(True, opened.interrupted))
                self._inode = inode(self._file)
                return opened.store
        self.memory = open_unsaved()
        self.events.put(Ready(False, 0))
        return self.memory

    def _take(self) -> None:
        """Wait for changes, for the next retry, or until running answers have more text."""
        timeout = _RETRY_SECONDS if self._waiting else FLUSH_SECONDS if self._answers else None
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
        if self._file is not None and self.memory is None and inode(self._file) != self._inode:
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
            if entry.done is not None:
                entry.done.set()
