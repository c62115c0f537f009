"""Which values a person may set; without torch, since commands check before anything is stored."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..models.errors import UsageError
from .events import Sampling

MOST_TOP_K = 1_000_000  # more than any vocabulary has
MOST_TOKENS = 1_000_000  # of one answer
PREDICTORS = ("auto", "learned", "gate", "partial", "none")  # see predictor.py; "none" prefetches nothing
TRANSFERS = ("auto", "staged", "in place")  # see tuned_link.py

_VALID = {
    "temperature": "0 (greedy) to 5",
    "top_k": f"0 (off) to {MOST_TOP_K:,}",
    "top_p": "above 0 up to 1 (off)",
    "min_p": "0 (off) to 1",
    "repetition_penalty": "0.001 to 10",
    "seed": "0 to 2^63 - 1",
}


def check(sampling: Sampling) -> None:
    """Raises UsageError: a value outside its range."""
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if not may_be(field.name, value):
            raise UsageError(f"{field.name} cannot be {value}", "", f"Give {_VALID[field.name]}.")


def may_be(name: str, value: Any) -> bool:
    """Whether `Sampling`'s field `name` may have this value, of whatever type it is."""
    if name == "seed" and value is None:
        return True
    if type(value) is not int and (type(value) is not float or name in ("top_k", "seed")):
        return False
    match name:
        case "temperature":
            return 0 <= value <= 5
        case "top_k":
            return 0 <= value <= MOST_TOP_K
        case "top_p":
            return 0 < value <= 1
        case "min_p":
            return is_share(value)
        case "repetition_penalty":
            return 0.001 <= value <= 10
        case _:
            return 0 <= value < 1 << 63


def is_share(value: Any) -> bool:
    """Whether it is a number from 0 to 1."""
    return type(value) in (int, float) and 0 <= value <= 1
