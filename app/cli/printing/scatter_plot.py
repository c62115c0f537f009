"""A plot of points in text characters, with a logarithmic vertical axis."""

from __future__ import annotations

import math
from collections.abc import Sequence


def scatter(points: Sequence[tuple[float, float, str]], width: int, height: int, x_name: str, y_name: str) -> list[str]:
    """Lines of text. Of points (x, y > 0, one character) in the same place the last one is shown.

    The axes end at the outermost points; x is linear, y a power of ten.
    """
    xs, ys = [x for x, _, _ in points], [math.log10(y) for _, y, _ in points]
    left, bottom = min(xs), math.floor(min(ys))
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
        label = "" if decade is None else f"{10.0**decade:g}"
        lines.append(f"{label:>9} {'|' if decade is None else '+'}{''.join(cells).rstrip()}")
    lines.append(f"{'':>10}+{'-' * width}")
    lines.append(f"{'':>11}{f'{left:.3g}':<{width - 5}}{left + span:>5.3g}")
    lines.append(f"{'':>11}{x_name:^{width}}".rstrip())
    return lines
