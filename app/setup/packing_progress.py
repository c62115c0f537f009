"""The tokens that packing calibrates on, and its remaining time in words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...models.errors import UsageError
from ..arguments import read_text

if TYPE_CHECKING:
    from torch import Tensor


LEAST_TOKENS = 1024  # tokens of the user's text: with fewer, every threshold is a guess


class TooShortError(UsageError):
    """A calibration text is too short."""


def tokens_of(folder: Path, text_file: Path | None) -> Tensor:
    """Calibration tokens by the tokenizer in `folder`, from a file of the user's or the built-in text.

    Raises:
        TooShortError: the text is too short. UsageError: it cannot be read. CheckpointError: the tokenizer is missing
            or damaged.
    """
    from ...models.catalog import asset
    from ...models.packing.calibration import read_tokens

    if text_file is None:
        return read_tokens(folder, asset("calibration.txt").read_text(encoding="utf-8"))
    text = read_text(text_file)
    tokens = read_tokens(folder, text) if text.strip() else None
    if tokens is None or tokens.numel() < LEAST_TOKENS:
        have = 0 if tokens is None else tokens.numel()
        raise TooShortError(
            f"{text_file} is too short to calibrate on",
            f"It has {have:,} tokens; {LEAST_TOKENS:,} are needed, and the first 4,096 are used.",
            "Give a longer text, about the subjects of your chats.",
        )
    return tokens


def time_left(seconds: float) -> str:
    """An estimate in words: "about 3 h 20 min left"."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute left"
    hours, minutes = divmod(minutes, 60)
    return f"about {hours} h {minutes} min left" if hours else f"about {minutes} min left"
