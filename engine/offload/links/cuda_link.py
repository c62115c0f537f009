"""The link to a GPU (kernels/cpu/link/cuda_link.cpp): through pinned memory, or by reading rows in place.

What only torch can make is made here once: buffers, streams, events, and for each lane a graph that puts its rows into
their slots (`kernels.triton.land`), so that compiled code need not know how Triton passes arguments.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import maker
from ....kernels import operations as kernels
from ....kernels.codes import align
from ....kernels.cpu.binding import array_of, codes, records
from ....models.errors import FloeError
from ...machine import torch_build
from .link import CardFields, Link
from .pinning import Pinned
from .transfer import CHUNK, Transfer

LANES: int = codes.LINK_LANES
STREAMS = 2  # one chunk's rows are put into their slots while the next chunk's cross the bus
STALLS = 64  # waits of the compute stream that are measured at the same time
_FUNCTIONS = {
    "set_context": "cuCtxSetCurrent",
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "copy": "cuMemcpyHtoDAsync_v2",
    "launch": "cuGraphLaunch",
    "record": "cuEventRecord",
    "query": "cuEventQuery",
    "synchronize": "cuEventSynchronize",
    "elapsed": "cuEventElapsedTime",
    "wait": "cuStreamWaitEvent",
    "address": "cuPointerGetAttribute",
    "text": "cuGetErrorString",
}


@dataclass(frozen=True, slots=True)
class CardParts:
    """What a link uses on a card: records for compiled code, and what keeps their handles and addresses alive.

    Attributes:
        driver, lanes: `floe_driver`, and `floe_lane` for each of `LANES`. stalls: (N, 2) pairs of events with times.
        compute: the handle of the stream that waits for rows. streams: torch's streams of the lanes.
    """

    driver: Any
    lanes: Sequence[Any]
    stalls: NDArray[np.int64]
    compute: int
    streams: Sequence[Any]
    held: object


class CudaLink(Link):
    """To a GPU (FloE section 3.4.2): cores pack a chunk into pinned memory, one copy transfers it with its slot
    numbers, and a kernel puts its rows there.

    `wait` returns when the copies are under way, with the compute stream ordered after them; that is the current one of
    the thread that opens the link. `zero_copy`: rows in pinned memory are read by the device itself. Rows in RAM never
    change, so only unpinning has to wait for the kernels that read them: see `close`.
    """

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        parts: CardParts,
        *,
        chunk: int = CHUNK,
        zero_copy: bool = False,
        pinned: Pinned | None = None,
    ) -> None:
        """`pinned`: what holds the rows that are read in place; it is released when the link ends.

        Raises:
            NativeUnavailableError: there is no compiled library. ValueError: no such size.
        """
        fields = CardFields(
            driver=parts.driver,
            lanes=array_of(parts.lanes),
            stalls=parts.stalls,
            stall_count=len(parts.stalls),
            head=head_of(chunk),
            compute=parts.compute,
            in_place=zero_copy,
        )
        self.zero_copy, self._pinned, self._streams = zero_copy, pinned, parts.streams
        self._target: ref[Tensor] | None = None
        name = "cuda, read in place" if zero_copy else "cuda"
        super().__init__("cuda", name, nbytes, chunk=chunk, device=device, card=fields, held=parts)

    def submit(self, transfer: Transfer) -> None:
        """See `Link`."""
        self._meet(transfer.source, transfer.target)
        super().submit(transfer)

    def ends(self, source: Tensor, target: Tensor) -> tuple[int, Tensor | None, Tensor | None]:
        """See `Link`."""
        self._meet(source, target)
        return super().ends(source, target)

    def _meet(self, source: Tensor, target: Tensor) -> None:
        """Make sure that rows can be read, and that a target is not written to too early.

        Raises:
            ValueError: pageable memory that is to be read in place. RuntimeError: the link's failure.
        """
        if self.zero_copy and not source.is_pinned():
            raise ValueError("source is in pageable memory, which the device cannot read in place: pin it")
        if self._target is None or self._target() is not target:
            # A new target: pending work of the compute stream on that memory comes first, and it is not reused before
            # the copies have ended.
            for stream in self._streams:
                target.record_stream(stream)
            self.follow()
            self._target = ref(target)

    def close(self) -> None:
        """See `Link`. Afterwards no kernel reads rows in RAM, and none is pinned."""
        super().close()
        if self._pinned is not None:
            self._pinned.release()


def open_cuda_link(
    device: torch.device, nbytes: int, *, chunk: int = CHUNK, zero_copy: bool = False, pinned: Pinned | None = None
) -> CudaLink:
    """The link to a GPU, as seen from its current stream.

    Args:
        pinned: what holds the rows that are read in place; it is released when the link ends.

    Raises:
        NativeUnavailableError: there is no compiled library. FloeError: no link to this GPU can be. ValueError: no
            such size. torch.OutOfMemoryError.
    """
    device = torch.empty(0, device=device).device  # with its number
    try:
        parts = parts_on(device, nbytes, chunk, zero_copy=zero_copy)
    except torch.OutOfMemoryError:
        raise
    except (OSError, AttributeError, ImportError, RuntimeError) as error:
        cause = f"{str(error).strip().partition(chr(10))[0].rstrip('.')}."
        hint = torch_build.remedy() or "Use --device cpu, or a GPU that holds the whole model."
        raise FloeError(f"No rows can be sent to {device}", cause, hint) from error
    return CudaLink(device, nbytes, parts, chunk=chunk, zero_copy=zero_copy, pinned=pinned)


def head_of(chunk: int) -> int:
    """Bytes in front of a lane's rows: four words, then slots and rows of the source."""
    return align(32 + 8 * chunk)


