"""Random walks over branches, beside the same tree in plain dictionaries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from floe_chat.app.history import AnswerStats, ChatSetup, new_id, open_history
from floe_chat.app.history.database.store import HistoryStore
from floe_chat.engine.events import Sampling

STATS = AnswerStats(6, 12.5, 0.4, "stop")
SETUP = ChatSetup("demo", "Fast", Sampling(temperature=0.1, seed=7), "Be brief.", "Tutor")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = open_history(tmp_path / "history.db").store
    yield opened
    opened.close()


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
