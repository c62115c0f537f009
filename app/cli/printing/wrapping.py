"""Lines of a page no longer than the terminal is wide, and than people read well."""

from __future__ import annotations

import shutil
import textwrap

_MOST = 100


def wrapped(text: str, first: str = "", others: str = "") -> str:
    """`text` over lines that begin with `first` and then with `others`; 100 columns in a file or pipe."""
    columns = min(_MOST, shutil.get_terminal_size((_MOST, 0)).columns)
    return textwrap.fill(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=others,
        replace_whitespace=False,
        break_on_hyphens=False,
    )
