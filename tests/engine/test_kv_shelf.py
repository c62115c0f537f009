"""Conversations that were answered before the present one come back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache, LibraryStore
from floe_chat.engine.decoder.kv_shelf import LEAST, KVShelf
from floe_chat.engine.decoder.kv_stores import BorrowingStore, GrowingStore, Layout
from floe_chat.engine.events import Finished, Load, Loaded
from torch import Tensor

from .driver import Engine, a_preset, asking
from .test_kv import Lender

SAME, FINER = a_preset("", 0.5, 0.5), a_preset("", 0.3, 0.3)
LAYERS, ENTRY, WINDOW = 9, (2, 3), 4096
LAYOUT = Layout(LAYERS, ENTRY, WINDOW, torch.float32, torch.device("cpu"))
TOKEN = LAYERS * 6 * 4  # bytes


def entry_of(conversation: Sequence[int], at: int) -> Tensor:
    """What a layer would have for a token: it depends on all before it."""
    seen = hash(tuple(conversation[: at + 1])) & 0xFFFF
    return torch.arange(6.0).view(ENTRY) + seen


class Talks:
    """A cache whose entries are those of `entry_of`, and its shelf."""

    def __init__(self, most: int, *, borrowing: bool = False) -> None:
        self.kv, self.shelf = KVCache(), KVShelf(most)
        store = BorrowingStore(LAYOUT, Lender(LAYOUT.nbytes(LAYERS, WINDOW))) if borrowing else GrowingStore(LAYOUT)
        self.kv.store = self.store = store

    def ask(self, prompt: list[int], answer: Sequence[int] = ()) -> int:
        """Compute what is missing; how much of the prompt was there."""
        self.shelf.turn_to(self.kv, prompt, SAME)
        kept = self.kv.keep(prompt, SAME)
        talk = [*prompt, *answer]
        self.store.reserve(len(talk))
        for number, layer in enumerate(self.store.layers()):
            for at in range(kept, len(talk)):
                layer[at] = entry_of(talk, at) + number
        self.store.length = len(talk)
        self.kv.computed(talk[kept:], SAME)
        for number, layer in enumerate(self.store.layers()):
            for at in (0, kept - 1, kept, len(talk) - 1):
                if at >= 0:
                    assert torch.equal(layer[at], entry_of(talk, at) + number), (number, at)
        return kept


def talk(seed: int, length: int) -> list[int]:
    return [random.Random(seed).randrange(1, 1 << 30) + at for at in range(length)]


@pytest.mark.parametrize("borrowing", [False, True])
def test_two_conversations_in_turn(borrowing: bool) -> None:
    talks = Talks(1 << 30, borrowing=borrowing)
    one, two = talk(1, 200), talk(2, 300)
    assert talks.ask(one) == talks.ask(two) == 0
    for turn in range(4):
        one, two = one + talk(10 + turn, 70), two + talk(20 + turn, 90)
        assert (talks.ask(one), talks.ask(two)) == (len(one) - 70, len(two) - 90)
    assert talks.shelf.nbytes() == len(one) * TOKEN  # nothing is there twice


def test_a_common_beginning_serves_all() -> None:
    """Such as a long system prompt."""
    talks, system = Talks(1 << 30), talk(0, 500)
    assert talks.ask(system + talk(1, 80)) == 0
    assert talks.ask(system + talk(2, 80)) == 500
    assert talks.ask(talk(3, 100)) == 0
    assert talks.ask(system + talk(4, 80)) == 500
    assert talks.ask(system + talk(1, 80) + [7]) == 580
    assert talks.ask(system + talk(2, 80) + [7]) == 580
    assert talks.ask(system + talk(4, 80) + [7]) == 580


def test_the_oldest_gives_way() -> None:
    talks = Talks(1300 * TOKEN)  # a copy needs its store's room, which grows by blocks
    for seed in range(4):
        assert talks.ask(talk(seed, 500)) == 0
        assert talks.shelf.nbytes() <= 1300 * TOKEN
    assert talks.ask([*talk(2, 500), 1]) == 500
    assert talks.ask([*talk(3, 500), 1]) == 500
    assert talks.ask([*talk(0, 500), 1]) == 0


def test_what_is_too_large_is_not_parked() -> None:
    talks = Talks(400 * TOKEN)
    talks.ask(talk(1, 500))
    talks.ask(talk(2, 500))
    assert talks.shelf.nbytes() == 0


def test_a_few_tokens_are_not_worth_it() -> None:
    talks = Talks(1 << 30)
    talks.ask(talk(1, 300), talk(5, LEAST - 1))
    talks.ask(talk(1, 300) + talk(2, 50))  # such as another answer to the same question
    assert talks.shelf.nbytes() == 0


def test_what_a_coarser_preset_computed_stays_away() -> None:
    talks = Talks(1 << 30)
    talks.ask(talk(1, 300))
    talks.shelf.turn_to(talks.kv, talk(2, 300), SAME)
    talks.kv.keep(talk(2, 300), SAME)
    talks.shelf.turn_to(talks.kv, talk(1, 300), FINER)
    assert talks.kv.keep(talk(1, 300), FINER) == 0


def test_the_librarys_cache_is_left_alone() -> None:
    kv, shelf = KVCache(), KVShelf(1 << 30)
    kv.store = LibraryStore()
    kv.computed(talk(1, 200), SAME)
    shelf.turn_to(kv, talk(2, 200), SAME)
    assert shelf.nbytes() == 0


@pytest.fixture
def parking(exact_pack: Path) -> Iterator[Engine]:
    engine = Engine()
    with engine:
        yield engine


@pytest.mark.parametrize("parked", [0, 1 << 30])
def test_answers_are_the_same_with_and_without(parking: Engine, exact_pack: Path, parked: int) -> None:
    """Tokens are compared with those of an engine that knows one conversation only."""
    parking.send(Load(str(exact_pack), "Exact", parked=parked))
    parking.until(Loaded)
    talks, request = {seed: [at % 90 + 3 for at in talk(seed, 100)] for seed in (1, 2)}, 0
    for turn in range(3):
        for seed in talks:
            request += 1
            parking.send(asking(request, talks[seed]))
            finished = parking.end_of(request)
            assert isinstance(finished, Finished)
            # All but the answer's last token, and what the question adds.
            assert finished.stats.reused_tokens == (len(talks[seed]) - 4 if parked and turn else 0)
            assert parking.tokens_of(request) == alone(exact_pack, talks[seed])
            talks[seed] += [*parking.tokens_of(request), 5, 6, 7]


def alone(pack: Path, prompt: list[int]) -> list[int]:
    with Engine() as engine:
        engine.send(Load(str(pack), "Exact"))
        engine.until(Loaded)
        engine.send(asking(1, prompt))
        engine.end_of(1)
        return engine.tokens_of(1)
