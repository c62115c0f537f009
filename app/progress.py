"""What long commands say while they run, on stderr, and figures as JSON."""

from __future__ import annotations

import math
import sys
from typing import Any

import click

from .widgets.plain import printable


def step(what: str) -> None:
    """Something that goes on, in words; the next step takes its place."""
    if sys.stderr.isatty():
        click.echo(f"\r{printable(what)[:99]:<99}", nl=False, err=True)


def note(what: str) -> None:
    """Something that has to be read."""
    clear()
    click.echo(f"floe-chat: {printable(what)}", err=True)


def clear() -> None:
    """Wipe the last step."""
    if sys.stderr.isatty():
        click.echo(f"\r{'':99}\r", nl=False, err=True)


def rounded(value: Any) -> Any:
    """Six digits of every number; what is infinite, such as the perplexity of an absurd model, is null."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
