"""The links: order, bytes, rate, failure. Nothing here depends on a clock being fast; gates hold the mover instead."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat import kernels
from floe_chat.engine import links
from floe_chat.engine.links import CudaLink, ThrottledLink, tuned_chunk
from floe_chat.engine.transfer import LANES, Job, Link, Transfer
from floe_chat.kernels import reference
from torch import Tensor

NBYTES = 128
ROWS = 600
SLOTS = 400
SENTINEL = 0xA5
FAST = 1e12


def compute_with(backend: kernels.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(_device: str) -> kernels.Backend:
        return backend

    monkeypatch.setattr(links.kernels, "choose", choose)


@pytest.fixture(params=["native", "reference"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Backend:
    """Which code packs and places: the machine's own choice, or plain torch."""
    chosen = kernels.choose("cpu")
    if request.param == "reference":
        chosen = replace(chosen, gather_rows=reference.gather_rows, pool_scatter=reference.pool_scatter)
    compute_with(chosen, monkeypatch)
    return chosen


@pytest.fixture
def source() -> Tensor:
    return torch.randint(0, 256, (ROWS, NBYTES), dtype=torch.uint8)


@pytest.fixture
def target() -> Tensor:
    return torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)


class Gated(ThrottledLink):
    """Sends one chunk for each `gate.release()`, and notes what it was asked to send."""

    def __init__(self, chunk: int, fail_at: int = -1) -> None:
        self.gate = threading.Semaphore(0)
        self.asked: list[tuple[Transfer, int, int]] = []
        self.fail_at = fail_at
        super().__init__(NBYTES, rate=FAST, chunk=chunk)

    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        self.asked.append((job.transfer, first, last))
        self.gate.acquire()
        if len(self.asked) > self.fail_at >= 0:
            raise OSError("the bus is gone")
        super()._send(lane, job, first, last)

    def open(self) -> None:
        self.gate.release(10_000)


@pytest.fixture
def gated() -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(chunk: int = 10, fail_at: int = -1) -> Gated:
        made.append(Gated(chunk, fail_at))
        return made[-1]

    yield make
    for link in made:
        link.open()
        link.close()


def until(condition: Callable[[], bool]) -> None:
    """Another thread gets there; the suite's own timeout ends a test where it never does."""
    while not condition():
        time.sleep(0.0005)


class Sender:
    """Transfers of random rows into slots that no other one of them has."""

    def __init__(self, source: Tensor, target: Tensor, seed: int = 0) -> None:
        self.source, self.target = source, target
        self.random = np.random.default_rng(seed)
        self.free: list[int] = self.random.permutation(target.shape[0]).tolist()

    def make(self, count: int, *, urgent: bool = False, score: float = 0.0, layer: int = 0) -> Transfer:
        index = self.random.integers(0, self.source.shape[0], count)
        slots = np.array([self.free.pop() for _ in range(count)], dtype=np.int32)
        return Transfer(self.source, index, self.target, slots, urgent, score, layer)

    def there(self, transfer: Transfer) -> bool:
        return torch.equal(self.target[transfer.slots.tolist()].cpu(), self.source[transfer.index.tolist()])

    def untouched(self, slots: list[int]) -> bool:
        return bool((self.target[slots] == SENTINEL).all())


def test_urgent_goes_first_then_the_highest_score_then_the_older(
    gated: Callable[..., Gated], source: Tensor, target: Tensor
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
    gated: Callable[..., Gated], source: Tensor, target: Tensor
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


def test_waiting_makes_a_prefetch_urgent(gated: Callable[..., Gated], source: Tensor, target: Tensor) -> None:
    link, sender = gated(), Sender(source, target)
    begun, better, wanted = sender.make(1), sender.make(5, score=2.0), sender.make(5, score=1.0)
    link.submit(begun)
    until(lambda: bool(link.asked))
    link.submit(better)
    link.submit(wanted)
    opener = threading.Thread(target=lambda: (until(lambda: wanted.urgent), link.open()))
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
    link: Link = ThrottledLink(NBYTES, rate=rate, latency=latency, chunk=chunk)
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
@pytest.mark.usefixtures("cpu")
def test_the_slots_are_written_and_nothing_else(chunk: int, source: Tensor) -> None:
    with torch.inference_mode():  # as the engine thread makes them
        target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
        link = ThrottledLink(NBYTES, rate=FAST, chunk=chunk)
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
    gated: Callable[..., Gated], source: Tensor, target: Tensor
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
@pytest.mark.usefixtures("cpu")
def test_many_random_transfers(seed: int, source: Tensor, target: Tensor) -> None:
    sender = Sender(source, target, seed)
    random = sender.random
    link = ThrottledLink(NBYTES, rate=float(random.choice([1e8, FAST])), chunk=int(random.integers(1, 20)))
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


def test_drop_returns_what_has_not_begun(gated: Callable[..., Gated], source: Tensor, target: Tensor) -> None:
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
    fail_at: int, gated: Callable[..., Gated], source: Tensor, target: Tensor
) -> None:
    link, sender = gated(fail_at=fail_at), Sender(source, target)
    lost, prefetch, other = sender.make(60, urgent=True), sender.make(5), sender.make(5)
    for transfer in (lost, prefetch, other):
        link.submit(transfer)
    threading.Timer(0.01, link.open).start()
    with pytest.raises(OSError, match="the bus is gone") as caught:
        link.wait(lost)
    for action in (lambda: link.submit(sender.make(1)), lambda: link.wait(prefetch), link.drain):
        with pytest.raises(OSError, match="the bus is gone") as again:
            action()
        assert again.value is caught.value
    assert not lost.done and link.finished() == [] and link.drop(None) == [other]
    link.close()
    assert sender.untouched(lost.slots[10 * fail_at :].tolist())


