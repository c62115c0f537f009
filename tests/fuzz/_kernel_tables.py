"""Calls of the pool's tables: the compiled ones beside those in numpy, with the same hostile arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from floe_chat.kernels.cpu import pool_table
from floe_chat.kernels.offload.placing import Found
from floe_chat.kernels.offload.pool import FILLING, FREE_COUNT, EvictionRule, Means
from floe_chat.kernels.offload.sharing import Lanes
from floe_chat.kernels.types import Active

from ..kernels.plain_pool import CompiledTable, StepTable, landing
from . import _operands as made
from ._operands import Case


def transfer(rng: Random) -> Case:
    """`landing`: which rows go to which slots."""
    rows, capacity = rng.randrange(9), rng.randrange(9)
    count = rng.randrange(capacity + 1) if rows else 0
    given = {
        "source": np.array([rng.randrange(rows) for _ in range(count)], np.int64),
        "slots": np.array(rng.sample(range(capacity), count), np.int32),
        "rows": rows,
        "capacity": capacity,
    }
    order = "source", "slots", "rows", "capacity"
    return Case(
        given,
        lambda _m, g: pool_table.landing(*(g[name] for name in order)).tolist(),
        plain=lambda g: landing(*(g[name] for name in order)).tolist(),
    )


def tables(rng: Random) -> str:
    """Some calls one after the other on two equal tables, until both refuse to be made or rows were evicted.

    Which of equally worthy rows goes is open: from there on only what each table says of itself is looked at.
    """
    layers, experts, neurons = (rng.choice((1, 2, 3, *((0, -1) if rng.random() < 0.05 else ()))) for _ in range(3))
    rule = _tried(_rule, rng)
    if rule is None:
        return "refused"
    seed = rng.getrandbits(32)

    def make(kind: type[StepTable]) -> StepTable:
        return kind(layers, experts, neurons, rule, _means(seed, layers, experts, neurons))

    both = [_tried(make, kind) for kind in (CompiledTable, StepTable)]
    if both == [None, None]:
        return "refused"
    compiled, plain = both
    assert isinstance(compiled, StepTable) and isinstance(plain, StepTable)
    refused, alike = 0, True
    for _ in range(rng.randrange(1, 12)):
        call = _call(rng, compiled)
        found = [_tried(call, table) for table in ((compiled, plain) if alike else (compiled,))]
        refused += found[0] is None
        free = int(compiled.counters[FREE_COUNT])
        assert 0 <= free <= compiled.capacity
        _consistent(compiled)
        if alike:
            assert (found[0] is None) == (found[1] is None), f"compiled: {found[0]}; numpy: {found[1]}"
            alike = np.array_equal(compiled.slots, plain.slots) and np.array_equal(compiled.states, plain.states)
            # Tables part only where rows had to go, and then as many went from both.
            assert (compiled.slots >= 0).sum() == (plain.slots >= 0).sum() and free == int(plain.counters[FREE_COUNT])
            assert not alike or found[0] is None or _listed(found[0]) == _listed(found[1])
    return "refused" if refused else "computed"


def _tried(make: Callable[..., Any], *given: Any) -> Any:
    """What it returns, True for nothing, None if it is refused."""
    try:
        found = make(*given)
    except (ValueError, MemoryError):
        return None
    return True if found is None else found


def _rule(rng: Random) -> EvictionRule:
    def some(value: float, *others: float) -> Any:
        return rng.choice(others) if rng.random() < 0.03 else value

    return EvictionRule(
        by_score=rng.random() < 0.5,
        marks_use=rng.random() < 0.5,
        sample=some(3, 0, -1),
        smallest_window=some(rng.randrange(1, 5), 0, -7),
        bar=some(0.3, 1.0, -0.1, float("nan")),
        prefetch_worth=some(0.4, float("nan"), -1.0, float("inf")),
        turn=some(0.5, float("nan"), 1e300),
        use_rate=some(0.02, 1.0, float("nan"), -0.5),
        largest_growth=some(3.0, 0.0, float("nan"), float("inf")),
        score_rate=0.3,
        habit_rate=0.01,
    )


def _means(seed: int, layers: int, experts: int, neurons: int) -> Means:
    random, shape = np.random.default_rng(seed), (max(layers, 0), max(experts, 0))
    raw = random.random((shape[0], shape[1] * max(neurons, 0)), dtype=np.float32)
    return Means(random.random(shape), random.random(shape), raw, 1 + random.random(shape))


def _call(rng: Random, table: StepTable) -> Callable[[StepTable], Any]:
    """A call with arguments of which some are hostile; both tables get the same."""

    def number(value: int) -> Any:
        return rng.choice((*made.NUMBERS, value + 1, value - 1)) if rng.random() < 0.1 else value

    def array(value: Any) -> Any:
        return made.hostile_array(rng, value) if rng.random() < 0.15 else value

    layer, width = number(rng.randrange(table.layers)), table.width
    match rng.randrange(5):
        case 0:
            capacity = number(rng.randrange(2 * width + 3))
            # As many as memory might hold are made in earnest.
            capacity = capacity if not 1 << 20 < capacity < 1 << 31 else 1 << 31
            return lambda one: one.resize(capacity)
        case 1:
            wanted, spared = number(rng.randrange(6)), number(rng.randrange(1, 9))
            # More than there could ever be: no list of them is made in earnest.
            wanted = wanted if not 1 << 20 < wanted < 1 << 62 else 1 << 20
            absent = np.flatnonzero(table.slots[:width] == -1)
            keys = array(absent[: rng.randrange(6)].astype(np.int64))
            return lambda one: _visited(one, layer, wanted, keys, spared)
        case 2:
            absent = np.flatnonzero(table.slots[:width] == -1) if rng.random() < 0.9 else np.arange(width)
            keys = array(absent[: rng.randrange(absent.size + 1)].astype(np.int64))
            urgent = rng.random() < 0.5
            return lambda one: one.reserve(layer, keys, urgent=urgent)
        case 3:
            filling = np.flatnonzero(table.states[:-1] == FILLING)
            slots, arrived = array(filling[: rng.randrange(filling.size + 1)].astype(np.int32)), rng.random() < 0.7
            return lambda one: one.settle(slots, arrived=arrived)
        case _:
            size = number(table.neurons)
            chosen = [
                rng.sample(range(table.neurons), rng.randrange(table.neurons + 1)) for _ in range(rng.randrange(3))
            ]
            experts = array(np.array([rng.randrange(table.experts) for _ in chosen], np.int64))
            offsets = array(np.cumsum([0, *map(len, chosen)]))
            neurons = array(np.array([one for part in chosen for one in part], np.int64))
            return _step(rng, layer, size, experts, offsets, neurons)


def _visited(table: StepTable, layer: int, wanted: int, keys: Any, spared: int) -> Any:
    """`visit`, `keep` for some of them, and `release`."""
    slots = table.visit(wanted)
    try:
        return slots, table.keep(layer, keys[: slots.size], slots[: keys.size], spared)
    finally:
        table.release()


def _step(rng: Random, layer: int, width: int, *lists: Any) -> Callable[[StepTable], Any]:
    """`place`, `note`, `ahead` or `right`."""
    experts, offsets, neurons = (
        torch.from_numpy(np.ascontiguousarray(each, each.dtype.newbyteorder("="))) for each in lists
    )
    tokens, chosen = rng.randrange(3), rng.choice((0, 0, 0, 1, 1 << 40, -1))
    floats = torch.rand(experts.numel()), torch.full((tokens, 1), 0.5), torch.rand(neurons.numel())
    late = torch.rand(experts.numel()) if rng.random() < 0.3 else None
    found = Found(
        layer,
        width,
        Active(offsets, neurons.int() if rng.random() < 0.9 else neurons, floats[2]),
        experts,
        floats[0],
        torch.full((tokens, 1), chosen),
        floats[1],
        late,
        rng.choice((None, torch.rand(tokens, rng.randrange(4)))),
    )
    memory = rng.choice((0.0, rng.random())), rng.choice((0.0, rng.random()))
    lanes = Lanes(rng.random(), rng.choice((rng.random(), float("inf"))), rng.random(), rng.random(), *memory)
    guessed = np.array([rng.randrange(6) for _ in range(rng.randrange(4))], np.int32)
    return rng.choice(
        (
            lambda one: one.place(found, lanes),
            lambda one: one.note(found),
            lambda one: one.ahead(found),
            lambda one: one.right(found, guessed),
        )
    )


def _listed(found: Any) -> Any:
    """What a call returned, to compare."""
    if isinstance(found, np.ndarray):
        return found.tolist()
    if isinstance(found, Sequence):
        return [_listed(part) for part in found]
    if is_dataclass(found):
        return [_listed(getattr(found, part.name)) for part in fields(found)]
    return found


def _consistent(table: StepTable) -> None:
    """Each neuron with a slot is the one that the slot holds; all others are free."""
    held = np.flatnonzero(table.slots >= 0)
    slots = table.slots[held]
    assert (slots < table.capacity).all() and np.unique(slots).size == slots.size
    assert np.array_equal(table.keys[slots], held)
    assert int((table.states[: table.capacity] != 0).sum()) == held.size
    free = table.free[: int(table.counters[FREE_COUNT])]
    assert not np.intersect1d(free, slots).size and np.unique(free).size == free.size


KINDS: tuple[Callable[[Random], Case], ...] = (transfer,)
