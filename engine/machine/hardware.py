"""This machine's hardware, each figure with its source. A failed probe leaves a gap with a reason and never crashes.

Probing takes milliseconds; measurements are in rates.py.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ...kernels import operations as kernels
from ...kernels.cpu import binding, native
from . import containers, gpus, torch_build
from .containers import ROOT
from .gpus import Gpu

HALF_PINNED = "Windows lends about half of the memory to GPUs"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware found, in bytes; None if unknown.

    Attributes:
        system: in words. wsl: whether it is Linux inside Windows. cpu_isa: the instruction set of our kernels.
        ram_total, ram_available: what this process may use, so in a container at most its limit, ram_limit.
        pinnable: how much memory can be pinned for copies to a GPU.
        gpus: devices, first those that torch computes on. gpu_reason: why torch computes on none.
        sources: by field, the source of its value, or why there is none.
        remedy: how to make torch compute on a GPU that is there, see torch_build.py; "" if there is nothing to mend.
    """

    system: str
    wsl: bool
    cpu: str
    cores_physical: int | None
    cores_usable: int
    cpu_isa: str
    ram_total: int
    ram_available: int
    ram_limit: int | None
    pinnable: int | None
    gpus: tuple[Gpu, ...]
    gpu_reason: str
    disk_folder: str
    disk_free: int | None
    torch_version: str
    torch_threads: int
    sources: Mapping[str, str]
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ComputePath:
    """Which kernels a device would run, and why; `backend` is None if there is no such device.

    On a GPU that is as far as it shows without touching it; see `remedy` for what Triton lacks.
    """

    device: str
    backend: str | None
    reason: str


def compute_paths() -> tuple[ComputePath, ...]:
    """The path that the CPU and each GPU of this machine would take."""
    gpus, reason = _gpus()
    cpu = kernels.choose("cpu")
    part = f"; a part of a model needs compiled code, and {why}" if (why := uncompiled()) else ""
    paths = [ComputePath("cpu", cpu.name, cpu.reason)]
    for index in range(len(gpus)):
        name, why = kernels.foreseen(index)
        paths.append(ComputePath(f"cuda:{index}", name, why + part))
    return tuple(paths) if gpus else (*paths, ComputePath("cuda", None, reason))


def all_idle() -> bool:
    """Whether there are GPUs, and torch computes on none."""
    return not _gpus()[0] and bool(gpus.of_driver()[0])


def uncompiled() -> str:
    """Why the compiled kernels are missing; "" where they are not."""
    try:
        binding.library()
    except native.NativeUnavailableError as error:
        return str(error)
    return ""


def compiled_by() -> str:
    """The one command that brings the compiled kernels."""
    if isa := os.environ.get("FLOE_CPU_ISA"):
        return f"Unset FLOE_CPU_ISA, which asks for {isa!r}; or use --device cpu."
    script = Path(binding.__file__).with_name("build.py")
    words = [sys.executable, str(script), str(script.with_name("_floe.so"))]
    if not script.with_name("offload").is_dir():  # a wheel has no sources: it brought the library
        words = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", "floe-chat"]
    return f"Run: {shlex.join(words)}; or use --device cpu."


def probe(folder: Path, root: Path = ROOT) -> Hardware:
    """Examine this machine; `folder` is or would be the models folder, `root` contains /proc and /sys."""
    sources: dict[str, str] = {}
    wsl = is_wsl(root)
    total, available, limit = _memory(sources, root)
    found, reason = _gpus()
    known, sources["gpus"] = gpus.of_driver()
    sources["gpus"] = sources["gpus"] or "NVML, and torch for what it can compute on"
    return Hardware(
        system=_system(wsl),
        wsl=wsl,
        cpu=_cpu_name(root, sources),
        cores_physical=_physical(sources),
        cores_usable=_usable(sources, root),
        cpu_isa=_isa(sources),
        ram_total=total,
        ram_available=available,
        ram_limit=limit,
        pinnable=_pinnable(sources, total, root) if found else None,
        gpus=gpus.merged(found, known),
        gpu_reason=reason,
        disk_folder=str(folder),
        disk_free=_disk_free(folder, sources),
        torch_version=torch.__version__,
        torch_threads=torch.get_num_threads(),
        sources=sources,
        remedy=torch_build.remedy(),
    )


def ram(root: Path = ROOT) -> tuple[int, int]:
    """Bytes of RAM that this process may use in all, and that are free for it now."""
    total, available, _ = _memory({}, root)
    return total, available


def machine_id() -> str:
    """Twelve letters that identify this machine: a hash of its name, CPU, cores and memory, and of its GPUs with their
    driver and links. What was measured on another is measured again.
    """
    ram = psutil.virtual_memory().total
    names = [gpu.name for gpu in _gpus()[0]]
    names += gpus.installed() if names else ()
    known = [platform.node(), _cpu_name(ROOT, {}), _usable_cores(), round(ram / 2**30), *names]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


