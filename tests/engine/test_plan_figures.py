"""The figures that stand in for measurements on this machine make sense."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.speed_estimate import Speeds
from floe_chat.models.catalog import asset

from ..bench.plan_figures import of_frontier

FILE: dict[str, Any] = json.loads(asset("figures.json").read_text(encoding="utf-8"))


def test_what_tune_measured_is_in_the_file() -> None:
    points = json.loads(asset("demo", "packed", "frontier.json").read_text(encoding="utf-8"))["points"]
    for name, values in of_frontier(points).items():
        assert values == FILE[name]["values"], "run tests/bench/plan_figures.py"


def test_one_core_is_known_at_all_widths_and_two_reach_no_more_than_memory_gives() -> None:
    alone, shares = figures().core_bytes_s, figures().kernels
    assert set(alone) == set(shares) - {"prompt"}
    for kind, widths in alone.items():
        assert set(widths) == set(shares[kind]) and max(shares[kind].values()) <= 1


def test_figures_make_sense() -> None:
    found = figures()
    for curve in (found.dropped, found.hits):
        assert all(x0 < x1 for (x0, _), (x1, _) in pairwise(curve)) and min(y for _, y in curve) >= 0
        values = [y for _, y in curve]
        assert values in (sorted(values), sorted(values, reverse=True)) and max(values) <= 1
    for losses in found.quantization.values():
        assert [losses[bits] for bits in sorted(losses)] == sorted(losses.values(), reverse=True)
    assert 0 < found.host_s < found.host_gpu_s < found.host_behind_s + found.host_pool_s
    assert Speeds(read=1e9).host_pool == found.host_pool_s
    assert all(entry["command"] and re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]) for entry in FILE.values())
