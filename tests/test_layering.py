"""Imports point down only (pyproject.toml, import-linter), shown on this source and on copies that break the rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("app", "engine", "models", "kernels")
BAD_IMPORTS = {
    "kernels/types.py": "from ..models import errors",
    "models/errors.py": "def late() -> None:\n    from ..engine import events",
    "engine/events.py": "import floe_chat.app.log",
    "app/log.py": "from ..kernels import layouts",
    "models/transformers_import.py": "from ..kernels.backend import choose",
    "engine/offload/missing_rows.py": "from ..experts import moe_layer",
    "models/pack/manifest.py": "from ..packing import pack",
    "app/client/prompt.py": "from ..widgets.chat import turns",
}
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
# What a layer must not know, whatever library it comes from.
FOREIGN = {
    "kernels": {"click", "textual", "transformers", "tokenizers", "safetensors"},
    "models": {"click", "textual"},
    "engine": {"click", "textual", "tokenizers", "safetensors"},
}

# Who calls what only CUDA and ROCm have; all others ask `torch.accelerator`, or the module of their device's kind.
OF_CUDA = {
    "engine/decoder/graphs.py",
    "engine/machine/gpus.py",
    "engine/offload/links/cuda_link.py",
    "kernels/maker.py",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages as they would be installed, free to be broken."""
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.dll", "*.dylib")
        shutil.copytree(ROOT / package, tmp_path / "floe_chat" / package, ignore=ignore)
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the packages in `folder`, which hide the installed ones."""
    environment = os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)


def test_the_contracts_are_kept(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout and "KEPT" in done.stdout
    files = sum(1 for package in PACKAGES for _ in (copy / "floe_chat" / package).rglob("*.py"))
    assert f"Analyzed {files} files" in done.stdout


@pytest.mark.thorough
def test_imports_that_point_up_are_noticed(copy: Path) -> None:
    for name, line in BAD_IMPORTS.items():
        with (copy / "floe_chat" / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 kept, 7 broken" in done.stdout
    told = done.stdout.split("Broken contracts", maxsplit=1)[1]
    for name in BAD_IMPORTS:
        assert "floe_chat." + name.removesuffix(".py").replace("/", ".") + " ->" in told, name


# The top-level name of a package, wherever in a file it is imported.
IMPORTED = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)


@pytest.mark.parametrize("package", FOREIGN)
def test_a_layer_knows_only_the_libraries_of_its_kind(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) >= 4
    known = {
        str(path.relative_to(ROOT)): sorted(FOREIGN[package] & {*IMPORTED.findall(path.read_text("utf-8"))})
        for path in files
    }
    assert {path: names for path, names in known.items() if names} == {}


def test_torchs_names_for_cuda_alone_are_in_few_files() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = re.compile(r"torch\.cuda|from torch import.*\bcuda\b")
    assert {path.relative_to(ROOT).as_posix() for path in files if named.search(path.read_text("utf-8"))} == OF_CUDA


def test_every_folder_of_modules_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    there = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    assert {".".join(("floe_chat", *folder.parts)) for folder in there} <= set(listed)
