"""The compiled links against their definitions: the same orders at the same times, the same bytes and refusals."""

from __future__ import annotations

import ctypes
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.cards import Card
from floe_chat.engine.offload.links.compiled_link import CompiledLink
from floe_chat.engine.offload.links.transfer import Link, Transfer
from floe_chat.engine.offload.virtual.virtual_clock import Clock
from floe_chat.kernels.cpu.binding import codes, library, records
from floe_chat.models.errors import FloeError

from .driver import silent
from .moving import NBYTES, ROWS, SENTINEL, SLOTS
from .plain_link import VirtualLink

CARD = Card("plain", 2**30, 1e3, 1e3, 3.7 * NBYTES, 0.3, 0.5, 1e2, 1e3, math.inf)
STALE = -(2**63), -1, 0, 10**6, 2**63 - 1


@dataclass
class Side:
    """One of two links that are used alike."""

    link: Link
    clock: Clock
    target: torch.Tensor
    sent: list[Transfer]
    dropped: list[Transfer]

    def named(self, found: list[Transfer]) -> list[int]:
        return [next(i for i, transfer in enumerate(self.sent) if transfer is one) for one in found]


def sides(chunk: int, ticks: np.ndarray[Any, np.dtype[np.float64]]) -> Iterator[Side]:
    for compiled in (False, True):
        clock = Clock(ticks)
        target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
        made: Link = (
            CompiledLink(
                *("virtual", "sim:plain", NBYTES),
                chunk=chunk,
                rate=CARD.link_bytes_s,
                latency=CARD.link_latency_s,
                clock=clock.record,
            )
            if compiled
            else VirtualLink(CARD, clock, NBYTES, chunk)
        )
        yield Side(made, clock, target, [], [])


@pytest.mark.parametrize("seed", range(8))
def test_the_compiled_queue_does_what_the_definition_does(seed: int, source: torch.Tensor) -> None:
    """Random use, with the host's own time counted by a scripted clock: to the last bit, and the last read of it."""
    draw = random.Random(seed)
    ticks = np.cumsum([draw.choice((0.0, 0.01, 0.5)) for _ in range(20_000)])
    both = list(sides(draw.choice((1, 3, 10, 1000)), ticks))
    free = draw.sample(range(SLOTS), SLOTS)

    def step(side: Side, action: int, numbers: list[int], urgent: bool, score: float, layer: int | None) -> object:
        link, clock = side.link, side.clock
        match action:
            case 0:
                index, slots = np.array(numbers[::2], np.int64), np.array(numbers[1::2], np.int32)
                side.sent.append(Transfer(source, index, side.target, slots, urgent, score, layer or 0))
                link.submit(side.sent[-1])
            case 1 if side.sent:
                wanted = side.sent[numbers[0] % len(side.sent)]
                return None if wanted in side.dropped else (link.wait(wanted), wanted.done)
            case 2:
                return side.named(link.finished())
            case 3:
                dropped = link.drop(layer)
                side.dropped += dropped
                return side.named(dropped)
            case 4:
                return clock.run(draw_lane(score), abs(score)), link.queued_bytes()
            case _:
                return link.bytes_moved, link.busy_s
        return None

    def draw_lane(score: float) -> Any:
        return ("host", "gpu", "link")[int(score * 7) % 3]

    told: list[int] = []
    for turn in range(300):
        action, count = draw.choice((0, 0, 0, 1, 2, 3, 4, 4, 5)), draw.choice((0, 1, 4, 9, 30))
        if action == 0 and len(free) < count:
            continue
        numbers = [draw.randrange(1000)]
        if action == 0:
            numbers = [n for _ in range(count) for n in (draw.randrange(ROWS), free.pop())]
        given = numbers, draw.random() < 0.3, float(draw.randrange(9)) / 3, draw.choice((None, 0, 1, 2))
        found: list[object] = []
        for side in both:
            if turn % 3:
                with side.clock.host():
                    found.append(step(side, action, *given))
            else:
                found.append(step(side, action, *given))
        assert found[0] == found[1], (turn, action)
        states = [
            [getattr(side.clock.record, name) for name, *_ in side.clock.record._fields_ if name != "ticks"]
            for side in both
        ]
        assert states[0] == states[1], (turn, action)
        if action in (2, 3):
            named = found[0]
            assert isinstance(named, list)
            told += named
            free = [slot for i in named for slot in both[0].sent[i].slots.tolist()] + free
    assert len(told) == len(set(told)) > 20
    assert torch.equal(both[0].target, both[1].target) and (both[0].target != SENTINEL).any()


