"""The ordinary way in: a wheel, built from a clean copy and installed in a fresh environment, runs from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.install, pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path) -> str:
    """Stdout of a command that must succeed, in an environment that knows nothing of this checkout."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean["CXXFLAGS"] = "-O0"  # the kernels compile in a fifth of the time
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the files that git tracks, so that no stray file of the checkout gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source, cwd=out)
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
    assert not [name for name in names if "checkpoint" in name.split("/")[:-1] or name.startswith("tests/")]


def test_installed_wheel_answers_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    bin_folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python, floe_chat = bin_folder / "python", bin_folder / "floe-chat"
    pip = [sys.executable, "-m", "pip", "--python", python]
    venv.create(tmp_path / "env")
    # Its libraries are those of this environment, since torch is large; the program is not, as .pth files there are not
    # read. Whether pip installs them is what every other test has shown.
    folder = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (folder / "libraries.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    run(*pip, "install", "--quiet", "--no-deps", "--ignore-installed", wheel, cwd=tmp_path)
    assert "No broken requirements" in run(*pip, "check", cwd=tmp_path)
    assert str(tmp_path) in run(python, "-c", "import floe_chat.app; print(floe_chat.app.__file__)", cwd=tmp_path)
    assert run(floe_chat, "--version", cwd=tmp_path).startswith("floe-chat, version ")
    assert "Paths" in run(floe_chat, "doctor", cwd=tmp_path)
    answer = run(floe_chat, "ask", "--seed", "1", "What is an expert?", cwd=tmp_path)
    assert len(answer.split()) >= 4
