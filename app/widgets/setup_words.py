"""Plans in words that need no glossary: rounding, speed, places, what is missing, durations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from . import units

if TYPE_CHECKING:
    from ...engine.options import Option, Range
    from ...models.pack import PackSpec
    from ...models.published import Entry

# Mean KL divergence that rounding costs by the demo model's measure (engine/options.py, ROUNDING), below which it is
# called so. The presets Balanced and Fast add 0.010 and 0.039 by the same measure.
_ROUNDED = ((0.001, "none"), (0.005, "hardly any"), (0.010, "very little"), (0.015, "little"), (0.030, "noticeable"))
_STRONG = "strong"
_PLACES = {
    "gpu": "all of it on the GPU",
    "pool": "GPU and processor together",
    "cpu": "on the processor",
}


def rounding(kl: float) -> str:
    """How much rounding changes a model, from "none" to "strong"."""
    return next((word for most, word in _ROUNDED if kl < most), _STRONG)


def rounding_explained(spec: PackSpec, kl: float) -> str:
    """A sentence on what rounding to these widths means."""
    told = {
        "none": "answers are the original's",
        "hardly any": "answers are all but the original's",
        "very little": "answers stay very close to the original's",
        "little": "answers stay close to the original's",
        "noticeable": "now and then an answer is worse than the original's",
        _STRONG: "answers are plainly worse than the original's",
    }[rounding(kl)]
    return (
        f"Of 16 bits per weight, experts keep {bits(spec.up, spec.gate, spec.down)} and attention {spec.dense}: {told}."
    )


def bits(*widths: int) -> str:
    """Widths of several matrices: "4", "3 to 4"."""
    least, most = min(widths), max(widths)
    return f"{most}" if least == most else f"{least} to {most}"


def rate(of: Range) -> str:
    """An estimate of tokens per second with its range: "6.1 (4.8 to 7.9)"."""
    return f"{digits(of.mid)} ({digits(of.low)} to {digits(of.high)})"


def digits(number: float) -> str:
    """Two significant digits: an estimate has no more."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def place(one: Option) -> str:
    """Where it would run."""
    where = _PLACES[one.place]
    return where if one.ram_share >= 1 else f"{where}, {1 - one.ram_share:.0%} of it read from the disk"


def missing(one: Option) -> str:
    """What stands against it, short: "needs 12.1 GB more memory"; "" where it works."""
    lacks = [f"{units.size(count)} more {'memory' if what == 'ram' else what}" for what, count in one.missing.items()]
    if lacks:
        return f"needs {' and '.join(lacks)}"
    return "" if one.works else f"too slow: {digits(one.decode.mid)} tokens/s"


def only_disk_lacks(one: Option) -> bool:
    """Whether another disk would be enough."""
    return set(one.missing) == {"disk"}


def about(entry: Entry) -> str:
    """What a model is, in a few words."""
    weights = entry.sizes.parameters
    said = [f"{weights / 1e9:.3g} B weights" if weights >= 1e9 else f"{weights / 1e6:.2g} M weights"]
    if entry.chat is None:
        said.append("continues text, cannot chat")
    if entry.licence:
        said.append(entry.licence)
    if entry.gated:
        said.append("terms to accept")
    return " · ".join(said)


def duration(seconds: float | None) -> str:
    """A forecast: "some 40 minutes", "some 5.3 hours"; "" where there is none."""
    if seconds is None:
        return ""
    minutes = seconds / 60
    if minutes >= 100:
        return f"some {minutes / 60:.1f} hours"
    return "a minute" if minutes <= 1 else f"some {math.ceil(minutes)} minutes"
