"""What this machine has. A probe that fails is a gap in the answer, never a crash."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .. import kernels


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. Bytes of memory; `capability` such as "8.6"."""

    name: str
    capability: str
    vram_total: int
    vram_free: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What was found. `cpu_isa` is the widest instruction set that torch uses, `gpu_reason` why there is no GPU."""

    system: str
    cpu: str
    cores_physical: int | None
    cores_usable: int
    cpu_isa: str
    ram_total: int
    ram_available: int
    gpus: tuple[Gpu, ...]
    gpu_reason: str
    disk_folder: str
    disk_free: int
    torch_version: str
    torch_threads: int


@dataclass(frozen=True, slots=True)
class ComputePath:
    """Which kernels a kind of device would run, and why; `backend` is None where the device is not there."""

    device: str
    backend: str | None
    reason: str


def compute_paths() -> tuple[ComputePath, ...]:
    """The path that each kind of device would take on this machine."""
    cpu = kernels.choose("cpu")
    gpus, reason = _gpus()
    if not gpus:
        return ComputePath("cpu", cpu.name, cpu.reason), ComputePath("cuda", None, reason)
    cuda = kernels.choose("cuda")
    return ComputePath("cpu", cpu.name, cpu.reason), ComputePath("cuda", cuda.name, cuda.reason)


def probe(folder: Path) -> Hardware:
    """Look at this machine; `folder` is where models lie or would lie."""
    memory = psutil.virtual_memory()
    gpus, gpu_reason = _gpus()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return Hardware(
        system=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        cpu=_cpu_name(),
        cores_physical=psutil.cpu_count(logical=False),
        cores_usable=_usable_cores(),
        cpu_isa=torch.backends.cpu.get_cpu_capability(),
        ram_total=memory.total,
        ram_available=memory.available,
        gpus=gpus,
        gpu_reason=gpu_reason,
        disk_folder=str(folder),
        disk_free=shutil.disk_usage(existing).free,
        torch_version=torch.__version__,
        torch_threads=torch.get_num_threads(),
    )


def machine_id() -> str:
    """Twelve letters that tell this machine from others: of its name, CPU, cores and memory, none of which it shows."""
    found = probe(Path.cwd())
    gpus = [gpu.name for gpu in found.gpus]
    known = [platform.node(), found.cpu, found.cores_usable, round(found.ram_total / 2**30), *gpus]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


def choose_device(wanted: str) -> tuple[str, str]:
    """The device that will compute, and why.

    Args:
        wanted: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: a device that does not exist here.
    """
    if wanted == "cpu":
        return "cpu", "it was asked for"
    gpus, reason = _gpus()
    if wanted == "auto":
        return ("cuda:0", f"there is a {gpus[0].name}") if gpus else ("cpu", reason)
    device = torch.device(wanted)
    if device.type != "cuda":
        raise ValueError(f"floe-chat computes on cpu or cuda, not on {device.type}")
    if (device.index or 0) >= len(gpus):
        raise ValueError(reason or f"there are {len(gpus)} GPUs")
    return f"cuda:{device.index or 0}", "it was asked for"


_SMALL_EXPERT = 1 << 20  # weights of one expert matrix; sharing out less costs more than computing it


def choose_threads(hidden: int, intermediate: int) -> tuple[int, str]:
    """How many CPU threads torch should use for experts of this size, and why."""
    cores = min(_usable_cores(), psutil.cpu_count(logical=False) or _usable_cores())
    if hidden * intermediate < _SMALL_EXPERT:
        return 1, "1 thread, since experts this small are slower when shared out"
    return cores, f"{cores} threads, one per usable core"


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    if torch.version.cuda is None:
        return (), "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return (), "torch sees no CUDA device"
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        found.append(Gpu(torch.cuda.get_device_name(index), f"{major}.{minor}", total, free))
    return tuple(found), ""


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
