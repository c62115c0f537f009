"""The links: order, bytes, rate, failure. Nothing here depends on a clock being fast; gates hold the mover instead."""

from __future__ import annotations

import ctypes
import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.cards import Card
from floe_chat.engine.offload.links.link import Link, throttled_link
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.virtual.virtual_clock import Clock
from floe_chat.kernels.cpu.binding import codes, library, records
from floe_chat.models.errors import FloeError
from torch import Tensor

from .driver import silent
from .moving import FAST, NBYTES, ROWS, SENTINEL, SLOTS, GatedLink, Sender, until
from .plain_link import PlainLink

CARD = Card("plain", 2**30, 1e3, 1e3, 3.7 * NBYTES, 0.3, 0.5, 1e2, 1e3, math.inf)
STALE = -(2**63), -1, 0, 10**6, 2**63 - 1


@dataclass
class Side:
    """One of two links that are used alike."""

    link: Link | PlainLink
    clock: Clock
    target: Tensor
    sent: list[Transfer]
    dropped: list[Transfer]

    def named(self, found: list[Transfer]) -> list[int]:
        return [next(i for i, transfer in enumerate(self.sent) if transfer is one) for one in found]


def sides(chunk: int, ticks: np.ndarray[Any, np.dtype[np.float64]]) -> list[Side]:
    clocks, rate = (Clock(ticks), Clock(ticks)), CARD.link_bytes_s
    record, latency = clocks[1].record, CARD.link_latency_s
    ours = Link("virtual", "sim:plain", NBYTES, chunk=chunk, rate=rate, latency=latency, clock=record)
    links = PlainLink(CARD, clocks[0], NBYTES, chunk), ours
    target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
    return [Side(link, clock, target.clone(), [], []) for link, clock in zip(links, clocks, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_the_queue_does_what_the_definition_does(seed: int, source: Tensor) -> None:
    """Random use, with the host's own time counted by a scripted clock: to the last bit, and the last read of it."""
    draw = random.Random(seed)
    ticks = np.cumsum([draw.choice((0.0, 0.01, 0.5)) for _ in range(20_000)])
    both = sides(draw.choice((1, 3, 10, 1000)), ticks)
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


def test_urgent_goes_first_then_the_highest_score_then_the_older(
    gated: Callable[..., GatedLink], source: Tensor, target: Tensor
) -> None:
    link, sender = gated(), Sender(source, target)
    begun = sender.make(3)
    link.submit(begun)
    until(lambda: bool(link.asked))
    low, high, same, middle = (sender.make(12, score=score) for score in (0.1, 0.9, 0.9, 0.5))
    first, second = (sender.make(12, urgent=True) for _ in range(2))
    for transfer in (low, high, first, same, middle, second):
        link.submit(transfer)
    assert link.queued_bytes() == (3 + 6 * 12) * NBYTES and link.finished() == []
    link.open()
    link.drain()
    order = [begun, first, second, high, same, middle, low]
    assert link.asked == [(begun, 0, 3)] + [(t, *span) for t in order[1:] for span in ((0, 10), (10, 12))]
    assert link.finished() == order and link.finished() == []
    assert link.queued_bytes() == 0 and link.bytes_moved == 75 * NBYTES
    assert all(transfer.done and sender.there(transfer) for transfer in order)


def test_an_urgent_one_goes_between_the_chunks_of_a_prefetch(
    gated: Callable[..., GatedLink], source: Tensor, target: Tensor
) -> None:
    link, sender = gated(), Sender(source, target)
    prefetch, urgent = sender.make(45), sender.make(15, urgent=True)
    index, slots = prefetch.index.tolist(), prefetch.slots.tolist()
    link.submit(prefetch)
    prefetch.index[:], prefetch.slots[:] = 0, 0  # the caller's arrays are not looked at again
    link.gate.release()
    until(lambda: len(link.asked) == 2)  # the first is on its way, the second is being packed
    link.submit(urgent)
    link.open()
    link.wait(urgent)
    link.drain()
    spans = [(transfer is urgent, first, last) for transfer, first, last in link.asked]
    assert spans[:4] == [(False, 0, 10), (False, 10, 20), (True, 0, 10), (True, 10, 15)]
    assert spans[4:] == [(False, 20, 30), (False, 30, 40), (False, 40, 45)]
    assert torch.equal(target[slots], source[index]) and sender.there(urgent)


def test_waiting_makes_a_prefetch_urgent(gated: Callable[..., GatedLink], source: Tensor, target: Tensor) -> None:
    link, sender = gated(), Sender(source, target)
    begun, better, wanted = sender.make(1), sender.make(5, score=2.0), sender.make(5, score=1.0)
    link.submit(begun)
    until(lambda: bool(link.asked))
    link.submit(better)
    link.submit(wanted)
    opener = threading.Thread(target=lambda: (until(lambda: link.urged(wanted)), link.open()))
    opener.start()
    assert link.wait(wanted) > 0
    opener.join()
    link.drain()
    assert [transfer for transfer, _, _ in link.asked] == [begun, wanted, better]
    assert link.wait(wanted) == 0.0 and not better.urgent


@pytest.mark.parametrize(("rate", "latency", "chunk"), [(4e5, 0.0, 20), (1e9, 0.01, 10)])
def test_a_throttled_link_is_not_faster_than_told(
    rate: float, latency: float, chunk: int, source: Tensor, target: Tensor
) -> None:
    sender, link = Sender(source, target), throttled_link(NBYTES, rate=rate, latency=latency, chunk=chunk)
    for count in (60, 33):  # the second one after a pause, which gives it nothing
        least = latency * math.ceil(count / chunk) + count * NBYTES / rate
        transfer, busy, begun = sender.make(count, urgent=True), link.busy_s, time.perf_counter()
        link.submit(transfer)
        waited = link.wait(transfer)
        assert time.perf_counter() - begun >= least and sender.there(transfer)
        assert link.busy_s - busy >= least - 1e-9
        assert 0 < waited <= time.perf_counter() - begun
        time.sleep(0.02)
    link.close()


@pytest.mark.parametrize("seed", range(3))
def test_many_random_transfers(seed: int, source: Tensor, target: Tensor) -> None:
    """Of the thread's link: all that was submitted lands once or is dropped, and no other byte changes."""
    sender = Sender(source, target, seed)
    random = sender.random
    link = throttled_link(NBYTES, rate=float(random.choice([1e8, FAST])), chunk=int(random.choice([1, 7, 19, 1000])))
    under_way: list[Transfer] = []
    submitted = moved = finished = dropped = 0
    owner: dict[int, bytes] = {}  # what each slot must hold

    def settle() -> None:
        nonlocal finished
        for transfer in link.finished():
            assert transfer.done and sender.there(transfer)
            under_way.remove(transfer)
            finished += 1
            for slot, row in zip(transfer.slots.tolist(), transfer.index.tolist(), strict=True):
                owner[slot] = source[row].numpy().tobytes()
            sender.free = transfer.slots.tolist() + sender.free

    for _ in range(400):
        action = random.random()
        if action < 0.6 and len(sender.free) > 60:
            transfer = sender.make(
                int(random.integers(0, 60)),
                urgent=bool(random.random() < 0.3),
                score=float(random.integers(0, 4)),
                layer=int(random.integers(0, 3)),
            )
            link.submit(transfer)
            under_way.append(transfer)
            submitted += 1
            moved += len(transfer.slots)
        elif action < 0.85 and under_way:
            transfer = under_way[int(random.integers(len(under_way)))]
            assert link.wait(transfer) >= 0
            assert transfer.done and sender.there(transfer)
        elif action < 0.9:
            layer = int(random.integers(0, 4))
            for transfer in link.drop(None if layer == 3 else layer):
                assert not transfer.done and not transfer.urgent and layer in (3, transfer.layer)
                under_way.remove(transfer)
                sender.free += transfer.slots.tolist()
                dropped += 1
                moved -= len(transfer.slots)
        settle()
    link.drain()
    settle()
    assert under_way == [] and submitted == finished + dropped and finished > 100
    assert link.queued_bytes() == 0 and link.bytes_moved == moved * NBYTES
    empty = bytes([SENTINEL]) * NBYTES
    assert [row.numpy().tobytes() for row in target] == [owner.get(slot, empty) for slot in range(SLOTS)]
    link.close()


def test_drop_returns_what_has_not_begun(gated: Callable[..., GatedLink], source: Tensor, target: Tensor) -> None:
    link, sender = gated(), Sender(source, target)
    begun = sender.make(25, layer=1)
    link.submit(begun)
    until(lambda: bool(link.asked))
    of_one, of_two = ([sender.make(5, layer=layer, score=score) for score in (1.0, 3.0, 2.0)] for layer in (1, 2))
    urgent = sender.make(5, urgent=True, layer=1)
    for transfer in (*of_one, *of_two, urgent):
        link.submit(transfer)
    assert {id(t) for t in link.drop(1)} == {id(t) for t in of_one}
    assert link.drop(1) == [] and link.drop(7) == []
    assert link.queued_bytes() == (25 + 15 + 5) * NBYTES
    with pytest.raises(ValueError, match="dropped"):
        link.wait(of_one[0])
    link.submit(of_one[0])  # it may come again
    assert {id(t) for t in link.drop(None)} == {id(t) for t in (*of_two, of_one[0])}
    link.open()
    link.drain()
    assert link.finished() == [urgent, begun] and sender.there(begun) and sender.there(urgent)
    assert sender.untouched([int(slot) for t in (*of_one, *of_two) for slot in t.slots])


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_failure_reaches_whoever_waits_or_submits(
    fail_at: int, gated: Callable[..., GatedLink], source: Tensor, target: Tensor
) -> None:
    link, sender = gated(fail_at=fail_at), Sender(source, target)
    lost, prefetch, other = sender.make(60, urgent=True), sender.make(5), sender.make(5)
    for transfer in (lost, prefetch, other):
        link.submit(transfer)
    opener = threading.Thread(target=lambda: (until(lambda: link.urged(lost)), link.open()))
    opener.start()
    with pytest.raises(RuntimeError, match="the gate is broken"):
        link.wait(lost)
    opener.join()
    for action in (lambda: link.submit(sender.make(1)), lambda: link.wait(prefetch), link.drain):
        with pytest.raises(RuntimeError, match="the gate is broken"):
            action()
    assert not lost.done and link.finished() == [] and link.drop(None) == [other]
    link.close()
    assert sender.untouched(lost.slots[10 * fail_at :].tolist())


def test_closing_while_busy(gated: Callable[..., GatedLink], source: Tensor, target: Tensor) -> None:
    link, sender = gated(), Sender(source, target)
    single, long, queued = sender.make(10), sender.make(40), sender.make(10)
    for transfer in (single, long, queued):
        link.submit(transfer)
    link.gate.release(2)
    until(lambda: len(link.asked) == 3)  # two chunks sent, the third being packed
    errors: list[Exception] = []

    def waiting() -> None:
        try:
            link.wait(queued)
        except RuntimeError as error:
            errors.append(error)

    waiter, closer = threading.Thread(target=waiting), threading.Thread(target=link.close)
    waiter.start()
    until(lambda: link.urged(queued))
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        while True:
            link.submit(sender.make(0))
    link.open()
    closer.join()
    waiter.join()
    assert "closed" in str(errors[0])
    assert link.bytes_moved == 30 * NBYTES and single in link.finished() and not long.done and not queued.done
    assert torch.equal(target[long.slots[:20].tolist()], source[long.index[:20].tolist()])
    assert sender.untouched([*long.slots[20:].tolist(), *queued.slots.tolist()])
    assert link.wait(single) == 0.0
    link.close()


@pytest.mark.parametrize("content", [True, False])
def test_a_link_that_takes_no_time(content: bool, source: Tensor, target: Tensor) -> None:
    link = Link("none", "none", NBYTES, chunk=7, content=content)
    index, slots = np.arange(40, 60), np.arange(399, 379, -1, dtype=np.int32)
    sent = Transfer(source, index, target, slots, urgent=False, score=0.0, layer=3)
    link.submit(sent)
    assert link.drop(None) == [] and link.wait(sent) == 0.0 and link.finished() == [sent]
    assert (link.bytes_moved, link.busy_s, link.queued_bytes()) == (20 * NBYTES, 0.0, 0)
    assert torch.equal(target[380:].flip(0), source[40:60]) == content and (target[:380] == SENTINEL).all()
    assert content or (target == SENTINEL).all()
    link.close()
    with pytest.raises(RuntimeError, match="closed"):
        link.submit(Transfer(source, index, target, slots, urgent=True, score=0.0, layer=3))


Change = Callable[[Transfer], dict[str, Any]]


def _index(*rows: int) -> Change:
    return lambda _: {"index": np.array(rows)}


def _slots(*slots: int) -> Change:
    return lambda _: {"slots": np.array(slots, dtype=np.int32)}


MISFITS: list[tuple[Change, str]] = [
    (lambda t: {"source": t.source[:, :64].contiguous()}, "source must be rows of 128"),
    (lambda t: {"source": t.source[:, ::2]}, "contiguous"),
    (lambda t: {"target": t.target.float()}, "target must be"),
    (lambda t: {"target": t.target[None]}, "2-D"),
    (lambda t: {"target": t.target.to("meta")}, "on cpu, not of 128 on meta"),
    (lambda t: {"index": t.index.astype(np.int32)}, "int64 and int32"),
    (lambda t: {"slots": t.slots[:2]}, "int64 and int32"),
    (lambda _: {"score": math.nan}, "score"),
    (_index(0, 1, ROWS), "out of range"),
    (_index(0, -1, 2), "out of range"),
    (_index(2**32, 1, 2), "out of range"),
    (_index(-(2**32) + 1, 1, 2), "out of range"),
    (_slots(0, 1, SLOTS), "out of range"),
    (_slots(-1, 1, 2), "out of range"),
    (_slots(5, 1, 5), "twice"),
]


@pytest.mark.parametrize(("change", "said"), MISFITS)
@pytest.mark.parametrize("kind", ["throttled", "none"])
def test_what_does_not_fit_is_refused_at_once(
    kind: Any, change: Change, said: str, source: Tensor, target: Tensor
) -> None:
    link, sender = Link(kind, kind, NBYTES, rate=FAST), Sender(source, target)
    good = sender.make(3)
    with pytest.raises(ValueError, match=said):
        link.submit(replace(good, **change(good)))
    assert sender.untouched(list(range(SLOTS)))
    link.submit(good)
    link.wait(good)
    assert sender.there(good) and link.finished() == [good]
    with pytest.raises(ValueError, match="before"):
        link.submit(good)
    with pytest.raises(ValueError, match="never submitted"):
        link.wait(sender.make(2))
    link.close()


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
        {"row_bytes": 0},
        {"row_bytes": 100},
        {"chunk": 0},
        {"chunk": 2**60},
        {"pack_threads": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"latency": -1.0},
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
    with pytest.raises(ValueError, match="multiples of 64"):
        throttled_link(100, rate=1.0)


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
    link = Link("none", "none", NBYTES)
    handle: int = ctypes.c_int64(link.handle).value
    assert library().link_queued(handle) == 0
    del link
    assert library().link_queued(handle) == codes.BAD_INDEX


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("device", ["throttled:1gb", "sim:rtx3060-12gb", "sim:rtx3060-12gb,sim:rtx3060-12gb"])
def test_without_the_library_a_device_names_the_command_that_builds_it(device: str, tiny_pack: Path) -> None:
    with pytest.raises(FloeError, match=device.partition(",")[0]) as refused:
        load(tiny_pack, None, device, silent, vram=1 << 30 if device == "throttled:1gb" else None)
    assert refused.value.exit_code == 1 and "it was not compiled" in refused.value.cause
    assert "build.py" in refused.value.hint or device == "throttled:1gb"
