"""Importing transformers: from several threads, and without what it would load and never use here."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager


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
    """Import transformers' model code, with its modules told that hqq and scipy are absent where they do not matter.

    Its KV cache imports hqq for a quantized cache that floe-chat does not use, and hqq decorates functions with
    torch.compile at import, which loads torch._inductor: 1.5 to 2.5 s of CPU before the first answer (of 7 to 8).
    `models/pack/quantize.py` imports hqq itself, when something is packed. Its losses import scipy, where it is
    installed, for training detectors: another second.
    """
    _import_without("is_hqq_available", "transformers.cache_utils")
    _import_without("is_scipy_available", "transformers.loss.loss_utils")


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
