"""The virtual device: profiles and names, the clock's lanes, a link whose time is counted and whose bytes are real."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.cards import CHUNK_BYTES, Card
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.virtual.virtual_clock import Clock, Timeline
from floe_chat.engine.offload.virtual.virtual_device import VirtualDevice

from .driver import answer, silent
from .plain_link import VirtualLink

RANDOM = random.Random()
NBYTES = 128  # of a row
# A chunk of 10 rows takes 1 + 10 virtual seconds.
PLAIN = Card("plain", 2**30, 1e3, 1e3, NBYTES, 1.0, 0.5, 1e2, 1e3, 10 * NBYTES)


class TestCards:
    def test_costs(self) -> None:
        assert PLAIN.gpu_s(700, 70, 0) == pytest.approx(1.0)  # seven tenths of the published rate
        assert PLAIN.gpu_s(70, 700, 4) == pytest.approx(1.0 + 4 * 0.5)
        assert PLAIN.cpu_s(100, 100) == pytest.approx(1.0 + 2 * 1.0)
        assert PLAIN.cpu_s(10, 1000) == pytest.approx(1.0 + 2 * 1.0)
        assert PLAIN.copy_s(10 * NBYTES) == pytest.approx(11.0)
        slow_packing = dataclasses.replace(PLAIN, pack_bytes_s=NBYTES / 2)
        assert slow_packing.copy_s(10 * NBYTES) == pytest.approx(21.0)

    def test_rates_are_what_its_costs_come_to(self) -> None:
        found = card("rtx3060-12gb", study=True)
        rates, nbytes = found.rates(flops_per_byte=4), 64 * CHUNK_BYTES
        rates_before = dataclasses.replace(rates)
        rates.observed("link", nbytes, 64 * found.copy_s(CHUNK_BYTES))
        rates.observed("cpu", nbytes, found.cpu_s(nbytes, 4 * nbytes))
        rates.observed("cpu_batch", 99 * nbytes, found.cpu_s(nbytes, 4 * 99 * nbytes))
        rates.observed("gpu", nbytes, found.gpu_s(nbytes, 4 * nbytes, 1))
        for name, value in dataclasses.asdict(rates).items():
            assert value == pytest.approx(getattr(rates_before, name), rel=1e-3), name


class TestClock:
    def test_lanes_are_monotone_and_never_overlap_themselves(self) -> None:
        clock = Clock()
        lanes: tuple[Timeline, ...] = ("host", "gpu", "cpu", "link")
        spans: dict[Timeline, list[tuple[float, float]]] = {lane: [] for lane in lanes}
        worked: dict[Timeline, float] = dict.fromkeys(lanes, 0.0)
        for _ in range(500):
            lane = RANDOM.choice(lanes)
            before = {each: clock.end(each) for each in lanes}
            seconds, after = RANDOM.choice([0.0, RANDOM.random()]), RANDOM.choice([0.0, clock.now + RANDOM.random()])
            match RANDOM.randrange(4):
                case 0:
                    waited = clock.sync(lane)
                    assert clock.now == max(before["host"], before[lane]) and waited == clock.now - before["host"]
                case 1:
                    waited = clock.wait(lane, after)
                    assert clock.end(lane) >= after and waited >= 0
                    assert waited == max(0.0, after - max(before[lane], before["host"]))
                case _:
                    end = clock.run(lane, seconds, after)
                    assert end == clock.end(lane) and end - seconds >= max(after, before["host"]) - 1e-9
                    spans[lane].append((end - seconds, end))
                    worked[lane] += seconds
            assert all(clock.end(each) >= before[each] for each in lanes)
        for each in lanes:
            assert all(
                first[1] <= second[0] + 1e-9 for first, second in zip(spans[each], spans[each][1:], strict=False)
            )
            assert clock.busy(each) == pytest.approx(worked[each])

    @pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
    def test_impossible_work_is_refused(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="seconds"):
            Clock().run("gpu", seconds)


def compiled(card: Card, clock: Clock, nbytes: int, chunk: int) -> Link:
    rate, latency = min(card.link_bytes_s, card.pack_bytes_s), card.link_latency_s
    name = f"sim:{card.name}"
    return Link("virtual", name, nbytes, chunk=chunk, rate=rate, latency=latency, clock=clock.record)


MAKE: dict[str, Callable[[Card, Clock, int, int], Link | VirtualLink]] = {
    "definition": VirtualLink,
    "compiled": compiled,
}


class Bench:
    """A link of chunks of 10 rows, a source of random rows and a target of as many slots."""

    make: Callable[[Card, Clock, int, int], Link | VirtualLink] = staticmethod(MAKE["compiled"])

    def __init__(self, rows: int = 1000, device: Card = PLAIN, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.source = torch.randint(256, (rows, NBYTES), dtype=torch.uint8)
        self.target = torch.zeros(rows, NBYTES, dtype=torch.uint8)
        self.link = self.make(device, self.clock, NBYTES, 10)
        self._free = RANDOM.sample(range(rows), rows)

    def transfer(self, rows: int, urgent: bool = False, score: float = 0.0, layer: int = 0) -> Transfer:
        index = np.array([RANDOM.randrange(len(self.source)) for _ in range(rows)], np.int64)
        slots = np.array([self._free.pop() for _ in range(rows)], np.int32)
        return Transfer(self.source, index, self.target, slots, urgent, score, layer)

    def submit(self, rows: int, urgent: bool = False, score: float = 0.0, layer: int = 0) -> Transfer:
        made = self.transfer(rows, urgent, score, layer)
        self.link.submit(made)
        return made

    def later(self, seconds: float) -> list[Transfer]:
        self.clock.run("host", seconds)
        return self.link.finished()


@pytest.fixture(params=sorted(MAKE), scope="class")
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which link a `Bench` has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "make", staticmethod(MAKE[request.param]))
        yield


@pytest.mark.usefixtures("kind")
class TestLink:
    def test_it_is_a_link(self) -> None:
        assert Bench().link.name == "sim:plain"

    def test_bytes_are_there_at_once_and_nowhere_else(self) -> None:
        bench = Bench()
        sent = [bench.submit(rows, urgent=bool(rows % 2)) for rows in (1, 9, 10, 11, 35)]
        expected = torch.zeros_like(bench.target)
        for each in sent:
            expected[torch.from_numpy(each.slots).long()] = bench.source[torch.from_numpy(each.index)]
        assert torch.equal(bench.target, expected) and bench.target.any()

    def test_time_goes_by_chunks(self) -> None:
        bench = Bench()
        sent = bench.submit(25)
        assert bench.later(11 + 11 + 6 - 0.1) == [] and not sent.done
        assert bench.link.queued_bytes() == 5 * NBYTES and bench.link.bytes_moved == 20 * NBYTES
        assert bench.later(0.2) == [sent] and sent.done
        assert bench.link.queued_bytes() == 0 and bench.link.bytes_moved == 25 * NBYTES
        assert bench.later(99) == [], "told once"

    def test_the_link_begins_nothing_before_it_was_asked(self) -> None:
        bench = Bench()
        bench.later(100)
        sent = bench.submit(10)
        assert bench.later(10.9) == [] and bench.later(0.2) == [sent]

    def test_urgent_overtakes_what_is_queued_but_not_the_chunk_under_way(self) -> None:
        bench = Bench()
        prefetch = bench.submit(40)
        bench.clock.run("host", 15)  # the second chunk is under way, until 22
        urgent, second = bench.submit(10, urgent=True), bench.submit(10, urgent=True)
        assert bench.link.wait(urgent) == pytest.approx(22 + 11 - 15)
        assert bench.link.wait(second) == pytest.approx(11)
        assert bench.link.finished() == [urgent, second]
        assert bench.link.wait(prefetch) == pytest.approx(22)

    def test_prefetches_go_by_score_and_equals_in_order(self) -> None:
        bench = Bench()
        scores = [0.1, 0.9, 0.5, 0.9]
        sent = [bench.submit(5, score=score) for score in scores]
        assert bench.later(1000) == [sent[1], sent[3], sent[2], sent[0]]

    def test_waiting_for_a_prefetch_makes_it_urgent(self) -> None:
        bench = Bench()
        best, wanted = bench.submit(10, score=9.0), bench.submit(10, score=1.0)
        assert bench.link.wait(wanted) == pytest.approx(11)
        assert wanted.urgent and not best.done
        assert bench.link.wait(best) == pytest.approx(11)

    def test_what_is_there_needs_no_waiting(self) -> None:
        bench = Bench()
        sent = bench.submit(10)
        bench.clock.run("host", 11)
        assert bench.link.wait(sent) == 0.0 and bench.link.wait(sent) == 0.0
        other = bench.submit(10, urgent=True)
        bench.clock.run("gpu", 50)
        assert bench.link.wait(other) == 0.0, "it comes while the GPU works"
        assert bench.link.finished() == [sent, other]

    def test_dropping_frees_the_link(self) -> None:
        bench = Bench()
        begun, here, there = (bench.submit(100, score=s, layer=layer) for s, layer in ((3, 1), (2, 1), (1, 2)))
        bench.clock.run("host", 5)
        assert bench.link.drop(1) == [here]
        assert bench.link.queued_bytes() == 200 * NBYTES
        assert bench.link.drop(None) == [there] and bench.link.drop(None) == []
        assert bench.later(1e6) == [begun]
        assert bench.clock.busy("link") == pytest.approx(110) and bench.link.bytes_moved == 100 * NBYTES
        with pytest.raises(ValueError, match="dropped"):
            bench.link.wait(here)

    def test_urgent_ones_are_not_dropped(self) -> None:
        bench = Bench()
        first, urgent = bench.submit(10, urgent=True), bench.submit(10, urgent=True)
        assert bench.link.drop(None) == [] and bench.later(22) == [first, urgent]

    def test_nothing_to_move_is_done_at_once(self) -> None:
        bench = Bench()
        sent = bench.submit(0)
        assert sent.done and bench.link.wait(sent) == 0.0 and bench.link.finished() == [sent]

    @pytest.mark.parametrize("urgent", [False, True])
    def test_what_cannot_be_moved_is_refused(self, urgent: bool) -> None:
        bench = Bench()
        sent = bench.submit(5, urgent)
        with pytest.raises(ValueError, match="before"):
            bench.link.submit(sent)
        with pytest.raises(ValueError, match="never"):
            bench.link.wait(bench.transfer(1))
        with pytest.raises(ValueError, match="number"):
            bench.submit(1, urgent, score=math.nan)
        for index, slots in (([1000], [1]), ([1], [1000]), ([1, 2], [3]), ([1, 2], [3, 3]), ([-1], [1])):
            bad = bench.transfer(0, urgent)
            bad.index, bad.slots = np.array(index, np.int64), np.array(slots, np.int32)
            with pytest.raises(ValueError):
                bench.link.submit(bad)
        assert bench.link.queued_bytes() == 5 * NBYTES
        bench.link.close()
        with pytest.raises(RuntimeError, match="closed"):
            bench.submit(1, urgent)

    @pytest.mark.parametrize("name", ["plain", "rtx3060-12gb", "l4-24gb"])
    def test_whatever_happens(self, name: str) -> None:
        """Random use: time is monotone, nobody waits less than the bytes need, and the link's time is its bytes'."""
        device = PLAIN if name == "plain" else card(name)
        unit = device.copy_s(10 * NBYTES)
        for _ in range(15):
            bench = Bench(4000, device)
            sent: dict[Transfer, float] = {}
            told: list[Transfer] = []
            dropped: list[Transfer] = []
            link, clock = bench.link, bench.clock
            lanes: tuple[Timeline, ...] = ("host", "gpu", "link")
            for _ in range(60):
                before: dict[Timeline, float] = {lane: clock.end(lane) for lane in lanes}
                match RANDOM.randrange(7):
                    case 0 | 1 | 2:
                        rows = RANDOM.randint(0, 45)
                        sent[bench.submit(rows, RANDOM.random() < 0.3, RANDOM.random(), RANDOM.randrange(3))] = (
                            clock.now
                        )
                    case 3:
                        clock.run(RANDOM.choice(("host", "gpu")), RANDOM.random() * 4 * unit)
                    case 4 if left := [t for t in sent if t not in dropped]:
                        wanted = RANDOM.choice(left)
                        idle = link.wait(wanted)
                        assert wanted.done and clock.end("gpu") - before["gpu"] >= idle >= 0
                        alone = len(wanted.index) * NBYTES / device.link_bytes_s  # no rate is above the link's
                        assert max(clock.end("gpu"), clock.now) >= (sent[wanted] + alone) * (1 - 1e-9)
                    case 5:
                        dropped += link.drop(RANDOM.choice([None, 0, 1, 2]))
                    case _:
                        clock.sync("gpu")
                        told += link.finished()
                assert all(clock.end(lane) >= end for lane, end in before.items())
                waiting = sum(len(t.index) for t in sent if t not in dropped) * NBYTES
                assert link.queued_bytes() + link.bytes_moved == waiting
            clock.run("host", 1e4 * unit)
            told += link.finished()
            moved = [t for t in sent if t not in dropped]
            assert sorted(map(id, told)) == sorted(map(id, moved)), "each is told once"
            assert all(t.done for t in moved) and not any(t.done for t in dropped)
            rows = [len(t.index) for t in moved]
            chunks, rate = sum(-(-n // 10) for n in rows), min(device.link_bytes_s, device.pack_bytes_s)
            assert link.busy_s == pytest.approx(sum(rows) * NBYTES / rate + chunks * device.link_latency_s)
            assert clock.busy("link") == pytest.approx(link.busy_s) and link.queued_bytes() == 0
            for t in moved:
                there = bench.target[torch.from_numpy(t.slots).long()]
                assert torch.equal(there, bench.source[torch.from_numpy(t.index)])


def test_the_hosts_own_work_takes_its_time_inside_host_alone() -> None:
    clock = Clock(np.array([10.0, 10.5, 12.0, 12.25]))
    clock.run("gpu", 1.0)
    assert clock.now == 0 and clock.busy("host") == 0  # outside, nothing is read
    with clock.host(), clock.aside():  # 10.0, 10.5
        assert clock.run("gpu", 1.0) == 2.0
    # 12.0: what stood for the card took 1.5 seconds of this thread, which are not counted
    assert clock.busy("host") == 0.75 and clock.now == 0.75  # 12.25
    with clock.aside():
        assert clock.now == 0.75


def test_work_that_is_handed_over_after_the_hosts_begins_later() -> None:
    clock = Clock(np.array([0.0, 3.0, 4.0, 4.0]))
    with clock.host():
        assert clock.run("gpu", 2.0) == 5.0  # after 3 seconds of the host
        assert clock.sync("gpu") == 1.0  # of which it has spent one more by now
    assert clock.now == 5.0


def test_a_virtual_device_counts_the_hosts_time(tiny_pack: Path) -> None:
    """On the chat's own path: the same answer, in more virtual time than by the card's profile alone."""
    loaded, _ = load(tiny_pack, None, "sim:rtx3060-12gb", silent, vram=1 << 20)
    assert loaded.offload is not None and isinstance(loaded.offload.device, VirtualDevice)
    clock = loaded.offload.device.clock
    answer(loaded, [1, 40, 41, 42], max_new_tokens=6)
    assert 0 < clock.busy("host") <= clock.now  # as much where no layer waits for the card
    assert clock.end("gpu") >= clock.busy("gpu") > 0
    loaded.close()
