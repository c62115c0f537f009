"""Figures in words, short enough for a narrow column. None is an em dash, never a zero."""

from __future__ import annotations

NOT_MEASURED = "—"

_PREFIXES = ("B", "kB", "MB", "GB", "TB")


def rate(per_second: float | None) -> str:
    """Three significant digits: 6.13, 61.3, 613."""
    if per_second is None:
        return NOT_MEASURED
    return _three_digits(per_second)


def rate_of(per_second: float | None) -> str:
    """`rate` with its unit."""
    return NOT_MEASURED if per_second is None else f"{_three_digits(per_second)} tokens/s"


def seconds(value: float | None) -> str:
    """0.12 s, 12.3 s; below a hundredth in smaller units."""
    if value is None:
        return NOT_MEASURED
    if 0 < value < 0.01:
        return milliseconds(value)
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def milliseconds(value: float | None) -> str:
    """Seconds as 0.42 ms, 12.3 ms; below a hundredth in µs."""
    if value is None:
        return NOT_MEASURED
    return f"{_three_digits(value * 1e6)} µs" if 0 < value < 1e-5 else f"{_three_digits(value * 1e3)} ms"


def share(value: float | None) -> str:
    """A part of a whole, given in 0..1, as a percentage; a small one never looks like none."""
    if value is None:
        return NOT_MEASURED
    return "<1 %" if 0 < value < 0.005 else f"{value * 100:.0f} %"


def count(number: int) -> str:
    """Tokens as 12, 999, 1.2k, 34k."""
    return str(number) if number < 1000 else f"{number / 1000:.1f}k" if number < 9_950 else f"{number / 1000:.0f}k"


def size(count: float | None) -> str:
    """Bytes with a decimal prefix: 1.31 GB is 1.31e9 bytes."""
    if count is None:
        return NOT_MEASURED
    step = 0
    while count >= 999.5 and step + 1 < len(_PREFIXES):
        count /= 1000
        step += 1
    return f"{count:.0f} {_PREFIXES[0]}" if step == 0 else f"{_three_digits(count)} {_PREFIXES[step]}"


def size_of(part: float | None, whole: float) -> str:
    """Bytes of a limit: 3.20 of 4.00 GB, 450 MB of 4.00 GB."""
    held, limit = size(part), size(whole)
    unit = limit[limit.rindex(" ") :]
    return f"{held.removesuffix(unit)} of {limit}"


def _three_digits(value: float) -> str:
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
