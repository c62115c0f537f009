"""The log file: what went wrong in detail, for the person's own eyes; nothing is ever sent anywhere."""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

import platformdirs


def log_file() -> Path:
    """Where the log lies; it is created by the first thing that is logged."""
    return Path(platformdirs.user_log_dir("floe-chat", appauthor=False)) / "floe-chat.log"


def start_log() -> None:
    """Send this program's log records to `log_file`, and none to the terminal, which the screen owns."""
    logger = logging.getLogger("floe_chat")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(_PrivateFile(log_file(), maxBytes=1 << 20, backupCount=1, encoding="utf-8", delay=True))


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> IO[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        path = Path(self.baseFilename)
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, self.mode, encoding=self.encoding, opener=lambda p, f: os.open(p, f, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A log that cannot be written must not break what it reports on."""
