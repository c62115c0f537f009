"""Figures that stand in for measurements agree with the benchmarks that measured them, wherever they are written."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from floe_chat.engine.bench.cards import mixes, offload
from floe_chat.engine.offload import cards
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.engine.planning.speed_estimate import Speeds
from floe_chat.models.catalog import asset
from floe_chat.models.quantities import trimmed

from ..bench.plan_figures import BENCHMARKS, of_frontier, written

FILE: dict[str, Any] = json.loads(asset("figures.json").read_text(encoding="utf-8"))
DOCUMENT = BENCHMARKS.read_text(encoding="utf-8")
HOST_ROWS = "on a GPU's path", "of these until absent rows are asked for and"


def test_benchmarks_have_the_table_of_this_file() -> None:
    assert written(DOCUMENT, FILE) == DOCUMENT, "run tests/bench/plan_figures.py"


def test_what_tune_measured_is_in_the_file() -> None:
    points = json.loads(asset("demo", "packed", "frontier.json").read_text(encoding="utf-8"))["points"]
    for name, values in of_frontier(points).items():
        assert values == FILE[name]["values"], "run tests/bench/plan_figures.py"


@pytest.mark.parametrize("part", ["up", "gate", "down"])
def test_the_section_on_the_frontier_says_the_same(part: str) -> None:
    line = re.search(rf"^\| {part} 2 / 3 / 4 / 8 bit \| ([^|]*) \|", DOCUMENT, re.MULTILINE)
    assert line
    stated = [float(figure) for figure in line[1].split(" / ")]
    # The section rounds to four decimals, and an earlier run of the same command differs in the last of them.
    assert stated == pytest.approx([figures().quantization[part][bits] for bits in (2, 3, 4, 8)], abs=3e-4)


def test_one_core_is_known_at_all_widths_and_two_reach_no_more_than_memory_gives() -> None:
    alone, shares = figures().core_bytes_s, figures().kernels
    assert set(alone) == set(shares) - {"prompt"}
    for kind, widths in alone.items():
        assert set(widths) == set(shares[kind]) and max(shares[kind].values()) <= 1


def test_kernels_are_the_slower_ones_of_their_table() -> None:
    label = r"^\| (`signal_gemv`|`sparse_swiglu`|linear 4096 x 4096,) (\d)[ -]bit.*?"
    found = re.findall(label + r" \| ([\d.]+) / ([\d.]+) \| .* \| (\d+) / (\d+) % \|$", DOCUMENT, re.MULTILINE)
    assert len(found) == 10
    kinds = {"`signal_gemv`": "up", "`sparse_swiglu`": "rows", "linear 4096 x 4096,": "dense"}
    for name, bits, *numbers in found:
        *alone, one, other = map(float, numbers)
        assert figures().core_bytes_s[kinds[name]][int(bits)] == pytest.approx(1e9 * min(alone))
        assert figures().kernels[kinds[name]][int(bits)] == pytest.approx(min(one, other) / 100)


def test_replays_take_the_share_that_their_section_says() -> None:
    share = re.search(r"the CPU's share \((\d+) % of its memory's rate", DOCUMENT)
    for name in offload.CARDS:
        assert share and float(share[1]) == pytest.approx(
            100 * mixes.cpu_reached(cards.named(name, study=True)), abs=0.5
        )


def test_times_are_those_of_their_sections() -> None:
    spans = [re.search(rf"^  \| {row}.*? \| (0\.\d+) to (0\.\d+) \|", DOCUMENT, re.MULTILINE) for row in HOST_ROWS]
    whole, asked = (sum(map(float, span.groups())) / 2 for span in spans if span is not None)
    assert figures().host_pool_s * 1e3 == pytest.approx(asked, abs=0.005)
    assert figures().host_behind_s * 1e3 == pytest.approx(whole - asked, abs=0.005)
    compiled, lean = re.findall(r"Mixtral (0\.\d+) ms with the compiled step, (0\.\d+) by the lean pass", DOCUMENT)[0]
    assert (trimmed(figures().host_s * 1e3), figures().host_gpu_s * 1e3) == (compiled, float(lean))
    library = re.findall(r"operations, (0\.\d+) by transformers' modules", DOCUMENT)[0]
    assert trimmed(figures().host_library_s * 1e3) == library
    seconds = float(re.findall(r"\((\d+\.\d) s for each of its experts\)", DOCUMENT)[0])
    assert figures().packed_weights_s == pytest.approx(3 * 14336 * 4096 / seconds / 2, rel=0.01)
    batch = float(re.findall(r"one expert, 32 tokens, 60 % sparse \| .* / (\d+) ms \|$", DOCUMENT, re.MULTILINE)[0])
    assert figures().core_prompt_bytes_s == pytest.approx(14336 * 4352 * 32 / (batch / 1e3) / 2, rel=0.07)


def test_figures_make_sense() -> None:
    found = figures()
    for curve in (found.dropped, found.hits):
        assert all(x0 < x1 for (x0, _), (x1, _) in pairwise(curve)) and min(y for _, y in curve) >= 0
        values = [y for _, y in curve]
        assert values in (sorted(values), sorted(values, reverse=True)) and max(values) <= 1
    for losses in found.quantization.values():
        assert [losses[bits] for bits in sorted(losses)] == sorted(losses.values(), reverse=True)
    assert 0 < found.host_s < found.host_gpu_s < found.host_behind_s + found.host_pool_s
    assert found.host_gpu_s < found.host_library_s
    assert Speeds(read=1e9).host_pool == found.host_pool_s
    assert all(entry["command"] and re.fullmatch(r"20\d\d-\d\d-\d\d", entry["date"]) for entry in FILE.values())
