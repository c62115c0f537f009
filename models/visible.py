"""Text from a pack, a hub or a model, made safe for a terminal and for JSON that a terminal shows."""

from __future__ import annotations

_LONGEST_NAME = 200  # characters

_VISIBLE: dict[int, int | None] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(
        [*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000)], 0xFFFD
    ),
    ord("\r"): None,
    0x7F: 0x2421,
}


def visible(text: str) -> str:
    """`text` with control characters except newline and tab as their Unicode pictures, so none reaches a terminal.

    C0 controls become U+2400..., DEL U+2421; C1 controls, Unicode's direction overrides and halves of surrogate pairs
    U+FFFD; carriage returns are dropped.
    """
    return text.translate(_VISIBLE)


def as_name(text: str) -> str:
    """`text` as a name: `visible`, on one line and of at most 200 characters."""
    line = visible(text).replace("\n", "\ufffd").replace("\t", "\ufffd")
    return line if len(line) <= _LONGEST_NAME else f"{line[:_LONGEST_NAME]}…"
