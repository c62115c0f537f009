"""Importing torch, which is most of what a start takes."""

from __future__ import annotations

import gc
import importlib
import sys


def import_torch() -> None:
    """Import torch, where that has not been done, without looking for garbage meanwhile.

    What it makes, some 150,000 objects, stays until the program ends. To look through them again and again as they are
    made takes a tenth of the import, and every later look through all of them a pause that a person sees: so they are
    set aside for good.
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
