"""The tables, and the migrations of older files: `MIGRATIONS[n]` leads from version n to n + 1.

`PRAGMA user_version` holds the version. Steps are never changed once released, only added.
"""

from __future__ import annotations

import re
import sqlite3

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
