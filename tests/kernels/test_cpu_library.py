"""The compiled library in processes: after a fork, told by the environment, and what it says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from floe_chat.kernels.cpu import binding, native

pytestmark = pytest.mark.usefixtures("two_threads")

SCRIPT = """
import os, torch
from floe_chat.kernels.cpu import binding, native
data = torch.arange(1 << 22, dtype=torch.uint8)
torch.set_num_threads(2)
before = native.read(data)
if hasattr(os, 'fork'):
    child = os.fork()
    if child == 0:
        os._exit(0 if native.read(data) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert native.read(data) == before
print(native.isa().name)
"""


def test_works_after_fork_by_the_instruction_set_that_was_asked_for() -> None:
    asked = {"FLOE_CPU_LIBRARY": str(native.library_path()), "FLOE_CPU_ISA": "portable"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **asked}, cwd=Path.home()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["portable"]


def test_an_instruction_set_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_CPU_ISA", "sse9")
    binding.library.cache_clear()
    try:
        with pytest.raises(binding.NativeUnavailableError, match="valid are avx512, avx2, portable"):
            native.isa()
    finally:
        binding.library.cache_clear()


def test_reason_is_on_record() -> None:
    chosen = native.isa()
    assert chosen.name in native.ISAS
    if "FLOE_CPU_ISA" in os.environ:
        assert chosen.reason == "it was asked for"
    else:
        assert "this CPU" in chosen.reason or "x86" in chosen.reason


def test_hugepages_are_asked_for_without_harm() -> None:
    data = torch.zeros(1 << 22, dtype=torch.uint8)
    native.advise_hugepages(data)
    assert not data.any()
