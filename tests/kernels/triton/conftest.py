"""The Triton kernels run on a GPU where there is one, else under Triton's interpreter in a process of its own.

Triton decides at import whether it interprets, so on a machine without a GPU these files are left to
`test_processes.py`, which starts pytest once more on this folder with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    collect_ignore = ["test_processes.py"]
elif not torch.cuda.is_available():
    collect_ignore = [
        "test_attend.py",
        "test_dense.py",
        "test_listed.py",
        "test_moving.py",
        "test_select.py",
        "test_sparse.py",
        "test_token.py",
    ]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what no result may contain: NaN, or a far too large index."""
    plain = torch.empty

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        made = plain(*arguments, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 0x5A if made.itemsize == 1 else 1 << 20)

    monkeypatch.setattr(torch, "empty", empty)
