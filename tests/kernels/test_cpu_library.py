"""The compiled library in processes: after a fork, told by the environment, and what it says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from floe_chat.kernels.cpu import native

pytestmark = pytest.mark.usefixtures("two_threads")

SCRIPT = """
import os, torch
from floe_chat.kernels.cpu import native
data = torch.arange(1 << 22, dtype=torch.uint8)
torch.set_num_threads(2)
before = native.read(data)
if {fork}:
    child = os.fork()
    if child == 0:
        os._exit(0 if native.read(data) == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert native.read(data) == before
print(native.isa().name)
"""


def run_script(fork: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(fork=fork)]
    env = {**os.environ, "FLOE_CPU_LIBRARY": str(native.library_path()), **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env, cwd=Path.home())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_works_after_fork_and_does_not_hold_up_exit() -> None:
    done = run_script(fork=True)
    assert done.returncode == 0, done.stderr


def test_environment_forces_the_instruction_set() -> None:
    assert run_script(fork=False, FLOE_CPU_ISA="portable").stdout.split() == ["portable"]
    refused = run_script(fork=False, FLOE_CPU_ISA="sse9")
    assert refused.returncode != 0
    assert "valid are avx512, avx2, portable" in refused.stderr


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
