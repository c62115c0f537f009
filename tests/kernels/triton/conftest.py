"""The Triton kernels run on a GPU where there is one, else under Triton's interpreter in a process of its own.

Triton decides at import whether it interprets, so on a machine without a GPU these files, and what others compute on
"triton", are left to `test_processes.py`, which starts pytest once more with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

from ..oracle import INTERPRETED

if INTERPRETED:
    collect_ignore = ["test_processes.py"]
elif not torch.cuda.is_available():
    collect_ignore = ["test_token.py", "test_triton.py"]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def on_poisoned_memory(poisoned: None) -> None:
    """All of these."""
