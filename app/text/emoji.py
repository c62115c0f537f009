"""Emoji as all terminals count them.

Terminals disagree on the number of cells of a heart with a variation selector, a joined family of four or a thumb with
a skin tone; the rest of the line is then not where Textual believes. So only the first character is drawn, in the cells
that Textual counts for the whole. Copied and saved text stays whole.
"""

from __future__ import annotations

import re

from rich.cells import cell_len, split_graphemes
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_PARTS = "\u200d\ufe0f\u20e3\U0001f3fb-\U0001f3ff"  # joiner, selector, key cap, skin tones
_PART = re.compile(f"[{_PARTS}]")
_STRAY = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # after anything but an emoji
_FIRST = re.compile(f"[0-9#*©®{_PARTS}\u2000-\u2bff\u3000-\u33ff\U0001f000-\U0001faff]")  # no joined letters


class PlainEmoji(LineFilter):
    """Draws only the first character of emoji that consist of several."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if not any(_PART.search(segment.text) for segment in segments if not segment.text.isascii()):
            return segments
        return [segment._replace(text=plain_emoji(segment.text)) for segment in segments]


def plain_emoji(text: str) -> str:
    """`text` in the same number of cells, without characters whose width differs between terminals."""
    if not _PART.search(text):
        return text
    spans, _ = split_graphemes(text)
    return "".join(_drawn(text[start:end], cells) for start, end, cells in spans)


def _drawn(grapheme: str, cells: int) -> str:
    if not _PART.search(grapheme):
        return grapheme
    if not _FIRST.match(grapheme):
        return _STRAY.sub("", grapheme)
    first = _PART.sub("", grapheme[0])
    return first + " " * (cells - cell_len(first))
