"""What was measured on this machine, saved in the user's cache for the next start, in files that only they read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from ..models import private_file

_log = logging.getLogger("floe_chat.engine")


def rates_folder() -> Path:
    """The folder of measured rates."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "rates"


def write(file: Path, fields: Mapping[str, Any]) -> None:
    """Replace `file` at once; a cache that cannot be written only means measuring again, which the log says."""
    try:
        private_file.own_folder(file.parent)
        private_file.replace(file, json.dumps(dict(fields)))
    except OSError as error:
        _log.warning("What was measured could not be saved in %s: %s", file, error)


def read(file: Path) -> Any:
    """What `write` saved, as JSON gives it.

    Raises:
        OSError: it cannot be read. ValueError: it is not JSON.
    """
    return private_file.read_json(file)
