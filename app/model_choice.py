"""Which model answers: the one to start with, which the settings save, and the one that a saved chat belongs to."""

from __future__ import annotations

from pathlib import Path

from ..models import catalog
from ..models.errors import FloeError, UsageError
from .settings_file import change, read


def start_with(file: Path, model: str) -> None:
    """Save `model` (what `--model` takes) as the one that the next start uses; nothing is written if it is already.

    Raises:
        FloeError: the settings cannot be written, see `settings_file.change`.
    """
    if read(file).settings.model != model:
        change(file, {"chat.model": model})


def missing(model: str, error: FloeError, instead: str) -> str:
    """Says that the `model` of a saved chat cannot answer, and which one answers `instead` ("": none does).

    `error`: what `catalog.find(model, saved=True)` raised.
    """
    name = catalog.short_name(model)
    why = "is not installed any more" if isinstance(error, UsageError) else f"cannot be used: {error.title}"
    said = f"This chat was answered by {name}, which {why}."
    return f"{said} {catalog.short_name(instead)} answers instead." if instead else said
