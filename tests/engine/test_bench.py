"""What benchmarks say of their figures, on clocks and machines that are made up; nothing here waits for a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from floe_chat.engine.bench.measure import Figure, Row, measure
from floe_chat.engine.machine import random_weights
from floe_chat.engine.machine.load import Others

GB = 10**9


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float, nbytes: int = 0) -> Callable[[int], int]:
        """Work whose calls take these times in turn, the last one from then on."""
        times: Iterator[float] = iter(seconds)
        last = seconds[-1]

        def work(_turn: int) -> int:
            self.now += next(times, last)
            return nbytes

        return work


def row(rows: tuple[Row, ...], name: str) -> Row:
    return next(row for row in rows if row.name == name)


def test_medians_spread_and_rates_are_of_the_runs_after_the_warm_up() -> None:
    clock = Clock()
    work = clock.taking(50, 1, 2, 3, 4, 100, nbytes=6 * GB)
    (found,) = measure([Figure("a", work, inner=1)], warm=1, runs=5, clock=clock)
    assert (found.ms, found.runs, found.gb_s) == (3000, 5, 2)
    assert found.spread == pytest.approx((4 - 2) / 3) and found.noisy


def test_shares_and_ratios_are_taken_within_a_round() -> None:
    clock = Clock()
    # Each round is slower than the one before, for both alike.
    floor = Figure("floor", clock.taking(1, 2, 4, nbytes=GB), inner=1)
    slow = Figure("slow", clock.taking(2, 4, 8, nbytes=GB), floor="floor", peer="floor", inner=1)
    found = row(measure([floor, slow], warm=0, runs=3, clock=clock), "slow")
    assert (found.floor, found.of_floor, found.peer, found.speedup) == ("floor", 0.5, "floor", 0.5)


def test_a_run_is_the_mean_of_its_calls_and_every_call_gets_a_new_number() -> None:
    clock, turns = Clock(), list[int]()

    def work(turn: int) -> int:
        turns.append(turn)
        clock.now += 1 + turn % 2
        return 3 * GB

    (found,) = measure([Figure("a", work, tokens=6)], warm=1, runs=2, clock=clock)
    assert turns == list(range(12))
    assert (found.ms, found.gb_s, found.tokens_s, found.spread) == (1500, 2, 4, 0)


def test_what_is_slow_runs_once_and_is_compared_with_the_median() -> None:
    clock = Clock()
    slow = Figure("slow", clock.taking(10), once=True)
    fast = Figure("fast", clock.taking(99, 2, 5, 5), peer="slow", inner=1)
    rows = measure([slow, fast], warm=1, runs=3, clock=clock)
    assert (row(rows, "slow").runs, row(rows, "slow").spread, row(rows, "slow").noisy) == (1, None, False)
    assert row(rows, "fast").speedup == 2 and row(rows, "fast").gb_s is None


def test_caches_are_added_up_once_each(tmp_path: Path) -> None:
    for cpu, shared in enumerate(("0-1", "0-1", "2")):
        for index, (level, size) in enumerate([("1", "32K"), ("3", "1024K")]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, content in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(content + "\n")
    assert random_weights.last_level_cache(tmp_path) == 2 << 20
    assert random_weights.last_level_cache(tmp_path / "nothing") == random_weights.UNKNOWN_CACHE


def test_weights_in_turn_are_more_than_the_cache_holds() -> None:
    assert [random_weights.needed(10, cache) for cache in (0, 5, 6, 1000)] == [2, 2, 4, 400]


@pytest.mark.parametrize(
    ("machine", "own", "cores"), [(8.0, 4.0, 1.0), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0), (12.0, 0.0, 3.0)]
)
def test_what_other_programs_use_is_the_machines_time_without_our_own(machine: float, own: float, cores: float) -> None:
    now = {"machine": 100.0, "own": 10.0, "clock": 50.0}
    others = Others(lambda: now["machine"], lambda: now["own"], lambda: now["clock"])
    assert others.cores() == 0.0
    now = {"machine": 100.0 + machine, "own": 10.0 + own, "clock": 54.0}
    assert others.cores() == cores


@pytest.mark.parametrize(
    ("line", "huge"), [("FileHugePages:   2048 kB", True), ("FileHugePages: 0 kB", False), ("", False)]
)
def test_huge_pages_of_files_are_seen(tmp_path: Path, line: str, huge: bool) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 24 kB\n{line}\n")
    assert random_weights.files_in_hugepages(tmp_path / "meminfo") is huge
    assert not random_weights.files_in_hugepages(tmp_path / "nothing")