def test_a_link_that_takes_no_time(source: torch.Tensor) -> None:
    link = CompiledLink("none", "none", NBYTES, chunk=7)
    target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
    index, slots = np.arange(40, 60), np.arange(399, 379, -1, dtype=np.int32)
    sent = Transfer(source, index, target, slots, urgent=False, score=0.0, layer=3)
    link.submit(sent)
    assert link.drop(None) == [] and link.wait(sent) == 0.0 and link.finished() == [sent]
    assert (link.bytes_moved, link.busy_s, link.queued_bytes()) == (20 * NBYTES, 0.0, 0)
    assert torch.equal(target[380:].flip(0), source[40:60]) and (target[:380] == SENTINEL).all()
    link.drain()
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.submit(Transfer(source, index, target, slots, urgent=True, score=0.0, layer=3))


def test_rows_without_content_leave_memory_alone(source: torch.Tensor) -> None:
    link = CompiledLink("none", "none", NBYTES, content=False)
    target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
    link.submit(Transfer(source, np.arange(9), target, np.arange(9, dtype=np.int32), True, 0.0, 0))
    assert link.bytes_moved == 9 * NBYTES and (target == SENTINEL).all()


@pytest.mark.parametrize("first", [2**31, 2**32, -(2**32) + 1, 2**62])
def test_a_row_that_no_32_bits_hold_is_refused(first: int, source: torch.Tensor, target: torch.Tensor) -> None:
    link = CompiledLink("none", "none", NBYTES)
    with pytest.raises(ValueError, match="out of range"):
        link.submit(Transfer(source, np.array([first, 1]), target, np.arange(2, dtype=np.int32), True, 0.0, 0))
    assert (target == SENTINEL).all()


CONFIG: dict[str, Any] = {
    "kind": codes.LINK_NONE,
    "pack_threads": 1,
    "row_bytes": 64,
    "chunk": 5,
    "rate": 0.0,
    "latency": 0.0,
    **dict.fromkeys(("clock", "gate", "driver", "lanes", "stalls", "extents")),
    **dict.fromkeys(("stall_count", "head", "compute", "in_place", "extent_count", "readers", "gap", "sector"), 0),
}
ON_DISK = {"kind": codes.LINK_DISK, "extents": np.zeros((1, 4), np.int64), "extent_count": 1, "readers": 1, "sector": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 99},
        {"kind": -1},
        {"row_bytes": 0},
        {"row_bytes": 100},
        {"row_bytes": 2**62},
        {"chunk": 0},
        {"chunk": 2**60},
        {"pack_threads": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"latency": -1.0},
        {"latency": math.inf},
        {"clock": None},
        {"kind": codes.LINK_CUDA},
        {"kind": codes.LINK_DISK},
        *(
            {**ON_DISK, name: wrong}
            for name, wrong in (("readers", 0), ("gap", -1), ("sector", 0), ("extent_count", 0))
        ),
    ],
    ids=str,
)
def test_a_link_that_cannot_be_gets_no_handle(change: dict[str, Any]) -> None:
    given = {"kind": codes.LINK_VIRTUAL, "rate": 1.0, "clock": Clock().record}
    config = records.link_config(**{**CONFIG, **given, **change})
    assert library().link_open(config) in (codes.BAD_SHAPE, codes.UNSUPPORTED)


def opened() -> int:
    return library().link_open(records.link_config(**CONFIG))


def used(handle: int) -> list[int]:
    """What each function says to a handle."""
    functions, room, seconds = library(), np.full(4, 77, np.int64), np.full(1, 77.0)
    none32 = np.zeros(1, np.int32)
    found = [
        functions.link_submit(handle, None, 1, None, 1, 1, none32, none32, 1, 0.0, 0),
        functions.link_wait(handle, 1, None, seconds),
        functions.link_finished(handle, 4, room),
        functions.link_drop(handle, -1, 4, room),
        functions.link_queued(handle),
        functions.link_moved(handle, room, seconds),
        functions.link_drain(handle),
        functions.link_follow(handle),
        functions.link_close(handle),
        functions.link_free(handle),
    ]
    assert functions.link_failure(handle) is None
    if set(found) == {codes.BAD_INDEX}:
        assert (room == 77).all() and (seconds == 77).all()
    return found


