"""The link of a virtual card: bytes arrive at once, and the queue's time is counted by a virtual clock.

`VirtualLink` defines what the compiled one does (kernels/cpu/link/virtual_link.cpp), and stands in for it where the
library is missing.
"""

from __future__ import annotations

import logging

import torch

from ....kernels import operations as kernels
from ....kernels.cpu.binding import NativeUnavailableError, isa_is_forced
from ..cards import CHUNK_BYTES, PREFIX, Card
from ..links.compiled_link import CompiledLink
from ..links.link_queue import Job, LinkQueue
from ..links.transfer import Link, Transfer
from .virtual_clock import Clock

_log = logging.getLogger("floe_chat.engine")


def open_link(card: Card, clock: Clock, nbytes: int, *, content: bool = True) -> Link:
    """The link of a card for rows of `nbytes`.

    Args:
        content: whether bytes are moved at all; only times count if not.

    Raises:
        NativeUnavailableError: an instruction set is requested by name and is not available.
    """
    chunk = max(1, CHUNK_BYTES // nbytes)
    try:
        return CompiledLink(
            *("virtual", PREFIX + card.name, nbytes),
            chunk=chunk,
            rate=min(card.link_bytes_s, card.pack_bytes_s),
            latency=card.link_latency_s,
            clock=clock.record,
            content=content,
        )
    except NativeUnavailableError as error:
        if isa_is_forced():
            raise
        _log.info("the virtual link is Python's: %s", error)
        return VirtualLink(card, clock, nbytes, chunk, content=content)


class VirtualLink:
    """A link (see `transfer.Link`) whose chunks take a card's time.

    Bytes are in the target when `submit` returns, so that decisions and results are real; `done` follows the clock's
    link lane. Landed are the chunks due by the host's clock, and those that the GPU has waited for.
    """

    def __init__(self, card: Card, clock: Clock, nbytes: int, chunk: int, *, content: bool = True) -> None:
        """`nbytes`: of one row. `chunk`: rows at a time, at most. `content`: see `open_link`."""
        self.name = PREFIX + card.name
        self._card, self._clock, self._content = card, clock, content
        self._queue = LinkQueue(nbytes, chunk, torch.device("cpu"))
        self._staging = torch.empty(self._queue.chunk, nbytes, dtype=torch.uint8)
        self._closed = False

    @property
    def bytes_moved(self) -> int:
        """Bytes landed so far."""
        return self._queue.bytes_moved

    @property
    def busy_s(self) -> float:
        """Virtual seconds, see `LinkQueue`."""
        return self._queue.busy_s

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        self._catch_up()
        return self._queue.queued_bytes

    def submit(self, transfer: Transfer) -> None:
        """See `Link`."""
        if self._closed:
            raise RuntimeError("the link is closed")
        job = self._queue.accept(transfer)
        self._catch_up()
        self._queue.put(job, self._clock.now)
        with self._clock.aside():
            if self._content:
                self._move(job)

    def wait(self, transfer: Transfer) -> float:
        """The GPU's lane begins nothing more before the rows have landed; returns the virtual seconds that it idles
        because of that.

        Raises:
            ValueError: it was never submitted, or was dropped.
        """
        if not transfer.done:
            self._catch_up()
        if transfer.done:
            return 0.0
        job = self._queue.urge(transfer)
        with self._clock.aside():
            while job.begun < job.total:  # nothing submitted later can overtake what begins here
                self._begin_chunk()
            last = next(chunk for chunk in self._queue.flying if chunk.last == job.total and chunk.job is job)
            self._land(last.due)
        idle = self._clock.wait("gpu", last.due)
        self._clock.wait("host", last.begun_at)  # as a real link returns once the last chunk is under way
        return idle

    def finished(self) -> list[Transfer]:
        """See `Link`."""
        self._catch_up()
        return self._queue.finished()

    def drop(self, layer: int | None) -> list[Transfer]:
        """See `Link`."""
        self._catch_up()
        return self._queue.drop(layer)

    def close(self) -> None:
        """End: queued transfers are not done."""
        self._closed = True

    def _move(self, job: Job) -> None:
        cpu, size, rows = kernels.choose("cpu"), self._queue.chunk, job.rows()
        for wanted, slots in zip(job.index.split(size), job.places.split(size), strict=True):
            packed = self._staging[: len(wanted)]
            cpu.gather_rows(rows, 0, wanted, packed)
            cpu.pool_scatter(job.transfer.target, slots, packed)

    def _catch_up(self) -> None:
        """Begin the chunks that begin before now, and land those that end by now."""
        now = self._clock.now
        with self._clock.aside():  # on a real link its own thread does this
            while self._queue and not self._closed and self._begins() < now:
                self._begin_chunk()
            self._land(now)

    def _begins(self) -> float:
        return max(self._clock.end("link"), self._queue.asked_at())

    def _begin_chunk(self) -> None:
        chunk = self._queue.begin(self._begins())
        chunk.due = self._clock.run("link", self._card.copy_s(chunk.total * self._queue.nbytes), asked=chunk.begun_at)
        self._queue.sent(chunk)

    def _land(self, until: float) -> None:
        flying = self._queue.flying
        while flying and flying[0].due <= until:
            self._queue.landed(flying[0].due)
