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


def until_settled(looking: Looking, cost: Cost) -> list[int]:
    tokens(looking, cost, SKIPPED + TRIED + CHECKED + 1)
    assert looking.settled
    return [looking.does(layer) for layer in range(LAYERS)]


def gaining(*gains: tuple[float, ...]) -> Cost:
    """Layers take about 1; one that looks ahead costs 0.1 and saves the next one that plus a predictor's gain there."""
    draw = random.Random(3)

    def cost(looking: Looking, layer: int) -> float:
        before = looking.does(layer - 1) if layer else 0
        saved = 0.1 + gains[layer - 1][before - 1] if before else 0.0
        return 1.0 + draw.uniform(-0.02, 0.02) + 0.1 * bool(looking.does(layer)) - saved

    return cost


G, B = 0.2, -0.1


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([(G,)] * 5, [1] * 5 + [0]),
        ([(B,)] * 5, [0] * 6),
        ([(G,), (B,), (G,), (G,), (B,)], [1, 0, 1, 1, 1, 0]),  # the last but one does as most
        ([(B, G)] * 5, [2] * 5 + [0]),
        ([(B, B)] * 5, [0] * 6),
        ([(G, 2 * G), (B, B), (2 * G, G), (G, 2 * G), (B, B)], [2, 0, 1, 2, 2, 0]),
    ],
)
def test_layers_look_ahead_where_it_pays(gains: list[tuple[float, ...]], expected: list[int]) -> None:
    """By the predictor that gains most."""
    looking = Looking(LAYERS, ("learned", "partial")[: len(gains[0])])
    assert until_settled(looking, gaining(*gains)) == expected


def test_a_choice_that_makes_tokens_slower_is_dropped() -> None:
    """Each layer alone gains, together they are in each other's way."""
    alone = gaining(*[(0.2,)] * 5)

    def cost(looking: Looking, layer: int) -> float:
        crowded = sum(bool(looking.does(other)) for other in range(LAYERS)) > LAYERS // 2
        return alone(looking, layer) + 0.5 * crowded

    assert until_settled(Looking(LAYERS, ["learned"]), cost) == [0] * LAYERS


def test_what_was_found_is_kept_for_the_next_start(tmp_path: Path) -> None:
    file, names = tmp_path / "ahead.json", ("learned", "partial")
    found = until_settled(Looking(LAYERS, names, file), gaining(*[(0.1, 0.2)] * 5))
    again = Looking(LAYERS, names, file)
    assert again.settled and again.any and [again.does(layer) for layer in range(LAYERS)] == found
    turned = Looking(LAYERS, names[::-1], file)
    assert [turned.does(layer) for layer in range(LAYERS)] == [{0: 0, 1: 2, 2: 1}[at] for at in found]
    for other in (Looking(LAYERS + 1, names, file), Looking(LAYERS, ["learned"], file)):  # of another model
        assert not other.settled and other.any
    file.write_text("{}", encoding="utf-8")
    assert not Looking(LAYERS, names, file).settled


def test_incomplete_tokens_do_not_count() -> None:
    looking = Looking(LAYERS, ["learned"])
    for _ in range(2 * (SKIPPED + TRIED + CHECKED)):
        for layer in (0, 1, 3, 5):
            looking.found(layer, lambda: 0.0)
    assert not looking.settled
    assert Looking(1, ["learned"]).settled and not Looking(1, ["learned"]).any
