"""Messages of long commands on stderr, and figures as JSON."""

from __future__ import annotations

import math
import shutil
import sys
from typing import Any

import click

from .text.plain_text import printable


def step(what: str) -> None:
    """Show the current work; the next step replaces it."""
    if sys.stderr.isatty():
        width = _width()
        click.echo(f"\r{printable(what)[:width]:<{width}}", nl=False, err=True)


def note(what: str) -> None:
    """Print a message that stays."""
    clear()
    click.echo(f"floe-chat: {printable(what)}", err=True)


def clear() -> None:
    """Wipe the last step."""
    if sys.stderr.isatty():
        click.echo(f"\r{'':{_width()}}\r", nl=False, err=True)


def _width() -> int:
    # Text in the last column would wrap into the next line, where no carriage return wipes it. Escape sequences could,
    # but some terminals print them.
    return max(1, min(99, shutil.get_terminal_size().columns - 1))


def rounded(value: Any) -> Any:
    """Every number with six digits; infinities, such as the perplexity of a broken model, become null."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