def test_a_stale_handle_is_refused_everywhere() -> None:
    for handle in STALE:
        assert set(used(handle)) == {codes.BAD_INDEX}
    handles = [opened() for _ in range(3)]
    assert min(used(handles[1])) == codes.OK
    assert set(used(handles[1])) == {codes.BAD_INDEX}
    assert opened() not in handles
    for _ in range(200):
        assert set(used(random.randrange(-(2**63), -1))) == {codes.BAD_INDEX}
    for handle in handles[::2]:
        assert min(used(handle)) == codes.OK


@pytest.mark.parametrize("seed", range(4))
def test_orders_that_do_not_fit_change_nothing(seed: int) -> None:
    draw, functions, handle = np.random.default_rng(seed), library(), opened()
    source, target = np.zeros((9, 64), np.uint8), np.full((9, 64), 7, np.uint8)
    good = {"rows": 9, "capacity": 9, "count": 3, "index": [0, 8, 8], "slots": [5, 0, 8], "score": 0.0}
    bad: list[dict[str, object]] = [
        *({"rows": n} for n in (-1, 0, 8, -(2**63))),
        *({"capacity": n} for n in (-1, 0, 8)),
        *({"count": n} for n in (-1, -(2**63))),
        *({"index": [0, int(draw.integers(9, 2**31)), 1]} for _ in range(5)),
        *({"slots": [int(draw.integers(-(2**31), 0)), 1, 2]} for _ in range(5)),
        {"slots": [3, 1, 3]},
        {"score": math.nan},
    ]

    def submit(given: dict[str, Any], *ends: Any) -> int:
        index, slots = np.array(given["index"], np.int32), np.array(given["slots"], np.int32)
        order = (given["count"], index, slots, 1, given["score"], 0)
        return functions.link_submit(handle, ends[0], given["rows"], ends[1], given["capacity"], *order)

    for change in bad:
        assert submit({**good, **change}, source, target) in (codes.BAD_INDEX, codes.BAD_SHAPE, codes.REPEATED)
    assert submit(good, None, target) == submit(good, source, None) == codes.BAD_SHAPE
    assert functions.link_finished(handle, -1, np.zeros(1, np.int64)) == codes.BAD_SHAPE
    assert (target == 7).all() and functions.link_finished(handle, 1, np.zeros(1, np.int64)) == 0
    assert submit(good, source, target) > 0 and (target == 0).any()
    functions.link_free(handle)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_none_of_its_parents_links() -> None:
    handle = opened()
    child = os.fork()
    if not child:  # whatever happens here, the test runner must not go on twice
        functions, code = library(), 1
        try:
            code = 0 if functions.link_queued(handle) == codes.BAD_INDEX and opened() > handle else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert library().link_queued(handle) == 0
    library().link_free(handle)


def test_a_link_that_nobody_holds_is_freed() -> None:
    link = CompiledLink("none", "none", NBYTES)
    handle: int = ctypes.c_int64(link.handle).value
    assert library().link_queued(handle) == 0
    del link
    assert library().link_queued(handle) == codes.BAD_INDEX


@pytest.mark.usefixtures("no_library")
def test_without_the_library_a_throttled_device_says_why_it_cannot_be(tiny_pack: Path) -> None:
    with pytest.raises(FloeError, match="throttled:1gb") as refused:
        load(tiny_pack, None, "throttled:1gb", silent, vram=1 << 30)
    assert refused.value.exit_code == 1 and "it was not compiled" in refused.value.cause


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("cards", ["sim:rtx3060-12gb", "sim:rtx3060-12gb,sim:rtx3060-12gb"], ids=["one", "two"])
def test_without_the_library_virtual_cards_name_the_command_that_builds_it(cards: str, tiny_pack: Path) -> None:
    with pytest.raises(FloeError, match="sim:rtx3060-12gb") as refused:
        load(tiny_pack, None, cards, silent)
    assert "it was not compiled" in refused.value.cause and "build.py" in refused.value.hint
