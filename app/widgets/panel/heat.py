"""Small pictures of numbers, made of characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

_BARS = " ▁▂▃▄▅▆▇█"
_FULL = len(_BARS) - 1


def condense(values: Iterable[float], width: int) -> list[float]:
    """At most `width` values: neighbours are averaged where there are more."""
    values = list(values)
    if width < 1:
        return []
    count = len(values)
    if count <= width:
        return values
    edges = [index * count // width for index in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def bars(values: Sequence[float], *, rows: int = 1, top: float | None = None) -> list[str]:
    """One column per value in `rows` lines, the uppermost first; `top` (by default the largest) is full height.

    A value above zero is drawn at least one step high, so that it cannot be mistaken for none.
    """
    highest = max(values, default=0.0) if top is None else top
    if highest <= 0:
        return [_BARS[0] * len(values)] * rows
    steps = [max(1 if value > 0 else 0, round(value / highest * rows * _FULL)) for value in values]
    return ["".join(_BARS[min(_FULL, max(0, step - _FULL * row))] for step in steps) for row in reversed(range(rows))]


def stack(parts: Sequence[float], width: int) -> list[int]:
    """How many of `width` cells each of `parts` takes in one bar; they fill it unless all parts are 0.

    A part above zero takes one at least, so that it cannot be mistaken for none, as long as there are enough cells.
    """
    whole = sum(parts)
    if whole <= 0 or width < 1:
        return [0] * len(parts)
    exact = [part / whole * width for part in parts]
    cells = [int(value) for value in exact]
    by_rest = sorted(range(len(parts)), key=lambda index: cells[index] - exact[index])
    for index in by_rest[: width - sum(cells)]:
        cells[index] += 1
    for index, part in enumerate(parts):
        if part > 0 and not cells[index] and (most := max(cells)) > 1:
            cells[cells.index(most)] -= 1
            cells[index] = 1
    return cells


def stretch(text: str, width: int, *, most: int = 4) -> str:
    """Every character repeated to fill up to `width` columns, each at most `most` wide."""
    times = max(1, min(most, width // max(1, len(text))))
    return "".join(character * times for character in text)
