"""Importing torch, which is most of what a start takes."""

from __future__ import annotations

import gc
import importlib
import sys


def import_torch() -> None:
    """Import torch, unless that is done, without garbage collection meanwhile.

    Its 150,000 or so objects stay until the program ends. Scanning them repeatedly during the import takes a tenth of
    its time, and every later full collection would be a visible pause: so they are frozen for good.
    """
    if "torch" in sys.modules:
        return
    looked = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        if looked:
            gc.enable()
