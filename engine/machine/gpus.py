"""The GPUs of this machine: those that torch can compute on, and what NVIDIA's library (NVML) adds about each."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...kernels import maker

_log = logging.getLogger("floe_chat.engine")
WAKING_S = 1.0  # an idle card runs its memory at 405 MHz and its link at generation 1 for the first 0.1 to 1 s of work
_NO_LIBRARY = "nvidia-ml-py is not installed"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Bytes of memory; `capability` such as "8.6", or "gfx1100" of AMD's.

    Attributes:
        vram_free: by the driver's library; None: unknown, since only a context on the device could tell.
        index: torch's number, as in cuda:0; None where torch cannot compute on it. source: what reported it.
        uuid: what both sources call it. link: PCIe generation and lanes now, such as "4.0 x16" (an idle card lowers its
            generation); link_most: at the most; "" where unknown.
    """

    name: str
    capability: str
    vram_total: int
    vram_free: int | None
    index: int | None = None
    source: str = "torch"
    uuid: str = ""
    link: str = ""
    link_most: str = ""


def of_torch() -> tuple[tuple[Gpu, ...], str]:
    """The devices that torch computes on, or why there are none. No context is made, which takes 0.3 to 0.5 GB."""
    if reason := maker.without():
        return (), reason
    if not torch.cuda.is_available():
        return (), "torch sees no CUDA device"
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        told: Any = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{told.uuid}" if hasattr(told, "uuid") else ""
        capability = maker.architecture(index).removeprefix("compute capability ")
        found.append(Gpu(told.name, capability, told.total_memory, None, index, uuid=uuid))
    return tuple(found), ""


def free(place: str) -> int:
    """Bytes of a device for new tensors: what is free on it, and what torch keeps of what it no longer needs. The
    device gets a context.
    """
    gc.collect()
    unused, _ = torch.cuda.mem_get_info(place)
    return unused + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)


def give_back() -> None:
    """Return what torch keeps of what it no longer needs to the devices, for other programs and the next model."""
    if torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a card that has failed gives nothing; who computes there learns why
            torch.cuda.empty_cache()


def lost() -> bool:
    """Whether a GPU that this process has memory on answers no more: after most errors every later call fails too."""
    try:
        for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
            if torch.cuda.memory_reserved(index):  # the others would get a context here
                torch.cuda.synchronize(index)
    except RuntimeError:
        return True
    return False


def wake(place: str) -> None:
    """Copy to a GPU until its clocks and its link are as fast as they get, before anything on it is timed."""
    if place == "cpu":
        return
    near = torch.empty(64 << 20, dtype=torch.uint8, device=place)
    far = pinned(near.shape, dtype=torch.uint8)
    end = time.perf_counter() + WAKING_S
    while time.perf_counter() < end:
        near.copy_(far, non_blocking=True)
        near.bitwise_not_()
        torch.cuda.synchronize(place)


def pinned(size: Sequence[int], **how: Any) -> Tensor:
    """Memory in RAM that a GPU reads at the link's full rate, or any where the system pins no more."""
    try:
        return torch.empty(size, **how, pin_memory=True)
    except RuntimeError as error:
        _log.warning("memory of %s elements is not pinned: %s", tuple(size), error)
        return torch.empty(size, **how)


def register(device: torch.device, start: int, nbytes: int, flags: int) -> str:
    """Pin pages of RAM for a GPU; what the driver said to it, or ""."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = cudart.cudaHostRegister(start, nbytes, flags)
    if not int(error):
        return ""
    with contextlib.suppress(RuntimeError):  # CUDA reports it again at the next check after a launch: this one
        torch.ones(1, device=device)
        torch.cuda.synchronize(device)
    return str(cudart.cudaGetErrorString(error))


def unregister(device: torch.device, starts: Sequence[int]) -> None:
    """Unpin pages of RAM, once a GPU has finished all its work."""
    with contextlib.suppress(RuntimeError):  # a failed device no longer reads
        torch.cuda.synchronize(device)
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        for start in starts:
            cudart.cudaHostUnregister(start)


def of_driver(library: ModuleType | Any | None = None) -> tuple[tuple[Gpu, ...], str]:
    """All devices that the driver knows, and why there are none or some are missing.

    Args:
        library: pynvml; None imports it. If it fails midway, only the rest is lost.
    """
    nvml, reason = _started(library)
    if nvml is None:
        return (), reason
    found: list[Gpu] = []
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            found.append(_device(nvml, nvml.nvmlDeviceGetHandleByIndex(number)))
    except (nvml.NVMLError, OSError) as error:
        reason = f"NVML: {error}"
    with contextlib.suppress(nvml.NVMLError, OSError):
        nvml.nvmlShutdown()
    return tuple(found), reason or ("" if found else "NVML sees no device")


def cuda_of_driver(library: ModuleType | Any | None = None) -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, such as (12, 4); None if unknown. library: as for `of_driver`."""
    nvml, _ = _started(library)
    if nvml is None:
        return None
    version = 0
    with contextlib.suppress(nvml.NVMLError, OSError):
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is 12.4
    with contextlib.suppress(nvml.NVMLError, OSError):
        nvml.nvmlShutdown()
    return (version // 1000, version % 1000 // 10) if version else None


def installed(library: ModuleType | Any | None = None) -> tuple[str, ...]:
    """What rates of GPUs depend on besides their names: the driver's version, and each one's link; empty if unknown."""
    nvml, _ = _started(library)
    if nvml is None:
        return ()
    version = ""
    with contextlib.suppress(nvml.NVMLError, OSError):
        version = _text(nvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(nvml.NVMLError, OSError):
        nvml.nvmlShutdown()
    return version, *(gpu.link_most for gpu in of_driver(library)[0])


def _started(library: ModuleType | Any | None) -> tuple[Any, str]:
    """NVML, ready for questions, or None and why it is not."""
    nvml: Any = library
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return None, _NO_LIBRARY
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return None, f"NVML: {error}"
    return nvml, ""


def merged(torch_gpus: tuple[Gpu, ...], driver_gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Torch's devices with the driver's details, then those that only the driver knows."""
    left = list(driver_gpus)
    together: list[Gpu] = []
    for gpu in torch_gpus:
        same = next((other for other in left if _same(gpu, other)), None)
        if same is not None:
            left.remove(same)
            gpu = replace(
                gpu, source="torch and NVML", vram_free=same.vram_free, link=same.link, link_most=same.link_most
            )
        together.append(gpu)
    return (*together, *left)


def _same(gpu: Gpu, other: Gpu) -> bool:
    return gpu.uuid == other.uuid if gpu.uuid and other.uuid else gpu.name == other.name


def _device(nvml: Any, handle: Any) -> Gpu:
    """A device: its name and memory, and whatever else it reports."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    told = dict(_optional(nvml, handle))
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=told.get("capability", ""),
        vram_total=int(memory.total),
        vram_free=int(memory.free),
        source="NVML",
        uuid=told.get("uuid", ""),
        link=told.get("link", ""),
        link_most=told.get("link_most", ""),
    )


def _optional(nvml: Any, handle: Any) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        yield "capability", f"{major}.{minor}"
    with contextlib.suppress(nvml.NVMLError):
        yield "uuid", _text(nvml.nvmlDeviceGetUUID(handle))
    with contextlib.suppress(nvml.NVMLError):
        generation, lanes = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
        yield "link", f"{generation(handle)}.0 x{lanes(handle)}"
    with contextlib.suppress(nvml.NVMLError):
        generation, lanes = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
        yield "link_most", f"{generation(handle)}.0 x{lanes(handle)}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
