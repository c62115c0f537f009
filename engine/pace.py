"""Whether several tokens together are faster than one after the other, as measured while they come: of as many answers,
or of one.
"""

from __future__ import annotations

import math

from .quality_presets import Preset

_TRY = 16  # tokens after which a speed is known
_AGAIN = 512  # tokens after which it is not any more: texts have grown, and other programs have come or gone
_STEP = 1 / 4  # weight of a new observation in the moving mean


class Pace:
    """Seconds per token, by the number of tokens that were computed together, at one preset."""

    def __init__(self) -> None:
        self._preset: Preset | None = None
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def observed(self, preset: Preset, together: int, seconds: float, tokens: int) -> None:
        """So many tokens of all answers took so many seconds."""
        if preset is not self._preset:
            self._preset, self._seconds, self._tokens = preset, {}, {}
        each = seconds / tokens
        before = self._seconds.get(together, math.inf)
        self._seconds[together] = before + _STEP * (each - before) if math.isfinite(before) else each
        self._tokens[together] = self._tokens.get(together, 0) + tokens
        if self._tokens[together] >= _AGAIN:
            self._tokens = {together: _TRY}

    def seconds(self, preset: Preset, together: int) -> float | None:
        """Of a token, where so many are computed together, if that is known."""
        return self._seconds[together] if preset is self._preset and self.known(together) else None

    def refused(self, preset: Preset, together: int) -> None:
        """So many cannot be computed together now."""
        self.observed(preset, together, math.inf, _TRY)

    def known(self, together: int) -> bool:
        """Whether the speed of so many is known."""
        return self._tokens.get(together, 0) >= _TRY

    def joins(self, preset: Preset, together: int) -> bool:
        """Whether so many answers are to be computed together: it is faster than one alone, or has to be tried."""
        if preset is not self._preset or not self.known(1):
            return False
        return not self.known(together) or self._seconds[together] < self._seconds[1]

    def may_join(self, preset: Preset, together: int) -> bool:
        """Whether it may turn out to be faster."""
        return preset is not self._preset or not self.known(1) or self.joins(preset, together)
