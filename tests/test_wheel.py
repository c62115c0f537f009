"""The ordinary way in: a wheel, built from the source archive, runs from anywhere in a fresh environment."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path) -> str:
    """Stdout of a command that must succeed, in an environment that knows nothing of this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean["CXXFLAGS"] = "-O0 -g"  # the kernels compile in a fifth of the time; nothing of -g may be left
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks, so that no stray file of the checkout gets in."""
    source = tmp_path_factory.mktemp("source")
    for name in filter(None, run("git", "ls-files", "-z", cwd=ROOT).split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(tracked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive alone."""
    out = tmp_path_factory.mktemp("wheel")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=tracked)
    (archive,) = out.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, archive, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_program_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "floe_chat/app/cli/main.py",
        "floe_chat/app/floe.tcss",
        "floe_chat/engine/experts/moe_layer.py",
        "floe_chat/kernels/cpu/floe.h",
        "floe_chat/kernels/cpu/floe_offload.h",
        "floe_chat/kernels/cpu/floe_pack.h",
        "floe_chat/kernels/reference.py",
        "floe_chat/models/pack/packed_model.py",
        "floe_chat/assets/calibration.txt",
        "floe_chat/assets/demo/packed/manifest.json",
    ):
        assert needed in names
    assert not [name for name in names if {"checkpoint", "make", "tests"} & set(name.split("/")[:-1])]


def test_source_archive_lacks_no_module(wheel: Path, tracked: Path) -> None:
    listed = tomllib.loads((tracked / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    modules = [path for name in listed for path in (tracked / name.partition(".")[2].replace(".", "/")).glob("*.py")]
    there = set(zipfile.ZipFile(wheel).namelist())
    assert len(modules) > 300
    assert not [path for path in modules if f"floe_chat/{path.relative_to(tracked).as_posix()}" not in there]


def test_one_wheel_of_a_platform_serves_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"floe_chat-[\d.]+-py3-none-(linux|win|macosx)\w+\.whl", wheel.name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")
def test_compiled_library_is_stripped_and_needs_only_the_system(wheel: Path) -> None:
    library = zipfile.ZipFile(wheel).read("floe_chat/kernels/cpu/_floe.so")
    sections = elf_sections(library)
    assert ".text" in sections and not [name for name in sections if name.startswith((".debug", ".zdebug", ".stab"))]
    # The libraries that every manylinux system has: no libpython, no torch, and no OpenMP beside torch's own.
    needed = set(re.findall(rb"[\w+.-]+\.so[.\d]*", sections[".dynstr"]))
    system = rb"(libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|ld-linux-[\w-]+)\.so\.\d+"
    assert b"libc.so.6" in needed and not [name for name in needed if not re.fullmatch(system, name)]


def elf_sections(file: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit little-endian ELF file by name (System V ABI, chapter 4)."""
    assert file[:6] == b"\x7fELF\x02\x01"
    (start,), (size, count, names) = struct.unpack_from("<Q", file, 0x28), struct.unpack_from("<3H", file, 0x3A)
    headers = [struct.unpack_from("<II4Q", file, start + number * size) for number in range(count)]
    text = file[headers[names][4] :]
    # 8 is a section that takes no place in the file.
    return {
        text[name:].partition(b"\0")[0].decode(): b"" if kind == 8 else file[offset : offset + length]
        for name, kind, _, _, offset, length in headers
    }


def test_installed_wheel_answers_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    bin_folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = bin_folder / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    venv.create(tmp_path / "env")
    # Its libraries are those of this environment, since torch is large; the program is not, as .pth files there are not
    # read. Whether pip installs them is what every other test has shown.
    folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (folder / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    run(*pip, "install", "--quiet", "--no-deps", "--ignore-installed", wheel, cwd=tmp_path)
    assert "No broken requirements" in run(*pip, "check", cwd=tmp_path)
    assert str(tmp_path) in run(python, "-P", ROOT / "tests" / "installed.py", cwd=tmp_path)
