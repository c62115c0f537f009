"""Every kind in turn in one process, which imports and builds what they need once: the short campaign of `make test`.

Seed s is seed s // n of kind s % n, where n kinds are there.
"""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

from floe_chat.models.tokenizer import chat_process

from ..forking import Nursery
from .driver import kinds

KINDS = [importlib.import_module(f"{__package__}.{kind}") for kind in kinds()]
# Some twenty tokenizers' processes, each of which would import what all of them need.
chat_process.subprocess = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
    Popen=Nursery().fork, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
)


def good(scratch: Path) -> None:
    for kind in KINDS:
        (scratch / kind.__name__).mkdir()
        if hasattr(kind, "good"):
            kind.good(scratch / kind.__name__)


def attempt(seed: int, scratch: Path) -> str:
    kind = KINDS[seed % len(KINDS)]
    try:
        kind.attempt(seed // len(KINDS), scratch / kind.__name__)
    except Exception as error:
        error.add_note(f"{kind.__name__}, seed {seed // len(KINDS)}")
        raise
    return kind.__name__
