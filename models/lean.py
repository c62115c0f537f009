"""Importing transformers without what it would load and never use here."""

from __future__ import annotations

import importlib
import sys


def import_model_code() -> None:
    """Import transformers' model code, with its KV cache module told that hqq is absent.

    That module imports hqq for a quantized cache that floe-chat does not use, and hqq decorates functions with
    torch.compile at import, which loads torch._inductor: 1.5 to 2.5 s of CPU before the first answer (of 7 to 8).
    `models/quantize.py` imports hqq itself, when something is packed.
    """
    if "transformers.cache_utils" in sys.modules:
        return
    import transformers.utils

    original = transformers.utils.is_hqq_available
    transformers.utils.is_hqq_available = _absent
    try:
        importlib.import_module("transformers.cache_utils")
    finally:
        transformers.utils.is_hqq_available = original


def _absent(min_version: str = "") -> bool:
    return False
