"""Graphics cards by the names that people type, and the list of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from typing import Any

import pytest
from floe_chat.engine.offload import cards
from floe_chat.models.catalog import asset
from floe_chat.models.errors import UsageError

FILE: Any = json.loads(asset("devices.json").read_text(encoding="utf-8"))
GB = 1 << 30


@pytest.mark.parametrize(
    ("text", "title", "gb"),
    [
        ("4090", "RTX 4090", 24),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        ("sim:rtx4090-24gb", "RTX 4090", 24),
        ("3080", "RTX 3080", 10),
        ("RTX 3080 12GB", "RTX 3080", 12),
        ("3080ti", "RTX 3080 Ti", 12),
        ("RTX 4060 Laptop GPU", "RTX 4060 Laptop", 8),
        ("4070 ti super", "RTX 4070 Ti Super", 16),
        ("NVIDIA A100 80GB", "A100", 80),
        ("quadro rtx 6000", "Quadro RTX 6000", 24),
        ("rtx3090@12gb", "RTX 3090", 12),
        ("4060 Ti 8GB", "RTX 4060 Ti", 8),
        ("4080S", "RTX 4080 Super", 16),
    ],
)
def test_a_card_by_what_people_call_it(text: str, title: str, gb: int) -> None:
    found = cards.named(text)
    assert (found.title, found.vram_bytes) == (title, gb * GB)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("RX 7900 XTX", "AMD cards are not supported yet"),
        ("7800xt", "AMD cards are not supported yet"),
        ("MacBook Pro", "Apple's GPUs"),
        ("1080ti", "older than the RTX 20 series"),
        ("gtx 1660", "--vram"),
        ("arc b580", "Intel cards"),
        ("rtx 4091", "Did you mean RTX 4090?"),
        ("3060 to", "Did you mean RTX 3060"),
        ("voodoo", "--card list"),
        ("", "--card list"),
        ("x" * 5000, "--card list"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_other_cards_get_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        cards.named(text)
    assert reason in str(caught.value) and caught.value.hint and len(caught.value.title) < 100


def test_every_figure_has_a_source() -> None:
    figures = [each for group in (FILE["common"], *FILE["hosts"].values()) for each in group.values()]
    named = [each for each in figures if not isinstance(each, str)]
    assert len(named) > 30 and all(set(each) == {"value", "source"} and each["value"] > 0 for each in named)


def test_less_memory_can_be_asked_for() -> None:
    whole, half = cards.named("sim:rtx3090-24gb"), cards.named("sim:rtx3090-24gb@12.5gb")
    assert half == dataclasses.replace(whole, name="rtx3090-24gb@12.5gb", vram_bytes=int(12.5 * GB))
    assert cards.named("sim:rtx3090-24gb@24gb").vram_bytes == whole.vram_bytes


@pytest.mark.parametrize("limit", ["", "gb", "0gb", "-1gb", "25gb", "nangb", "1e1gb", "8gb@4gb", "8mb"])
def test_limits_that_make_no_sense_are_refused(limit: str) -> None:
    with pytest.raises(UsageError, match="24 GB"):
        cards.named(f"sim:rtx3090-24gb@{limit}")


def test_the_list_is_sorted_by_series_and_generation() -> None:
    series = cards.by_series()
    assert [name for name in series if name.startswith("GeForce RTX")] == [f"GeForce RTX {n}" for n in (20, 30, 40, 50)]
    for name in (name for name in series if name.startswith("GeForce RTX")):
        models = [int(number[0]) for card in series[name] if (number := re.findall(r"\d{4}", card.title))]
        assert models == sorted(models), name
    assert {card.name for found in series.values() for card in found} == set(FILE["cards"])


def test_figures_are_in_range() -> None:
    """A slip of a digit would be outside: bounds of what NVIDIA has sold."""
    for name, own in FILE["cards"].items():
        card, gb = cards.named(f"sim:{name}"), float(name.rpartition("-")[2].removesuffix("gb"))
        assert card == cards.named(name) == cards.named(card.title + " " + name.rpartition("-")[2]), name
        assert card.name == name and gb * 0.93 <= card.vram_bytes / GB <= gb and 2018 <= own["year"] <= 2025
        assert 6 * GB <= card.vram_bytes <= 141 * GB and 150e9 <= card.gpu_bytes_s <= 5e12, name
        # What arithmetic a card has to the bytes that it reads: from HBM3's H20 to an L40S.
        assert 30 < card.gpu_flops / card.gpu_bytes_s < 500, name
        # Of each multiprocessor and clock, a power of two by generation and class; the H20's is cut by export rules.
        log = math.log2(card.gpu_flops / card.clocks_s)
        assert name.startswith("h20-") or (9 <= round(log) <= 12 and abs(log - round(log)) < 0.025), name
        assert re.fullmatch("[345]x(8|16)", own["pcie"]) and own["gpu_flops_source"] and own["host"] in FILE["hosts"]
        assert card.pack_bytes_s < card.cpu_bytes_s < card.gpu_bytes_s and card.link_bytes_s < card.cpu_bytes_s * 2
    for series in ("GeForce RTX 40", "GeForce RTX 50"):  # a larger card of a generation is no slower
        for one, other in itertools.pairwise(cards.by_series()[series]):
            assert other.gpu_flops >= one.gpu_flops, (one.title, other.title)
