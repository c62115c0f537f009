"""Lines of `floe-chat --plain`: the conversation on stdout, remarks on stderr."""

from __future__ import annotations

import sys

from ..text.plain_text import printable


def say(text: str) -> None:
    """Print a line of the conversation."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def remark(text: str) -> None:
    """Print a line about the conversation."""
    sys.stdout.flush()
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()
