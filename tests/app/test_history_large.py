"""A conversation of 10,000 messages: what is read of it, counted in SQLite's own steps and not by a clock."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from floe_chat.app.history import ChatSetup, new_id, open_history
from floe_chat.app.history.database.opening import connect
from floe_chat.app.history.database.reading import Reader
from floe_chat.app.history.database.store import HistoryStore

MESSAGES = 10_000
_GRAIN = 10


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One long conversation, among 300 short ones."""
    file = tmp_path_factory.mktemp("large") / "history.db"
    store = open_history(file).store
    with store.transaction():
        for number in range(301):
            store.add_conversation(chat := new_id(), ChatSetup("demo"), f"chat {number}")
            parent = None
            for place in range(MESSAGES if number == 150 else 2):
                message = new_id(parent or 0)
                store.insert(
                    message, chat, parent, "assistant" if place % 2 else "user", f"message {place} of {number}"
                )
                parent = message
            store.switch(chat, parent)
    store.close()
    return file


@pytest.fixture
def connection(file: Path) -> Iterator[sqlite3.Connection]:
    opened = connect(file)
    yield opened
    opened.close()


@pytest.fixture
def reader(connection: sqlite3.Connection) -> Reader:
    return HistoryStore(connection)


def steps(connection: sqlite3.Connection, read: Callable[[], object]) -> int:
    """Instructions of SQLite's virtual machine that `read` takes."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += _GRAIN
        return 0

    connection.set_progress_handler(tick, _GRAIN)
    try:
        read()
    finally:
        connection.set_progress_handler(None, 0)
    return count


def head(reader: Reader, title: str) -> int:
    (found,) = [one for one in reader.conversations(400) if one.title == title]
    shown = reader.conversation(found.id).head
    assert shown is not None
    return shown


def test_a_branch_costs_a_few_steps_per_message(connection: sqlite3.Connection, reader: Reader) -> None:
    last = head(reader, "chat 150")
    assert len(reader.branch(last)) == MESSAGES
    assert steps(connection, lambda: reader.branch(last)) < 60 * MESSAGES


def test_a_window_costs_the_same_in_a_long_and_in_a_short_conversation(
    connection: sqlite3.Connection, reader: Reader
) -> None:
    branch = reader.branch(head(reader, "chat 150"))
    for start in (0, 5_000, MESSAGES - 50):
        window = branch[start : start + 50]
        assert steps(connection, lambda window=window: reader.messages(window)) < 150 * 50
        assert [message.position for message in reader.messages(window)] == list(range(start, start + 50))
    assert len(reader.messages(branch)) == MESSAGES


def test_a_page_of_the_list_costs_as_much_as_it_is_long(connection: sqlite3.Connection, reader: Reader) -> None:
    page = reader.conversations(50)
    assert steps(connection, lambda: reader.conversations(50)) < 100 * 50
    assert steps(connection, lambda: reader.conversations(50, page[-1])) < 100 * 50
    assert [one.messages for one in reader.conversations(400) if one.title == "chat 150"] == [MESSAGES]


def test_siblings_cost_next_to_nothing(connection: sqlite3.Connection, reader: Reader) -> None:
    last = head(reader, "chat 150")
    assert steps(connection, lambda: reader.siblings(last)) < 200


def test_a_search_in_all_of_it_finds_the_place(reader: Reader) -> None:
    (hit,) = reader.search('"message 8642 of 150"')
    assert (hit.position, hit.shown, hit.name) == (8642, True, "chat 150")
    assert len(reader.search("message", 30)) == 30


def test_a_long_branch_can_be_deleted_taken_back_forked_and_wiped(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "history.db"
    copy.write_bytes(file.read_bytes())
    store = open_history(copy).store
    (chat,) = [one.id for one in store.conversations(400) if one.title == "chat 150"]
    branch = shown(store, chat)
    with store.transaction():
        store.delete_message(branch[1], mark := new_id())
        assert shown(store, chat) == branch[:1]
        store.undo(mark)
        assert shown(store, chat) == branch
        store.fork(fork := new_id(), branch[4_999])
        store.delete_message(branch[1], mark)
        assert store.purge((mark >> 20) + 1) == 1
    assert shown(store, chat) == branch[:1] and len(shown(store, fork)) == 5_000
    store.close()


def shown(reader: Reader, chat: int) -> tuple[int, ...]:
    return reader.branch(reader.conversation(chat).head)
