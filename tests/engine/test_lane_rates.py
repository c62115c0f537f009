"""The rates of lanes, learned from what is observed and kept in a file."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.offload.lane_rates import RateName, Rates, rates_file

from .rates import RANDOM, some_rates


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
