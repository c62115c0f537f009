"""Emoji as all terminals count them.

Of a heart with a variation selector, a family joined of four people or a thumb with a colour of skin, one terminal
makes another number of cells than the next, and what follows on the line then stands elsewhere than Textual believes.
So only their first character is drawn, in the cells that Textual has for the whole. What is copied or kept stays whole.
"""

from __future__ import annotations

import re

from rich.cells import cell_len, split_graphemes
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_PARTS = "\u200d\ufe0f\u20e3\U0001f3fb-\U0001f3ff"  # joiner, selector, key cap, colours of skin
_PART = re.compile(f"[{_PARTS}]")
_STRAY = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")  # behind anything but an emoji
_FIRST = re.compile(f"[0-9#*©®{_PARTS}\u2000-\u2bff\u3000-\u33ff\U0001f000-\U0001faff]")  # no joined letters


class PlainEmoji(LineFilter):
    """Draws the first character of those that are made of several."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if not any(_PART.search(segment.text) for segment in segments if not segment.text.isascii()):
            return segments
        return [segment._replace(text=plain_emoji(segment.text)) for segment in segments]


def plain_emoji(text: str) -> str:
    """`text` in as many cells, with nothing in it of which terminals count different ones."""
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
