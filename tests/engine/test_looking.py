"""Where looking ahead pays, by times that are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from floe_chat.engine.offload.looking import CHECKED, SKIPPED, TRIED, Looking

LAYERS = 6
Cost = Callable[[Looking, int], float]  # of a layer in this token


def tokens(looking: Looking, cost: Cost, count: int) -> None:
    now = 0.0
    for _ in range(count):
        for layer in range(LAYERS):
            looking.found(layer, lambda at=now: at)
            now += cost(looking, layer)


def until_settled(looking: Looking, cost: Cost) -> list[bool]:
    tokens(looking, cost, SKIPPED + TRIED + CHECKED + 1)
    assert looking.settled
    return [looking.does(layer) for layer in range(LAYERS)]


def gaining(*gains: float) -> Cost:
    """Layers take about 1; one that looks ahead costs 0.1 and saves the next one that plus the gain of its place."""
    draw = random.Random(3)

    def cost(looking: Looking, layer: int) -> float:
        saved = 0.1 + gains[layer - 1] if layer and looking.does(layer - 1) else 0.0
        return 1.0 + draw.uniform(-0.02, 0.02) + 0.1 * looking.does(layer) - saved

    return cost


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((0.2,) * 5, [True] * 5 + [False]),
        ((-0.1,) * 5, [False] * 6),
        ((0.2, -0.1, 0.2, 0.2, -0.1), [True, False, True, True, True, False]),  # the last but one does as most
    ],
)
def test_layers_look_ahead_where_it_pays(gains: tuple[float, ...], expected: list[bool]) -> None:
    assert until_settled(Looking(LAYERS), gaining(*gains)) == expected


def test_a_choice_that_makes_tokens_slower_is_dropped() -> None:
    """Each layer alone gains, together they are in each other's way."""
    alone = gaining(*(0.2,) * 5)

    def cost(looking: Looking, layer: int) -> float:
        crowded = sum(looking.does(other) for other in range(LAYERS)) > LAYERS // 2
        return alone(looking, layer) + 0.5 * crowded

    assert until_settled(Looking(LAYERS), cost) == [False] * LAYERS


def test_what_was_found_is_kept_for_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "ahead.json"
    found = until_settled(Looking(LAYERS, file), gaining(*(0.2,) * 5))
    again = Looking(LAYERS, file)
    assert again.settled and again.any and [again.does(layer) for layer in range(LAYERS)] == found
    other = Looking(LAYERS + 1, file)  # another model with rows of this width
    assert not other.settled and other.any
    file.write_text("{}", encoding="utf-8")
    assert not Looking(LAYERS, file).settled


def test_incomplete_tokens_do_not_count() -> None:
    looking = Looking(LAYERS)
    for _ in range(2 * (SKIPPED + TRIED + CHECKED)):
        for layer in (0, 1, 3, 5):
            looking.found(layer, lambda: 0.0)
    assert not looking.settled
    assert Looking(1).settled and not Looking(1).any
