"""What a client reports beside the engine's own events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine.events import Event

if TYPE_CHECKING:
    from ...engine.quality_presets import Preset


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer to `request`, safe to show: control characters are already replaced."""

    request: int
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """More of what the model thinks before the answer to `request`, as safe to show; `tokens` of the model's."""

    request: int
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A question accepted by the engine, of so many tokens; `dropped` of the oldest messages do not fit the window."""

    request: int
    prompt_tokens: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Cost:
    """A preset and its quality loss as measured on this pack; None where `floe-chat tune` has not run.

    Attributes:
        kl: mean KL divergence, nats. bytes_per_token: of experts' weights read.
        text: what `kl` was measured on, "" where that is not known. tokens: how many of it were predicted.
        rounded: whether `kl` is from the 16-bit model, and counts what rounding costs; else from the pack itself.
    """

    preset: Preset
    kl: float | None
    bytes_per_token: float | None
    text: str = ""
    tokens: int = 0
    rounded: bool = True


@dataclass(frozen=True, slots=True)
class Spelled:
    """What a token writes, which may be a part of a character, and its probability as a natural logarithm."""

    written: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Likely:
    """The next token of the answer to `request`, before its text, and those that were the likeliest."""

    request: int
    token: Spelled
    likeliest: tuple[Spelled, ...]


Update = Event | TextDelta | ThoughtDelta | Likely
