"""Cases that cover a cross product's pairs instead of all of it.

`covering` parametrizes a test. Every combination of the `whole` axes becomes one case. The `beside` axes are spread
over these cases, so that each of their values meets each value of every other axis at least once; without --all, cases
are made until each value has had one. The remaining cases of the cross product are drawn at random by
tests/bench/kernel_sweep.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

FIXTURES = "isa", "on_backend", "place"  # axes that are parameters of a fixture
SWEEP = "FLOE_TEST_SWEEP"  # "SEED:COUNT" makes each test run so many random cases instead
EVERY = "FLOE_TEST_ALL"  # set by --all, for xdist's workers too
Axes = Mapping[str, Sequence[Any]]
Row = tuple[Any, ...]


def covering(whole: Axes, beside: Axes | None = None) -> pytest.MarkDecorator:
    """The mark that gives a test these cases; the names of the axes are the test's arguments or FIXTURES."""
    beside = beside or {}
    names = [*whole, *beside]
    swept = SWEEP in os.environ
    rows = _swept({**whole, **beside}) if swept else covering_rows(whole, beside, pairs=EVERY in os.environ)
    return pytest.mark.parametrize(
        names,
        rows,
        ids=["-".join(map(_named, names, row)) for row in rows],
        indirect=[name for name in names if name in FIXTURES],
    )


def covering_rows(whole: Axes, beside: Axes, *, pairs: bool = True) -> list[Row]:
    """One row per combination of `whole`, more where that is too few for all pairs; the same ones each time.

    Without `pairs`, those of the first rows that show every value.
    """
    axes = [*whole.values(), *beside.values()]
    missing = {
        (one, two, a, b)
        for one, two in combinations(range(len(axes)), 2)
        if two >= len(whole)
        for a, b in product(range(len(axes[one])), range(len(axes[two])))
    }
    drawn = random.Random(0)
    others = list(product(*(range(len(values)) for values in beside.values())))
    some = min(30, len(others))  # looking at all of them would take longer than the tests

    def new_pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, row[i], row[j]) for i, j in combinations(range(len(row)), 2)} & missing

    chosen: list[tuple[int, ...]] = []
    unseen = {(axis, place) for axis, values in enumerate(axes) for place in range(len(values))}
    sizes = [len(values) for values in whole.values()]
    # All axes change from row to row, so that the first rows, `make test`'s sample, meet different values of each.
    starts = sorted(
        product(*map(range, sizes)),
        key=lambda row: [(value - row[0]) % size for value, size in zip(row[1:], sizes[1:], strict=True)],
    )
    while starts and (unseen or pairs):
        start = starts.pop(0)
        row = max(((*start, *other) for other in drawn.sample(others, some)), key=lambda row: len(new_pairs(row)))
        missing -= new_pairs(row)
        unseen -= set(enumerate(row))
        chosen.append(row)
        if not starts and missing:
            _, _, a, _ = pair = min(missing)
            starts.append(start if pair[0] >= len(whole) else (*start[: pair[0]], a, *start[pair[0] + 1 :]))
    return [tuple(values[place] for values, place in zip(axes, row, strict=True)) for row in chosen]


def _swept(axes: Axes) -> list[Row]:
    """Random rows of the full cross product, each at most once."""
    seed, count = map(int, os.environ[SWEEP].split(":"))
    every = list(product(*axes.values()))
    return random.Random(seed).sample(every, min(count, len(every)))


def _named(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "_".join(map(str, value))
    return f"{name}{value}" if isinstance(value, int | float) else str(value).removeprefix("torch.")
