"""Numbers with units, as every page, command and error prints them: two or three significant digits, no exponents.

Disks and downloads count in powers of 1000 (`size`), memory in powers of 1024 (`memory`), as both are sold.
"""

from __future__ import annotations

import math
import re

from .errors import UsageError

_PREFIXES = ("B", "kB", "MB", "GB", "TB")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def digits(value: float, significant: int = 3) -> str:
    """A number rounded to so many significant digits: 0.0065, 6.13, 613, 1,300."""
    if not math.isfinite(value):
        return "—"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{significant - 1}e}")
    decimals = significant - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(0, decimals)}f}"


def trimmed(value: float, significant: int = 3) -> str:
    """`digits` without zeros at the end of a fraction: 24, 1.5, 0.06. For text; in a column use `digits`."""
    text = digits(value, significant)
    return text.rstrip("0").rstrip(".") if "." in text else text


def divergence(nats: float) -> str:
    """A KL divergence: 0.0135; what float noise makes is below what anyone could notice."""
    return "<0.000001" if 0 < nats < 1e-6 else digits(nats, 2 if nats < 1e-4 else 3)


def estimate(low: float, mid: float, high: float) -> str:
    """An expected value and its range, two significant digits each: "950 (560 to 1,300)"."""
    return f"{digits(mid, 2)} ({digits(low, 2)} to {digits(high, 2)})"


def size(nbytes: float) -> str:
    """Bytes of files and of what moves, in powers of 1000: "31 B", "1.31 GB"."""
    step = 0
    while nbytes >= 999.5 and step + 1 < len(_PREFIXES):
        nbytes /= 1000
        step += 1
    return f"{nbytes:.0f} {_PREFIXES[0]}" if step == 0 else f"{digits(nbytes)} {_PREFIXES[step]}"


def memory(nbytes: float) -> str:
    """Bytes of RAM or of a graphics card, in powers of 1024: "24 GB", "11.2 GB", "512 MB"."""
    unit, name = (2**30, "GB") if nbytes >= 2**30 else (2**20, "MB")
    return f"{trimmed(nbytes / unit)} {name}"


def rate(bytes_s: float) -> str:
    """Bytes per second, always in GB/s, so that rates can be compared: "23.2 GB/s", "0.51 GB/s"."""
    return f"{trimmed(bytes_s / 1e9)} GB/s"


def duration(seconds: float) -> str:
    """How long something took: "8.9 ms", "850 ms", "12.3 s", "25 minutes", "2.9 hours", "3.1 days"."""
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3)} ms"
    if seconds < 2 * _MINUTE:
        return f"{digits(seconds)} s"
    if seconds < 100 * _MINUTE:
        return f"{seconds / _MINUTE:.0f} minutes"
    return f"{digits(seconds / _HOUR, 2)} hours" if seconds < 2 * _DAY else f"{digits(seconds / _DAY, 2)} days"


def forecast(seconds: float) -> str:
    """How long something will take, no finer than a minute: "1 minute", "about 25 minutes", "about 2.9 hours"."""
    if seconds <= _MINUTE:
        return "1 minute"
    minutes = math.ceil(seconds / _MINUTE)
    return f"about {minutes} minutes" if minutes < 100 else f"about {duration(seconds)}"


def fetching(nbytes: float) -> str:
    """How long a download takes where 10 MB arrive in a second: "about 31 minutes at 10 MB/s"."""
    return f"{forecast(nbytes / 10e6)} at 10 MB/s"


def share(part: float) -> str:
    """A share in 0..1 as a percentage: a small one is never shown as zero."""
    return "<1 %" if 0 < part < 0.005 else f"{part * 100:.0f} %"


def memory_size(text: str | None) -> int | None:
    """Bytes of a size such as "8", "10gb", "1.5 TiB" or "900mb": multiples of 1024, as memory is sold; GB if no unit is
    given; None stays None.

    Raises:
        UsageError: something else.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([mgt])(?:i?b)?)?\s*", text, re.IGNORECASE | re.ASCII)
    size = float(match[1]) * 2 ** {"m": 20, "g": 30, "t": 40}[(match[2] or "g").lower()] if match else 0.0
    if not 1 <= size < 2**60:
        raise UsageError(f"{text!r} is not a memory size", "", "Give it in GB, such as 10, or with a unit: 900mb.")
    return int(size)
