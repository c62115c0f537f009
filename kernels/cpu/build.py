"""Builds the native library. Needs only Python and a C++ compiler.

`python build.py OUTPUT [FLAG ...]` builds it by hand, for example with `-fsanitize=address,undefined -g`. The flags of
one instruction set apply to its own folder alone, so the library starts on every processor.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
NAME = "_floe.dll" if os.name == "nt" else "_floe.so"
SOURCES = tuple(sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("*/**/*.cpp")))
ARCH = {  # by folder of arch/; on other processors than x86 these compile to empty tables
    "avx2": {"unix": ["-mavx2", "-mfma", "-mf16c", "-mpopcnt"], "msvc": ["/arch:AVX2"]},
    "avx512": {
        # gcc 12's own header trips over its warnings about uninitialized values (its bug 105593).
        "unix": [
            *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c", "-mpopcnt"),
            *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
        ],
        "msvc": ["/arch:AVX512"],
    },
}
FLAGS = {
    "unix": ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", f"-I{HERE}"],
    "msvc": ["/O2", "/std:c++17", "/EHsc", "/utf-8", f"/I{HERE}"],
}


def flags_for(source: str, compiler: str, machine: str) -> list[str]:
    """The options of one source file.

    Args:
        source: a name of `SOURCES`. compiler: "unix" (gcc, clang) or "msvc". machine: as platform.machine() says.
    """
    own = ARCH.get(Path(source).parent.name) if machine.lower() in ("x86_64", "amd64") else None
    return FLAGS[compiler] + (own[compiler] if own else [])


def write_layout(folder: Path) -> Path:
    """The source of `floe_layout` (header.py), which belongs to the library too."""
    header, source = runpy.run_path(str(HERE / "header.py")), folder / "layout.cpp"
    source.write_text(header["layout_source"](header["read"]()), encoding="utf-8")
    return source


def build(output: Path, extra: list[str] | None = None) -> None:
    """Compile with $CXX, c++, g++ or clang++, and $CXXFLAGS after our own flags, into the shared library `output`.

    Raises:
        FileNotFoundError: no compiler. subprocess.CalledProcessError: it failed; stderr holds its words.
    """
    named, extra = os.environ.get("CXX"), [*(extra or []), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    compiler = shlex.split(named) if named else [c for c in ("c++", "g++", "clang++") if shutil.which(c)][:1]
    if not compiler:
        raise FileNotFoundError("no C++ compiler: install g++ or clang++, or set CXX")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def compiled(source: Path) -> str:
            target = str(Path(folder) / f"{source.parent.name}_{source.name}.o")
            flags = [*flags_for(str(source), "unix", platform.machine()), *extra]
            _run([*compiler, *flags, "-c", str(source), "-o", target])
            return target

        sources = *(HERE / source for source in SOURCES), write_layout(Path(folder))
        objects = list(pool.map(compiled, sources))  # arch/ takes longest and comes first
        _run([*compiler, "-shared", *objects, *extra, "-pthread", "-o", str(output)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
