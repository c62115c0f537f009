"""The values that users may set; without torch, since commands check values before anything is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..models.errors import UsageError
from ..models.quantities import memory_size

if TYPE_CHECKING:
    from .events import Sampling

PREDICTORS = ("auto", "learned", "gate", "partial", "none")  # see predictor.py; "none" prefetches nothing
KV_BITS = ("auto", "16", "8")  # of stored keys and values, see memory_plan.py
TRANSFERS = ("auto", "staged", "in place")  # see tuned_link.py
PLACEMENTS = ("auto", "pool", "static", "cpu")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where a person wants experts that do not all fit the device.

    Attributes:
        kind: of `PLACEMENTS`. pool: bytes of its rows; None: as many as fit.
    """

    kind: str = "auto"
    pool: int | None = None

    @classmethod
    def of(cls, text: str) -> Wanted:
        """By its name: one of `PLACEMENTS`, or "pool:4gb".

        Raises:
            UsageError: it is none.
        """
        kind, colon, size = text.partition(":")
        if kind not in PLACEMENTS or (colon and kind != "pool"):
            hint = "Use auto, pool, pool:SIZE, static or cpu."
            raise UsageError(f"There is no placement {text!r}", "", hint)
        return cls(kind, memory_size(size) if colon else None)

    @property
    def least(self) -> Literal["pool", "cpu"]:
        """Where all layers are if there is the least memory for it."""
        return "pool" if self.kind == "pool" else "cpu"


ANY_PLACE = Wanted()


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included except for `above_low`."""

    low: float
    high: float
    whole: bool = False
    above_low: bool = False

    def converted(self, value: Any, *, typed: bool = False) -> Any:
        """`value` as a number of this range; one that was `typed` is a text.

        Raises:
            ValueError: it is none.
        """
        from msgspec import Meta, convert  # takes time, and many commands draw no token

        limits = Meta(gt=self.low, le=self.high) if self.above_low else Meta(ge=self.low, le=self.high)
        kind = int if self.whole else float
        return convert(kind(value) if typed else value, Annotated[kind, limits])

    def __contains__(self, value: object) -> bool:
        try:
            self.converted(value)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        within = f"above {self.low:,}, at most" if self.above_low else f"from {self.low:,} to"
        return f"{kind} {within} {self.high:,}"


SAMPLING: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 5),
        "top_k": Range(0, 1_000_000, whole=True),  # more than any vocabulary has
        "top_p": Range(0, 1, above_low=True),
        "min_p": Range(0, 1),
        "repetition_penalty": Range(0.001, 10),
        "seed": Range(0, (1 << 63) - 1, whole=True),
    }
)
"""The values that each field of `Sampling` may have; the seed may also be None."""
RESERVED = Range(1, 10_000_000, whole=True)  # tokens of context, at most the model's window
MAX_TOKENS = Range(1, 1_000_000, whole=True)  # of one answer


def check(sampling: Sampling) -> None:
    """Raises UsageError: a value outside its range."""
    for name, values in SAMPLING.items():
        value = getattr(sampling, name)
        if not may_be(name, value):
            raise UsageError(f"{name} cannot be {value}", "", f"Use {values}.")


def may_be(name: str, value: Any) -> bool:
    """Whether `Sampling`'s field `name` may have this value, which can be of any type."""
    return value in SAMPLING[name] or (name == "seed" and value is None)
