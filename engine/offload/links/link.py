"""Links copy rows from RAM into device memory. Their queue, threads and time are compiled (kernels/cpu/link): no chunk
passes through Python.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.cpu.binding import check, codes, library, records, refused
from ....kernels.cpu.pool_table import landing
from .transfer import CHUNK, Transfer

LinkKind = Literal["none", "virtual", "throttled", "cuda", "disk"]
_KINDS: dict[LinkKind, int] = {
    "none": codes.LINK_NONE,
    "virtual": codes.LINK_VIRTUAL,
    "throttled": codes.LINK_THROTTLED,
    "cuda": codes.LINK_CUDA,
    "disk": codes.LINK_DISK,
}
CPU = torch.device("cpu")
_MOST = 256  # transfers that one call names


class FileFields(TypedDict):
    """Of `floe_link_config`, what only a link from files has, see `disk_files.py`."""

    extents: NDArray[np.int64] | None
    extent_count: int
    readers: int
    gap: int
    sector: int


class CardFields(TypedDict):
    """Of `floe_link_config`, what only a link to a GPU has."""

    driver: Any
    lanes: Any
    stalls: NDArray[np.int64] | None
    stall_count: int
    head: int
    compute: int
    in_place: bool


_NO_FILES = FileFields(extents=None, extent_count=0, readers=0, gap=0, sector=0)
_NO_CARD = CardFields(driver=None, lanes=None, stalls=None, stall_count=0, head=0, compute=0, in_place=False)


class Link:
    """Copies rows from RAM into device memory. All methods belong to the engine thread.

    Kinds: "none" moves rows at once and takes no time; "virtual" moves them at once and counts a clock's time;
    "throttled" moves them by a thread, and a chunk takes at least latency + bytes / rate. Its times show how rows are
    ordered, never a GPU's: they are always labelled "throttled". "disk" reads them from the files behind the sources.

    Attributes:
        name: for people. handle: the library's.
    """

    def __init__(
        self,
        kind: LinkKind,
        name: str,
        nbytes: int,
        *,
        chunk: int = CHUNK,
        rate: float = 0.0,
        latency: float = 0.0,
        clock: Any = None,
        content: bool = True,
        gate: Any = None,
        device: torch.device = CPU,
        card: CardFields = _NO_CARD,
        files: FileFields = _NO_FILES,
        held: object = None,
    ) -> None:
        """Rows of `nbytes`, `chunk` of them at a time.

        Args:
            rate, latency: bytes per second, and seconds of a chunk; not of "none". clock: `floe_clock`, of "virtual".
            content: whether bytes are moved at all; only times count if not. gate: `floe_link_gate`, for tests.
            device: where the target is. card: of "cuda". files: of "disk". held: what must live as long as the link.

        Raises:
            NativeUnavailableError: there is no compiled library. ValueError: no such size, rate or latency.
            RuntimeError: the system cannot start it.
        """
        self._functions = library()
        config = records.link_config(
            kind=_KINDS[kind],
            pack_threads=torch.get_num_threads(),
            row_bytes=nbytes,
            chunk=chunk,
            rate=rate,
            latency=latency,
            clock=clock,
            gate=gate,
            **card,
            **files,
        )
        self.handle: int = self._functions.link_open(config)
        if refused(self.handle):
            raise ValueError(
                f"a link of {rate} bytes/s after {latency} s, in chunks of {chunk} rows of {nbytes} bytes: "
                f"rows are multiples of 64 bytes"
            )
        self.name, self.nbytes, self.chunk, self.device, self._content = name, nbytes, chunk, device, content
        self._numbers: dict[Transfer, int] = {}  # of those that are neither done nor dropped
        self._transfers: dict[int, Transfer] = {}
        self._lent: list[tuple[Tensor, Tensor]] = []
        self._named, self._bytes, self._seconds = np.empty(_MOST, np.int64), np.empty(1, np.int64), np.empty(1)
        # Transfers keep alive the memory that the link's thread works on.
        kept = config, held, self._transfers, self._lent
        self._end = weakref.finalize(self, _free, self._functions, self.handle, kept)

    @property
    def bytes_moved(self) -> int:
        """Bytes landed so far."""
        self._moved()
        return int(self._bytes[0])

    @property
    def busy_s(self) -> float:
        """Seconds in which rows were on their way; virtual ones if the clock is."""
        self._moved()
        return float(self._seconds[0])

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        queued: int = self._functions.link_queued(self.handle)
        check(queued)
        return queued

    def submit(self, transfer: Transfer) -> None:
        """Take a transfer and return at once. Urgent ones go first, in order; then prefetches, highest score first.

        Raises:
            ValueError: rows, slots or tensors that do not fit. RuntimeError: the link's failure.
        """
        source, target, given = transfer.source, transfer.target, transfer.index
        check_ends(transfer, self.nbytes, self.device)
        if transfer.done or transfer in self._numbers:
            raise ValueError("the transfer was submitted before")
        index, slots = given.astype(np.int32), np.ascontiguousarray(transfer.slots)
        ends = (source if self._content else None, len(source), target if self._content else None, len(target))
        order = (transfer.urgent, transfer.score, transfer.layer)
        number: int = codes.BAD_INDEX
        if np.array_equal(index, given):
            number = self._functions.link_submit(self.handle, *ends, index.size, index, slots, *order)
        if self._refused(number):
            landing(given, slots, len(source), len(target))  # says what is wrong
            check(number)
        self._numbers[transfer], self._transfers[number] = number, transfer
        transfer.done = not index.size

    def ends(self, source: Tensor, target: Tensor) -> tuple[int, Tensor | None, Tensor | None]:
        """What a compiled call needs to submit by itself: the handle, and both ends if bytes have content. Both live
        until `forget_ends`.

        Raises:
            ValueError: tensors that do not fit.
        """
        check_tensors(source, target, self.nbytes, self.device)
        self._lent.append((source, target))
        return self.handle, source if self._content else None, target if self._content else None

    def forget_ends(self) -> None:
        """Nothing that compiled calls have submitted is on its way any more."""
        self._lent.clear()

    def wait(self, transfer: Transfer) -> float:
        """Wait until later computation finds the rows in their slots; returns the seconds waited.

        Raises:
            ValueError: it was never submitted, or was dropped. RuntimeError: the link's failure.
        """
        number = self._numbers.get(transfer)
        if number is None:
            if transfer.done:
                return 0.0
            raise ValueError("the transfer is not on this link: it was never submitted, or dropped")
        transfer.urgent = True
        if self._refused(self._functions.link_wait(self.handle, number, None, self._seconds)):
            raise RuntimeError(f"the link has lost transfer {number}")
        transfer.done = True
        return float(self._seconds[0])

    def finished(self) -> list[Transfer]:
        """The transfers done since the last call."""
        found = self._taken(lambda: self._functions.link_finished(self.handle, _MOST, self._named))
        for transfer in found:
            transfer.done = True
        return found

    def drop(self, layer: int | None) -> list[Transfer]:
        """Take prefetches of a layer (None: of all) that have not begun out of the queue."""
        which = -1 if layer is None else layer
        return self._taken(lambda: self._functions.link_drop(self.handle, which, _MOST, self._named))

    def drain(self) -> None:
        """Wait until everything submitted has landed.

        Raises:
            RuntimeError: the link's failure.
        """
        self._refused(self._functions.link_drain(self.handle))

    def follow(self) -> None:
        """Let chunks that begin from now on come after what the compute stream has been given so far.

        Raises:
            RuntimeError: the link's failure.
        """
        self._refused(self._functions.link_follow(self.handle))

    def close(self) -> None:
        """End: transfers under way land, queued ones are not done. No row moves afterwards."""
        check(self._functions.link_close(self.handle))

    def _moved(self) -> None:
        check(self._functions.link_moved(self.handle, self._bytes, self._seconds))

    def _taken(self, name: Callable[[], int]) -> list[Transfer]:
        """The transfers that calls of `name` find."""
        found: list[Transfer] = []
        count = _MOST
        while count == _MOST:
            count = name()
            check(count)
            for number in self._named[:count].tolist():
                found.append(self._transfers.pop(number))
                del self._numbers[found[-1]]
        return found

    def _refused(self, code: int) -> bool:
        """Whether the library refused the arguments.

        Raises:
            RuntimeError: the link's failure, or another error.
        """
        if code == codes.LINK_FAILED:
            raise RuntimeError(self._functions.link_failure(self.handle).decode())
        return refused(code)


def check_tensors(source: Tensor, target: Tensor, nbytes: int, device: torch.device) -> None:
    """Check both ends of transfers.

    Raises:
        ValueError: tensors that do not fit.
    """
    for what, tensor, place in (("source", source, torch.device("cpu")), ("target", target, device)):
        if tensor.dtype != torch.uint8 or tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(f"{what} must be contiguous 2-D uint8, not {tensor.ndim}-D {tensor.dtype}")
        if tensor.shape[1] != nbytes or tensor.device != place:
            raise ValueError(
                f"{what} must be rows of {nbytes} bytes on {place}, not of {tensor.shape[1]} on {tensor.device}"
            )


def check_ends(transfer: Transfer, nbytes: int, device: torch.device) -> None:
    """Check a transfer's tensors and arrays, but not what index and slots hold.

    Raises:
        ValueError: rows, slots, tensors or a score that do not fit.
    """
    index, slots = transfer.index, transfer.slots
    check_tensors(transfer.source, transfer.target, nbytes, device)
    if index.dtype != np.int64 or slots.dtype != np.int32 or index.ndim != 1 or index.shape != slots.shape:
        raise ValueError(
            f"index and slots must be (N,) int64 and int32, "
            f"not {index.shape} {index.dtype} and {slots.shape} {slots.dtype}"
        )
    if math.isnan(transfer.score):
        raise ValueError("a score must be a number")


def throttled_link(nbytes: int, *, rate: float, latency: float = 0.0, chunk: int = CHUNK) -> Link:
    """The link of the test device: RAM to RAM.

    Raises:
        NativeUnavailableError: there is no compiled library. ValueError: no such size, rate or latency.
    """
    return Link("throttled", "throttled", nbytes, chunk=chunk, rate=rate, latency=latency)


def _free(functions: Any, handle: int, _held: object) -> None:
    functions.link_free(handle)