def test_a_failure_to_land_counts_as_well(
    gated: Callable[..., Gated], source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError("the card is gone")

    link, sender = gated(), Sender(source, target)
    monkeypatch.setattr(link, "_land", gone)
    transfer = sender.make(1)
    link.submit(transfer)
    link.open()
    with pytest.raises(OSError, match="the card is gone"):
        link.wait(transfer)
    assert not transfer.done and link.bytes_moved == 0


def test_closing_while_busy(gated: Callable[..., Gated], source: Tensor, target: Tensor) -> None:
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
    until(lambda: queued.urgent)
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


def test_the_buffers_stay_the_same(monkeypatch: pytest.MonkeyPatch, source: Tensor, target: Tensor) -> None:
    chosen = kernels.choose("cpu")
    buffers: set[int] = set()

    def noted(rows: Any, expert: int, neurons: Tensor, out: Tensor) -> None:
        buffers.add(out.data_ptr())
        chosen.gather_rows(rows, expert, neurons, out)

    compute_with(replace(chosen, gather_rows=noted), monkeypatch)
    link = ThrottledLink(NBYTES, rate=FAST, chunk=7)
    for seed in range(50):
        sender = Sender(source, target, seed)
        transfer = sender.make(60)
        link.submit(transfer)
        link.wait(transfer)
        assert sender.there(transfer)
    assert len(buffers) == LANES
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
        _changed("row", "row out of range 0..599", lambda _: {"index": np.array([0, 1, ROWS])}),
        _changed("negative row", "row out of range", lambda _: {"index": np.array([0, -1, 2])}),
        _changed("slot", "slot out of range 0..399", lambda _: _slots(0, 1, SLOTS)),
        _changed("absent slot", "slot out of range", lambda _: _slots(-1, 1, 2)),
        _changed("slot twice", "a slot is written twice", lambda _: _slots(5, 1, 5)),
        _changed("score", "score", lambda _: {"score": math.nan}),
    ],
)
def test_what_does_not_fit_is_refused_at_once(change: Change, said: str, source: Tensor, target: Tensor) -> None:
    link, sender = ThrottledLink(NBYTES, rate=FAST), Sender(source, target)
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
        ThrottledLink(NBYTES, **sizes)
    with pytest.raises(ValueError, match="multiples of 64"):
        ThrottledLink(100, rate=1.0)


def test_the_chunk_size_is_measured(source: Tensor, target: Tensor) -> None:
    made: list[ThrottledLink] = []

    def make(chunk: int) -> ThrottledLink:
        made.append(ThrottledLink(NBYTES, rate=1e9, latency=0.002, chunk=chunk))
        return made[-1]

    best, rates = tuned_chunk(make, source, target, sizes=(4, 40, 400))
    assert best == 400 and sorted(rates) == [4, 40, 400]
    for chunk, rate in rates.items():
        assert 0 < rate <= SLOTS * NBYTES / (0.002 * SLOTS / chunk)
    for link in made:
        with pytest.raises(RuntimeError, match="closed"):
            link.submit(Sender(source, target).make(1))