def is_wsl(root: Path = ROOT) -> bool:
    """Whether this is the Windows Subsystem for Linux, whose kernel says so."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text(encoding="utf-8").lower()
    except (OSError, UnicodeDecodeError):
        return False


def choose_device(wanted: str) -> tuple[str, str]:
    """The device that will compute, and why.

    Args:
        wanted: "auto", "cpu", "cuda" or "cuda:N", in any case of letters.

    Raises:
        ValueError: a device that does not exist here.
    """
    named = re.fullmatch(r"auto|cpu(:0)?|cuda(:(?P<index>\d{1,4}))?", wanted, re.IGNORECASE | re.ASCII)
    if named is None:
        raise ValueError("Devices are auto, cpu, cuda and cuda:N.")
    kind, index = wanted.lower().partition(":")[0], int(named["index"] or 0)
    if kind == "cpu":
        return "cpu", "it was asked for"
    gpus, reason = _gpus()
    if kind == "auto":
        return ("cuda:0", f"the GPU is {gpus[0].name}") if gpus else ("cpu", reason)
    if index >= len(gpus):
        raise ValueError(reason or f"there are {len(gpus)} GPUs")
    return f"cuda:{index}", "it was asked for"


_SMALL_EXPERT = 1 << 20  # weights of one expert matrix; splitting less work costs more than computing it


def choose_threads(hidden: int, intermediate: int) -> tuple[int, str]:
    """How many CPU threads torch should use for experts of this size, and why."""
    cores = min(_usable_cores(), psutil.cpu_count(logical=False) or _usable_cores())
    if hidden * intermediate < _SMALL_EXPERT:
        return 1, "1 thread: experts this small are slower with several"
    return cores, f"{cores} threads, one per usable core"


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    return gpus.of_torch()


def _system(wsl: bool) -> str:
    name = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    return f"{name}, inside Windows (WSL)" if wsl else name


def _memory(sources: dict[str, str], root: Path) -> tuple[int, int, int | None]:
    """Total, available, and the container's limit."""
    memory = psutil.virtual_memory()
    sources["ram_total"] = sources["ram_available"] = "the system"
    group = containers.memory(root)
    if group is None:
        sources["ram_limit"] = "no container limits it"
        return memory.total, memory.available, None
    sources["ram_limit"] = group.source
    if group.limit < memory.total:
        sources["ram_total"] = f"the container's limit, {group.source}"
    available = min(memory.available, max(0, group.limit - group.used))
    if available < memory.available:
        sources["ram_available"] = f"the container's limit less what it uses, {group.source}"
    return min(memory.total, group.limit), available, group.limit


def lends_half(root: Path = ROOT) -> bool:
    """Whether the system is one of `HALF_PINNED`."""
    return is_wsl(root) or platform.system() == "Windows"


def _pinnable(sources: dict[str, str], total: int, root: Path) -> int:
    if lends_half(root):
        sources["pinnable"] = HALF_PINNED
        return total // 2
    sources["pinnable"] = "Linux has no limit; a tenth is left to the system"
    return total - total // 10


def _cpu_name(root: Path, sources: dict[str, str]) -> str:
    sources["cpu"] = "/proc/cpuinfo"
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    sources["cpu"] = "the system"
    return platform.processor() or platform.machine()


def _physical(sources: dict[str, str]) -> int | None:
    try:
        cores = psutil.cpu_count(logical=False)
    except (OSError, ValueError) as error:  # a /proc that lacks what psutil reads
        sources["cores_physical"] = f"unknown: {error}"
        return None
    sources["cores_physical"] = "the system" if cores else "unknown: the system does not report it"
    return cores


def _usable(sources: dict[str, str], root: Path) -> int:
    limit = containers.cores(root)
    sources["cores_usable"] = "the process's affinity"
    if limit is not None:
        sources["cores_usable"] += f", and the container's {limit:g} cores of time"
    return _usable_cores(root)


def _isa(sources: dict[str, str]) -> str:
    try:
        isa = native.isa()
    except native.NativeUnavailableError as error:
        sources["cpu_isa"] = str(error)
        return f"plain torch, {torch.backends.cpu.get_cpu_capability()}"
    sources["cpu_isa"] = isa.reason
    return isa.name


def _disk_free(folder: Path, sources: dict[str, str]) -> int | None:
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
    except (OSError, StopIteration, ValueError) as error:
        sources["disk_free"] = f"unknown: {error}"
        return None
    sources["disk_free"] = f"the file system of {existing}"
    return free


def _usable_cores(root: Path = ROOT) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return containers.usable_cores(allowed, root)
