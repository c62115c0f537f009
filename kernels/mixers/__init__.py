"""Mixers: what lets a layer's tokens see each other, between the layer's first projection and the one back.

Each is one file: its weights, what it stores of a text, and its plain definition for one token. Its other
implementations are named after it: cpu/src/dense/, triton/, and the engine's for many tokens (engine/decoder/mixers/).
"""

from __future__ import annotations


class Stateful:
    """A mixer that keeps one state of a text, and nothing of each token."""

    __slots__ = ()

    @property
    def attending(self) -> None:
        """How entries are stored and met: there are none."""

    @property
    def turned(self) -> int:
        """How many numbers of a head rope turns: none."""
        return 0
