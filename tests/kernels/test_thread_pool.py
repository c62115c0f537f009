"""What several threads do at once, with and without the race detector: callers of the thread pool (a link that packs
rows, and the CPU's share meanwhile), threads that wait, and users of a link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from floe_chat.kernels.cpu import build

HERE = Path(__file__).parent
POOL, LINKS = build.HERE / "src" / "thread_pool.cpp", build.HERE / "link"

each_build = pytest.mark.parametrize(
    "flags",
    [pytest.param([], id="plain"), pytest.param(["-fsanitize=thread"], id="race detector", marks=pytest.mark.thorough)],
)


def compiled(program: str, sources: Sequence[Path], flags: list[str], folder: Path) -> Path:
    """A C++ program of this folder."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    command = [compiler, "-std=c++17", "-O1", "-g", *flags, f"-I{build.HERE}", f"-I{POOL.parent}"]
    command += [str(HERE / f"{program}.cpp"), *map(str, sources), "-pthread", "-o", str(folder / program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if flags and "tsan" in built.stderr:
        pytest.skip("this g++ comes without its thread sanitizer")
    assert built.returncode == 0, built.stderr
    return folder / program


def ran(program: Path, under: Sequence[str] = ()) -> list[int]:
    """The numbers that it prints. under: a command in front of it."""
    # Where addresses are spread over more bits than the sanitizer's tables have, it ends before main.
    near = ["setarch", "-R"]
    if shutil.which("setarch") is None or subprocess.run([*near, "true"], check=False).returncode:
        near = []
    found = subprocess.run([*under, *near, str(program)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return list(map(int, found.stdout.split()))


@pytest.mark.thorough  # test_cpu_native.py has callers in several threads too
@each_build
def test_two_callers_share_the_threads(flags: list[str], tmp_path: Path) -> None:
    first, second, broken = ran(compiled("two_callers", [POOL], flags, tmp_path))
    assert broken == 0
    assert min(first, second) > 1


def test_a_thread_that_waits_spins_only_on_a_core_that_is_free(tmp_path: Path) -> None:
    program = compiled("spinning", [POOL], [], tmp_path)
    if shutil.which("taskset") is None:
        pytest.skip("needs taskset")
    one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    for under in ([], one):
        count, alone, busy, seen = ran(program, under)
        assert (under is one) <= (count == 1)
        assert (alone > 2) == (count > 1)
        assert busy == 2 and seen  # before and behind it


@pytest.mark.thorough  # its every call is tested from Python, in tests/engine
@each_build
def test_a_link_keeps_its_promises_to_several_threads(flags: list[str], tmp_path: Path) -> None:
    finished, dropped, broken = ran(compiled("links", [POOL, *sorted(LINKS.glob("*.cpp"))], flags, tmp_path))
    assert broken == 0
    assert finished > 200 and dropped > 5
