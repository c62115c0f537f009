"""The virtual device: profiles and names, the clock's lanes, a link whose time is counted and whose bytes are real."""

from __future__ import annotations

import dataclasses
import math
import random
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


class Bench:
    """A link of chunks of 10 rows, a source of random rows and a target of as many slots."""

    def __init__(self, rows: int = 1000) -> None:
        self.clock, rate = Clock(), min(PLAIN.link_bytes_s, PLAIN.pack_bytes_s)
        self.source = torch.randint(256, (rows, NBYTES), dtype=torch.uint8)
        self.target = torch.zeros(rows, NBYTES, dtype=torch.uint8)
        latency, record = PLAIN.link_latency_s, self.clock.record
        self.link = Link("virtual", "sim:plain", NBYTES, chunk=10, rate=rate, latency=latency, clock=record)
        self._free = RANDOM.sample(range(rows), rows)

    def submit(self, rows: int, urgent: bool = False) -> Transfer:
        index = np.array([RANDOM.randrange(len(self.source)) for _ in range(rows)], np.int64)
        slots = np.array([self._free.pop() for _ in range(rows)], np.int32)
        made = Transfer(self.source, index, self.target, slots, urgent, score=0.0, layer=0)
        self.link.submit(made)
        return made

    def later(self, seconds: float) -> list[Transfer]:
        self.clock.run("host", seconds)
        return self.link.finished()


class TestLink:
    """In figures that are easy to follow; test_link.py compares with the definition."""

    def test_time_goes_by_chunks(self) -> None:
        bench = Bench()
        sent = bench.submit(25)
        assert bench.later(11 + 11 + 6 - 0.1) == [] and not sent.done
        assert bench.link.queued_bytes() == 5 * NBYTES and bench.link.bytes_moved == 20 * NBYTES
        assert bench.later(0.2) == [sent] and sent.done
        assert bench.link.queued_bytes() == 0 and bench.link.bytes_moved == 25 * NBYTES
        assert bench.later(99) == [], "told once"

    def test_urgent_overtakes_what_is_queued_but_not_the_chunk_under_way(self) -> None:
        bench = Bench()
        prefetch = bench.submit(40)
        bench.clock.run("host", 15)  # the second chunk is under way, until 22
        urgent, second = bench.submit(10, urgent=True), bench.submit(10, urgent=True)
        assert bench.link.wait(urgent) == pytest.approx(22 + 11 - 15)
        assert bench.link.wait(second) == pytest.approx(11)
        assert bench.link.finished() == [urgent, second]
        assert bench.link.wait(prefetch) == pytest.approx(22)

    def test_what_is_there_needs_no_waiting(self) -> None:
        bench = Bench()
        sent = bench.submit(10)
        bench.clock.run("host", 11)
        assert bench.link.wait(sent) == 0.0 and bench.link.wait(sent) == 0.0
        other = bench.submit(10, urgent=True)
        bench.clock.run("gpu", 50)
        assert bench.link.wait(other) == 0.0, "it comes while the GPU works"
        assert bench.link.finished() == [sent, other]


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
