"""The pool of neuron rows after calls in any order: which rows leave it, by each policy, and what it remembers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from floe_chat.engine.offload import eviction
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool, Slots
from floe_chat.kernels.offload.pool import SPARE
from floe_chat.models.pack.usage_file import Heat, from_popularity
from numpy.typing import NDArray

from ..kernels.plain_pool import definition

POLICIES: tuple[Policy, ...] = ("score", "lru", "fifo")


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.int64)


@dataclass(frozen=True)
class Found:
    """Where neurons are: slots (N,) int32, -1 where absent; whether the row is ready, or on its way, (N,) bool."""

    slots: Slots
    ready: NDArray[np.bool_]
    coming: NDArray[np.bool_]


def find(pool: RowPool, layer: int, keys: Keys) -> Found:
    """Where neurons in any order, which may be named twice, are; their use is noted."""
    neurons = pool.slots.shape[2]
    given = layer, keys // neurons, np.arange(keys.size + 1), keys % neurons, neurons
    located = definition(pool.table).locate(*given)
    definition(pool.table).count(*given)
    found = Found(np.full(keys.size, -1, np.int32), np.zeros(keys.size, np.bool_), np.zeros(keys.size, np.bool_))
    for part, mask in ((located.ready, found.ready), (located.coming, found.coming)):
        found.slots[part.at], mask[part.at] = part.places, True
    return found


def bring(pool: RowPool, layer: int, keys: Keys, *, urgent: bool = True) -> Slots:
    """Bring rows when the step that found them missing is over: until then rows of their experts stay."""
    pool.release()
    slots = pool.reserve(layer, keys, urgent=urgent)
    pool.filled(slots)
    return slots


def present(pool: RowPool, layer: int = 0) -> set[int]:
    return set(np.flatnonzero(pool.slots[layer].reshape(-1) >= 0).tolist())


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
            *(self.abandon, self.release, self.heard),
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


def hits(policy: Policy, asked: list[Keys], experts: int, neurons: int, capacity: int) -> float:
    pool = RowPool(1, experts, neurons, capacity, policy)
    count = total = 0
    for keys in asked:
        found = find(pool, 0, keys)
        count, total = count + int(found.ready.sum()), total + keys.size
        bring(pool, 0, keys[found.slots < 0])
        pool.release()
    return count / total


@pytest.mark.parametrize("capacity", [1, 5, 20])
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_where_the_window_is_the_whole_pool_the_policy_is_exact(policy: Policy, capacity: int) -> None:
    dice, pool = random.Random(capacity), RowPool(1, 3, 11, capacity, policy)
    order: list[int] = []  # the next to go first
    for _ in range(300):
        key = min(dice.randrange(33), dice.randrange(33))
        found = find(pool, 0, keys_of(key))
        assert found.ready[0] == (key in order)
        if key in order:
            if policy == "lru":
                order.remove(key)
                order.append(key)
        else:
            order = [*order[len(order) == capacity :], key]
            bring(pool, 0, keys_of(key))
        pool.release()
        assert present(pool) == set(order)


def test_by_score_the_rows_of_the_expert_that_the_router_forgot_go_first() -> None:
    pool = RowPool(1, 2, 8, 8)
    for turn in range(40):
        definition(pool.table).hear(0, np.array([0.9, 0.1] if turn < 20 else [0.1, 0.9]))
        keys = keys_of(0, 1, 2, 3) if turn < 20 else keys_of(8, 9, 10, 11)
        found = find(pool, 0, keys)
        bring(pool, 0, keys[found.slots < 0])
        pool.release()
    bring(pool, 0, keys_of(12, 13))
    assert len(present(pool) & {0, 1, 2, 3}) == 2 and {8, 9, 10, 11, 12, 13} <= present(pool)


def test_by_score_the_neuron_that_is_active_more_often_stays() -> None:
    rng, often = np.random.default_rng(5), 20
    asked = [
        np.concatenate([np.flatnonzero(rng.random(often) < 0.8), often + np.flatnonzero(rng.random(180) < 0.2)])
        for _ in range(400)
    ]
    found = {policy: hits(policy, asked, 1, 200, 60) for policy in POLICIES}
    assert found["score"] > max(found["lru"], found["fifo"]) + 0.02, found


def test_by_score_the_layer_whose_turn_is_next_keeps_its_rows() -> None:
    pool = RowPool(3, 1, 4, 9)
    for turn in range(30):
        find(pool, turn % 3, np.arange(3))
        if turn < 3:
            bring(pool, turn, np.arange(3))
        pool.release()
    find(pool, 0, keys_of(3))  # layers 1 and 2 come before layer 0 does again
    bring(pool, 0, keys_of(3))
    assert [len(present(pool, layer)) for layer in range(3)] == [3, 3, 3]


def test_a_prefetch_leaves_rows_that_are_worth_more_than_a_guess() -> None:
    pool = RowPool(1, 2, 8, 4)
    for _ in range(300):
        definition(pool.table).hear(0, np.array([1.3, 0.0]))
        keys = np.arange(4)
        bring(pool, 0, keys[find(pool, 0, keys).slots < 0])
        pool.release()
    assert pool.reserve(0, keys_of(8, 9), urgent=False).size == 0 and present(pool) == {0, 1, 2, 3}
    assert pool.reserve(0, keys_of(8, 9), urgent=True).size == 2


def test_a_prefetch_does_not_displace_another_that_is_still_to_be_asked_for() -> None:
    pool = RowPool(2, 1, 8, 4)
    bring(pool, 1, keys_of(0, 1, 2), urgent=False)
    assert bring(pool, 1, keys_of(3, 4), urgent=False).size == 1
    find(pool, 1, keys_of(7))  # the guess was wrong: its rows have no claim any more
    assert bring(pool, 1, keys_of(4, 5, 6), urgent=False).size == 3


def test_a_pool_keeps_a_small_part_of_itself_free_for_the_next_step() -> None:
    for capacity, kept in ((30, 3), (64, 6)):
        pool = RowPool(1, 2, 100, capacity)
        bring(pool, 0, np.arange(capacity))
        pool.release()
        slots = pool.visit(6)
        assert slots.size == 6
        pool.keep(0, np.arange(100, 106), slots)
        pool.release()
        assert pool.capacity - pool.used == kept
    for policy in ("lru", "fifo"):
        pool = RowPool(1, 2, 100, 30, policy)
        bring(pool, 0, np.arange(30))
        pool.release()
        pool.filled(pool.keep(0, np.arange(100, 106), pool.visit(6)))
        assert pool.used == 30, "all rows stay that were copied"


def test_by_score_rows_that_are_seldom_used_displace_no_others() -> None:
    """FloE's rows have long tails: what is used once in a while is copied for its step alone."""
    rng, pool = np.random.default_rng(3), RowPool(4, 2, 400, 400)
    for turn in range(1200):
        layer = turn % 4
        often = np.flatnonzero(rng.random(60) < 0.9)
        seldom = 60 + np.flatnonzero(rng.random(340) < 0.05)
        keys = np.concatenate([often, seldom])
        found = find(pool, layer, keys)
        absent = keys[found.slots < 0]
        slots = pool.visit(absent.size)
        pool.filled(pool.keep(layer, absent[: slots.size], slots))
        pool.release()
    assert sum(len(present(pool, layer) & set(range(60))) for layer in range(4)) >= 228


