"""The files of a folder at which others may be at work."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files(folder: Path) -> Iterator[os.stat_result]:
    """What is known of each regular file under `folder`, without those that are renamed or deleted meanwhile."""
    for where, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            with suppress(FileNotFoundError):
                found = Path(where, name).stat()
                if stat.S_ISREG(found.st_mode):
                    yield found
