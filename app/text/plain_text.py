"""Text from outside made safe to put on a terminal."""

from __future__ import annotations

import re

from ...models.visible import CONTROLS

_UNPRINTABLE = re.compile(f"[{CONTROLS}]")


def printable(text: str) -> str:
    """`text` with one kind of newline, and U+FFFD for every control character, but newline and tab."""
    return _UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def one_line(text: str) -> str:
    """`text` as `printable` makes it, for one row: U+FFFD for newlines and tabs too. File names may have them."""
    return printable(text).replace("\n", "\ufffd").replace("\t", "\ufffd")
