"""What long commands say while they run, on stderr, and figures as JSON."""

from __future__ import annotations

import math
import shutil
import sys
from typing import Any

import click

from .widgets.plain import printable


def step(what: str) -> None:
    """Something that goes on, in words; the next step takes its place."""
    if sys.stderr.isatty():
        width = _width()
        click.echo(f"\r{printable(what)[:width]:<{width}}", nl=False, err=True)


def note(what: str) -> None:
    """Something that has to be read."""
    clear()
    click.echo(f"floe-chat: {printable(what)}", err=True)


def clear() -> None:
    """Wipe the last step."""
    if sys.stderr.isatty():
        click.echo(f"\r{'':{_width()}}\r", nl=False, err=True)


def _width() -> int:
    # What reaches the last column goes on in the next line, where no carriage return would wipe it. No escape sequence
    # does that here: some terminals show them.
    return max(1, min(99, shutil.get_terminal_size().columns - 1))


def rounded(value: Any) -> Any:
    """Six digits of every number; what is infinite, such as the perplexity of an absurd model, is null."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
