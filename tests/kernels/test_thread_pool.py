"""Two callers of the thread pool at once: a link that packs rows, and the CPU's share beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from floe_chat.kernels.cpu import build

HERE = Path(__file__).parent


@pytest.mark.parametrize("flags", [[], ["-fsanitize=thread"]], ids=["plain", "race detector"])
def test_two_callers_share_the_threads(flags: list[str], tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    pool, program = build.HERE / "src" / "thread_pool.cpp", tmp_path / "two_callers"
    command = [compiler, "-std=c++17", "-O1", "-g", *flags, f"-I{pool.parent}", HERE / "two_callers.cpp", pool]
    built = subprocess.run([*command, "-pthread", "-o", program], capture_output=True, text=True, check=False)
    if flags and "tsan" in built.stderr:
        pytest.skip("this g++ comes without its thread sanitizer")
    assert built.returncode == 0, built.stderr
    # Where addresses are spread over more bits than the sanitizer's tables have, it ends before main.
    near = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*near, "true"], check=False).returncode:
        near = []
    ran = subprocess.run([*near, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    first, second, broken = map(int, ran.stdout.split())
    assert broken == 0
    assert min(first, second) > 1
