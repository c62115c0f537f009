"""The compiled tables of a pool beside those in numpy: the same calls, the same tables after each.

Which rows are evicted is the same too, but for rows worth exactly as much as each other, of which either may take any:
so the pools here are asked with worths that differ, or compared by how many went and what those were worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from floe_chat.kernels.cpu import pool_table
from floe_chat.kernels.offload.located import Keys, Part, Slots
from floe_chat.kernels.offload.pool import (
    BROUGHT,
    COMING,
    FILLING,
    FINDS,
    FREE_COUNT,
    HAND,
    LAYER,
    VISITING,
    EvictionRule,
    Means,
)

from .plain_pool import CompiledTable, StepTable, cut, landing

RULE = EvictionRule(
    by_score=True,
    marks_use=False,
    sample=3,
    smallest_window=4,
    bar=0.3,
    prefetch_worth=0.4,
    turn=0.5,
    use_rate=0.02,
    largest_growth=3.0,
    score_rate=0.3,
    habit_rate=0.01,
)
LRU = replace(RULE, by_score=False, marks_use=True)
FIFO = replace(RULE, by_score=False)
SHAPE = (3, 4, 30)


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.int64)


def means(seed: int, shape: tuple[int, int, int] = SHAPE) -> Means:
    """As after some use, no two alike."""
    rng, (layers, experts, neurons) = np.random.default_rng(seed), shape
    return Means(
        rng.random((layers, experts)),
        rng.random((layers, experts)),
        rng.random((layers, experts * neurons), dtype=np.float32),
        1 + rng.random((layers, experts)),
    )


def both(rule: EvictionRule, capacity: int, seed: int = 0) -> tuple[StepTable, CompiledTable]:
    tables = StepTable(*SHAPE, rule, means(seed)), CompiledTable(*SHAPE, rule, means(seed))
    for table in tables:
        table.resize(capacity)
    return tables


def assert_equal(one: StepTable, two: StepTable) -> None:
    for name in ("slots", "residents", "counters", "busy", "bar"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    for name in ("states", "keys", "marks"):  # but for nobody's slot
        np.testing.assert_array_equal(getattr(one, name)[:-1], getattr(two, name)[:-1], err_msg=name)
    free = int(one.counters[FREE_COUNT])
    np.testing.assert_array_equal(one.free[:free], two.free[:free])
    visiting = int(one.counters[VISITING])
    np.testing.assert_array_equal(one.visitors[:visiting], two.visitors[:visiting])
    assert one.counters[COMING] == np.count_nonzero(one.states[:-1] == FILLING)
    for name in ("growth", "recent", "habit"):
        np.testing.assert_array_equal(getattr(one.means, name), getattr(two.means, name), err_msg=name)
    np.testing.assert_allclose(one.means.raw, two.means.raw, rtol=1e-6)
    if not one.holds_all:
        held = np.flatnonzero(one.states[:-1])
        np.testing.assert_allclose(one.kept[held], two.kept[held], rtol=1e-6)


def assert_same_part(one: Part, two: Part) -> None:
    for name in ("offsets", "at", "places"):
        assert getattr(one, name).dtype == getattr(two, name).dtype
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)


def _agree(table: StepTable, wanted: StepTable) -> None:
    for name in ("slots", "cells"):
        getattr(table, name)[:] = getattr(wanted, name)


@pytest.mark.parametrize("wanted", [1, 7, 500, 1999, 2000, 3000])
def test_the_rows_worth_least_go(wanted: int) -> None:
    shape = (1, 2, 4000)
    rule = replace(RULE, smallest_window=5000)
    worths: list[float] = []
    for kind in (StepTable, CompiledTable):
        table = kind(*shape, rule, means(3, shape))
        table.resize(2000)
        table.settle(table.reserve(0, np.arange(2000), urgent=True), arrived=True)
        table.release()
        before = table.keys[:2000].copy()
        taken = table.reserve(0, np.arange(4000, 4000 + wanted), urgent=True)
        assert taken.size == min(wanted, 2000)
        worth = table.means.raw[0][before]
        gone = np.zeros(2000, np.bool_)
        gone[taken] = True
        assert gone.all() or worth[gone].max() <= worth[~gone].min()
        assert (table.slots[before[gone]] == -1).all() and (table.slots[before[~gone]] >= 0).all()
        worths.append(float(np.sort(worth[gone]).astype(np.float64).sum()))
    assert worths[0] == worths[1]


@pytest.mark.parametrize("urgent", [True, False])
def test_the_same_rows_of_a_large_window_go(urgent: bool) -> None:
    shape, wanted = (2, 4, 4000), 3000
    tables = [kind(*shape, RULE, means(5, shape)) for kind in (StepTable, CompiledTable)]
    for table in tables:
        table.resize(18_001)
        table.settle(table.reserve(0, np.arange(table.width), urgent=True), arrived=True)
        table.settle(table.reserve(1, np.arange(2001), urgent=False), arrived=True)
        table.release()
        table.busy[2] = 1
    for start in (2001, 5001, 8001):
        taken = [table.reserve(1, np.arange(start, start + wanted), urgent=urgent) for table in tables]
        assert taken[0].size == wanted
        assert sorted(taken[0].tolist()) == sorted(taken[1].tolist())
        assert not ((tables[0].keys[taken[0]] >= 8000) & (tables[0].keys[taken[0]] < 12_000)).any()
        _agree(tables[1], tables[0])
        for table in tables:
            table.settle(taken[0], arrived=True)
            table.release()
            table.busy[2] = 1
        assert_equal(*tables)


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_visitors_worth_more_than_the_bar_stay_and_as_many_others_go(kind: type[StepTable]) -> None:
    shape = (2, 2, 100)
    table = kind(*shape, replace(RULE, smallest_window=100, prefetch_worth=10.0), means(4, shape))
    table.means.recent[:] = table.means.growth[:] = 1
    table.means.raw[0], table.means.raw[1] = np.tile(np.linspace(1, 2, 200), (2, 1))
    table.resize(100)
    table.settle(table.reserve(0, np.arange(100), urgent=True), arrived=True)
    table.release()
    table.counters[LAYER] = 1  # so that layer 1 has been
    slots = table.visit(20)
    assert slots.size == 20 and table.counters[VISITING] == 20, "the worst have gone"
    assert np.array_equal(np.flatnonzero(table.slots < 0)[:20], np.arange(20))
    table.means.raw[1, :12], table.means.raw[1, 12:20] = 0.1, 9.0
    kept = table.keep(1, np.arange(20), slots, 5)
    np.testing.assert_array_equal(kept, slots[12:])
    assert table.slots[200:220].tolist() == [-1] * 12 + kept.tolist() and table.counters[COMING] == 8
    assert (table.counters[FREE_COUNT], table.counters[VISITING]) == (8, 12), "20 slots are free for the next step"
    assert 1.2 < table.bar[0] < 1.6, "what 30 in a hundred of the rows are worth less than"
    table.settle(kept, arrived=True)
    table.release()
    assert (table.counters[FREE_COUNT], table.counters[VISITING]) == (20, 0)
    assert table.reserve(0, keys_of(1, 2), urgent=False).size == 2, "a prefetch takes no visitor's place"
    assert table.counters[FREE_COUNT] == 20
    there = np.count_nonzero(table.slots >= 0)
    again = table.visit(20)
    assert np.count_nonzero(table.slots >= 0) == there and table.counters[FREE_COUNT] == 0
    table.means.raw[1, 100:120] = 0.1
    none = table.keep(1, np.arange(100, 120), again, 5)
    assert none.size == 0 and table.counters[VISITING] == 20, "all are worth less than those that are there"


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_visitors_fill_what_is_free_whatever_they_are_worth(kind: type[StepTable]) -> None:
    table = kind(*SHAPE, RULE, means(4))
    table.means.raw[:] = 0
    table.resize(100)
    assert table.keep(0, np.arange(30), table.visit(30), 10).size == 30
    assert table.keep(0, np.arange(30, 90), table.visit(60), 10).size == 60
    table.settle(table.slots[:90], arrived=True)
    table.release()
    kept = table.keep(0, np.arange(90, 100), table.visit(10), 10)
    assert kept.size == 0 and table.counters[VISITING] == 10, "a tenth of the pool is for visitors"


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_what_does_not_fit_is_refused_and_changes_nothing(kind: type[StepTable]) -> None:
    table = kind(*SHAPE, RULE, means(1))
    table.resize(10)
    moving = table.reserve(1, np.arange(4), urgent=True)
    one, ends = np.array([1]), np.array([0, 2])
    before = [array.copy() for array in (table.slots, table.states, table.counters, table.means.raw)]
    wrong = {
        "an expert": lambda: table.locate(0, np.array([4]), ends, np.array([0, 1]), 30),
        "an expert is": lambda: table.locate(0, np.array([-1]), ends, np.array([0, 1]), 30),
        "a neuron is": lambda: table.locate(0, one, ends, np.array([0, 30]), 30),
        "a neuron is out": lambda: table.locate(0, one, ends, np.array([-1, 3]), 30),
        "parts of": lambda: table.locate(0, one, ends, np.array([0, 1]), 20),
        "parts of 30": lambda: table.locate(0, one, ends, np.array([0, 1]), 60),
        "offsets": lambda: table.locate(0, one, np.array([0, 3]), np.array([0, 1]), 30),
        "offsets must": lambda: table.locate(0, one, np.array([1, 2]), np.array([0, 1]), 30),
        "offsets must rise": lambda: table.locate(0, np.array([1, 1]), np.array([0, 3, 2]), np.array([0, 1]), 30),
        "a key": lambda: table.reserve(0, np.array([5, 120]), urgent=True),
        "already has a slot": lambda: table.reserve(1, np.array([9, 3]), urgent=True),
        "twice": lambda: table.reserve(0, np.array([9, 8, 9]), urgent=False),
        "a slot is out": lambda: table.settle(np.array([10], np.int32), arrived=True),
        "not filling": lambda: table.settle(np.array([*moving, 9], np.int32), arrived=True),
        "last visitors": lambda: table.keep(1, np.array([9]), moving[:1], 8),
        "named twice": lambda: table.settle(np.array([*moving, moving[0]], np.int32), arrived=False),
        "slots must be": lambda: table.settle(np.array([[0]], np.int32), arrived=True),
        "cannot visit": lambda: table.visit(-1),
        "keep 1 / 0": lambda: table.keep(0, keys_of(), moving[:0], 0),
        "keep 1 / -": lambda: table.keep(0, keys_of(), moving[:0], 1 - (1 << 64)),
        "keys must be": lambda: table.reserve(0, np.array([[1]]), urgent=True),
        "layer": lambda: table.reserve(1 << 64, one, urgent=True),
        "layer index": lambda: table.locate(3, one, ends, np.array([0, 1]), 30),
        "resize|slots|rows": lambda: table.resize(-1),
        "resize|slots|rows|hold": lambda: table.resize(1 << 40),
    }
    for words, call in wrong.items():
        with pytest.raises(ValueError, match=words if kind is StepTable else "."):
            call()
        for array, kept in zip((table.slots, table.states, table.counters, table.means.raw), before, strict=True):
            np.testing.assert_array_equal(array, kept, err_msg=words)
    assert (table.counters[FINDS], table.counters[BROUGHT], table.counters[HAND]) == (0, 1, 0)


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_marks_are_counted_round(kind: type[StepTable]) -> None:
    """Of what is counted a slot keeps the lower bits: nothing changes where they begin anew."""
    for rule, ready in ((RULE, [4, 5]), (LRU, [1, 2])):
        table = kind(*SHAPE, rule, means(2))
        table.means.recent[:] = table.means.growth[:] = 1
        table.means.raw[0, :10] = np.arange(10)
        table.resize(3)
        table.counters[FINDS] = (1 << 31) - 3
        for key in (4, 1, 5):
            table.settle(table.reserve(0, keys_of(key), urgent=True), arrived=True)
            table.release()
        for key in (1, 2):  # the one used longest ago, or that is worth least, goes
            table.locate(0, keys_of(0), keys_of(0, 1), keys_of(key), 30)
            table.release()
            if table.slots[key] < 0:
                table.settle(table.reserve(0, keys_of(key), urgent=True), arrived=True)
            table.release()
        table.locate(0, keys_of(0), keys_of(0, 1), keys_of(2), 30)
        table.release()
        found = np.flatnonzero(table.slots[:30] >= 0).tolist()
        assert set(ready) < set(found), (rule, found)


def test_the_expert_of_any_key_is_found() -> None:
    """Keys at the edges of experts whose number of neurons is no power of two, and many of them."""
    for layers, experts, neurons in ((1, 3, 1), (2, 5, 7), (1, 2, 1 << 16), (3, 11, 65_537)):
        shape = layers, experts, neurons
        table = pool_table.PoolTable(*shape, RULE, means(1, shape))
        table.resize(layers * experts * 2)
        for layer in range(layers):
            edges = np.unique([[e * neurons, (e + 1) * neurons - 1] for e in range(experts)])
            table.settle(table.reserve(layer, edges, urgent=True), arrived=True)
        assert table.residents.tolist() == [min(neurons, 2)] * (layers * experts)


@pytest.mark.parametrize("kind", [StepTable, CompiledTable])
def test_tables_that_cannot_be_are_refused(kind: type[StepTable]) -> None:
    for shape in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, -3), (1 << 10, 1 << 10, 1 << 11)):
        with pytest.raises(ValueError, match="a pool"):
            kind(*shape, RULE, means(0))
    with pytest.raises(ValueError, match="raw must be"):
        kind(3, 4, 31, RULE, means(0))
    with pytest.raises(ValueError, match="growth must be"):
        kind(*SHAPE, RULE, replace(means(0), growth=np.ones((3, 4), np.float32)))
    nan = float("nan")
    for name, wrong in (
        *(("sample", 0), ("sample", 1 << 31), ("bar", 1.0), ("bar", nan), ("smallest_window", 0), ("use_rate", 1.0)),
        *(("prefetch_worth", nan), ("prefetch_worth", float("inf")), ("turn", 1e300), ("score_rate", nan)),
        ("largest_growth", nan),
    ):
        with pytest.raises(ValueError, match="must"):
            replace(RULE, **{name: wrong})


def test_a_part_is_cut_call_by_call() -> None:
    part = Part(np.array([0, 3, 3, 7, 9]), np.arange(20, 29), np.arange(50, 59))
    first, rest = cut(part, np.array([1, 0, 4, 0]))
    assert_same_part(first, Part(np.array([0, 1, 1, 5, 5]), keys_of(20, 23, 24, 25, 26), keys_of(50, 53, 54, 55, 56)))
    assert_same_part(rest, Part(np.array([0, 2, 2, 2, 4]), keys_of(21, 22, 27, 28), keys_of(51, 52, 57, 58)))
    nothing = Part(np.zeros(1, np.int64), keys_of(), keys_of())
    assert [each.at.size for each in cut(nothing, keys_of())] == [0, 0]


@pytest.mark.parametrize("land", [landing, pool_table.landing], ids=["numpy", "compiled"])
def test_a_transfer_names_rows_and_slots_that_exist_and_no_slot_twice(
    land: Callable[[Keys, Slots, int, int], Keys],
) -> None:
    index, slots = np.array([3, 3, 0]), np.array([5, 0, 6], np.int32)
    for _ in range(2):  # nothing is left behind
        places = land(index, slots, 4, 7)
        assert places.dtype == np.int64 and places.tolist() == [5, 0, 6]
        assert land(np.zeros(0, np.int64), np.zeros(0, np.int32), 4, 7).size == 0
        for bad, words in (([4], "out of range"), ([-1], "out of range")):
            with pytest.raises(ValueError, match=words):
                land(np.array(bad), slots[:1], 4, 7)
        for twice, words in (([0, 5, 0], "twice"), ([0, 1, 7], "out of range"), ([0, -1, 2], "out of range")):
            with pytest.raises(ValueError, match=words):
                land(index, np.array(twice, np.int32), 4, 7)
