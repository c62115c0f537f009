"""A settings file with the text that a test wants, and what is told of it."""

from __future__ import annotations

from pathlib import Path

from floe_chat.app.settings.file import read


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return file


def told(file: Path) -> list[str]:
    return [str(problem) for problem in read(file).problems]
