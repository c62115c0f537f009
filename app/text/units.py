"""Figures on a screen: as `models.quantities`, for values that may not have been measured. None is an em dash, never a
zero.
"""

from __future__ import annotations

from ...models import quantities

NOT_MEASURED = "—"


def rate(per_second: float | None) -> str:
    """Three significant digits: 6.13, 61.3, 613, 1,230."""
    return NOT_MEASURED if per_second is None else quantities.digits(per_second)


def rate_of(per_second: float | None) -> str:
    """`rate` with its unit."""
    return NOT_MEASURED if per_second is None else f"{rate(per_second)} tokens/s"


def seconds(value: float | None) -> str:
    """8.9 ms, 123 ms, 12.3 s."""
    return NOT_MEASURED if value is None else quantities.duration(value)


def milliseconds(value: float | None) -> str:
    """Seconds as 0.42 ms, 12.3 ms, whatever their size, for columns; below a hundredth of a millisecond in µs."""
    if value is None:
        return NOT_MEASURED
    if 0 < value < 1e-5:
        return f"{quantities.digits(value * 1e6)} µs"
    return f"{quantities.digits(value * 1e3)} ms"


def share(value: float | None) -> str:
    """A share in 0..1 as a percentage; a small one is never shown as zero."""
    return NOT_MEASURED if value is None else quantities.share(value)


def count(number: int) -> str:
    """Tokens as 12, 999, 1.2k, 34k."""
    return str(number) if number < 1000 else f"{number / 1000:.1f}k" if number < 9_950 else f"{number / 1000:.0f}k"


def size(count: float | None) -> str:
    """Bytes with a decimal prefix: 1.31 GB is 1.31e9 bytes."""
    return NOT_MEASURED if count is None else quantities.size(count)


def size_of(part: float | None, whole: float) -> str:
    """Bytes of a limit: 3.20 of 4.00 GB, 450 MB of 4.00 GB."""
    held, limit = size(part), size(whole)
    unit = limit[limit.rindex(" ") :]
    return f"{held.removesuffix(unit)} of {limit}"
