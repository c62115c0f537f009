"""The tests of the CPU kernels once more, on a build that watches every memory access and every undefined operation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from floe_chat.kernels.cpu import build, native

HERE = Path(__file__).parent
WATCHED = (
    "test_cpu_native.py",
    "test_many_tokens.py",
    "test_x_bits.py",
    "test_dense_step.py",
    "test_token_step.py",
    "test_draw.py",
    "test_pool.py",
)


def sanitizer_runtime() -> str:
    """gcc's address sanitizer library, which has to be loaded before everything else."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("this g++ comes without its address sanitizer")
    return path


def runs_avx512() -> bool:
    try:
        native.select_isa("avx512")
    except native.NativeUnavailableError:
        return False
    native.select_isa(None)
    return True


@pytest.mark.slow
@pytest.mark.timeout(1200)  # instrumented code is slow, more so beside other programs
def test_cpu_kernels_touch_only_their_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = sanitizer_runtime()
    monkeypatch.setenv("CXX", "g++")
    library = tmp_path / "floe_watched.so"
    flags = ["-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    if not runs_avx512():
        flags.append("-DFLOE_WITHOUT_AVX512")
    build.build(library, flags)
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps much of its memory to the end
        "FLOE_CPU_LIBRARY": str(library),
        "FLOE_TEST_EVERY": "16",  # of each test's cases: memory is touched alike in their neighbours
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(HERE / n) for n in WATCHED)]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert " passed" in ran.stdout.splitlines()[-1]
