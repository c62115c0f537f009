"""Lines of a page no longer than the terminal is wide, and than people read well."""

from __future__ import annotations

import shutil
import textwrap

_MOST = 100


def columns() -> int:
    """Columns of a page: the terminal's up to 100, and 100 in a file or pipe."""
    return min(_MOST, shutil.get_terminal_size((_MOST, 0)).columns)


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """`text` over lines that begin with `first` and then with `others`."""
    return textwrap.fill(
        text,
        columns(),
        initial_indent=first,
        subsequent_indent=others,
        replace_whitespace=False,
        break_on_hyphens=False,
    )
