"""Opens the history's file: makes it private, migrates it, checks it for damage, and cleans up after a crash."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import platformdirs

from ....engine.events import Notice
from ....models import private_file
from ....models.errors import FloeError, TryAgainError
from ..processes import is_running
from ..records import as_text, as_whole, new_id, now
from .store import KEPT_AFTER_DELETION, HistoryStore
from .trouble import SQLITE_ERRORS, checked, damaged, explain, is_busy, is_damage

# The tables, and the migrations of older files: `MIGRATIONS[n]` leads from version n to n + 1.
#
# `PRAGMA user_version` holds the version. Steps are never changed once released, only added.


_TABLES = (
    # AUTOINCREMENT: the number of a purged conversation is never reused.
    """CREATE TABLE conversation (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id INTEGER NOT NULL UNIQUE,
        title TEXT NOT NULL,
        created INTEGER NOT NULL,
        updated INTEGER NOT NULL,
        model TEXT NOT NULL,
        preset TEXT,
        sampling TEXT NOT NULL,
        system_prompt TEXT NOT NULL,
        persona TEXT NOT NULL,
        head INTEGER REFERENCES message (id) ON DELETE SET NULL,
        deleted INTEGER
    )""",
    # Columns that a walk along a branch reads come first; the text, which may spill to other pages, comes last.
    """CREATE TABLE message (
        id INTEGER PRIMARY KEY,
        conversation INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        parent INTEGER REFERENCES message (id),
        depth INTEGER NOT NULL,
        deleted INTEGER,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        state TEXT NOT NULL CHECK (state IN ('complete', 'streaming', 'stopped', 'failed')),
        created INTEGER NOT NULL,
        model TEXT NOT NULL,
        preset TEXT NOT NULL,
        stats TEXT,
        writer TEXT,
        text TEXT NOT NULL
    )""",
    """CREATE TABLE attachment (
        message INTEGER NOT NULL REFERENCES message (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        name TEXT NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (message, place)
    )""",
    # `mark` is the value in `deleted`: time and identifier in one (records.new_id).
    """CREATE TABLE deletion (
        mark INTEGER PRIMARY KEY,
        conversation INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        head INTEGER
    )""",
    "CREATE INDEX conversation_newest ON conversation (updated, number) WHERE deleted IS NULL",
    "CREATE INDEX conversation_head ON conversation (head)",
    "CREATE INDEX message_siblings ON message (parent, conversation)",
    "CREATE INDEX message_conversation ON message (conversation)",
    "CREATE INDEX message_streaming ON message (writer) WHERE state = 'streaming'",
)

_SEARCH_TABLES = (
    """CREATE VIRTUAL TABLE message_text USING fts5(
        text, content='message', content_rowid='id', tokenize='unicode61 remove_diacritics 2')""",
    """CREATE VIRTUAL TABLE conversation_title USING fts5(
        title, content='conversation', content_rowid='number', tokenize='unicode61 remove_diacritics 2')""",
)

# A text is indexed once it is finished, not at every commit while it grows.
_SEARCH_TRIGGERS = (
    """CREATE TRIGGER message_added AFTER INSERT ON message WHEN new.state <> 'streaming' BEGIN
        INSERT INTO message_text (rowid, text) VALUES (new.id, new.text); END""",
    """CREATE TRIGGER message_ended AFTER UPDATE OF state ON message
        WHEN old.state = 'streaming' AND new.state <> 'streaming' BEGIN
        INSERT INTO message_text (rowid, text) VALUES (new.id, new.text); END""",
    """CREATE TRIGGER message_reopened AFTER UPDATE OF state ON message
        WHEN old.state <> 'streaming' AND new.state = 'streaming' BEGIN
        INSERT INTO message_text (message_text, rowid, text) VALUES ('delete', old.id, old.text); END""",
    """CREATE TRIGGER message_purged AFTER DELETE ON message WHEN old.state <> 'streaming' BEGIN
        INSERT INTO message_text (message_text, rowid, text) VALUES ('delete', old.id, old.text); END""",
    """CREATE TRIGGER title_added AFTER INSERT ON conversation BEGIN
        INSERT INTO conversation_title (rowid, title) VALUES (new.number, new.title); END""",
    """CREATE TRIGGER title_changed AFTER UPDATE OF title ON conversation BEGIN
        INSERT INTO conversation_title (conversation_title, rowid, title) VALUES ('delete', old.number, old.title);
        INSERT INTO conversation_title (rowid, title) VALUES (new.number, new.title); END""",
    """CREATE TRIGGER title_purged AFTER DELETE ON conversation BEGIN
        INSERT INTO conversation_title (conversation_title, rowid, title) VALUES ('delete', old.number, old.title);
        END""",
)

_FILL_SEARCH = (
    "INSERT INTO message_text (rowid, text) SELECT id, text FROM message WHERE state <> 'streaming'",
    "INSERT INTO conversation_title (rowid, title) SELECT number, title FROM conversation",
)

_UNSENT = (
    "ALTER TABLE conversation ADD COLUMN quality TEXT",
    # Unsent texts: each program writes its own rows, and takes over those of programs that have ended.
    """CREATE TABLE unsent (
        writer TEXT NOT NULL,
        place INTEGER NOT NULL,
        written INTEGER NOT NULL,
        text TEXT NOT NULL,
        files TEXT NOT NULL,
        PRIMARY KEY (writer, place)
    )""",
)

# A search does not look into what a model thought.
_THOUGHT = ("ALTER TABLE message ADD COLUMN thought TEXT NOT NULL DEFAULT ''",)

_SEARCH = (*_SEARCH_TABLES, *_FILL_SEARCH, *_SEARCH_TRIGGERS)
MIGRATIONS = (_TABLES, _SEARCH, _UNSENT, _THOUGHT)
VERSION = len(MIGRATIONS)


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the tables in an open file; 0 of an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection, target: int = VERSION, *, search: bool = True) -> None:
    """Bring the tables to version `target`, step by step; each step is atomic.

    Without `search` nothing can be found: for an SQLite that has no full-text search.
    """
    while version_of(connection) < target:
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have taken this step while this one waited.
            if (version := version_of(connection)) < target:
                for statement in MIGRATIONS[version] if search or MIGRATIONS[version] is not _SEARCH else ():
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            # A full disk makes SQLite roll back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def lacking(connection: sqlite3.Connection) -> str:
    """Names a table, index or trigger that an open file lacks; "" if all are there."""
    found = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    made = re.findall(r"CREATE (?:VIRTUAL )?(?:TABLE|INDEX|TRIGGER) (\w+)", "\n".join(sum(MIGRATIONS, ())))
    return next((f"its {name} is missing" for name in made if name not in found), "")


def mend_search(connection: sqlite3.Connection, *, suspect: bool) -> bool:
    """Rebuild the search indexes from the texts, inside a transaction, if they are damaged; returns whether it did.

    SQLite's file check does not see damage in them, and their own check does not see all of it: `suspect` forces a
    rebuild after an error.
    """
    broken = [name for name in ("message_text", "conversation_title") if suspect or not _is_sound(connection, name)]
    for name in broken:
        # A damaged index can neither be emptied nor dropped: its shadow tables get the content of a new one's.
        connection.execute(f"CREATE VIRTUAL TABLE temp.fresh_{name} USING fts5(text)")
        for table in ("data", "idx", "docsize"):
            connection.execute(f"DELETE FROM {name}_{table}")
            connection.execute(f"INSERT INTO {name}_{table} SELECT * FROM temp.fresh_{name}_{table}")
        connection.execute(f"DROP TABLE temp.fresh_{name}")
        # And this connection's cached state of the damaged one has to go.
        connection.execute(f"INSERT INTO {name} ({name}) VALUES ('delete-all')")
    for statement in _FILL_SEARCH:
        if any(f"INTO {name} " in statement for name in broken):
            connection.execute(statement)
    return bool(broken)


def _is_sound(connection: sqlite3.Connection, name: str) -> bool:
    try:
        connection.execute(f"INSERT INTO {name} ({name}) VALUES ('integrity-check')")
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_CORRUPT_VTAB:
            raise
        return False
    return True


def has_search() -> bool:
    """Whether this Python's SQLite was built with full-text search (FTS5)."""
    connection = sqlite3.connect(":memory:")
    try:
        return bool(connection.execute("SELECT sqlite_compileoption_used('ENABLE_FTS5')").fetchone()[0])
    finally:
        connection.close()


BUSY_SECONDS = 2.0
"""How long a statement waits for another process's transaction."""

# Seconds. A check reads the whole file: some 10 ms per megabyte, which not every command should take.
_CHECK_EVERY = 24 * 3600


@dataclass(frozen=True, slots=True)
class OpenedHistory:
    """An open history; notices for the user from opening it; how many answers a crash cut off."""

    store: HistoryStore
    notices: tuple[Notice, ...]
    interrupted: int


def history_file() -> Path:
    """Where the history is: in its own folder, which is closed to other users."""
    return Path(platformdirs.user_data_dir("floe-chat", appauthor=False)) / "history" / "history.db"


def open_history(file: Path, patience: float | None = None) -> OpenedHistory:
    """Open the history in `file`, or begin one there. `patience`: seconds to wait for a lock, None: `BUSY_SECONDS`.

    Once a day, and after any sign of damage, the whole file is checked. A damaged file is renamed, with the date in its
    name, and a new one is started with all that can still be read. Answers that no process is writing any more are
    marked as stopped, and chats deleted a week ago are wiped.

    Raises:
        TryAgainError: another program holds it. FloeError: it cannot be written there, it has a newer version (and is
            left alone), or this Python's SQLite has no full-text search.
    """
    if not has_search():
        raise FloeError(
            "The history needs full-text search",
            f"This Python's SQLite {sqlite3.sqlite_version} was built without FTS5.",
            "Use a Python with a complete SQLite, such as those of python.org, uv or your distribution.",
        )
    try:
        emptied = checked(file).exists() and file.exists() and not file.stat().st_size
        notices = _make_private(file)
        found = inode(file)
        try:
            opened = _open(file, patience)
            notices += (_emptied(file),) if emptied else ()
            return replace(opened, notices=(*notices, *opened.notices))
        except (*SQLITE_ERRORS, FloeError) as error:
            if not is_damage(error, opening=True):
                raise
        # Two processes that start at the same time may both find the damage; the second finds the first one's new file.
        kept = _set_aside(file) if inode(file) == found else None
        _make_private(file)
        opened = _open(file, patience)
        return opened if kept is None else OpenedHistory(opened.store, (_carry_over(kept, opened.store),), 0)
    except (OSError, *SQLITE_ERRORS) as error:
        raise explain(error, file) from error


def open_to_read(file: Path) -> OpenedHistory:
    """Open the history in `file` for reading. If it cannot be written, it is read as it is.

    Raises:
        FloeError: as `open_history`, where it cannot even be read.
    """
    try:
        return open_history(file)
    except TryAgainError:  # it may be in the middle of a change
        raise
    except FloeError as error:
        connection = _reading_only(file)
        if connection is None:
            raise
        notice = Notice(error.title, f"{error.cause} It is opened read-only.")
        return OpenedHistory(HistoryStore(connection), (notice,), 0)


def parts(file: Path) -> list[Path]:
    """The existing ones of the file, its rollback journal, its write-ahead log and that log's index."""
    paths = (file.with_name(file.name + ending) for ending in ("", "-journal", "-wal", "-shm"))
    return [path for path in paths if path.exists()]


def inode(file: Path) -> int | None:
    """Identifies the file, whatever its name; None if there is none."""
    try:
        return file.stat().st_ino
    except OSError:
        return None


def open_unsaved() -> HistoryStore:
    """A history in memory: everything works, and nothing is saved."""
    connection = _configured(":memory:")
    migrate(connection, search=has_search())
    return HistoryStore(connection)


def connect(file: Path, patience: float | None = None) -> sqlite3.Connection:
    """One more connection to a file that `open_history` has opened; the caller takes care of threads."""
    # As a URI, since a bare name would create a new file if this one was removed.
    return _configured(f"{file.absolute().as_uri()}?mode=rw", patience=patience)


def _open(file: Path, patience: float | None) -> OpenedHistory:
    _refuse_foreign(file, patience)
    connection = connect(file, patience)
    try:
        _write_ahead(connection, patience)
        try:
            migrate(connection)
        except sqlite3.Error as error:
            raise explain(error, file) from error
        if finding := lacking(connection):
            raise damaged(file, finding)
        return _tidied(connection, file)
    except BaseException:
        connection.close()
        raise


def _write_ahead(connection: sqlite3.Connection, patience: float | None) -> None:
    """Switch to a write-ahead log. Where another program switches at the same time SQLite does not wait by itself."""
    until = time.monotonic() + (BUSY_SECONDS if patience is None else patience)
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > until:
                raise
        time.sleep(0.01)


def _tidied(connection: sqlite3.Connection, file: Path) -> OpenedHistory:
    """Check the file if that is due, and clean up after crashes and old deletions. While another program writes, a
    later start does this: readers need not wait, and writes queue up anyway.
    """
    store, notices, interrupted = HistoryStore(connection), (), 0
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        last = _last_check(file)
        due = last is None or not 0 <= time.time() - last < _CHECK_EVERY
        if due and _check(connection, file, suspect=last == 0):
            notices = (Notice("The search index was damaged", "It was built again from the chats; nothing is lost."),)
        with store.transaction():
            interrupted = _stop_abandoned(store)
            purged = store.purge(now() - KEPT_AFTER_DELETION)
        if purged:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log still holds what was wiped
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
    connection.execute(f"PRAGMA busy_timeout = {round(BUSY_SECONDS * 1000)}")
    return OpenedHistory(store, notices, interrupted)


def _stop_abandoned(store: HistoryStore) -> int:
    """Mark answers that no process is writing any more as stopped; returns how many there were. Those beside the one
    that is shown are removed if they have no text yet.
    """
    sql = """SELECT m.id, m.text, m.thought, m.writer, m.created,
            c.head IS NOT m.id AND m.deleted IS NULL AND c.deleted IS NULL
        FROM message m JOIN conversation c ON c.id = m.conversation WHERE m.state = 'streaming'"""
    stopped = 0
    for message, text, thought, writer, created, beside in list(store.rows(sql)):
        if is_running(as_text(writer), as_whole(created)):
            continue
        text, thought = as_text(text), as_text(thought)
        store.end_answer(message, text, "stopped", None, thought)
        if beside and not text.strip() and not thought.strip():
            store.delete_message(message, new_id())
        else:
            stopped += 1
    return stopped


def _reading_only(file: Path) -> sqlite3.Connection | None:
    """A connection that writes nothing; None where that is not possible, or where the tables are not ours."""
    try:
        file = private_file.real(file)
        for part in parts(file):
            private_file.need_ordinary(part)  # SQLite would block on a pipe
    except OSError:
        return None
    log = file.with_name(file.name + "-wal")
    # On a full or read-only disk the log's index cannot be created, and a failed opening leaves an unfinished one: a
    # connection with exclusive access keeps its index in memory. With an empty log, an immutable connection creates
    # none: it would get the file's mode, and nobody could write it later.
    full = log.exists() and log.stat().st_size > 0
    ways = (("mode=ro",), ("mode=rw", "locking_mode = EXCLUSIVE")) if full else (("mode=ro&immutable=1",),)
    for way, *first in ways:
        with suppress(*SQLITE_ERRORS):
            connection = _configured(f"{file.as_uri()}?{way}", *first)
            try:
                if version_of(connection) == VERSION and not lacking(connection):
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
    return None


def _check(connection: sqlite3.Connection, file: Path, *, suspect: bool) -> bool:
    """Check every page and record that; returns whether the search index was rebuilt.

    Raises:
        DamagedError: the file is damaged. sqlite3.Error: it cannot even be checked.
    """
    finding = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    if finding != "ok":
        raise damaged(file, finding)
    connection.execute("BEGIN IMMEDIATE")
    mended = mend_search(connection, suspect=suspect)
    connection.execute("COMMIT")
    os.close(private_file.open_for(checked(file), os.O_WRONLY | os.O_CREAT))
    os.utime(checked(file))
    return mended


def _last_check(file: Path) -> float | None:
    """Seconds since 1970; None: never."""
    try:
        return checked(file).stat().st_mtime
    except OSError:
        return None


def _configured(address: str, *first: str, patience: float | None = None) -> sqlite3.Connection:
    wait = BUSY_SECONDS if patience is None else patience
    connection = sqlite3.connect(address, uri=True, timeout=wait, isolation_level=None, check_same_thread=False)
    try:
        # With a write-ahead log, NORMAL can lose the last commits to a power cut, never to a killed process.
        for pragma in (*first, "foreign_keys = ON", "synchronous = NORMAL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _make_private(file: Path) -> tuple[Notice, ...]:
    """Folder 0700, file 0600; SQLite gives -wal and -shm the file's own mode.

    Raises:
        OSError: it cannot be made, or it, its journal or log is a folder, a pipe or a device: SQLite would wait for
            those.
    """
    private_file.own_folder(file.parent)
    if not file.exists():
        os.close(private_file.open_for(file, os.O_RDWR | os.O_CREAT))
    # Only SQLite may open it: closing another descriptor would drop the locks of this process's other connections.
    for part in parts(private_file.real(file)):
        with suppress(FileNotFoundError):  # another program has just closed the history
            private_file.need_ordinary(part)
    private_file.own_file(file)
    return (_readable(file),) if os.name != "nt" and file.stat().st_mode & 0o077 else ()


def _refuse_foreign(file: Path, patience: float | None) -> None:
    """Check before anything is written.

    Raises:
        FloeError: another program made it, or a newer floe-chat; or its version is none. sqlite3.Error: it cannot be
            read.
    """
    wait = BUSY_SECONDS if patience is None else patience
    connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=wait)
    try:
        version = version_of(connection)
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    finally:
        connection.close()
    if version == 0 and tables and "conversation" not in tables:
        raise FloeError(
            "The history file belongs to another program",
            f"{file} is a database with other tables. It was not changed.",
            "Move it away to start a new history.",
        )
    if version < 0:
        raise damaged(file, f"its version is {version}")
    if version > VERSION:
        raise FloeError(
            "The history was written by a newer floe-chat",
            f"{file} has version {version}; this program reads versions up to {VERSION}. It was not changed.",
            "Update floe-chat, or move the file away to start a new history.",
        )


def _readable(file: Path) -> Notice:
    return Notice(
        "Other users can read the history",
        f"{file} is a link, and the mode of its target was not changed. To close it: chmod 600 {file.resolve()}",
    )


def _emptied(file: Path) -> Notice:
    return Notice(
        "The history was emptied",
        f"{file} held chats and is empty now. A new history was started; you can put a backup in its place.",
    )


def _set_aside(file: Path) -> Path:
    kept = file.with_name(f"{file.stem}-damaged-{datetime.now():%Y-%m-%d-%H%M%S}{file.suffix}")
    checked(file).unlink(missing_ok=True)
    for part in parts(file):  # the log's content was not yet in the file
        part.rename(kept.with_name(part.name.replace(file.name, kept.name, 1)))
    return kept


def _carry_over(kept: Path, store: HistoryStore) -> Notice:
    from .salvage import salvage

    found = salvage(kept, store)
    told = "Nothing in it could be read. A new history was started."
    if found.conversations:
        whole = f"{_counted(found.messages, 'message')} of {_counted(found.conversations, 'chat')}"
        told = f"{whole} could be read and were copied to a new history."
    if found.gaps:
        told += f" {_counted(found.gaps, 'chat')} lost messages; those around the gap are joined."
    return Notice("The history was damaged", f"{told} The damaged file is {kept}.")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
