"""Plans in words: quality (bits and KL), speed, place, what is missing.

Bits are bits per weight. Widths are written up / gate and down / attention: "3/4/4".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ....models.quantities import digits, estimate, size, trimmed

if TYPE_CHECKING:
    from ....engine.planning.options import Option, SpeedRange
    from ....engine.planning.plan import Plan
    from ....models.catalog_entry import CatalogEntry

BITS = "Bits per weight: up / gate and down / attention. Fewer are smaller and faster, and less exact."
KL = (
    "KL: how far the model's next-word probabilities move from the 16-bit original's, in nats; "
    "0 is identical, below 0.01 hard to notice, above 0.1 noticeable."
)
# Up to which KL, and what it means: in a column, and in a sentence.
_CLOSE = (
    (1e-9, "the same", "Answers are the original model's"),
    (0.01, "very close", "Answers stay very close to the original model's"),
    (0.03, "close", "Answers stay close to the original model's"),
    (0.1, "less close", "Answers differ from the original model's now and then"),
)
_FAR = "different", "Answers differ noticeably from the original model's"
STANDINGS = {
    "reading": "At reading speed",
    "slower": "Slower answers, the fastest first",
    "base": "Base models, which cannot chat",
    "unfit": "Too large or too slow for this machine",
}
_PLACES = {"gpu": "all of it on the GPU", "pool": "on the GPU and the CPU together", "cpu": "on the CPU"}


class HasWidths(Protocol):
    """Bits per weight of a pack's parts."""

    @property
    def up(self) -> int: ...
    @property
    def gate(self) -> int: ...
    @property
    def down(self) -> int: ...
    @property
    def dense(self) -> int: ...


def widths(of: HasWidths) -> str:
    """Up / gate and down / attention: "3/4/4"; where gate and down differ, "3/4+8/4"."""
    rows = f"{of.gate}" if of.gate == of.down else f"{of.gate}+{of.down}"
    return f"{of.up}/{rows}/{of.dense}"


def in_bits(of: HasWidths) -> str:
    """Short, for a list: "3/4/4 bits", "16 bits, as published"."""
    same = {of.up, of.gate, of.down, of.dense}
    return "16 bits, as published" if same == {16} else f"{widths(of)} bits"


def named(of: HasWidths) -> str:
    """With the name of each part: "up 3, gate and down 4, attention 4 bits per weight"."""
    rows = f"gate and down {of.gate}" if of.gate == of.down else f"gate {of.gate}, down {of.down}"
    return f"up {of.up}, {rows}, attention {of.dense} bits per weight"


def closeness(kl: float) -> str:
    """The quality loss of widths in a word or two, for a column."""
    return next((word for least, word, _ in _CLOSE if kl < least), _FAR[0])


def loss(kl: float, *, figures: bool) -> str:
    """In a sentence: "Answers stay very close to the original model's"; figures: with the KL."""
    said = next((sentence for least, _, sentence in _CLOSE if kl < least), _FAR[1])
    return f"{said} (KL {trimmed(kl, 2)} nats, measured on the demo model)" if figures else said


def rate(of: SpeedRange) -> str:
    """An estimate of tokens per second with its range: "6.1 (4.8 to 7.9)"."""
    return estimate(of.low, of.mid, of.high)


def place(one: Option) -> str:
    """Where it would run."""
    where = _PLACES[one.place]
    return where if one.ram_share >= 1 else f"{where}, {1 - one.ram_share:.0%} of it read from the disk"


def missing(one: Option) -> str:
    """What it lacks, in short: "needs 12.1 GB more memory"; "" if it works."""
    lacks = [f"{size(count)} more {'memory' if what == 'ram' else what}" for what, count in one.missing.items()]
    if lacks:
        return f"needs {' and '.join(lacks)}"
    return "" if one.works else f"too slow: {digits(one.decode.mid, 2)} tokens/s"


def at_reading_speed(plan: Plan) -> bool:
    """Whether the model answers at least as fast as people read."""
    from ....engine.planning.plan import standing

    return standing(plan.entry, plan.chosen) == "reading"


def only_disk_lacks(one: Option) -> bool:
    """Whether only disk space is lacking."""
    return set(one.missing) == {"disk"}


def about(entry: CatalogEntry) -> str:
    """What a model is, in a few words."""
    weights = entry.sizes.parameters
    unit, name = (1e9, "B") if weights >= 1e9 else (1e6, "M")
    said = [f"{digits(weights / unit)} {name} parameters"]
    if entry.chat is None:
        said.append("base model, no chat")
    if entry.made_for:
        said.append(f"for {entry.made_for}")
    if entry.thinks:
        said.append("thinks first")
    if entry.gated:
        said.append("terms to accept")
    if entry.licence:
        said.append(entry.licence)
    if entry.rounding and not entry.file_bytes:  # else each line says it
        said.append(f"weights in {entry.rounding}")
    if entry.ready:
        said.append("ready pack")
    return " · ".join(said)
