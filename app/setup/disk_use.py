"""The files of a folder that other programs may be changing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files(folder: Path) -> Iterator[os.stat_result]:
    """The `stat` of each regular file under `folder`. Links, and files that disappear meanwhile, are left out."""
    for where, _, names in os.walk(folder):  # which skips folders that vanish or may not be read
        for name in names:
            with suppress(OSError):
                found = Path(where, name).lstat()
                if stat.S_ISREG(found.st_mode):
                    yield found
