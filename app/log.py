"""The log file: the details of what went wrong. Only its owner can read it, and nothing is ever sent anywhere."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any

import platformdirs

from ..models import private_file


def log_file() -> Path:
    """The log file. The first message that is logged creates it."""
    return Path(platformdirs.user_log_dir("floe-chat", appauthor=False)) / "floe-chat.log"


def start_log() -> None:
    """Send this program's log messages to `log_file`, and none to the terminal, which the screen owns."""
    logger = logging.getLogger("floe_chat")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(_PrivateFile(log_file(), maxBytes=1 << 20, backupCount=1, encoding="utf-8", delay=True))


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> IO[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        path = Path(self.baseFilename)
        private_file.own_folder(path.parent)
        return open(path, self.mode, encoding=self.encoding, opener=lambda p, f: private_file.open_for(Path(p), f))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A log that cannot be written must not break the program."""
