"""What a step decides, compiled, beside the definition: random walks, with equal lists and tables after each call.

Of rows worth exactly as much as each other either may go; then the tables are made equal again.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.links.link import Link
from floe_chat.kernels.offload.located import Slots
from floe_chat.kernels.offload.placing import Ahead, Found, Placed, Way
from floe_chat.kernels.offload.pool import FILLING, FINDS, FREE_COUNT, EvictionRule
from floe_chat.kernels.offload.sharing import Lanes
from floe_chat.kernels.types import Active

from .plain_pool import CompiledTable, StepTable
from .test_pool import FIFO, LRU, RULE, SHAPE, assert_equal, both

LAYERS, EXPERTS, NEURONS = SHAPE


class Walk:
    """The same calls on both tables."""

    def __init__(self, rule: EvictionRule, capacity: int, seed: int) -> None:
        self.dice, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.by_score = rule.by_score
        self.tables = both(rule, capacity, seed)
        self.moving: list[tuple[int, Slots]] = []
        self.promised: set[int] = set()  # slots of rows that were fetched ahead, before a call
        self.link = Link("none", "walk", 64, content=False)

    def way(self) -> Way | None:
        """Whether the call sends for its rows makes no difference to the tables."""
        handle, piece, pieces = self.link.handle, self.dice.randint(1, 9), self.dice.randint(1, 3)
        capacity = self.tables[0].capacity
        return self.dice.choice([None, Way(handle, None, None, EXPERTS * NEURONS, capacity, piece, pieces)])

    def found(self, layer: int, *, late: bool = False) -> Found:
        """A step of one token, whose experts differ, or of several, whose may be the same; some calls left out."""
        parts, tokens = self.dice.choice([1, 2, 3]), self.dice.choice([1, 1, 1, 2, 5, 8])
        width, top_k = NEURONS // parts, self.dice.randint(1, 3)
        chosen = np.stack([self.rng.permutation(EXPERTS)[:top_k] for _ in range(tokens)])
        experts = (chosen[..., None] * parts + np.arange(parts)).reshape(-1)
        if self.dice.random() < 0.1:
            experts = self.rng.integers(0, EXPERTS * parts, experts.size)
        shares = self.rng.choice([0.0, 0.2, 0.6, 1.0], experts.size)
        neurons = [np.flatnonzero(self.rng.random(width) < share) for share in shares]
        if self.dice.random() < 0.1:
            neurons = [self.rng.permutation(part) for part in neurons]
        total = sum(part.size for part in neurons)
        values = torch.from_numpy(self.rng.standard_normal(total)).float()
        if total:
            values[self.dice.randrange(total)] = torch.nan
        kind = self.dice.choice([torch.float32, torch.bfloat16])
        offsets = np.cumsum([0, *(part.size for part in neurons)])
        active = np.concatenate([*neurons, np.zeros(0, np.int64)]).astype(np.int32)
        scores = torch.from_numpy(self.rng.random(chosen.shape)).to(kind)
        if self.dice.random() < 0.1:
            scores[0, 0] = torch.inf
        weights = scores[..., None].expand(*chosen.shape, parts).reshape(-1)
        limits = torch.from_numpy(self.rng.random(experts.size)).float() if late else None
        heard = torch.from_numpy(self.rng.random((tokens, EXPERTS))).to(kind) if self.dice.random() < 0.5 else None
        if heard is not None and self.dice.random() < 0.1:
            heard[0, 0] = torch.nan
        return Found(
            *(layer, width, Active(torch.from_numpy(offsets), torch.from_numpy(active), values.to(kind))),
            *(torch.from_numpy(experts), weights, torch.from_numpy(chosen), scores, limits, heard),
        )

    def lanes(self) -> Lanes:
        start, each = self.rng.random(2) * 10, self.rng.random(2)
        # RAM is no limit, or each costs it the same, or any of them more.
        memory = self.dice.choice([np.zeros(2), np.repeat(self.rng.random(1), 2), self.rng.random(2)])
        return Lanes(start[0], np.inf if self.dice.random() < 0.2 else each[0], start[1], each[1], *memory)

    def place(self, layer: int) -> None:
        found, lanes = self.found(layer, late=self.dice.random() < 0.3), self.lanes()
        way = self.way()
        one, two = (table.place(found, lanes, way) for table in self.tables)
        same_lists(one, two, ("ready", "coming", "copied", "beside"))
        assert (one.looked, one.hit) == (two.looked, two.hit)
        self.reserved(layer, one, two)
        assert_equal(*self.tables)
        for table in self.tables:
            table.note(found)
        self.kept(layer, one)
        guessed = np.unique(self.rng.integers(0, EXPERTS * NEURONS, self.dice.randint(0, 60))).astype(np.int32)
        assert self.tables[0].right(found, guessed) == self.tables[1].right(found, guessed)

    def ahead(self, layer: int) -> None:
        guess = self.found(layer)
        way = self.way()
        one, two = (table.ahead(guess, way) for table in self.tables)
        np.testing.assert_array_equal(one.guessed, two.guessed)
        assert one.runs == two.runs and sum(count for _, count in one.runs) >= one.slots.size
        self.reserved(layer, one, two)

    def reserved(self, layer: int, one: Placed | Ahead, two: Placed | Ahead) -> None:
        np.testing.assert_array_equal(one.keys, two.keys)
        assert one.slots.size == two.slots.size
        if one.slots.tolist() != two.slots.tolist():
            self.agree(one.slots, two.slots)
        if isinstance(one, Ahead):
            self.moving.append((layer, one.slots))

    def kept(self, layer: int, placed: Placed) -> None:
        """Some of the visitors stay."""
        keys, spared = placed.keys[: placed.slots.size].astype(np.int64), self.dice.choice([1, 3, 8])
        one, two = (table.keep(layer, keys, placed.slots, spared) for table in self.tables)
        np.testing.assert_array_equal(one, two)
        free = [table.free[: table.counters[FREE_COUNT]] for table in self.tables]
        assert free[0].size == free[1].size
        self.agree(*free)
        self.moving.append((layer, one))

    def agree(self, taken: Slots, others: Slots) -> None:
        """Other slots were taken: by score only those of rows with a promise, all of which are worth the same."""
        one, two = self.tables
        assert not self.by_score or {*taken.tolist()} ^ {*others.tolist()} <= self.promised
        two.free[:] = one.free
        for name in ("slots", "cells", "residents", "visitors"):
            getattr(two, name)[:] = getattr(one, name)

    def arrive(self) -> None:
        if self.moving:
            _, slots = self.moving.pop(self.dice.randrange(len(self.moving)))
            arrived = self.dice.random() < 0.8
            for table in self.tables:
                table.settle(slots, arrived=arrived)

    def release(self) -> None:
        for table in self.tables:
            table.release()

    def resize(self) -> None:
        """Between two steps, with nothing under way."""
        while self.moving:
            self.arrive()
        self.release()
        capacity = self.dice.choice([1, 4, 40, 120, 359, 360])
        for table in self.tables:
            table.resize(capacity)


def same_lists(one: Placed, two: Placed, names: tuple[str, ...]) -> None:
    for name in names:
        for field in ("offsets", "at", "places"):
            want, got = (getattr(getattr(each, name), field) for each in (one, two))
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(want, got, err_msg=f"{name}.{field}")


@pytest.mark.some(5)
@pytest.mark.parametrize("rule", [RULE, LRU, FIFO], ids=["score", "lru", "fifo"])
@pytest.mark.parametrize("capacity", [4, 18, 36, 120, 330, 360])
@pytest.mark.parametrize("seed", range(3))
def test_the_compiled_step_leaves_the_tables_of_the_definition(
    rule: EvictionRule, capacity: int, seed: int, every_case: bool
) -> None:
    walk = Walk(rule, capacity, seed)
    for _ in range(80 if every_case else 50):
        layer, action, table = walk.dice.randrange(LAYERS), walk.dice.random(), walk.tables[0]
        walk.promised = {*np.flatnonzero(table.marks[:-1] > table.counters[FINDS]).tolist()}
        if action < 0.4:
            walk.place(layer)
        elif action < 0.55:
            walk.ahead(layer)
        elif action < 0.75:
            walk.arrive()
        elif action < 0.98:
            walk.release()
        else:
            walk.resize()
        assert_equal(*walk.tables)


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(kind: type[StepTable]) -> None:
    walk = Walk(RULE, 20, 5)
    table = walk.tables[kind is CompiledTable]
    good = walk.found(1)
    while good.active.neurons.numel() < 3 or good.width != NEURONS:
        good = walk.found(1)
    ends, neurons = good.active.offsets, good.active.neurons
    table.place(good, walk.lanes())
    before = [
        array.copy() for array in (table.slots, table.states, table.counters, table.means.raw, table.means.recent)
    ]
    wrong = [
        replace(good, layer=LAYERS),
        replace(good, layer=-1),
        replace(good, layer=1 << 64),
        replace(good, width=0),
        replace(good, width=7),
        replace(good, width=2 * NEURONS),
        replace(good, experts=good.experts + EXPERTS),
        replace(good, experts=good.experts[:-1]),
        replace(good, active=replace(good.active, neurons=neurons + NEURONS)),
        replace(good, active=replace(good.active, neurons=neurons - NEURONS)),
        replace(good, active=replace(good.active, neurons=neurons[:-1])),
        replace(good, active=replace(good.active, offsets=ends.flip(0))),
        replace(good, active=replace(good.active, offsets=ends + 1)),
    ]

    def place(found: Found) -> None:
        table.place(found, walk.lanes())

    calls = place, table.note, table.ahead
    alone = [
        replace(good, chosen=good.chosen + EXPERTS),
        replace(good, heard=torch.zeros(len(good.chosen), EXPERTS + 1)),
        replace(good, heard=torch.zeros(len(good.chosen) + 1, EXPERTS)),
    ]
    for call, found in [*((call, found) for call in calls for found in wrong), *((place, found) for found in alone)]:
        with pytest.raises((ValueError, IndexError)):
            call(found)
        after = (table.slots, table.states, table.counters, table.means.raw, table.means.recent)
        for now, then in zip(after, before, strict=True):
            np.testing.assert_array_equal(now, then)


def test_what_guesses_name_twice_is_fetched_once() -> None:
    for table in both(RULE, 100):
        active = Active(torch.tensor([0, 3, 5]), torch.tensor([1, 2, 3, 2, 4], dtype=torch.int32), torch.ones(5))
        none = torch.zeros(0, 1)
        guess = Found(0, NEURONS, active, torch.tensor([2, 2]), torch.tensor([0.4, 0.6]), none.long(), none)
        found = table.ahead(guess)
        assert found.runs == [(1, 2), (0, 2)] and found.slots.size == 4
        assert (found.keys - 2 * NEURONS).tolist() == [2, 4, 1, 3] and found.guessed.size == 5


def test_nothing_gives_way_where_all_rows_have_slots() -> None:
    for table in both(RULE, LAYERS * EXPERTS * NEURONS):
        for layer in range(LAYERS):
            slots = table.reserve(layer, np.arange(EXPERTS * NEURONS), urgent=False)
            table.settle(slots, arrived=True)
        assert table.counters[FREE_COUNT] == 0 and (table.slots >= 0).all()
        walk = Walk(RULE, 1, 0)
        for layer in range(LAYERS):
            found = walk.found(layer)
            placed = table.place(found, walk.lanes())
            assert placed.ready.at.size == found.active.neurons.numel() and not placed.keys.size
            np.testing.assert_array_equal(placed.ready.at, np.arange(placed.ready.at.size))
            table.note(found)
        with pytest.raises(ValueError, match="in use"):
            table.resize(50)
        table.release()
        table.resize(50)  # from here on means are looked at again
        held = np.flatnonzero(table.states[:-1])
        np.testing.assert_array_equal(table.kept[held], table.means.raw.reshape(-1)[table.keys[held]])


def test_a_compiled_call_sends_for_the_rows_that_it_places() -> None:
    rng, walk = np.random.default_rng(1), Walk(RULE, 60, 1)
    source, table = torch.from_numpy(rng.integers(0, 255, (EXPERTS * NEURONS, 64), np.uint8)), walk.tables[1]
    target, link = torch.zeros(60, 64, dtype=torch.uint8), Link("none", "test", 64)
    way = Way(*link.ends(source, target), len(source), len(target), 5, 2)
    moved = 0
    for _ in range(60):
        found = walk.found(walk.dice.randrange(LAYERS))
        placed = table.place(found, walk.lanes(), way)
        keys = placed.keys[: placed.slots.size].astype(np.int64)
        kept, ahead = table.keep(found.layer, keys, placed.slots, 8), table.ahead(found, way)
        ends = [end for _, end in ahead.sent]
        assert ends == sorted({*ends}) and (ends or [0])[-1] == ahead.slots.size and len(ends) <= 2 * len(ahead.runs)
        assert (placed.transfer > 0) == (placed.slots.size > 0)
        for part in (placed, ahead):
            keys, slots = torch.from_numpy(part.keys[: part.slots.size]).long(), torch.from_numpy(part.slots).long()
            assert torch.equal(target[slots], source[keys])
            moved += part.slots.size
        for slots in (kept, ahead.slots):
            table.settle(slots, arrived=True)
        table.release()
    assert link.bytes_moved == moved * 64 > 0
    with pytest.raises(ValueError, match="do not fit"):
        table.place(walk.found(0), walk.lanes(), replace(way, rows=5))  # it leads to other rows
    link.close()
    free = table.counters[FREE_COUNT]
    table.release()
    with pytest.raises(RuntimeError, match="closed"):
        for layer in range(LAYERS):
            table.place(walk.found(layer), Lanes(0.0, np.inf, 0.0, 1.0), way)
    assert table.counters[FREE_COUNT] >= free and not (table.states[:-1] == FILLING).any()
