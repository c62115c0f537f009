"""What was measured on this machine, kept in the user's cache for the next start, in files that only they read."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

_log = logging.getLogger("floe_chat.engine")


def rates_folder() -> Path:
    """Where rates are kept."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "rates"


def write(file: Path, fields: Mapping[str, Any]) -> None:
    """Replace `file` at once; a cache that cannot be written only means measuring again, which the log says."""
    partial = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(partial, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as out:
            json.dump(dict(fields), out)
        partial.replace(file)
    except OSError as error:
        _log.warning("What was measured could not be kept in %s: %s", file, error)
        with contextlib.suppress(OSError):
            partial.unlink()
