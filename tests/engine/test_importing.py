"""Importing torch leaves the interpreter as it was, and what was made is no longer looked through for garbage."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest
from floe_chat.engine.torch_import import import_torch


def test_garbage_is_looked_for_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def imported(name: str) -> None:
        seen.append((name, gc.isenabled()))

    kept, made = gc.get_freeze_count(), [[number] for number in range(100)]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        patch.setattr(importlib, "import_module", imported)
        import_torch()
    assert seen == [("torch", False)] and gc.isenabled() and gc.get_freeze_count() >= kept + len(made)
    kept = gc.get_freeze_count()
    import_torch()  # which this process has done already: what a second model finds is not kept for ever
    assert gc.get_freeze_count() == kept
