"""Conversations as trees: written, read back, never written over; walked at random; read of 3,000 messages."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.history import (
    Answer,
    AnswerStats,
    Attachment,
    Changed,
    ChatSetup,
    History,
    HistoryTrouble,
    MessageState,
    Tree,
    as_json,
    as_markdown,
    file_name,
    new_id,
    open_history,
    parse,
    read_attachment,
)
from floe_chat.app.history.attachments import LARGEST
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
    with pytest.raises(ZeroDivisionError), history.answering(question, "demo", "") as raising:
        raising.append("so f")
        raise ZeroDivisionError
    (failed,) = settled(history).messages([raising.id])
    assert (failed.state, failed.text) == ("failed", "so f")


def test_what_a_model_thought_is_saved_beside_its_answer_and_forked(history: History) -> None:
    question = history.ask(chat := history.begin(SETUP), None, "count", [Attachment("a.txt", "text")])
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
    assert answer.id in [hit.message for hit in history.search("one")] and not history.search("Let me")
    history.delete(chat)  # a fork lives by itself
    asked, given = settled(history).tree(copy).messages
    assert (asked.attachments, asked.thought) == ((Attachment("a.txt", "text"),), "")
    assert (given.thought, given.stats) == (whole.thought, whole.stats) and history.conversation(copy).setup == SETUP
    assert not {asked.id, given.id} & {question, answer.id}


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


def test_no_query_is_an_error(history: History) -> None:
    history.ask(history.begin(SETUP), None, "a b c")
    settled(history)
    for words in ('"', '""', "*", "AND", "NEAR(", "a OR", "-x", "(", "\0", "\ud800", "'; --", "c++ ^", "^*"):
        assert isinstance(history.search(words), list), words


def test_any_text_is_kept(history: History) -> None:
    for text in ("", "\0", "a\0b", "\ud800 half", "\x1b]0;title\x07", "\u202eright to left", "é" * 5000):
        chat = history.begin(replace(SETUP, system_prompt=text), text)
        question = history.ask(chat, None, text, [Attachment(text, text)])
        (found,) = settled(history).messages([question])
        expected = text.replace("\ud800", "?")
        assert (found.text, found.attachments) == (expected, (Attachment(expected, expected),))
        assert history.conversation(chat).title == expected
    assert len(history.conversations()) == 7


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
    for _ in range(6):
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
        looking.join(60)
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


@pytest.mark.parametrize("seed", range(3))
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


# A conversation of 3,000 messages: what is read of it, counted in SQLite's own steps and not by a clock


MESSAGES = 3_000
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


def test_reading_costs_as_much_as_what_is_read(connection: sqlite3.Connection) -> None:
    """A branch by its messages, a window and a page of the list by their lengths alone."""
    reader = HistoryStore(connection)
    (chat,) = [one for one in reader.conversations(400) if one.title == "chat 150"]
    branch = shown(reader, chat.id)
    assert len(branch) == len(reader.messages(branch)) == chat.messages == MESSAGES
    assert steps(connection, lambda: reader.branch(branch[-1])) < 60 * MESSAGES
    for start in (0, 1_500, MESSAGES - 50):
        window = branch[start : start + 50]
        assert steps(connection, lambda window=window: reader.messages(window)) < 150 * 50
        assert [message.position for message in reader.messages(window)] == list(range(start, start + 50))
    page = reader.conversations(50)
    assert steps(connection, lambda: reader.conversations(50)) < 100 * 50
    assert steps(connection, lambda: reader.conversations(50, page[-1])) < 100 * 50
    (hit,) = reader.search('"message 2642 of 150"')
    assert (hit.position, hit.shown, hit.name) == (2642, True, "chat 150")
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
        store.fork(fork := new_id(), branch[1_499])
        store.delete_message(branch[1], mark)
        assert store.purge((mark >> 20) + 1) == 1
    assert shown(store, chat) == branch[:1] and len(shown(store, fork)) == 1_500
    store.close()


def shown(reader: Reader, chat: int) -> tuple[int, ...]:
    return reader.branch(reader.conversation(chat).head)


# Export, import and attachments: nothing lost, nothing obeyed, bad files refused with the place and the reason


NASTY = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202etxt.exe\u2066 \r\n\0 </details> ```\n# no heading\t\u2028é漢"


@pytest.fixture
def tree(store: HistoryStore) -> Tree:
    """Two branches, two attachments, every kind of value."""
    setup = ChatSetup("demo", None, Sampling(0.1, 3, 0.9, 0.2, 1.1, 2**62), f"Be brief. {NASTY}", "Tutor")
    chat, first, one, two, last = (new_id() for _ in range(5))
    with store.transaction():
        store.add_conversation(chat, setup, f"Title {NASTY}")
        store.add_question(
            first, chat, None, f"first {NASTY}", [Attachment(f"a{NASTY}.txt", NASTY), Attachment("b", "")]
        )
        states: tuple[MessageState, MessageState] = ("complete", "failed")
        for answer, state in zip((one, two), states, strict=True):
            store.begin_answer(answer, first, "demo", "High", "")
            stats = AnswerStats(7, None, 0.25, "length", True, 5)
            store.end_answer(answer, f"{state} answer", state, stats, f"thought {NASTY}")
        store.begin_answer(last, store.tree(chat).messages[-1].id, "", "", "")
        store.end_answer(last, "", "stopped", None)
        store.switch(chat, one)
    return store.tree(chat)


def edited(text: str, change: Callable[[Any], object]) -> str:
    document = json.loads(text)
    change(document)
    return json.dumps(document)


def test_json_loses_nothing_and_is_the_same_after_a_round_trip(store: HistoryStore, tree: Tree) -> None:
    text = as_json([tree, tree])
    once, twice = parse(text, "x", print)
    assert as_json([once]) == as_json([twice]) == as_json([tree])
    with store.transaction():
        store.add_tree(copy := new_id(), once)
    again = store.tree(copy)
    assert as_json([again]) == as_json([tree])
    assert again.conversation.number == 2 and not {m.id for m in again.messages} & {m.id for m in tree.messages}
    assert again.conversation.head == again.messages[1].id
    assert again.messages[0].text == tree.messages[0].text == f"first {NASTY}"
    assert {hit.conversation for hit in store.search('"complete answer"')} == {tree.conversation.id, copy}


def test_exports_of_earlier_versions_have_no_thinking(tree: Tree) -> None:
    def change(document: Any) -> None:
        document["conversations"][0]["title"] = " \t\n"
        for message in document["conversations"][0]["messages"]:
            del message["thought"]
            if message["stats"] is not None:
                del message["stats"]["thought_tokens"]

    (read,) = parse(edited(as_json([tree]), change), "x", print)
    assert {message.thought for message in read.messages} == {""}
    assert [message.stats and message.stats.thought_tokens for message in read.messages] == [None, 0, 0, None]
    assert read.conversation.title == "" and read.name.startswith("first")  # a blank title is none


def test_nothing_that_a_terminal_obeys_leaves_as_it_is(tree: Tree) -> None:
    for text in (as_json([tree]), as_markdown(tree)):
        left = {char for char in text if char != "\n" and char != "\t" and (ord(char) < 32 or 0x7F <= ord(char) < 0xA0)}
        assert not left and "\u202e" not in text and "\u2066" not in text
    assert "\ufffd]52;c;" in as_markdown(tree)


def test_markdown_reads_as_the_branch_that_is_shown(store: HistoryStore) -> None:
    with store.transaction():
        store.add_conversation(chat := new_id(), ChatSetup("demo", "Fast", system_prompt="Be brief."), created=0)
        store.add_question(q := new_id(), chat, None, "What is an expert?", [Attachment("a.md", "text with ``` in it")])
        store.begin_answer(a := new_id(), q, "demo", "Fast", "")
        store.end_answer(a, "A small network.\n", "complete", AnswerStats(4, 12.5, 0.25, "stop"))
        store.begin_answer(b := new_id(), q, "", "", "")
        store.end_answer(b, "Cut", "stopped", None)
        store.begin_answer(c := new_id(), q, "demo", "Fast", "")
        store.end_answer(c, "Small.", "complete", AnswerStats(4, None, None, "stop", False, 1234), "They ask.\n\nSo:")
        store.switch(chat, a)
    assert as_markdown(store.tree(chat)) == (
        "# What is an expert?\n\ndemo · Fast · 1970-01-01 00:00 UTC\n\n## System prompt\n\nBe brief.\n\n"
        "## You\n\nWhat is an expert?\n\n### Attached: a.md\n\n````\ntext with ``` in it\n````\n\n"
        "## demo · Fast\n\nA small network.\n\n*4 tokens · 12.5 tokens/s · first token 250 ms · end of turn*\n"
    )
    with store.transaction():
        store.switch(chat, b)
    assert as_markdown(store.tree(chat)).endswith("## Answer\n\nCut\n\n*cut off*\n")
    with store.transaction():
        store.switch(chat, c)
    assert as_markdown(store.tree(chat)).endswith(
        "## demo · Fast\n\n> *Thought for 1,234 tokens*\n>\n> They ask.\n>\n> So:\n\nSmall.\n\n"
        "*4 tokens · end of turn*\n"
    )


def test_names_of_files_are_safe() -> None:
    names = {"What is an expert?": "12-what-is-an-expert.md", "../../etc/passwd": "12-etc-passwd.md"}
    names |= {"Ünïcode 漢字": "12-ünïcode-漢字.md", "\x1b[31m\0 nul ... ": "12-31m-nul.md", "/": "12.md"}
    assert {name: file_name(12, name, ".md") for name in names} == names
    assert file_name(12, "漢" * 100, ".md") == f"12-{'漢' * 20}.md"


def chat(**changed: object) -> Callable[[Any], object]:
    return lambda document: document["conversations"][0].update(changed)


def message(**changed: object) -> Callable[[Any], object]:
    return lambda document: document["conversations"][0]["messages"][1].update(changed)


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda d: d.update(format="other"), "format"),
    (lambda d: d.update(version=2), "version 2"),
    (lambda d: d.update(version=True), "version True"),
    (lambda d: d.pop("conversations"), "conversations is missing"),
    (lambda d: d.update(conversations=[1]), "conversations[0] is not an object"),
    (lambda d: d["conversations"][0].pop("title"), "conversations[0].title is missing"),
    (chat(head=99), "conversations[0].head is message 99"),
    (chat(created="2026-01-01T00:00:00"), "conversations[0].created is not a time"),
    (chat(updated="1066-01-01T00:00:00Z"), "conversations[0].updated is not a time"),
    (
        lambda d: d["conversations"][0]["sampling"].update(top_p="much"),
        "conversations[0].sampling.top_p is not a number",
    ),
    (lambda d: d["conversations"][0]["sampling"].update(top_k=1.5), "conversations[0].sampling.top_k is not a whole"),
    (chat(quality={"sparsity": 10**400}), "quality.sparsity is not a number from 0"),
    (lambda d: d["conversations"][0]["messages"][1]["stats"].update(tokens=10**600), "tokens is not a number from 0"),
    (lambda d: d["conversations"][0]["messages"][1]["stats"].update(first_token_s=1e300), "_s is not a number from 0"),
    (message(role="system"), "messages[1].role is not one of user, "),
    (message(text=5), "conversations[0].messages[1].text is not text"),
    (message(parent=2), "messages[1].parent is message 2"),
    (message(parent=3), "messages[1].parent is message 3"),
    (message(id=1), "messages[1].id 1 appears twice"),
    (message(state="done"), "messages[1].state is not one of complete"),
    (lambda d: d["conversations"][0]["messages"][0]["attachments"][0].pop("name"), "attachments[0].name is missing"),
]


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[reason for _change, reason in BAD])
def test_a_bad_file_is_refused_with_the_place_and_the_reason(
    tree: Tree, change: Callable[[Any], object], reason: str
) -> None:
    with pytest.raises(UsageError, match="cannot be imported") as refused:
        parse(edited(as_json([tree]), change), "backup.json", print)
    assert reason in refused.value.cause


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -1), ("temperature", float("nan")), ("temperature", 10**400)),
        *(("top_k", 10**30), ("seed", -1), ("repetition_penalty", 1e999)),
    ],
    ids=lambda given: str(given)[:20],
)
def test_sampling_values_that_no_model_takes_are_left_out_and_told(tree: Tree, name: str, value: float) -> None:
    told: list[str] = []
    (read,) = parse(
        edited(as_json([tree]), lambda d: d["conversations"][0]["sampling"].update({name: value})), "x", told.append
    )
    assert read.conversation.setup.sampling == replace(
        tree.conversation.setup.sampling, **{name: getattr(Sampling(), name)}
    )
    assert len(told) == 1 and f"conversations[0].sampling.{name} cannot be" in told[0] and len(told[0]) < 120


def test_what_is_no_json_of_ours_is_refused() -> None:
    texts = {"": "Line 1, column 1", '{\n "a": \n}': "Line 3, column 1", "[]": "format", "null": "format"}
    for text, reason in (texts | {"[" * 100_000: "", f'{{"a": {"9" * 5000}}}': ""}).items():
        with pytest.raises(UsageError, match="cannot be imported") as refused:
            parse(text, "x", print)
        assert reason in refused.value.cause and refused.value.cause


def test_a_text_file_is_attached_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"\xef\xbb\xbfline\r\n\x1b[31mred \xc3\xa9")
    assert read_attachment(file) == Attachment("notes.txt", "line\r\n\x1b[31mred é")
    file.write_bytes(b"x" * LARGEST)
    assert len(read_attachment(file).text) == LARGEST


def test_what_is_no_text_is_not_attached(tmp_path: Path) -> None:
    contents = {
        "binary": (b"\x7fELF\0\0", "zero bytes"),
        "latin": ("café".encode("latin-1"), "not UTF-8"),
        "utf16": ("text".encode("utf-16"), "not UTF-8|zero bytes"),
        "huge": (b"x" * (LARGEST + 1), f"at most {LARGEST:,} can be"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="cannot be attached") as refused:
            read_attachment(tmp_path / name)
        assert any(part in refused.value.cause for part in reason.split("|"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="cannot be attached"):
            read_attachment(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing", Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot be attached"):
            read_attachment(path)
