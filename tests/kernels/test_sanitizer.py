"""The CPU kernels' tests and hostile calls once more, on a build that watches every memory access and every undefined
operation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from floe_chat.kernels.cpu import build, native

HERE = Path(__file__).parent
DRIVER = HERE.parent / "fuzz" / "driver.py"
WATCHED = (
    "test_cpu_native.py",
    "test_operations.py",
    "test_dense_step.py",
    "test_dense_together.py",
    "test_token_step.py",
    "test_draw.py",
    "test_pool.py",
    "test_rounding.py",
    "test_arguments.py",
    "../engine/test_link.py",
    "../engine/test_cuda_link.py",
    "../engine/test_disk_link.py",
)
INPUTS = 400  # hostile calls; `make fuzz` makes more


def sanitizer_runtime() -> str:
    """gcc's address sanitizer library and its C++ library, which have to be loaded before everything else: without the
    latter an exception that torch throws ends the process."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    paths: list[str] = []
    for name in ("libasan.so", "libstdc++.so"):
        found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(found.stdout.strip())
    if not all(Path(path).is_absolute() for path in paths):
        pytest.skip("this g++ comes without its address sanitizer")
    return ":".join(paths)


def runs_avx512() -> bool:
    try:
        native.select_isa("avx512")
    except native.NativeUnavailableError:
        return False
    native.select_isa(None)
    return True


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the kernels run on the watching build."""
    runtime, library = sanitizer_runtime(), tmp_path_factory.mktemp("watched") / "floe_watched.so"
    flags = ["-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    if not runs_avx512():
        flags.append("-DFLOE_WITHOUT_AVX512")
    with mock.patch.dict(os.environ, {"CXX": "g++"}):
        build.build(library, flags)
    # Python keeps much of its memory to the end; what asks for too much gets none, as without the sanitizer.
    options = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64"
    return os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "FLOE_CPU_LIBRARY": str(library)}


@pytest.mark.thorough
@pytest.mark.timeout(1200)  # instrumented code is slow, more so beside other programs
def test_hostile_calls_touch_only_their_own_memory(watched: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), "kernel_calls", "--inputs", str(INPUTS)]
    ran = subprocess.run(command, env=watched, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert json.loads(ran.stdout)["inputs"] == INPUTS


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_cpu_kernels_touch_only_their_own_memory(watched: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(HERE / n) for n in WATCHED)]
    ran = subprocess.run(command, env=watched, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert " passed" in ran.stdout.splitlines()[-1]
