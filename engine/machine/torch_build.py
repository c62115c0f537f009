"""A torch that cannot use the NVIDIA GPU of this machine, and the command that replaces it on this system."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

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


def remedy(library: ModuleType | Any | None = None) -> str:
    """One sentence: why torch does not use an NVIDIA GPU that is here, and the command that mends it.

    Empty if torch uses one, if our kernels could not, and where another torch would change nothing.

    Args:
        library: pynvml; None imports it.
    """
    if platform.system() == "Darwin" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.version.cuda is not None and torch.cuda.is_available():
        return ""
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
        f"`{_command(index)}`."
    )


def _index(gpu: Gpu, cuda: tuple[int, int] | None) -> tuple[str, bool]:
    """The index of PyTorch's builds for this GPU, and whether the driver, which runs this CUDA, is too old for it."""
    if cuda is not None and cuda >= (13, 0):
        return _NEWEST, False
    if _numbers(gpu.capability) >= _BLACKWELL:
        return _NEWEST, cuda is not None
    return _OLDER, cuda is not None and cuda < (12, 0)


def _command(index: str) -> str:
    """Replaces torch, in the same release, in the environment that runs us; whatever else is there stays."""
    release = re.match(r"\d+(\.\d+)*", torch.__version__)
    wanted = f"torch=={release[0]}+{index}" if release else "torch"
    environment, source = Path(sys.prefix), ("--index-url", f"{_INDEX}{index}")
    if (environment / "pipx_metadata.json").is_file():
        words = ("pipx", "runpip", environment.name, "install", wanted, *source)
    elif importlib.util.find_spec("pip") is None:  # made by uv, perhaps as one of its tools
        words = ("uv", "pip", "install", "--python", sys.executable, wanted, *source)
    else:
        words = (sys.executable, "-m", "pip", "install", wanted, *source)
    if platform.system() != "Windows":
        return shlex.join(words)
    quoted = [f'"{word}"' if " " in word else word for word in words]
    return f"{'& ' if quoted[0] != words[0] else ''}{' '.join(quoted)}"  # PowerShell calls a quoted program so


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
