"""Evaluations of tiny packs, in windows so short that they take no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from floe_chat.engine.quality import evaluate, text_windows
from floe_chat.engine.quality.evaluate import Evaluation, run
from floe_chat.engine.quality.told import Told
from floe_chat.models.errors import FloeError

WINDOW = 64  # tokens: short, to keep the tests so
TEXT = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(7)).tolist()


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes; the arithmetic is the same."""
    monkeypatch.setattr(text_windows, "WINDOW", WINDOW)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 8)


def unread(_what: str) -> None:
    """Progress that nobody looks at."""


def measured(
    pack: Path, source: Path, *presets: str, ids: list[int] = TEXT, tokens: int = 128, notes: list[str] | None = None
) -> Evaluation:
    """An evaluation on the CPU; what it notes goes to `notes`."""
    return run(pack, source, ids, presets, tokens, "cpu", Told(unread, unread if notes is None else notes.append))


def refused(pack: Path, source: Path, *presets: str, **options: Any) -> FloeError:
    with pytest.raises(FloeError) as caught:
        measured(pack, source, *presets, **options)
    assert caught.value.title and caught.value.hint, caught.value
    return caught.value


def cache_folder() -> Path:
    """Where the source's logits are kept."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "source-logits"