def driver_of(library: Any) -> Any:
    """`floe_driver` of the driver's library, with the context that is current in this thread.

    Raises:
        AttributeError: the library lacks a function. RuntimeError: no context.
    """
    context = ctypes.c_void_p()
    if getattr(library, _called("cuCtxGetCurrent"))(ctypes.byref(context)) or not context.value:
        raise RuntimeError("the GPU's driver has no context in this thread")
    addresses = {
        name: ctypes.cast(getattr(library, _called(real)), ctypes.c_void_p).value for name, real in _FUNCTIONS.items()
    }
    return records.driver(context=context.value, **addresses)


def _called(function: str) -> str:
    """What a function of CUDA's driver is called by the one that is here; AMD's takes and returns the same."""
    if not maker.is_amd():
        return function
    return "hipDrvGetErrorString" if function == "cuGetErrorString" else f"hip{function[2:].removesuffix('_v2')}"


def _driver() -> str:
    """The file of the driver's library."""
    if not maker.is_amd():
        return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    if sys.platform == "win32":
        return "amdhip64.dll"
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")  # torch may have brought its own
    found = re.search(r"/\S*/libamdhip64\.so\S*", maps)
    return found[0] if found else "libamdhip64.so"


def parts_on(device: torch.device, nbytes: int, chunk: int, *, zero_copy: bool) -> CardParts:
    """Buffers, streams, events and graphs on a GPU.

    Raises:
        OSError, AttributeError: the driver's library is not there, or too old. ImportError: no Triton for this GPU.
        RuntimeError: no memory, or a graph that cannot be captured.
    """
    if device.type != "cuda":
        raise OSError(f"{device} has no driver")
    chosen = kernels.choose(device)
    if chosen.name == "reference":
        raise ImportError(chosen.reason)
    library: Any = ctypes.CDLL(_driver())
    with torch.cuda.device(device):
        compute = torch.cuda.current_stream(device)
        # Their small kernels run before the compute stream's large ones.
        streams = [torch.cuda.Stream(device, priority=-1) for _ in range(STREAMS)]
        made = [_lane(streams[i % STREAMS], device, nbytes, chunk, zero_copy) for i in range(LANES)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(STALLS)]
        for event in (event for pair in events for event in pair):
            event.record(compute)  # an event has no handle before
        stalls = np.array([[event.cuda_event for event in pair] for pair in events], np.int64)
        driver, lanes = driver_of(library), [lane for lane, _ in made]
    return CardParts(driver, lanes, stalls, compute.cuda_stream, streams, (library, made, events))


def _lane(stream: Any, device: torch.device, nbytes: int, chunk: int, zero_copy: bool) -> tuple[Any, object]:
    """A lane's record, and what it needs alive."""
    from ....kernels import triton

    size = head_of(chunk) + (0 if zero_copy else chunk * nbytes)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    event, fence, graph = torch.cuda.Event(blocking=True), torch.cuda.Event(), torch.cuda.CUDAGraph()

    def land() -> None:
        triton.land(there, chunk, head_of(chunk), nbytes, in_place=zero_copy)

    with torch.cuda.stream(stream):  # the memory belongs to this stream, also when it is freed
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        land()  # compiles it; a head of zeros has no rows
        event.record(stream)
        fence.record(stream)
    stream.synchronize()
    # The threads of other links may call the driver meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        land()
    handles = {"stream": stream.cuda_stream, "event": event.cuda_event, "fence": fence.cuda_event}
    lane = records.lane(here=here, there=there.data_ptr(), scatter=graph.raw_cuda_graph_exec(), **handles)
    return lane, (here, there, event, fence, graph)
