"""A plot of points in text characters, with a logarithmic or linear vertical axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LINES = 4  # named ones of a linear axis


def scatter(
    points: Sequence[tuple[float, float, str]], width: int, height: int, x_name: str, y_name: str, *, log: bool = True
) -> list[str]:
    """Lines of text. Of points (x, y, one character) in the same place the last one is shown.

    The axes end at the outermost points; x is linear, y a power of ten and above 0, or linear too, from 0.
    """
    xs, most = [x for x, _, _ in points], max(y for _, y, _ in points)
    step = 10 ** math.floor(math.log10(max(most, 1e-9) / _LINES))  # of a linear axis: 1, 2 or 5 of these
    step = next(step * by for by in (1, 2, 5, 10) if most <= _LINES * step * by or by == 10)
    ys = [math.log10(y) if log else y / step for _, y, _ in points]
    left, bottom = min(xs), math.floor(min(ys)) if log else 0
    span, rise = max(max(xs) - left, 1e-9), max(math.ceil(max(ys)) - bottom, 1)
    canvas = [[" "] * width for _ in range(height)]
    for x, y, (_, _, mark) in zip(xs, ys, points, strict=True):
        column = round((x - left) / span * (width - 1))
        row = round((y - bottom) / rise * (height - 1))
        canvas[height - 1 - row][column] = mark
    decades = {round((height - 1) * step / rise): bottom + step for step in range(rise + 1)}
    lines = [f"{'':>9} {y_name}"]
    for row, cells in enumerate(canvas):
        decade = decades.get(height - 1 - row)
        label = "" if decade is None else f"{10.0**decade if log else decade * step:g}"
        lines.append(f"{label:>9} {'|' if decade is None else '+'}{''.join(cells).rstrip()}")
    lines.append(f"{'':>10}+{'-' * width}")
    lines.append(f"{'':>11}{f'{left:.3g}':<{width - 5}}{left + span:>5.3g}")
    lines.append(f"{'':>11}{x_name:^{width}}".rstrip())
    return lines
