"""Rates of lanes, learned from what is observed and kept in a file, and splits of work by them beside brute force."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.offload import missing_rows
from floe_chat.engine.offload.lane_rates import RateName, Rates, rates_file
from floe_chat.engine.offload.missing_rows import Lane, prefill, prefill_alike
from floe_chat.kernels.offload.sharing import Lanes, cpu_rows

RANDOM = random.Random()


def some_rates() -> Rates:
    def about(value: float) -> float:
        return value * 10 ** RANDOM.uniform(-1, 1)

    return Rates(
        link_bytes_s=about(20e9),
        link_latency_s=about(5e-6),
        cpu_bytes_s=about(30e9),
        cpu_batch_bytes_s=about(100e9),
        cpu_latency_s=about(2e-5),
        gpu_bytes_s=about(500e9),
        launch_s=about(5e-6),
    )


class TestRates:
    @pytest.mark.parametrize("what", ["link", "cpu", "cpu_batch", "gpu"])
    @pytest.mark.parametrize("factor", [0.1, 0.7, 1.5, 8.0])
    def test_observations_correct_a_rate(self, what: RateName, factor: float) -> None:
        rates = some_rates()
        before = rates_of(rates)
        true = before[f"{what}_bytes_s"] * factor
        latency = {"link": rates.link_latency_s, "gpu": rates.launch_s}.get(what, rates.cpu_latency_s)
        for _ in range(300):
            nbytes = RANDOM.uniform(1, 2) * true * latency * 100
            rates.observed(what, nbytes, latency + nbytes / true * RANDOM.uniform(0.8, 1.2))
        after = rates_of(rates)
        assert after.pop(f"{what}_bytes_s") == pytest.approx(true, rel=0.1)
        assert after.items() <= before.items(), "the others stay"

    def test_under_a_cap_the_rate_of_all_threads_is_learned(self) -> None:
        rates = some_rates()
        true = rates.cpu_bytes_s * 1.5
        for _ in range(300):
            rates.observed("cpu", true, rates.cpu_latency_s + 4.0, cap=0.25)
        assert rates.cpu_bytes_s == pytest.approx(true, rel=0.01)

    @pytest.mark.parametrize("seconds", [1e-3, 1e6, 2e-4])
    def test_one_absurd_observation_hardly_matters(self, seconds: float) -> None:
        rates = Rates(20e9, 5e-6, 30e9, 30e9, 2e-5, 500e9, 5e-6)
        rates.observed("link", 10**12, seconds)
        assert rates.link_bytes_s == pytest.approx(20e9, rel=0.07) and rates.link_bytes_s != 20e9

    @pytest.mark.parametrize(
        ("nbytes", "seconds", "cap"),
        [
            (0, 1.0, 1.0),
            (-1, 1.0, 1.0),
            (math.nan, 1.0, 1.0),
            (math.inf, 1.0, 1.0),
            (100, 0.0, 1.0),
            (100, -1.0, 1.0),
            (100, math.nan, 1.0),
            (100, math.inf, 1.0),
            (100, 3e-5, 1.0),  # shorter than its latency
            (100, 1.0, 0.0),
        ],
    )
    def test_what_says_nothing_is_passed_over(self, nbytes: float, seconds: float, cap: float) -> None:
        rates = Rates(20e9, 5e-6, 30e9, 30e9, 2e-5, 500e9, 5e-6)
        rates.observed("cpu", nbytes, seconds, cap)
        assert rates == Rates(20e9, 5e-6, 30e9, 30e9, 2e-5, 500e9, 5e-6)

    def test_they_are_kept_for_the_user_alone(self, tmp_path: Path) -> None:
        rates, file = some_rates(), tmp_path / "rates" / "machine.json"
        with logged() as lines:
            assert Rates.load(file) is None and not lines, "none yet is no damage"
            rates.save(file)
            assert Rates.load(file) == rates and not lines
        assert [path.name for path in file.parent.iterdir()] == ["machine.json"]
        dataclasses.replace(rates, ram_bytes_s=4e10, touched=1).save(file)
        assert Rates.load(file) == rates, "RAM's rate and the link's kind are found out at each start"
        if os.name == "posix":
            assert file.stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize(
        "damage",
        [
            b"",
            b"\xff\xfe\x00",
            b"[]",
            b"[" * 100_000,
            b'{"format": 1}',
            {"format": 2},
            {"link_bytes_s": 0.0},
            {"cpu_bytes_s": -1.0},
            {"gpu_bytes_s": math.nan},
            {"link_latency_s": math.inf},
            {"cpu_bytes_s": "fast"},
            {"cpu_bytes_s": True},
            {"cpu_bytes_s": None},
            {"launch_s": 10**400},
            {"another": 1.0},
        ],
        ids=lambda damage: str(damage)[:40],
    )
    def test_a_damaged_file_is_ignored_with_its_reason(self, tmp_path: Path, damage: bytes | dict[str, Any]) -> None:
        file = tmp_path / "machine.json"
        some_rates().save(file)
        if isinstance(damage, dict):
            damage = json.dumps({**json.loads(file.read_text()), **damage}).encode()
        file.write_bytes(damage)
        with logged() as lines:
            assert Rates.load(file) is None
        assert len(lines) == 1 and str(file) in lines[0]

    def test_a_cache_that_cannot_be_written_is_no_failure(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with logged() as lines:
            some_rates().save(tmp_path / "file" / "machine.json")
        assert len(lines) == 1

    def test_each_machine_device_and_width_has_its_file(self) -> None:
        wanted = [("a", "cuda:0", 64), ("b", "cuda:0", 64), ("a", "cuda:1", 64), ("a", "cuda:0", 128)]
        files = {rates_file(*each) for each in wanted}
        assert len(files) == 4 and all(":" not in file.name for file in files)


def rates_of(rates: Rates) -> dict[str, float]:
    return dataclasses.asdict(rates)


@contextmanager
def logged() -> Generator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("floe_chat.engine"), Keep()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class TestMemory:
    @staticmethod
    def end(lanes: Lanes, cpu: int, total: int) -> float:
        ends = [lanes.memory_cpu * cpu + lanes.memory_copy * (total - cpu)]
        if cpu:
            ends.append(lanes.cpu_start + lanes.cpu_row * cpu)
        if cpu < total:
            ends.append(lanes.copy_start + lanes.copy_row * (total - cpu))
        return max(ends)

    @pytest.mark.parametrize("most", [1, 3, 40])
    def test_of_the_soonest_splits_it_is_the_one_that_copies_most(self, most: int) -> None:
        """Times are whole numbers, so that none is rounded, and many are equal."""
        for _ in range(600):
            starts, each, memory = ([float(RANDOM.randint(low, 3 * most)) for _ in range(2)] for low in (0, 1, 0))
            memory = RANDOM.choice([memory, [memory[0]] * 2, [0.0] * 2])
            lanes = Lanes(starts[0], each[0], starts[1], each[1], *memory)
            total = RANDOM.randint(0, most)
            best = min(range(total + 1), key=lambda cpu: (self.end(lanes, cpu, total), cpu))
            assert cpu_rows(lanes, total) == best, (lanes, total)

    def test_a_row_takes_ram_no_longer_than_the_cpu(self) -> None:
        """Where the CPU reads little of its rows, they would hide a CPU that is as fast as RAM."""
        rates = Rates(13e9, 5e-6, 48e9, 48e9, 1e-5, 250e9, 5e-6, ram_bytes_s=38e9)
        lanes = rates.lanes(4096, 0.0, 1.0)
        assert lanes.memory_cpu == lanes.cpu_row and 0 < cpu_rows(lanes, 9000) < 9000
        assert rates.lanes(4096, 0.0, 1.0, 0.5).memory_cpu == pytest.approx(0.5 * 4096 / 38e9)

    def test_an_unknown_rate_is_no_limit(self) -> None:
        lanes = some_rates().lanes(4096, 0.0, 1.0)
        assert lanes.memory_cpu == lanes.memory_copy == 0.0 and lanes == Lanes(*lanes[:4])


class TestPrefill:
    @staticmethod
    def cost(
        lanes: Sequence[Lane],
        tokens: Sequence[int],
        resident: Sequence[float],
        nbytes: Sequence[float],
        rates: Rates,
        queued: float,
        cap: float,
    ) -> float:
        """When the later lane ends; the definition that `prefill` minimises."""
        cpu, copy = 0.0, queued if Lane.COPY in lanes else 0.0
        for lane, count, there, rows in zip(lanes, tokens, resident, nbytes, strict=True):
            absent = (1 - there) * rows
            if lane is Lane.COPY:
                copy += rates.link_latency_s + absent / rates.link_bytes_s + absent / rates.gpu_bytes_s
            elif lane is Lane.CPU:
                each = max(1 / rates.cpu_bytes_s, count / rates.cpu_batch_bytes_s)
                cpu += rates.cpu_latency_s + rows * each / cap
        return max(cpu, copy)

    @staticmethod
    def a_layer(experts: int) -> tuple[list[int], list[float]]:
        tokens = [RANDOM.choice([0, 1, 2, 7, 30, 200]) for _ in range(experts)]
        resident = [RANDOM.choice([0.0, 1.0, RANDOM.random()]) for _ in range(experts)]
        return tokens, resident

    @staticmethod
    def open_experts(tokens: Sequence[int], resident: Sequence[float]) -> list[int]:
        return [e for e in range(len(tokens)) if tokens[e] and resident[e] < 1]

    def placements(self, tokens: Sequence[int], resident: Sequence[float]) -> Generator[list[Lane]]:
        undecided = self.open_experts(tokens, resident)
        for chosen in itertools.product((Lane.COPY, Lane.CPU), repeat=len(undecided)):
            lanes = [Lane.GPU] * len(tokens)
            for e, lane in zip(undecided, chosen, strict=True):
                lanes[e] = lane
            yield lanes

    @pytest.mark.parametrize("experts", [1, 2, 8, 16])
    def test_no_placement_of_few_experts_ends_sooner(self, experts: int) -> None:
        for _ in range(12):
            tokens, resident = self.a_layer(experts)
            wide, rates = RANDOM.choice([10**6, 10**8]), some_rates()
            nbytes = [RANDOM.choice([wide, wide // 2]) for _ in tokens]
            queued, cap = RANDOM.choice([0.0, 1e-3, 1.0]), RANDOM.uniform(0.1, 1)
            lanes = prefill(tokens, resident, nbytes, rates, queued, cap)
            undecided = self.open_experts(tokens, resident)
            assert all((lane is Lane.GPU) == (e not in undecided) for e, lane in enumerate(lanes))
            costs = [
                self.cost(other, tokens, resident, nbytes, rates, queued, cap)
                for other in self.placements(tokens, resident)
            ]
            end = self.cost(lanes, tokens, resident, nbytes, rates, queued, cap)
            assert end <= min(costs) * (1 + 1e-9), (tokens, resident, nbytes, rates, queued, cap)

    @pytest.mark.parametrize("experts", [1, 8, 64])
    def test_experts_that_are_alike_are_placed_alike(self, experts: int) -> None:
        for _ in range(100):
            tokens, resident, nbytes = RANDOM.randint(1, 60), RANDOM.choice([0.0, 0.4, 0.9]), 10**7
            rates = some_rates()
            of_all = experts * [tokens], experts * [resident], experts * [nbytes]
            count = prefill_alike(experts, tokens, resident, nbytes, rates)
            lanes = count * [Lane.CPU] + (experts - count) * [Lane.COPY]
            end, other = (self.cost(one, *of_all, rates, 0.0, 1.0) for one in (lanes, prefill(*of_all, rates)))
            assert end == pytest.approx(other, rel=1e-9), (tokens, resident, rates)

    def test_the_balance_is_off_by_less_than_one_expert(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(missing_rows, "EXACT", 0)
        for _ in range(60):
            tokens, resident = self.a_layer(12)
            rates, queued = some_rates(), RANDOM.choice([0.0, 1e-3, 1.0])
            given = tokens, resident, [10**8] * 12, rates, queued, 1.0
            best = min(self.cost(other, *given) for other in self.placements(tokens, resident))
            one = 0.0
            for e in self.open_experts(tokens, resident):
                alone = [Lane.GPU] * 12
                times: list[float] = []
                for lane in (Lane.COPY, Lane.CPU):
                    alone[e] = lane
                    times.append(self.cost(alone, tokens, resident, [10**8] * 12, rates, 0.0, 1.0))
                one = max(one, min(times))
            assert self.cost(prefill(*given), *given) <= (best + one) * (1 + 1e-9), given

    def test_without_the_cpu_all_is_copied(self) -> None:
        lanes = prefill([5, 0, 5, 5], [0.2, 0.0, 1.0, 0.0], [10**6] * 4, some_rates(), cap=0.0)
        assert lanes == [Lane.COPY, Lane.GPU, Lane.GPU, Lane.COPY]
