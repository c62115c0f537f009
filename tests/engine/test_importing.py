"""Importing torch leaves the interpreter as it was, and what was made is no longer looked through for garbage."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest
from floe_chat.engine.torch_import import import_torch


def test_garbage_is_looked_for_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def imported(name: str) -> None:
        seen.append((name, gc.isenabled()))

    monkeypatch.setattr(gc, "freeze", lambda: seen.append("frozen"))
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        patch.setattr(importlib, "import_module", imported)
        import_torch()
    import_torch()  # which this process has done: what a second model finds is not kept for ever
    assert seen == [("torch", False), "frozen"] and gc.isenabled()
