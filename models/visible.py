"""Text from a pack, a hub or a model, made safe for a terminal and for JSON that a terminal shows."""

from __future__ import annotations

import re

_LONGEST_NAME = 200  # characters

CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that never reach a terminal unchanged, for a regular expression's brackets: control characters but newline
and tab,
Unicode's direction overrides, and halves of surrogate pairs."""

_CONTROL = re.compile(f"[{CONTROLS}]")


def visible(text: str) -> str:
    """`text` with control characters except newline and tab as their Unicode pictures, so none reaches a terminal.

    C0 controls become U+2400..., DEL U+2421; C1 controls, Unicode's direction overrides and halves of surrogate pairs
    U+FFFD; carriage returns are dropped.
    """
    return _CONTROL.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == ord("\r"):
        return ""
    return chr(0x2421 if code == 0x7F else 0x2400 + code if code < 0x20 else 0xFFFD)


def as_name(text: str) -> str:
    """`text` as a name: `visible`, on one line and of at most 200 characters."""
    line = visible(text).replace("\n", "\ufffd").replace("\t", "\ufffd")
    return line if len(line) <= _LONGEST_NAME else f"{line[:_LONGEST_NAME]}…"
