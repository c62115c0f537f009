"""Putting text on the clipboard."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress

from textual.app import App

_TOOLS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--clipboard", "--input")),
    ("TERM_PROGRAM", ("pbcopy",)),
    ("WSL_DISTRO_NAME", ("clip.exe",)),
)
_SECONDS = 5


def copy(app: App[int], text: str) -> None:
    """Copy through the terminal (OSC 52), which works over SSH too but never confirms it; also with the desktop's
    clipboard tool, if there is one.
    """
    app.copy_to_clipboard(text)
    if (command := local_tool(os.environ)) is not None:
        threading.Thread(target=_feed, args=(command, text), name="floe-clipboard", daemon=True).start()


def local_tool(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """The command that puts text on this desktop's clipboard; None over SSH, or if there is none."""
    if "SSH_CONNECTION" in environment:
        return None
    for variable, command in _TOOLS:
        if environment.get(variable) and (path := shutil.which(command[0])) is not None:
            return (path, *command[1:])
    return None


def _feed(command: tuple[str, ...], text: str) -> None:
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            input=text.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
