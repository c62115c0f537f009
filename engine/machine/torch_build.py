"""What keeps torch or Triton from using the NVIDIA GPU of this machine, and the command that mends it here."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...kernels import maker
from ...kernels.backend import TRITON_FROM
from . import gpus
from .gpus import Gpu

# Of PyTorch's indexes, the two that every release since 2.9 has. A driver runs builds of its own CUDA's major version.
_INDEX = "https://download.pytorch.org/whl/"
_NEWEST, _OLDER = "cu130", "cu126"
_DRIVER_OF = {
    _NEWEST: "580",
    _OLDER: "528",
}  # the first of the driver's branches that runs it, Windows' where they differ
_BLACKWELL = (10, 0)  # compute capability from which cu126 has no code
# How systems install packages, and what they call a C compiler and the headers of their own Python, by the first word.
_PACKAGES = {
    "apt-get": ("sudo apt install", "gcc", "python{0.major}.{0.minor}-dev"),
    "dnf": ("sudo dnf install", "gcc", "python3-devel"),
    "zypper": ("sudo zypper install", "gcc", "python3-devel"),
    "pacman": ("sudo pacman -S", "gcc", "python"),
}


def remedy(library: ModuleType | Any | None = None) -> str:
    """One sentence: why an NVIDIA GPU that is here is not used, and the command that mends it.

    Empty if nothing is missing, if our kernels could not run on it, and where no command helps.

    Args:
        library: pynvml; None imports it.
    """
    if platform.system() == "Darwin" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if found := gpus.of_torch()[0]:
        able = maker.is_amd() or any(_numbers(gpu.capability) >= TRITON_FROM for gpu in found)
        return _of_triton() if able else ""
    known, _ = gpus.of_driver(library)
    able = [gpu for gpu in known if not gpu.capability or _numbers(gpu.capability) >= TRITON_FROM]
    if not able:
        return ""
    gpu = max(able, key=lambda gpu: _numbers(gpu.capability))
    cuda = gpus.cuda_of_driver(library)
    if torch.version.cuda is None:
        cause = "is built without CUDA"
    elif cuda is not None and cuda[0] < _numbers(torch.version.cuda)[0]:
        cause = f"needs a driver for CUDA {torch.version.cuda}"
    else:
        return ""
    index, update = _index(gpu, cuda)
    update = f"update the driver to {_DRIVER_OF[index]} or newer, " if update else ""
    return (
        f"This torch ({torch.__version__}) {cause}; to use the {gpu.name}, {update}quit floe-chat and run "
        f"`{_command(_torch_of(index), '--index-url', f'{_INDEX}{index}')}`."
    )


def _of_triton() -> str:
    """What Triton needs and does not find: it compiles a part of itself when a first kernel runs."""
    windows = platform.system() == "Windows"
    if importlib.util.find_spec("triton") is None:
        missing, command = "is not installed", _command("triton-windows" if windows else "triton")
    elif windows:  # its Triton brings a compiler
        return ""
    else:
        scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for them
        header = Path(sysconfig.get_paths(scheme)["include"], "Python.h")
        found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"), header.is_file()
        if all(found):
            return ""
        lacking = [name for name, there in zip(("C compiler", f"{header}"), found, strict=True) if not there]
        missing = f"finds no {' and no '.join(lacking)}"
        how, *names = next((each for name, each in _PACKAGES.items() if shutil.which(name)), _PACKAGES["apt-get"])
        wanted = [name.format(sys.version_info) for name, there in zip(names, found, strict=True) if not there]
        command = f"{how} {' '.join(wanted)}"
    return f"Triton, by which we compute on a GPU, {missing}; to use the GPU, quit floe-chat and run `{command}`."


def _index(gpu: Gpu, cuda: tuple[int, int] | None) -> tuple[str, bool]:
    """The index of PyTorch's builds for this GPU, and whether the driver, which runs this CUDA, is too old for it."""
    if cuda is not None and cuda >= (13, 0):
        return _NEWEST, False
    if _numbers(gpu.capability) >= _BLACKWELL:
        return _NEWEST, cuda is not None
    return _OLDER, cuda is not None and cuda < (12, 0)


def _torch_of(index: str) -> str:
    """The present release of torch, in another build."""
    release = re.match(r"\d+(\.\d+)*", torch.__version__)
    return f"torch=={release[0]}+{index}" if release else "torch"


def _command(*wanted: str) -> str:
    """Installs what pip calls so in the environment that runs us; whatever else is there stays."""
    environment = Path(sys.prefix)
    if (environment / "pipx_metadata.json").is_file():
        words = ("pipx", "runpip", environment.name, "install", *wanted)
    elif importlib.util.find_spec("pip") is None:  # made by uv, perhaps as one of its tools
        words = ("uv", "pip", "install", "--python", sys.executable, *wanted)
    else:
        words = (sys.executable, "-m", "pip", "install", *wanted)
    if platform.system() != "Windows":
        return shlex.join(words)
    quoted = [f'"{word}"' if " " in word else word for word in words]
    return f"{'& ' if quoted[0] != words[0] else ''}{' '.join(quoted)}"  # PowerShell calls a quoted program so


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
