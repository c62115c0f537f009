"""The history as the chat screen uses it: writes return at once, reads take milliseconds."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...engine import state_folder
from ...models.errors import FloeError
from .answer import Answer
from .database.opening import connect
from .database.reading import Reader, forgiving
from .database.store import HistoryStore
from .database.trouble import SQLITE_ERRORS, explaining
from .database.writer import Write, Writer
from .events import Changed, HistoryEvent, HistoryTrouble, Recovered
from .processes import is_running, this_process
from .records import AnswerStats, Attachment, ChatSetup, Message, MessageState, Tree, Unsent, new_id

PATIENCE_SECONDS = 60.0
"""How long the end of the program waits for a lock or a full disk."""


class History(Reader):
    """One open history; any number of them, in any number of processes, can share a file.

    `History(history_file())` opens it in the background; `poll()` with the screen's timer; `close()` at the end. With
    `file` None nothing is saved; all else is the same. A file that cannot be used has the same effect: `poll` reports
    why (`HistoryTrouble`), then `Ready(saved=False)`. While another program locks it, the chat is kept in memory; it is
    written when the lock is free (`Ready(saved=True)`, `Recovered`).

    **Writes** return at once and never fail here. A thread makes them in order; ids are drawn in advance, so that a new
    message can be continued at once. Writes that fail for a passing reason (a lock, a full disk) wait in memory, `poll`
    reports it (`HistoryTrouble`, later `Recovered`), and they are retried every second.

    **Reads** (`Reader`) see committed data, some milliseconds after it was written: read again when `poll` reports
    `Changed`, or await `settled()` first. They may be called from any thread, wait for the opening, and raise FloeError
    where the file cannot be read (TryAgainError if it is locked) and UsageError for what does not exist.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file or Path(":memory:")
        self._writer = Writer(file)
        self._idle: list[sqlite3.Connection] = []
        self._watcher: sqlite3.Connection | None = None
        self._watching = threading.Lock()  # another thread may close while this one polls
        self._closed = False
        self._seen: object = None
        self._running: set[Answer] = set()

    def poll(self) -> list[HistoryEvent]:
        """What happened since the last call; `Changed` at most once. It costs some ten microseconds."""
        events = self._writer.events.take()
        if self._writer.opened.is_set():
            seen = self._version()
            if self._seen is not None and seen != self._seen:
                events.append(Changed())
            self._seen = seen
        return events

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on the writer's thread, when there is something to `poll`; only polling sees what other
        programs write.
        """
        self._writer.events.heard = heard

    @property
    def saved(self) -> bool:
        """Whether what is written now goes into its file. Waits for the opening, but not for a lock."""
        self._writer.opened.wait()
        return self._writer.memory is None

    def settle(self, timeout: float = 2.0) -> bool:
        """Wait until all writes so far are saved; False if they are not by then."""
        return self._writer.settle(timeout)

    async def settled(self, patience: float = 2.0) -> bool:
        """Wait until all writes so far can be read, while the caller's loop goes on; False if they cannot by then."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(done.set)

        self._writer.when_readable(wake)
        try:
            async with asyncio.timeout(patience):
                return await done.wait()
        except TimeoutError:
            return False

    def failure(self) -> FloeError | None:
        """Why its file is not open; None if it is, or if nothing is to be saved. Waits for the opening, but not for a
        lock.
        """
        self._writer.opened.wait()
        return self._writer.failure

    def close(self, timeout: float = 2.0) -> bool:
        """End: mark running answers as stopped and write everything. False if something cannot be written."""
        for answer in tuple(self._running):
            answer.finish(None, "stopped")
        saved = self._writer.close(timeout)
        with suppress(IndexError):  # popped, so that no other thread still uses it
            while True:
                self._idle.pop().close()
        with self._watching:
            self._closed = True
            if self._watcher is not None:
                self._watcher.close()
        return saved

    def close_patiently(self, patience: float = PATIENCE_SECONDS) -> bool:
        """As `close`, but a lock or a full disk is waited for, which stderr says; Ctrl+C stops waiting."""
        if patience and not self.settle():
            self._say()
            _say(f"Waiting up to {patience:.0f} s to save this chat; Ctrl+C stops waiting.")
            with suppress(KeyboardInterrupt):
                self.settle(patience)
        saved = self.close()
        self._say()
        if not saved:
            _say("This chat was not saved, or not all of it.")
        return saved

    def _say(self) -> None:
        """Print what `poll` would report."""
        for event in self.poll():
            if isinstance(event, HistoryTrouble):
                _say(f"{event.title}. {event.cause} {event.hint}")
            elif isinstance(event, Recovered):
                _say("This chat is now saved.")

    # Writing ----------------------------------------------------------------------------------------------------------

    def begin(self, setup: ChatSetup, title: str = "", drawn: int | None = None) -> int:
        """Begin a conversation and return its id, which may be `drawn` already. Without a title, its first question
        names it (`Summary.name`).
        """
        conversation = drawn or new_id()
        self._writer.put(lambda store: store.add_conversation(conversation, setup, title))
        return conversation

    def ask(self, conversation: int, parent: int | None, text: str, attachments: Sequence[Attachment] = ()) -> int:
        """Add a question after the message `parent` (None: as the first one) and show its branch; returns its id.

        An edited question is asked again under the same parent: the old one stays, with all that followed it.
        """
        message = new_id(parent or 0)
        files = tuple(attachments)
        self._writer.put(lambda store: store.add_question(message, conversation, parent, text, files))
        return message

    def answering(self, parent: int, model: str, preset: str) -> Answer:
        """Begin an answer to the question `parent`; another answer to the same question is its sibling."""
        answer = Answer(new_id(parent), "", "", self._end)

        def begin(store: HistoryStore) -> None:
            store.begin_answer(answer.id, parent, model, preset, this_process())
            self._writer.follow(answer)

        return self._begin(answer, begin)

    def continuing(self, message: Message, model: str, preset: str) -> Answer:
        """Continue the answer `message`."""
        answer = Answer(message.id, message.text, message.thought, self._end)

        def begin(store: HistoryStore) -> None:
            store.reopen_answer(answer.id, model, preset, this_process())
            self._writer.follow(answer)

        return self._begin(answer, begin)

    def switch(self, conversation: int, head: int | None) -> None:
        """Show the branch that ends in `head`; for a sibling of a message that is `newest_leaf(sibling)`."""
        self._writer.put(lambda store: store.switch(conversation, head))

    def rename(self, conversation: int, title: str) -> None:
        """Give a conversation a title; "" takes it away."""
        self._writer.put(lambda store: store.rename(conversation, title))

    def set_up(self, conversation: int, setup: ChatSetup) -> None:
        """Change the setup that answers a conversation from now on."""
        self._writer.put(lambda store: store.set_up(conversation, setup))

    def delete(self, conversation: int) -> int:
        """Delete a conversation; returns the mark that `undo` takes, for a week."""
        mark = new_id()
        self._writer.put(lambda store: store.delete(conversation, mark))
        state_folder.forget(conversation)
        return mark

    def delete_message(self, message: int) -> int:
        """Delete a message and all that follow it; returns the mark that `undo` takes. If its branch was shown, the
        branch before it is shown then.
        """
        mark = new_id()
        self._writer.put(lambda store: store.delete_message(message, mark))
        return mark

    def undo(self, mark: int) -> None:
        """Undo a deletion, and show what was shown before it."""
        self._writer.put(lambda store: store.undo(mark))

    def fork(self, message: int) -> int:
        """Begin another conversation with copies of the branch up to `message`; returns its id.

        The two are independent: either can be changed or deleted without the other.
        """
        conversation = new_id()
        self._writer.put(lambda store: store.fork(conversation, message))
        return conversation

    def add(self, tree: Tree) -> int:
        """Add a conversation, such as an imported one; returns its id."""
        conversation = new_id()
        self._writer.put(lambda store: store.add_tree(conversation, tree))
        return conversation

    def keep_unsent(self, questions: Sequence[Unsent]) -> None:
        """Save this program's unsent texts, replacing the earlier ones."""
        self._keep_unsent(questions, ())

    def take_over_unsent(self) -> list[Unsent]:
        """Unsent texts of programs that have ended, oldest first. From now on they are saved as this program's."""
        found = self.unsent(is_running)
        questions = [question for left in found.values() for question in left]
        if questions:
            self._keep_unsent(questions, tuple(found))
        return questions

    def _keep_unsent(self, questions: Sequence[Unsent], instead: Sequence[str]) -> None:
        kept = tuple(questions)
        self._writer.put(lambda store: store.keep_unsent(this_process(), kept, instead))

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterable[tuple[Any, ...]]:
        self._writer.opened.wait()
        memory = self._writer.memory
        with explaining(self._file):
            if memory is not None:
                with self._writer.lock:
                    return list(memory.rows(sql, values))
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect()
            try:
                return connection.execute(sql, values).fetchall()
            finally:
                self._idle.append(connection)

    def _begin(self, answer: Answer, begin: Write) -> Answer:
        self._running.add(answer)
        self._writer.put(begin)
        return answer

    def _end(self, answer: Answer, state: MessageState, stats: AnswerStats | None) -> None:
        self._running.discard(answer)

        def end(store: HistoryStore) -> None:
            text, thought = answer.collect()
            store.end_answer(answer.id, text, state, stats, thought)
            self._writer.leave(answer)

        self._writer.put(end)

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self._file)
        connection.text_factory = forgiving
        return connection

    def _version(self) -> object:
        if self._writer.memory is not None:
            return "memory", self._writer.commits
        with self._watching, suppress(*SQLITE_ERRORS):  # a read that fails says so itself
            if self._closed:
                return self._seen
            if self._watcher is None:
                self._watcher = self._connect()
            return self._watcher.execute("PRAGMA data_version").fetchone()  # changes when another has committed
        return self._seen


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        sys.stderr.write(f"floe-chat: {text}\n")
