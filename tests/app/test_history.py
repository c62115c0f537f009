"""Conversations as trees: written, read back, never written over; walked at random; read of 10,000 messages."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from floe_chat.app.history import (
    Answer,
    AnswerStats,
    Attachment,
    Changed,
    ChatSetup,
    History,
    HistoryTrouble,
    new_id,
    open_history,
)
from floe_chat.app.history.database.opening import connect
from floe_chat.app.history.database.reading import Reader
from floe_chat.app.history.database.store import KEPT_AFTER_DELETION, HistoryStore
from floe_chat.app.history.records import now
from floe_chat.engine.events import Sampling
from floe_chat.models.errors import UsageError

STATS = AnswerStats(6, 12.5, 0.4, "stop")
SETUP = ChatSetup("demo", "Fast", Sampling(temperature=0.1, seed=7), "Be brief.", "Tutor")


@pytest.fixture(params=["saved", "unsaved"])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[History]:
    """A fresh history: everything but keeping works without a file too."""
    opened = History(tmp_path / "history.db" if request.param == "saved" else None)
    yield opened
    assert opened.close(10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = open_history(tmp_path / "history.db").store
    yield opened
    opened.close()


def answered(history: History, parent: int, text: str) -> Answer:
    with history.answering(parent, "demo", "Fast") as answer:
        for word in text.split(" "):
            answer.append(f"{word} ")
        answer.finish(STATS)
    return answer


def settled(history: History) -> History:
    assert history.settle(10)
    return history


def texts(history: History, head: int | None) -> list[str]:
    return [message.text.strip() for message in settled(history).messages(history.branch(head))]


def test_what_was_written_is_read_back(history: History) -> None:
    chat = history.begin(SETUP)
    question = history.ask(chat, None, "What is\nan expert?", [Attachment("a.txt", "one"), Attachment("b.txt", "two")])
    answer = answered(history, question, "A small network")
    found = settled(history).conversation(chat)
    assert (found.setup, found.head, found.title, found.number) == (SETUP, answer.id, "", 1)
    asked, given = history.messages(history.branch(found.head))
    assert (asked.role, asked.text, asked.parent, asked.position) == ("user", "What is\nan expert?", None, 0)
    assert asked.attachments == (Attachment("a.txt", "one"), Attachment("b.txt", "two"))
    assert (given.role, given.text, given.parent, given.position) == ("assistant", "A small network ", question, 1)
    assert (given.model, given.preset, given.state, given.stats) == ("demo", "Fast", "complete", STATS)
    (listed,) = history.conversations()
    assert (listed.name, listed.first_line, listed.messages, listed.model) == ("What is", "What is", 2, "demo")


def test_a_stopped_answer_can_be_written_on(history: History) -> None:
    chat = history.begin(SETUP)
    question = history.ask(chat, None, "count")
    with history.answering(question, "demo", "Fast") as answer:
        answer.append("one two")
    (stopped,) = settled(history).messages([answer.id])
    assert (stopped.state, stopped.text, stopped.stats) == ("stopped", "one two", None)
    with history.continuing(stopped, "demo", "High") as more:
        more.append(" three")
        more.finish(STATS)
        more.append("after the end")
        more.finish(None, "failed")
    (whole,) = settled(history).messages([answer.id])
    assert (whole.state, whole.text, whole.stats, whole.preset) == ("complete", "one two three", STATS, "High")
    assert [hit.message for hit in history.search("two three")] == [answer.id]


def test_what_a_model_thought_is_saved_beside_its_answer(history: History) -> None:
    question = history.ask(history.begin(SETUP), None, "count")
    with history.answering(question, "demo", "Fast") as answer:
        answer.think("Let me ")
        answer.think("count.")
    (stopped,) = settled(history).messages([answer.id])
    assert (stopped.state, stopped.text, stopped.thought) == ("stopped", "", "Let me count.")
    with history.continuing(stopped, "demo", "Fast") as more:
        more.think(" Done.")
        more.append("one")
        more.finish(replace(STATS, thought_tokens=4))
        more.think("late")
    (whole,) = settled(history).messages([answer.id])
    assert (whole.text, whole.thought) == ("one", "Let me count. Done.")
    assert whole.stats is not None and whole.stats.thought_tokens == 4
    copy = history.fork(whole.id)
    assert [message.thought for message in settled(history).tree(copy).messages] == ["", whole.thought]
    assert answer.id in [hit.message for hit in history.search("one")] and not history.search("Let me")


def test_an_answer_that_raises_is_a_failed_one(history: History) -> None:
    question = history.ask(history.begin(SETUP), None, "hi")
    with pytest.raises(ZeroDivisionError), history.answering(question, "demo", "") as answer:
        answer.append("so f")
        raise ZeroDivisionError
    (failed,) = settled(history).messages([answer.id])
    assert (failed.state, failed.text) == ("failed", "so f")


def test_closing_ends_running_answers(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    question = history.ask(history.begin(SETUP), None, "hi")
    answer = history.answering(question, "demo", "")
    answer.append("as far as this")
    assert history.close()
    again = History(tmp_path / "history.db")
    (found,) = again.messages([answer.id])
    assert (found.state, found.text) == ("stopped", "as far as this")
    assert again.close()


def test_another_history_over_the_same_file_is_noticed(tmp_path: Path) -> None:
    one, other = (settled(History(tmp_path / "history.db")) for _ in range(2))
    one.poll()
    chat = other.begin(SETUP, "from the other")
    settled(other)
    assert Changed() in one.poll()
    assert one.conversation(chat).title == "from the other"
    assert one.close() and other.close()


def test_a_change_that_cannot_be_made_is_told_and_the_rest_is_kept(history: History) -> None:
    settled(history)
    history.poll()
    history.ask(new_id(), None, "into a conversation that is not there")
    chat = history.begin(SETUP, "kept")
    settled(history)
    (trouble,) = [event for event in history.poll() if isinstance(event, HistoryTrouble)]
    assert "no such chat" in trouble.title.lower()
    assert [found.id for found in history.conversations()] == [chat]
    with pytest.raises(UsageError):
        history.conversation(new_id())


def test_rename_set_up_and_delete_with_undo(history: History) -> None:
    chat = history.begin(SETUP)
    answer = answered(history, history.ask(chat, None, "the needle"), "in a haystack")
    history.rename(chat, "Needles")
    other = replace(SETUP, preset=None, sampling=Sampling(top_k=3))
    history.set_up(chat, other)
    found = settled(history).conversation(chat)
    assert (found.title, found.setup) == ("Needles", other)
    mark = history.delete(chat)
    assert settled(history).conversations() == [] and history.search("needle") == []
    assert history.newest() is None
    history.undo(mark)
    history.undo(mark)
    assert [one.id for one in settled(history).conversations()] == [chat]
    assert history.conversation(chat).head == answer.id and len(history.search("needles")) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_what_another_floe_chat_deleted_is_back_when_somebody_goes_on_with_it(tmp_path: Path, whole: bool) -> None:
    history, other = History(tmp_path / "history.db"), History(tmp_path / "history.db")
    chat = history.begin(SETUP)
    first = history.ask(chat, None, "one")
    rejected, second = answered(history, first, "otherwise"), answered(history, first, "two")
    settled(history)
    mark = other.delete(chat) if whole else other.delete_message(first)
    settled(other)
    assert other.conversations() == [] if whole else history.messages([first, second.id]) == []
    third = history.ask(chat, second.id, "three")
    assert texts(history, third) == ["one", "two", "three"] and settled(history).conversation(chat).head == third
    assert bool(history.messages([rejected.id])) == whole  # nobody goes on with this one
    other.undo(mark)
    assert settled(other).messages([rejected.id]) and len(other.conversations()) == 1
    history.close()
    other.close()


def test_a_fork_lives_by_itself(history: History) -> None:
    chat = history.begin(SETUP)
    first = history.ask(chat, None, "one", [Attachment("a.txt", "text")])
    second = answered(history, first, "two")
    history.ask(chat, second.id, "three")
    fork = history.fork(second.id)
    head = settled(history).conversation(fork).head
    assert texts(history, head) == ["one", "two"] and history.conversation(fork).setup == SETUP
    copied = history.messages(history.branch(head))
    assert copied[0].attachments == (Attachment("a.txt", "text"),) and copied[1].stats == STATS
    assert not {message.id for message in copied} & {first, second.id}
    history.delete(chat)
    assert texts(settled(history), head) == ["one", "two"]


def test_the_list_is_paged_newest_first(history: History) -> None:
    chats = [history.begin(SETUP, f"chat {number}") for number in range(7)]
    settled(history)
    last = now()
    while now() == last:  # times are whole milliseconds
        time.sleep(0.001)
    history.ask(chats[2], None, "newest")
    settled(history)
    expected = [f"chat {number}" for number in range(7)]
    pages: list[list[str]] = []
    page = history.conversations(3)
    while page:
        pages.append([one.title for one in page])
        page = history.conversations(3, page[-1])
    assert [len(one) for one in pages] == [3, 3, 1]
    titles = [title for page in pages for title in page]
    assert titles[0] == "chat 2" and sorted(titles) == sorted(expected)


def test_search_finds_titles_and_messages_with_their_place(history: History) -> None:
    chat = history.begin(SETUP, "Über Experten")
    first = history.ask(chat, None, "Wie viele Experten\ngibt es im \x1b[31mNetz\x1b[0m?")
    old = answered(history, first, "Acht Stück")
    new = answered(history, first, "Es sind acht Stück")
    settled(history)
    title, question = history.search("experten")
    assert (title.message, title.name, question.message, question.position) == (None, "Über Experten", first, 0)
    assert [question.snippet[start:end] for start, end in question.marks] == ["Experten"]
    assert "\n" not in question.snippet
    shown = {hit.message: hit.shown for hit in history.search("stuck ac")}
    assert shown == {old.id: False, new.id: True}
    assert [hit.message for hit in history.search('"sind acht"')] == [new.id]
    assert history.search("sind nichts") == [] and history.search(" ") == []


@pytest.mark.parametrize(
    "words", ['"', '""', "*", "AND", "NEAR(", "a OR", "-x", "(", "\0", "\ud800", "'; --", "c++ ^", "^*"]
)
def test_no_query_is_an_error(history: History, words: str) -> None:
    history.ask(history.begin(SETUP), None, "a b c")
    assert isinstance(settled(history).search(words), list)


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b", "\ud800 half", "\x1b]0;title\x07", "\u202eright to left", "é" * 5000]
)
def test_any_text_is_kept(history: History, text: str) -> None:
    chat = history.begin(replace(SETUP, system_prompt=text), text)
    question = history.ask(chat, None, text, [Attachment(text, text)])
    (found,) = settled(history).messages([question])
    expected = text.replace("\ud800", "?")
    assert (found.text, found.attachments) == (expected, (Attachment(expected, expected),))
    assert history.conversation(chat).title == expected and len(history.conversations()) == 1


def test_what_was_deleted_long_ago_is_wiped_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    history = History(file)
    gone, kept = history.begin(SETUP), history.begin(SETUP)
    question = history.ask(gone, None, "xylophone secret " * 40)
    answered(history, question, "zeppelin")
    first = history.ask(kept, None, "stays")
    history.ask(kept, history.ask(kept, first, "wobbegong " * 40), "walrus")
    settled(history)
    marks = history.delete(gone), history.delete_message(settled(history).branch(history.conversation(kept).head)[1])
    settled(history)
    history.close()
    store = open_history(file).store
    assert b"xylophone" in file.read_bytes()
    with store.transaction():
        assert store.purge(min(marks) >> 20) == 0
        assert store.purge((max(marks) >> 20) + 1 + KEPT_AFTER_DELETION) == 2
        store.undo(marks[0])
    store.close()
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(word in left for word in (b"xylophone", b"zeppelin", b"wobbegong", b"walrus"))
    assert b"stays" in left


def test_numbers_are_never_given_again(store: HistoryStore) -> None:
    for round_ in range(1, 4):
        identity, mark = new_id(), new_id()
        with store.transaction():
            store.add_conversation(identity, SETUP)
            assert store.conversation(identity).number == round_
            store.delete(identity, mark)
            store.purge((mark >> 20) + 1)


def test_it_is_closed_while_another_thread_looks(tmp_path: Path) -> None:
    for _ in range(20):
        history = History(tmp_path / "history.db")
        history.begin(SETUP)
        settled(history)
        history.conversations()
        ended = threading.Event()

        def look(history: History = history, ended: threading.Event = ended) -> None:
            while not ended.is_set():
                history.poll()

        looking = threading.Thread(target=look)
        looking.start()
        assert history.close()
        history.poll()
        ended.set()
        looking.join(10)
        assert not looking.is_alive()


# Random walks over branches, beside the same tree in plain dictionaries


@dataclass
class Model:
    """The same tree in plain dictionaries."""

    parents: dict[int, int | None] = field(default_factory=dict[int, "int | None"])
    texts: dict[int, str] = field(default_factory=dict[int, str])
    head: int | None = None

    def branch(self, head: int | None) -> list[int]:
        return [] if head is None else [*self.branch(self.parents[head]), head]

    def below(self, top: int) -> set[int]:
        return {message for message in self.parents if top in self.branch(message)}


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_over_branches_end_where_a_plain_tree_ends(store: HistoryStore, seed: int) -> None:
    dice = random.Random(seed)
    models: dict[int, Model] = {}
    undo: list[tuple[int, int, Model]] = []

    def begin() -> None:
        models[chat := new_id()] = Model()
        store.add_conversation(chat, SETUP)

    def add(chat: int, model: Model) -> None:
        parent = dice.choice([None, *model.parents, *model.parents])
        message, text = new_id(parent or 0), f"w{dice.randrange(40)} w{dice.randrange(40)}"
        if parent is not None and dice.random() < 0.5:
            store.begin_answer(message, parent, "demo", "", "")
            store.end_answer(message, text, "complete", STATS)
        else:
            store.add_question(message, chat, parent, text, ())
        model.parents[message], model.texts[message], model.head = parent, text, message

    def switch(chat: int, model: Model) -> None:
        if model.parents:
            leaf = store.newest_leaf(chosen := dice.choice(list(model.parents)))
            assert leaf == max(model.below(chosen))
            store.switch(chat, leaf)
            model.head = leaf

    def delete(chat: int, model: Model) -> None:
        if model.parents:
            undo.append((mark := new_id(), chat, replace(model, parents=dict(model.parents), texts=dict(model.texts))))
            store.delete_message(chosen := dice.choice(list(model.parents)), mark)
            gone = model.below(chosen)
            above = model.parents[chosen]
            for message in gone:
                del model.parents[message], model.texts[message]
            if model.head in gone:
                model.head = above if above is not None else max(model.parents, default=None)

    def take_back(chat: int, model: Model) -> None:
        if undo and undo[-1][1] == chat:
            mark, _chat, before = undo.pop()
            added = set(model.parents) - set(before.parents)
            store.undo(mark)
            before.parents |= {message: model.parents[message] for message in added}
            before.texts |= {message: model.texts[message] for message in added}
            models[chat] = before

    def fork(chat: int, model: Model) -> None:
        if model.parents:
            source = model.branch(dice.choice(list(model.parents)))
            store.fork(copy := new_id(), source[-1])
            copies = store.branch(store.conversation(copy).head)
            models[copy] = Model(
                dict(zip(copies, (None, *copies), strict=False)),
                {new: model.texts[old] for new, old in zip(copies, source, strict=True)},
                copies[-1],
            )

    with store.transaction():
        begin()
        for _ in range(150):
            chat = dice.choice(list(models))
            dice.choices([add, switch, delete, take_back, fork], [10, 4, 2, 2, 0.3])[0](chat, models[chat])
    for chat, model in models.items():
        assert store.conversation(chat).head == model.head
        assert list(store.branch(model.head)) == model.branch(model.head)
        found = store.tree(chat).messages
        assert {message.id: message.parent for message in found} == model.parents
        assert {message.id: message.text for message in found} == model.texts
        assert all(message.position == len(model.branch(message.id)) - 1 for message in found)
        for message in found:
            same = [other for other, parent in sorted(model.parents.items()) if parent == message.parent]
            assert list(store.siblings(message.id)) == same
            assert (message.sibling, message.siblings) == (same.index(message.id) + 1, len(same))
    every = {message: text for model in models.values() for message, text in model.texts.items()}
    for word in ("w1", "w7", "w39"):
        expected = {message for message, text in every.items() if any(w.startswith(word) for w in text.split())}
        assert {hit.message for hit in store.search(word, 10_000)} == expected


# A conversation of 10,000 messages: what is read of it, counted in SQLite's own steps and not by a clock


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
