"""As much of torch.cuda as pinning asks for, with everything in RAM."""

from __future__ import annotations

import contextlib
import mmap

import pytest
import torch
from torch import Tensor


class FakeCuda:
    """Which ranges are pinned.

    Attributes:
        registered: sizes by start. refused, refused_after: what the driver says to a range, and to which one. flags:
            of each range that was tried. read_only: whether ranges may be registered for reading alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: dict[int, int] = {}
        self.refused, self.refused_after = "", 0
        self.flags, self.read_only = list[int](), True

        def pinned(tensor: Tensor) -> bool:
            at = tensor.untyped_storage().data_ptr()  # as torch does: not the tensor's own
            return any(start <= at < start + size for start, size in self.registered.items())

        def synchronize(_device: object) -> None:
            """Nothing is under way."""

        def cudart() -> FakeCuda:
            return self

        def device(_device: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        monkeypatch.setattr(torch.cuda, "cudart", cudart)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(Tensor, "is_pinned", pinned)

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        self.flags.append(flags)
        assert flags in (1, 9) and not start % mmap.PAGESIZE and not size % mmap.PAGESIZE
        assert not any(at < start + size and start < at + other for at, other in self.registered.items())
        if self.refused and len(self.registered) == self.refused_after:
            return 1
        if flags == 9 and not self.read_only:
            return 1
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.registered[start]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        assert error == 1
        return self.refused or "not supported"
