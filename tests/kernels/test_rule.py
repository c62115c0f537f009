"""What a rule's values may be, and what a layer makes of them."""

from __future__ import annotations

import itertools
import math
import random
from math import nan
from typing import Any

import pytest
from floe_chat.kernels.rule import MOST_MULTIPLE, NOTHING, Rule


def test_a_layer_takes_its_part_of_the_four_shares() -> None:
    rule = Rule(0.5, 0.8, drop=0.2, major=0.4, weighed=True, alpha=0.3, late=0.25, layers=(0.5, 1.0, 1.5))
    first, _, last = (rule.at(layer) for layer in range(3))
    for name in ("sparsity", "product", "drop", "major"):
        assert 0 < getattr(first, name) < getattr(rule, name) < getattr(last, name) < 1
    rest = {"weighed": True, "alpha": 0.3, "late": 0.25, "layers": ()}
    assert {name: getattr(first, name) for name in rest} == rest
    assert Rule(0.5).at(7) == Rule(0.5)


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_share_is_what_was_asked_for_and_no_layer_is_empty(seed: int) -> None:
    rng = random.Random(seed)
    layers = tuple(rng.choice((0.0, 1.0, rng.uniform(1e-3, MOST_MULTIPLE))) for _ in range(rng.randint(1, 96)))
    takes = [layer for layer, factor in enumerate(layers) if factor]
    dial = sorted({0.0, 1e-9, rng.random(), rng.random(), 0.5, 0.9, 0.95, 0.99, 1.0})
    turned = [[Rule(share, layers=layers).at(layer).sparsity for layer in range(len(layers))] for share in dial]
    for share, shares in zip(dial, turned, strict=True):
        assert all(shares[layer] == 0 for layer in range(len(layers)) if layer not in takes)
        assert not takes or math.fsum(shares) / len(takes) == pytest.approx(share, rel=1e-9)
        assert share == 1 or max(shares) < 1
    for less, more in itertools.pairwise(turned):  # no layer has more left where more is left out
        assert all(a <= b for a, b in zip(less, more, strict=True))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, ""),
        ({"sparsity": 1, "layers": (0.0, MOST_MULTIPLE)}, ""),
        ({"sparsity": 1.5}, "sparsity"),
        ({"product": nan}, "product"),
        ({"drop": True}, "drop"),
        ({"alpha": "0.5"}, "alpha"),
        ({"late": -0.1}, "late"),
        ({"weighed": 1}, "weighed"),
        ({"layers": [1.0]}, "layers"),
        ({"layers": (1.0, nan)}, "layers"),
        ({"layers": (MOST_MULTIPLE + 1,)}, "layers"),
        ({"layers": 5}, "layers"),
    ],
    ids=str,
)
def test_wrong_values_are_named(fields: dict[str, Any], wrong: str) -> None:
    assert Rule(**fields).wrong == wrong


def test_nothing_is_skipped_by_nothing() -> None:
    assert Rule() == NOTHING and NOTHING.parts == 1 and not NOTHING.drops and NOTHING.lateness == 0
