"""An answer's text up to a text that ends it."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Passes text on up to the first of `stops`, and holds back what may be the beginning of one.

    Attributes:
        met: whether one came; nothing passes after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.met = stops, "", False

    def feed(self, text: str) -> str:
        """The text that is certain after more of it."""
        if self.met or not self._stops:
            return "" if self.met else text
        self._held += text
        # The one that is complete first, so that it does not matter in which pieces the text comes.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.met = True
            text, self._held = self._held[: min(found)[1]], ""
            return text
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def rest(self) -> str:
        """What was held back, at the answer's end."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
