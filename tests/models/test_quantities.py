"""Numbers in words: two or three significant digits, one form for each kind, never an exponent."""

from __future__ import annotations

import random

import pytest
from floe_chat.models import quantities


@pytest.mark.parametrize(
    ("value", "significant", "text"),
    [
        (0.0065, 2, "0.0065"),
        (0.9996, 3, "1.00"),
        (6.128, 3, "6.13"),
        (61.34, 3, "61.3"),
        (613.4, 3, "613"),
        (950.2, 2, "950"),
        (1296, 2, "1,300"),
        (12345, 3, "12,300"),
        (0, 3, "0"),
        (-0.25, 2, "-0.25"),
        (float("inf"), 3, "—"),
    ],
)
def test_digits(value: float, significant: int, text: str) -> None:
    assert quantities.digits(value, significant) == text


def test_no_number_has_an_exponent() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        value = 10 ** draw.uniform(-9, 15)
        for text in (quantities.digits(value), quantities.digits(value, 2), quantities.duration(value)):
            assert "e" not in text.removesuffix("minutes"), text
        assert float(quantities.digits(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_an_estimate_has_its_range() -> None:
    assert quantities.estimate(563.2, 951.4, 1311.0) == "950 (560 to 1,300)"
    assert quantities.estimate(0.286, 0.6, 0.81) == "0.60 (0.29 to 0.81)"


@pytest.mark.parametrize(
    ("nbytes", "files", "memory"),
    [
        (0, "0 B", "0 MB"),
        (24 << 20, "25.2 MB", "24 MB"),
        (11 << 30, "11.8 GB", "11 GB"),
        (1_600_000_000, "1.60 GB", "1.49 GB"),
        (999_600, "1.00 MB", "0.953 MB"),
    ],
)
def test_files_count_in_thousands_and_memory_as_it_is_sold(nbytes: int, files: str, memory: str) -> None:
    assert (quantities.size(nbytes), quantities.memory(nbytes)) == (files, memory)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.06e-6, "2.06 µs"),
        (0.00888, "8.88 ms"),
        (0.02, "20.0 ms"),
        (0.9999, "1.00 s"),
        (61.2, "61.2 s"),
        (1500, "25 minutes"),
        (10400, "2.9 hours"),
        (270_000, "3.1 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert quantities.duration(seconds) == text


def test_forecasts_are_no_finer_than_a_minute() -> None:
    forecasts = [quantities.forecast(seconds) for seconds in (3, 61, 1500, 10400)]
    assert forecasts == ["1 minute", "about 2 minutes", "about 25 minutes", "about 2.9 hours"]


def test_rates_and_shares() -> None:
    assert quantities.rate(2.32e10) == "23.2 GB/s" and quantities.rate(5.1e8) == "0.51 GB/s"
    assert [quantities.share(part) for part in (0, 0.004, 0.006, 1)] == ["0 %", "<1 %", "1 %", "100 %"]
