"""The pool of neuron rows after calls in any order: random walks beside plain dictionaries, and real bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from floe_chat.engine.offload import eviction
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool, Slots
from floe_chat.kernels.offload.pool import SPARE

from ..kernels.plain_pool import definition
from .pools import POLICIES, find, keys_of


@dataclass
class Model:
    """What a pool must hold after each call, by the words of its interface alone.

    Attributes:
        place: (layer, key) -> slot. filling: those on their way. held: layers and experts that this step uses.
        visitors: slots that are lent.
    """

    pool: RowPool
    dice: random.Random
    place: dict[tuple[int, int], int] = field(default_factory=dict)
    filling: set[tuple[int, int]] = field(default_factory=set)
    held: set[tuple[int, int]] = field(default_factory=set)
    visitors: list[int] = field(default_factory=list)

    @property
    def keys(self) -> int:
        return self.pool.slots[0].size

    def expert(self, row: tuple[int, int]) -> tuple[int, int]:
        return row[0], row[1] // self.pool.slots.shape[2]

    def some(self, pool: list[int]) -> Keys:
        return np.array(self.dice.sample(pool, self.dice.randint(0, len(pool))), np.int64)

    def some_filling(self) -> tuple[list[tuple[int, int]], Slots]:
        chosen = self.dice.sample(sorted(self.filling), self.dice.randint(0, len(self.filling)))
        return chosen, np.array([self.place[row] for row in chosen], np.int32)

    def find(self) -> None:
        layer = self.dice.randrange(len(self.pool.slots))
        keys = np.array(self.dice.choices(range(self.keys), k=self.dice.randint(0, self.keys)), np.int64)
        found = find(self.pool, layer, keys)
        rows = [(layer, int(key)) for key in keys]
        assert found.slots.dtype == np.int32
        assert found.slots.tolist() == [self.place.get(row, -1) for row in rows]
        assert found.ready.tolist() == [row in self.place and row not in self.filling for row in rows]
        assert found.coming.tolist() == [row in self.filling for row in rows]
        self.held |= {self.expert(row) for row in rows}

    def reserve(self) -> None:
        layer, urgent = self.dice.randrange(len(self.pool.slots)), self.dice.random() < 0.6
        keys = self.some([key for key in range(self.keys) if (layer, key) not in self.place])
        free = self.pool.capacity - len(self.place) - len(self.visitors)
        spared = int(self.pool.table.counters[SPARE])
        free = free if urgent else max(0, min(free, free + len(self.visitors) - spared))
        loose = self.loose()
        slots = self.pool.reserve(layer, keys, urgent=urgent).tolist()
        most, least = min(keys.size, free + len(loose)), min(keys.size, free)
        assert len(slots) == most if urgent else least <= len(slots) <= most
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.pool.capacity for slot in slots)
        owners = {slot: row for row, slot in self.place.items()}
        assert not {*slots} & {*self.visitors}
        evicted = {owners[slot] for slot in slots if slot in owners}
        assert evicted <= loose and len(evicted) == max(0, len(slots) - free), "as few as possible, none in use"
        for row in evicted:
            del self.place[row]
        rows = [(layer, int(key)) for key in keys[: len(slots)]]
        self.place.update(zip(rows, slots, strict=True))
        self.filling |= set(rows)
        self.held |= {self.expert(row) for row in rows} if urgent else set()

    def loose(self) -> set[tuple[int, int]]:
        return {row for row in self.place if row not in self.filling and self.expert(row) not in self.held}

    def visit(self) -> None:
        """Rows are copied for a step, some of which stay."""
        layer, before = self.dice.randrange(len(self.pool.slots)), dict(self.place)
        keys = self.some([key for key in range(self.keys) if (layer, key) not in self.place])
        free, loose = self.pool.capacity - len(self.place) - len(self.visitors), self.loose()
        slots = self.pool.visit(keys.size)
        assert slots.size == min(keys.size, free + len(loose)) and not {*slots.tolist()} & {*self.visitors}
        kept, keys = self.pool.keep(layer, keys[: slots.size], slots), keys[: slots.size]
        by_slot = dict(zip(slots.tolist(), keys.tolist(), strict=True))
        rows = {(layer, by_slot[slot]): slot for slot in kept.tolist()}
        table = self.pool.slots.reshape(len(self.pool.slots), -1)
        self.place = {row: slot for row, slot in self.place.items() if table[row] == slot}
        assert {*before} - {*self.place} <= loose, "none that is in use has gone"
        self.place |= rows
        self.filling |= {*rows}
        self.held |= {self.expert(row) for row in rows}
        self.visitors += [slot for slot in slots.tolist() if slot not in {*kept.tolist()}]

    def filled(self) -> None:
        rows, slots = self.some_filling()
        self.pool.filled(slots)
        self.filling -= set(rows)

    def abandon(self) -> None:
        rows, slots = self.some_filling()
        self.pool.abandon(slots)
        self.filling -= set(rows)
        for row in rows:
            del self.place[row]

    def release(self) -> None:
        self.pool.release()
        self.held.clear()
        self.visitors.clear()

    def heard(self) -> None:
        layer = self.dice.randrange(len(self.pool.slots))
        definition(self.pool.table).hear(layer, np.array([self.dice.random() for _ in range(self.pool.slots.shape[1])]))

    def resize(self) -> None:
        capacity = self.dice.choice([0, 1, self.pool.capacity, self.dice.randint(0, self.pool.slots.size + 3)])
        beyond = {row for row, slot in self.place.items() if slot >= capacity}
        if self.visitors or any(row in self.filling or self.expert(row) in self.held for row in beyond):
            before = self.pool.slots.copy()
            with pytest.raises(ValueError, match="in use"):
                self.pool.resize(capacity)
            assert (self.pool.slots == before).all()
            return
        self.pool.resize(capacity)
        assert self.pool.capacity == capacity
        for row in beyond:
            del self.place[row]

    def refusals(self) -> None:
        """Calls that must raise and leave all as it was."""
        layer = self.dice.randrange(len(self.pool.slots))
        absent = [key for key in range(self.keys) if (layer, key) not in self.place]
        there = [key for key in range(self.keys) if (layer, key) in self.place]
        wrong: list[Callable[[], object]] = [
            lambda: find(self.pool, layer, keys_of(self.keys)),
            lambda: find(self.pool, layer, keys_of(-1)),
            lambda: self.pool.reserve(layer, keys_of(-1), urgent=True),
            lambda: self.pool.filled(np.array([self.pool.capacity], np.int32)),
            lambda: self.pool.abandon(np.array([-1], np.int32)),
            lambda: self.pool.resize(-1),
        ]
        if absent:
            wrong.append(lambda: self.pool.reserve(layer, keys_of(*absent, absent[0]), urgent=True))
        if there:
            wrong.append(lambda: self.pool.reserve(layer, keys_of(*absent, there[-1]), urgent=False))
        settled = [slot for row, slot in self.place.items() if row not in self.filling]
        free = sorted({*range(self.pool.capacity)} - {*self.place.values()})
        moving = [self.place[row] for row in sorted(self.filling)]
        for slots in ([*moving, *settled[:1]], [*moving, *free[:1]], [*moving, *moving[:1]]):
            if len(slots) > len(moving):
                wrong.append(lambda slots=slots: self.pool.filled(np.array(slots, np.int32)))
                wrong.append(lambda slots=slots: self.pool.abandon(np.array(slots, np.int32)))
        with pytest.raises(ValueError, match=r"."):
            self.dice.choice(wrong)()

    def agrees(self) -> None:
        """The table holds what the model holds and nothing else; shares count what is ready."""
        layers, experts, neurons = self.pool.slots.shape
        table = np.full((layers, experts * neurons), -1, np.int32)
        ready = np.zeros((layers, experts))
        for (layer, key), slot in self.place.items():
            table[layer, key] = slot
            ready[layer, key // neurons] += (layer, key) not in self.filling
        assert (self.pool.slots.reshape(table.shape) == table).all()
        for layer in range(layers):
            np.testing.assert_allclose(self.pool.resident(layer), ready[layer] / neurons, rtol=1e-6)

    def step(self) -> None:
        calls = (
            *(self.find, self.reserve, self.visit, self.filled),
            *(self.abandon, self.release, self.heard, self.refusals),
        )
        self.dice.choice(calls)()
        if self.dice.random() < 0.05:
            self.resize()
        self.agrees()


SIZES = [(1, 1, 1), (1, 2, 3), (3, 1, 7), (2, 3, 5), (4, 2, 13)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_loses_no_slot_and_shares_none(
    policy: Policy, size: tuple[int, int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(f"{policy} {size} {seed}")
    # Small windows, so that the hand stops within the pool and goes round its end.
    monkeypatch.setattr(eviction, "SMALLEST_WINDOW", dice.choice([1, 3, 256]))
    monkeypatch.setattr(eviction, "SAMPLE", dice.choice([1, 2, 6]))
    rows = size[0] * size[1] * size[2]
    model = Model(RowPool(*size, dice.choice([0, 1, 2, rows // 2, rows, rows + 2]), policy), dice)
    for _ in range(150):
        model.step()
