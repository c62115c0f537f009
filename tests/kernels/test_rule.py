"""What a rule's values may be, and what a layer makes of them."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from floe_chat.kernels.rule import MOST_MULTIPLE, NOTHING, Rule


def test_a_layer_has_its_multiple_of_the_four_shares() -> None:
    rule = Rule(0.5, 0.8, drop=0.2, major=0.4, weighed=True, alpha=0.3, late=0.25, layers=(0.5, 1.0, 1.5))
    assert rule.at(0) == Rule(0.25, 0.4, drop=0.1, major=0.2, weighed=True, alpha=0.3, late=0.25)
    assert rule.at(1) == Rule(0.5, 0.8, drop=0.2, major=0.4, weighed=True, alpha=0.3, late=0.25)
    assert rule.at(2).product == 1.0  # no share is more than all
    assert Rule(0.5).at(7) == Rule(0.5)


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