def test_scores_that_are_no_numbers_are_forgotten() -> None:
    pool = RowPool(1, 2, 3, 3)
    before = pool.heat().scores
    definition(pool.table).hear(0, np.array([np.nan, 0.5]))
    definition(pool.table).hear(0, np.array([np.inf, 0.5]))
    assert (pool.heat().scores == before).all()


@pytest.mark.parametrize("growth", [3.0, 1e20], ids=["often", "never"])
def test_uses_are_moving_means_over_the_calls_of_an_expert(growth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LARGEST_GROWTH", growth)
    rng, neurons = np.random.default_rng(2), 9
    pool, mean = RowPool(2, 3, neurons, 5), np.zeros((2, 3, neurons))
    for turn in range(300):
        layer = turn % 2
        active = rng.random((3, neurons)) < 0.4
        active[rng.integers(3)] = False
        for expert in np.flatnonzero(active.any(1)):
            mean[layer, expert] += eviction.USE_RATE * (active[expert] - mean[layer, expert])
        find(pool, layer, np.flatnonzero(active.reshape(-1)))
    np.testing.assert_allclose(pool.heat().uses, mean, rtol=1e-4)


def random_heat(layers: int, experts: int, neurons: int) -> Heat:
    rng = np.random.default_rng(layers + neurons)
    return Heat(
        rng.dirichlet(np.ones(experts), layers).astype(np.float32),
        rng.random((layers, experts, neurons), dtype=np.float32),
    )


@pytest.mark.parametrize("capacity", [0, 1, 17, 2 * 3 * 11, 100])
def test_a_warm_start_names_the_hottest_neurons_first(capacity: int) -> None:
    kept = random_heat(2, 3, 11)
    pool = RowPool(2, 3, 11, capacity)
    layers, keys = pool.warm(kept)
    worth = (kept.scores[..., None] * kept.uses).reshape(2, 33)
    assert keys.size == min(capacity, 66) and len(set(zip(layers.tolist(), keys.tolist(), strict=True))) == keys.size
    assert worth[layers, keys].tolist() == sorted(worth.reshape(-1).tolist(), reverse=True)[: keys.size]
    for layer in range(2):
        bring(pool, layer, keys[layers == layer], urgent=False)
    assert sum(len(present(pool, layer)) for layer in range(2)) == keys.size
    np.testing.assert_allclose(pool.heat().uses, kept.uses, rtol=1e-6)


def test_without_heat_popular_experts_come_first_and_of_each_the_important_neurons() -> None:
    guess = from_popularity(np.array([[3.0, 1.0], [0.0, 0.0]]), 4)
    np.testing.assert_allclose(guess.scores, [[0.75, 0.25], [0.5, 0.5]])
    layers, keys = RowPool(2, 2, 4, 3).warm(guess)
    assert (layers.tolist(), keys.tolist()) == ([0, 0, 0], [0, 1, 2])


def test_heat_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="heat of"):
        RowPool(2, 3, 11, 4).warm(random_heat(2, 3, 12))
