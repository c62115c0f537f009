"""What torch's operations allocate, counted where a card's allocator cannot be asked."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """While it is entered: bytes of the storages that operations made and that live.

    Attributes:
        peak: the most bytes at once. largest: of one storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self._count(one)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # Its identity has no public name.
        key, nbytes = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if key not in self._alive:
            self._alive[key] = nbytes
            self.now += nbytes
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, nbytes)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)
