"""The links: order, bytes, rate, failure. Nothing here depends on a clock being fast; gates hold the mover instead."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.links.link import throttled_link
from floe_chat.engine.offload.links.transfer import Transfer
from torch import Tensor

from .moving import FAST, NBYTES, ROWS, SENTINEL, SLOTS, GatedLink, Sender, until


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
    link.submit(prefetch)
    link.gate.release()
    until(lambda: len(link.asked) == 2)  # the first is on its way, the second is being packed
    link.submit(urgent)
    link.open()
    link.wait(urgent)
    link.drain()
    spans = [(transfer is urgent, first, last) for transfer, first, last in link.asked]
    assert spans[:4] == [(False, 0, 10), (False, 10, 20), (True, 0, 10), (True, 10, 15)]
    assert spans[4:] == [(False, 20, 30), (False, 30, 40), (False, 40, 45)]
    assert sender.there(prefetch) and sender.there(urgent)


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


@pytest.mark.parametrize(("rate", "latency", "chunk"), [(4e5, 0.0, 20), (1e9, 0.01, 10), (1e6, 0.004, 7)])
def test_a_throttled_link_is_not_faster_than_told(
    rate: float, latency: float, chunk: int, source: Tensor, target: Tensor
) -> None:
    sender = Sender(source, target)
    link = throttled_link(NBYTES, rate=rate, latency=latency, chunk=chunk)
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
    assert link.name == "throttled"


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_the_slots_are_written_and_nothing_else(chunk: int, source: Tensor) -> None:
    with torch.inference_mode():  # as the engine thread makes them
        target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
        link = throttled_link(NBYTES, rate=FAST, chunk=chunk)
    sender = Sender(source, target)
    transfers = [sender.make(count, urgent=bool(count % 2)) for count in (1, 50, 0, 99, 100)]
    for transfer in transfers:
        link.submit(transfer)
    for transfer in transfers:
        link.wait(transfer)
        assert transfer.done and sender.there(transfer)
    assert sender.untouched(sender.free) and len(sender.free) == SLOTS - 250
    assert sorted(map(id, link.finished())) == sorted(map(id, transfers))
    link.close()


def test_what_was_submitted_no_longer_depends_on_the_callers_arrays(
    gated: Callable[..., GatedLink], source: Tensor, target: Tensor
) -> None:
    link, sender = gated(), Sender(source, target)
    transfer = sender.make(30)
    index, slots = transfer.index.copy(), transfer.slots.copy()
    link.submit(transfer)
    transfer.index[:], transfer.slots[:] = 0, 0
    link.open()
    link.drain()
    assert torch.equal(target[slots.tolist()], source[index.tolist()])


@pytest.mark.parametrize("seed", range(6))
def test_many_random_transfers(seed: int, source: Tensor, target: Tensor) -> None:
    sender = Sender(source, target, seed)
    random = sender.random
    link = throttled_link(NBYTES, rate=float(random.choice([1e8, FAST])), chunk=int(random.integers(1, 20)))
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


Change = Callable[[Transfer], dict[str, Any]]


def _changed(name: str, said: str, change: Change) -> Any:
    return pytest.param(change, said, id=name)


def _slots(*slots: int) -> dict[str, Any]:
    return {"slots": np.array(slots, dtype=np.int32)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        _changed("row size", "source must be rows of 128", lambda t: {"source": t.source[:, :64].contiguous()}),
        _changed("strides", "contiguous", lambda t: {"source": t.source[:, ::2]}),
        _changed("dtype", "target must be", lambda t: {"target": t.target.float()}),
        _changed("rank", "2-D", lambda t: {"target": t.target[None]}),
        _changed("device", "on cpu, not of 128 on meta", lambda t: {"target": t.target.to("meta")}),
        _changed("index dtype", "int64 and int32", lambda t: {"index": t.index.astype(np.int32)}),
        _changed("lengths", "int64 and int32", lambda t: {"slots": t.slots[:2]}),
        _changed("row", "out of range", lambda _: {"index": np.array([0, 1, ROWS])}),
        _changed("negative row", "out of range", lambda _: {"index": np.array([0, -1, 2])}),
        _changed("slot", "out of range", lambda _: _slots(0, 1, SLOTS)),
        _changed("absent slot", "out of range", lambda _: _slots(-1, 1, 2)),
        _changed("slot twice", "twice", lambda _: _slots(5, 1, 5)),
        _changed("score", "score", lambda _: {"score": math.nan}),
    ],
)
def test_what_does_not_fit_is_refused_at_once(change: Change, said: str, source: Tensor, target: Tensor) -> None:
    link, sender = throttled_link(NBYTES, rate=FAST), Sender(source, target)
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


@pytest.mark.parametrize(
    "sizes",
    [{"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"rate": 1.0, "latency": -1.0}, {"rate": 1.0, "chunk": 0}],
    ids=str,
)
def test_links_that_cannot_be(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        throttled_link(NBYTES, **sizes)
    with pytest.raises(ValueError, match="multiples of 64"):
        throttled_link(100, rate=1.0)
