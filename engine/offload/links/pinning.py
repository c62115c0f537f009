"""Pinning a pack's rows in RAM, so that a GPU's kernels read them over the link where they lie.

A pack is mapped, not read: its pages are the system's, which takes them back when it likes. Registering them with the
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

SHARE = 0.75  # of free RAM, what may be pinned: nothing else gets it back while the model is loaded
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
        """Give the pages back, once the device has done all that it was told; the second time nothing happens."""
        if self._starts:
            with contextlib.suppress(RuntimeError):  # a device that has failed reads nothing any more
                torch.cuda.synchronize(self._device)
            cudart: Any = torch.cuda.cudart()
            for start in self._starts:
                with torch.cuda.device(self._device):
                    cudart.cudaHostUnregister(start)
            self._starts.clear()
        self._tensors.clear()


def pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses of the whole pages in which tensors lie, [start, end), in order: no page can be pinned twice."""
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
    """Why so many bytes of rows cannot be read in place by the GPU `place`; "" where nothing speaks against it.

    Nothing is pinned here, so that the driver may still refuse.
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
    """CUDA tells an error a second time, to the next launch that asks for it; this is that launch."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
        torch.cuda.synchronize(device)
