"""One block of device memory, managed in bytes: rows at its beginning, keys and values of a conversation at its end."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 256
"""Bytes: the end of the memory is a multiple of it, if rows are not all that it holds."""
RING = 3
"""Experts of a prompt that are there at once: one is computed, and the link always has another to copy."""


class DeviceMemory:
    """Memory that grows only on request. Rows give way as more of its end is lent (`kv.Room`).

    Attributes:
        row_bytes: of one row. rows: (capacity, row_bytes) uint8, as many as fit beside the lent part.
        ring: for prompts, the rows of `RING` experts, (RING * F, row_bytes).
    """

    def __init__(self, place: str, row_bytes: int, capacity: int, neurons: int, most: int) -> None:
        """Room for `capacity` rows, and never for more than `most`.

        Args:
            place: torch's name of the device. neurons: of one expert, F.
        """
        self._place, self._most, self.row_bytes = place, most, row_bytes
        self._lent, self._least = 0, min(capacity, neurons) * row_bytes
        self.ring = self._new(RING * neurons * row_bytes).view(-1, row_bytes)
        self.take(capacity * row_bytes)

    @property
    def nbytes(self) -> int:
        """All bytes but the ring's."""
        return self._bytes.numel()

    def rows_beside(self, lent: int) -> int:
        """Rows that fit beside this many lent bytes; negative if there are fewer bytes than that."""
        return (self.nbytes - lent) // self.row_bytes

    def lend(self, nbytes: int) -> None:
        """Lend this many bytes at the end instead of those lent before; the content at their end is untouched."""
        self._lent = nbytes
        self._divide()

    def lent(self) -> Tensor:
        """(nbytes,) uint8, valid until memory is taken or given."""
        return self._bytes[self.nbytes - self._lent :]

    def take(self, nbytes: int) -> None:
        """Allocate the memory, or less of it if there is less, but for what is lent and one expert's rows; its content
        is undefined.
        """
        while (found := self._found(nbytes)) is None:
            nbytes = nbytes * 15 // 16 // ALIGNED * ALIGNED
        self._bytes = found
        self._divide()

    def _found(self, nbytes: int) -> Tensor | None:
        try:
            return self._new(nbytes)
        except torch.OutOfMemoryError:
            if nbytes * 15 // 16 // ALIGNED * ALIGNED < self._lent + self._least:
                raise
            return None

    def give(self) -> None:
        """Return all memory, including rows, to the device, except the ring's."""
        self._bytes = self._new(0)
        self.rows = self._bytes.view(0, self.row_bytes)
        if self.rows.is_cuda:
            torch.accelerator.empty_cache()

    def renew(self, capacity: int) -> None:
        """Make room for this many rows, returning all old memory first; the lent part survives, rows do not."""
        lent = self.lent().to("cpu", copy=True)
        self.give()
        self.take(capacity * self.row_bytes + self._lent)
        self.lent().copy_(lent)

    def _divide(self) -> None:
        capacity = min(self._most, self.rows_beside(self._lent))
        self.rows = self._bytes[: capacity * self.row_bytes].view(capacity, self.row_bytes)

    def _new(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._place)
