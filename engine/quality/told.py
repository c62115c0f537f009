"""Where a measurement's messages go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """Receives a run's messages: `step` gets progress that may be overwritten, `note` what should be read."""

    step: Callable[[str], None]
    note: Callable[[str], None]
