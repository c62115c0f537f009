"""Pinning a pack's rows in RAM, so that a GPU's kernels can read them in place over the link.

A pack is mapped, not read: its pages belong to the system, which may evict them. Registering them with the
driver fetches all of them, keeps them in RAM as this process's own, and gives them an address on the GPU.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ...machine import hardware

SHARE = 0.75  # share of free RAM that may be pinned: nothing else can use it while the model is loaded
_PORTABLE = 1  # cudaHostRegisterPortable: every device may read it


class PinError(RuntimeError):
    """Rows that could not be pinned; the message says why."""


class Pinned:
    """Tensors in RAM that a GPU may read, until `release`. Nothing unmaps them before that."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Pin the pages of these contiguous tensors on the CPU.

        Raises:
            PinError: the driver refuses; none is pinned then.
        """
        self._tensors, self._device = list(tensors), device
        self._starts: list[int] = []
        cudart: Any = torch.cuda.cudart()
        for start, end in pages(tensors):
            with torch.cuda.device(device):
                error = cudart.cudaHostRegister(start, end - start, _PORTABLE)
            if int(error):
                told = str(cudart.cudaGetErrorString(error))
                _forget_error(device)
                self.release()
                raise PinError(f"{(end - start) / 2**20:,.0f} MB of rows cannot be pinned: {told}")
            self._starts.append(start)

    def release(self) -> None:
        """Unpin the pages, once the device has finished all its work; a second call does nothing."""
        if self._starts:
            with contextlib.suppress(RuntimeError):  # a failed device no longer reads
                torch.cuda.synchronize(self._device)
            cudart: Any = torch.cuda.cudart()
            for start in self._starts:
                with torch.cuda.device(self._device):
                    cudart.cudaHostUnregister(start)
            self._starts.clear()
        self._tensors.clear()


def pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses of the whole pages that contain the tensors, [start, end), in order: no page can be pinned twice."""
    size = mmap.PAGESIZE
    spans = sorted(
        (tensor.data_ptr() // size * size, -(-(tensor.data_ptr() + tensor.nbytes) // size) * size)
        for tensor in tensors
        if tensor.nbytes
    )
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def why_not(place: str, nbytes: int) -> str:
    """Why this many bytes of rows cannot be read in place by the GPU `place`; "" if nothing prevents it.

    Nothing is pinned here, so the driver may still refuse.
    """
    backend = kernels.choose(place)
    if backend.name == "reference":
        return f"only the Triton kernels read RAM: {backend.reason}"
    found = hardware.probe(Path())
    room = min(int(SHARE * found.ram_available), found.ram_available if found.pinnable is None else found.pinnable)
    if nbytes > room:
        return f"{nbytes / 2**30:.1f} GB of rows would have to be pinned, and {room / 2**30:.1f} GB of RAM may be"
    return ""


def _forget_error(device: torch.device) -> None:
    """CUDA reports an error a second time, at the next check after a launch; this is that check."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
        torch.cuda.synchronize(device)
