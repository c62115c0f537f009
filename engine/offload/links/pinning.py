"""Pinning a pack's rows in RAM, so that a GPU's kernels can read them in place over the link.

A pack is mapped, not read: its pages belong to the system, which may evict them. Registering them with the
driver fetches all of them, keeps them in RAM as this process's own, and gives them an address on the GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ...machine import gpus, hardware

SHARE = 0.75  # share of free RAM that may be pinned: nothing else can use it while the model is loaded
# cudaHostRegisterPortable: every device may read it. ...ReadOnly: none writes, or the driver would give this process a
# copy of its own of each page of a mapped file, at 0.5 to 2 GB/s; not every platform has it.
_PORTABLE, _READ_ONLY = 1, 8


class PinError(RuntimeError):
    """Rows that could not be pinned; the message says why."""


class Pinned:
    """Tensors in RAM that a GPU may read, until `release`. Nothing unmaps them before that."""

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, report: Callable[[str], None] = lambda _step: None
    ) -> None:
        """Pin the pages of these contiguous tensors on the CPU. report: is given the progress, in words.

        Raises:
            PinError: the driver refuses; none is pinned then.
        """
        self._tensors, self._device = list(tensors), device
        self._starts: list[int] = []
        self._flags = _PORTABLE | _READ_ONLY
        spans = pages(tensors)
        done, total = 0, sum(end - start for start, end in spans)
        for start, end in spans:
            report(f"Pinning rows in RAM for the GPU: {done / 2**30:.1f} of {total / 2**30:.1f} GB")
            if refused := self._register(start, end - start):
                self.release()
                limit = f"; {hardware.HALF_PINNED}" if hardware.lends_half() else ""
                raise PinError(f"{(end - start) / 2**20:,.0f} MB of rows cannot be pinned: {refused}{limit}")
            self._starts.append(start)
            done += end - start

    @property
    def read_only(self) -> bool:
        """Whether the driver was content with pages that nobody writes, of which it makes no copies."""
        return bool(self._flags & _READ_ONLY)

    def _register(self, start: int, nbytes: int) -> str:
        """Pin some pages; what the driver said to it, or ""."""
        while refused := gpus.register(self._device, start, nbytes, self._flags):
            if self._flags == _PORTABLE:
                break
            self._flags = _PORTABLE
        return refused

    def release(self) -> None:
        """Unpin the pages, once the device has finished all its work; a second call does nothing."""
        if self._starts:
            gpus.unregister(self._device, self._starts)
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
        limit = f": {hardware.HALF_PINNED}" if room == found.pinnable and hardware.lends_half() else ""
        return (
            f"{nbytes / 2**30:.1f} GB of rows would have to be pinned, and {room / 2**30:.1f} GB of RAM may be{limit}"
        )
    return ""