class FakeEvent:
    """An event that comes to pass when a test says so."""

    def __init__(self, **options: bool) -> None:
        self.options, self.passed = options, threading.Event()
        self.stream: Any = None
        if options.get("enable_timing"):
            self.passed.set()

    def record(self, stream: Any) -> None:
        assert self.stream is None or self.passed.is_set(), "a lane was used before its rows had landed"
        self.stream = stream
        if not self.options.get("enable_timing"):
            self.passed.clear()
            stream.cuda.recorded.append(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.options == later.options == {"enable_timing": True} and self.stream is later.stream
        return 250.0


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.behind: list[Any] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.behind.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.behind.append(stream)


class FakeCuda:
    """As much of torch.cuda as the link calls. Copies are at once, events come to pass inside `running`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[FakeEvent] = []
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = []
        self.compute = FakeStream(self)
        self.kept: list[tuple[Tensor, FakeStream]] = []

        def stream(_device: object, priority: int) -> FakeStream:
            assert priority == -1
            self.streams.append(FakeStream(self))
            return self.streams[-1]

        @contextlib.contextmanager
        def on(stream: FakeStream) -> Generator[None]:
            self.current.append(stream)
            yield
            self.current.pop()

        def current(_device: object) -> FakeStream:
            return self.compute

        def keep(tensor: Tensor, stream: FakeStream) -> None:
            self.kept.append((tensor, stream))

        def pinned(tensor: Tensor) -> bool:
            return tensor.shape[0] == ROWS

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(Tensor, "record_stream", keep)
        monkeypatch.setattr(Tensor, "is_pinned", pinned)

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        ended = threading.Event()

        def run() -> None:
            passed = 0
            while not ended.is_set() or passed < len(self.recorded):
                if passed < len(self.recorded):
                    self.recorded[passed].passed.set()
                    passed += 1
                time.sleep(0.0002)

        device = threading.Thread(target=run)
        device.start()
        try:
            yield
        finally:
            ended.set()
            device.join()


@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
def test_the_cuda_link_moves_rows_through_its_lanes(
    zero_copy: bool, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    link: Link = CudaLink(torch.device("cpu"), NBYTES, chunk=7, zero_copy=zero_copy)
    sender = Sender(source, target)
    transfers = [sender.make(count, urgent=bool(count % 2)) for count in (1, 50, 7, 60)]
    for transfer in transfers:
        link.submit(transfer)
    with cuda.running():
        for transfer in transfers:
            link.wait(transfer)
            assert sender.there(transfer)
    assert sender.untouched(sender.free)
    assert len(cuda.streams) == 2 and [s.behind for s in cuda.streams] == [[cuda.compute]] * 2
    assert [(tensor is target, stream) for tensor, stream in cuda.kept] == [(True, s) for s in cuda.streams]
    assert {event.stream for event in cuda.recorded} == set(cuda.streams) and not cuda.current
    assert len(set(map(id, cuda.recorded))) == LANES and len(cuda.recorded) == 1 + 8 + 1 + 9
    other = Sender(source, torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8))
    again = other.make(3)
    link.submit(again)  # into another pool
    with cuda.running():
        link.wait(again)
        link.close()
    assert other.there(again) and len(cuda.kept) == 4 and cuda.kept[-1][0] is other.target
    assert link.bytes_moved == 121 * NBYTES


def test_the_compute_stream_waits_and_the_host_does_not(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    urgent, prefetch = sender.make(25, urgent=True), sender.make(10)
    link.submit(urgent)
    link.submit(prefetch)
    waited = link.wait(urgent)
    assert cuda.compute.behind == cuda.recorded[:3] and not any(event.query() for event in cuda.recorded)
    assert urgent.done and link.finished() == [urgent]
    assert not prefetch.done and link.queued_bytes() == 35 * NBYTES  # nothing has landed
    with cuda.running():
        link.drain()
    assert prefetch.done and link.finished() == [prefetch] and link.bytes_moved == 35 * NBYTES
    assert waited >= 0.25 and link.wait(prefetch) == 0.0  # the stream's quarter of a second is told once
    link.close()


def test_the_compute_stream_cannot_pass_a_chunk_that_is_still_being_packed(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernels.choose("cpu")
    returned: list[bool] = []

    def packing(rows: Any, expert: int, neurons: Tensor, out: Tensor) -> None:
        chosen.gather_rows(rows, expert, neurons, out)
        if neurons.numel() == 5:  # the last chunk of two
            waiter.start()
            waiter.join(0.05)
            returned.append(not waiter.is_alive())

    compute_with(replace(chosen, gather_rows=packing), monkeypatch)
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    transfer = sender.make(15)
    waiter = threading.Thread(target=link.wait, args=(transfer,))
    link.submit(transfer)
    until(lambda: bool(returned))
    waiter.join()
    assert returned == [False] and cuda.compute.behind == cuda.recorded and len(cuda.recorded) == 2
    with cuda.running():
        link.close()


def test_reading_in_place_needs_pinned_rows_and_kernels(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, zero_copy=True), Sender(source[:-1], target)
    with pytest.raises(ValueError, match="pin it"):
        link.submit(sender.make(1))
    link.close()
    compute_with(replace(kernels.choose("cpu"), name="reference", reason="an old card"), monkeypatch)
    with pytest.raises(ValueError, match="an old card"):
        CudaLink(torch.device("cpu"), NBYTES, zero_copy=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_gpu_reads_what_was_waited_for(streams: int, zero_copy: bool) -> None:
    source = torch.randint(0, 256, (4000, 4608), dtype=torch.uint8).pin_memory()
    target = torch.full((3000, 4608), SENTINEL, dtype=torch.uint8, device="cuda")
    link = CudaLink(torch.device("cuda"), 4608, chunk=64, streams=streams, zero_copy=zero_copy)
    sender = Sender(source, target, streams)
    for _ in range(200):
        prefetch, urgent = sender.make(700), sender.make(500, urgent=True)
        link.submit(prefetch)
        link.submit(urgent)
        for transfer in (urgent, prefetch):
            link.wait(transfer)
            got = target[torch.from_numpy(transfer.slots).to("cuda", torch.int64)]  # on the compute stream, at once
            assert torch.equal(got.cpu(), source[torch.from_numpy(transfer.index)])
            sender.free = transfer.slots.tolist() + sender.free
    link.drain()
    assert len(link.finished()) == 400 and link.bytes_moved == 200 * 1200 * 4608 and link.busy_s > 0
    link.close()
