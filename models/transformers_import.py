"""Importing transformers and hqq: from several threads, and without what they would load and never use here."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


def import_library() -> None:
    """Import transformers, or wait for the thread that does: to be called before `from transformers import ...`.

    As its import ends, the package puts another module in its own place. A thread that asks for a name of the package
    meanwhile would wait, and then look for it in the first module, which does not have it.
    """
    importlib.import_module("transformers")


@contextmanager
def untimed() -> Generator[None]:
    """Pause the limit on this process's computing time, if there is one (see chat_worker.py), for our own work."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


def import_model_code() -> None:
    """Import transformers' model code, without the second of CPU for scipy, where it is installed, which its losses
    import for training detectors; and with hqq, which its KV cache imports where it is installed, as `import_hqq` does.
    """
    if importlib.util.find_spec("hqq") is not None:
        import_hqq()
    _import_without("is_scipy_available", "transformers.loss.loss_utils")


def import_hqq() -> None:
    """Import hqq, with torch.compile standing aside: it decorates methods that nothing here calls, and to do so loads
    torch._inductor, which takes 2 to 4 s of CPU.
    """
    if "hqq.core.quantize" in sys.modules:
        return
    import torch

    compiling = torch.compile
    torch.compile = _as_they_are
    try:
        importlib.import_module("hqq.core.quantize")
    finally:
        torch.compile = compiling


def _as_they_are(**_options: object) -> Callable[[Any], Any]:
    return lambda function: function


def _import_without(available: str, module: str) -> None:
    """Import `module` while transformers' question `available` is answered with no."""
    if module in sys.modules:
        return
    import transformers.utils

    original = getattr(transformers.utils, available)
    setattr(transformers.utils, available, _absent)
    try:
        importlib.import_module(module)
    finally:
        setattr(transformers.utils, available, original)


def _absent(min_version: str = "") -> bool:
    return False
