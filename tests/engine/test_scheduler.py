"""Both ends of a step, compiled beside their definition, in virtual time: equal lists, tables, rates and clocks."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from floe_chat.engine.host_copies import Copy
from floe_chat.engine.offload.asked import Asked
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.device import Joined
from floe_chat.engine.offload.device_memory import DeviceMemory
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.row_pool import RowPool
from floe_chat.engine.offload.scheduler import PendingPrefetch, Scheduler
from floe_chat.engine.offload.virtual.virtual_device import VirtualDevice
from floe_chat.kernels.cpu.offload_steps import Beside
from floe_chat.kernels.offload.placing import Found
from floe_chat.kernels.offload.pool import FREE_COUNT, VISITING
from floe_chat.kernels.types import Active

from ..kernels.test_placing import EXPERTS, LAYERS, NEURONS, Walk
from ..kernels.test_pool import RULE
from .plain_link import PlainLink
from .plain_scheduler import PlainScheduler

NBYTES, CHUNK = 64, 5
CARD = card("sim:rtx3060-12gb")


class Side(VirtualDevice):
    """A card, and one of the two schedulers over it."""

    def __init__(self, capacity: int, *, compiled: bool) -> None:
        super().__init__(CARD, NBYTES, 64, 10_000, content=False)
        rate = min(CARD.link_bytes_s, CARD.pack_bytes_s)
        self.link = Link(
            *("virtual", "", NBYTES),
            chunk=CHUNK,
            rate=rate,
            latency=CARD.link_latency_s,
            clock=self.clock.record,
            content=False,
        )
        plain = PlainLink(CARD, self.clock, NBYTES, CHUNK, content=False)
        self.used: Link | PlainLink = self.link if compiled else plain
        self.beside: list[Active] = []
        self.pool = RowPool(LAYERS, EXPERTS, NEURONS, capacity)
        rows = torch.zeros(EXPERTS * NEURONS, NBYTES, dtype=torch.uint8)
        target = SimpleNamespace(rows=torch.zeros(capacity, NBYTES, dtype=torch.uint8), row_bytes=NBYTES)
        given = self, self.pool, cast(DeviceMemory, target), [rows] * LAYERS
        self.scheduler = Scheduler(*given) if compiled else PlainScheduler(*given, plain)

    def rows_beside(self, given: Beside, active: Active) -> Joined:
        self.beside.append(active)
        self.clock.run("cpu", 1e-6 * active.neurons.numel())
        return lambda: (given.hidden, active.offsets)

    def told(self) -> list[Any]:
        table, record = self.pool.table, self.clock.record
        lists = table.slots, table.cells[:-1], table.residents, table.counters, table.means.raw, table.means.growth
        free = np.sort(table.free[: table.counters[FREE_COUNT]]), table.visitors[: table.counters[VISITING]], table.busy
        times = [getattr(record, name) for name in ("host", "gpu", "cpu", "link")]
        moved = self.used.bytes_moved, self.used.busy_s, self.used.queued_bytes()
        return [*lists, *free, times, moved, [self.rates.link_bytes_s, self.rates.cpu_bytes_s]]


def same(one: list[Any], two: list[Any]) -> None:
    for want, got in zip(one, two, strict=True):
        np.testing.assert_array_equal(want, got)


class Steps:
    """The same steps on both sides."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.dice, self.walk = random.Random(seed), Walk(RULE, 1, seed)
        self.sides = Side(capacity, compiled=False), Side(capacity, compiled=True)

    def step(self, layer: int, guess: int | None) -> int:
        """Returns in how many loads the copied rows came."""
        found, share = self.walk.found(layer, late=self.dice.random() < 0.3), self.dice.choice([0.0, 0.5, 1.0])
        ahead = self.walk.found(guess) if guess is not None else None
        ram, touched = self.dice.choice([math.inf, 10 ** self.dice.uniform(7, 10)]), self.dice.choice([1, 3])
        for side in self.sides:
            side.rates.ram_bytes_s, side.rates.touched = ram, touched
        starts = [side.scheduler.start(found, _beside(found), share) for side in self.sides]
        (one, first), (two, second) = starts
        assert (first is None) == (second is None) == (not one.sizes[3])
        assert list(one.sizes) == list(two.sizes)
        for part, other in zip(one.parts, two.parts, strict=True):
            _same_part(part, other)
        self.same()
        if ahead is not None:
            for side in self.sides:
                side.scheduler.ahead = _pending(ahead)
                side.scheduler.look()
            self.same()
        ends = [side.scheduler.finish(found, placed) for side, (placed, _) in zip(self.sides, starts, strict=True)]
        loads = 0
        for (part, waited), (other, other_waited) in zip(*ends, strict=True):
            _same_part(part, other)
            assert waited == other_waited
            self.same()
            loads += 1
        return loads

    def pause(self) -> None:
        seconds = 10 ** self.dice.uniform(-8, -4)
        for side in self.sides:
            side.clock.wait("host", side.clock.now + seconds)

    def same(self) -> None:
        same(*(side.told() for side in self.sides))


def _same_part(one: Any, two: Any) -> None:
    for name in ("offsets", "at", "places"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def _beside(found: Found) -> Beside:
    none = cast(Any, None)
    return Beside(none, torch.zeros(len(found.chosen), 64), none, None, 22)


def _pending(guess: Found) -> PendingPrefetch:
    active = guess.active
    lists = [active.offsets[1:], active.neurons, active.values, guess.experts, guess.weights, guess.chosen]
    return PendingPrefetch(guess.layer, guess.width, Asked(active.values, Copy(lists)))


@pytest.mark.parametrize("capacity", [3, 20, 90, 300, 360])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 6))])
def test_compiled_steps_are_those_of_the_definition(capacity: int, seed: int) -> None:
    steps = Steps(capacity, seed)
    loads, layer = 0, 0
    for _ in range(40):
        action = steps.dice.random()
        if action < 0.75:
            layer = (layer + 1) % LAYERS
            following = (layer + 1) % LAYERS if steps.dice.random() < 0.5 else None
            loads = max(loads, steps.step(layer, following))
        elif action < 0.9:
            steps.pause()
        elif action < 0.93:
            keys = np.flatnonzero(steps.sides[0].pool.layers[layer] < 0)[: steps.dice.randint(0, 50)]
            for side in steps.sides:
                side.scheduler.fetch(layer, keys, score=0.5)
        elif action < 0.96:
            for side in steps.sides:
                side.scheduler.forget(layer if action < 0.95 else None)
        else:
            for side in steps.sides:
                side.scheduler.settle()
        steps.same()
    assert loads > (1 if capacity < 20 else 0)
    for side in steps.sides:
        assert side.used.bytes_moved > 0
        side.close()
