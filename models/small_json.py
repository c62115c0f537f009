"""Small JSON files that floe-chat wrote and reads back: setup notes, journals of downloads, markers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from . import private_file

_MOST = 1 << 20  # bytes


def read(path: Path) -> Any:
    """The value in the file at `path`.

    Raises:
        FileNotFoundError: there is none. OSError: it cannot be read, is a pipe or a device, or is larger than 1 MB.
        ValueError: it is not JSON (RFC 8259: without infinities), or is nested too deeply.
    """
    content = private_file.read(path, _MOST)
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")
