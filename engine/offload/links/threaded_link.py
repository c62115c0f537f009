"""The base of the real links: a thread that packs, sends and lands chunks of the queue, by the machine's clock.

A chunk of rows is packed into a lane (a staging buffer), sent, and landed in its slots; while it is on its way the next
one is packed (FloE section 3.4.2).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from .link_queue import Chunk, Job, LinkQueue
from .transfer import Transfer

LANES = 4  # chunks between packing and landing: one being packed, one on its way, and some slack for late wake-ups


class ThreadedLink(ABC):
    """A link (see `transfer.Link`) whose subclasses define how a chunk is sent and landed."""

    def __init__(self, name: str, device: torch.device, nbytes: int, chunk: int) -> None:
        """Start the thread: the last thing in a link's own constructor.

        Args:
            nbytes: of one row. chunk: rows at a time, at most.

        Raises:
            ValueError: sizes that no rows have.
        """
        self.name, self.device, self.nbytes, self.chunk = name, device, nbytes, chunk
        self._queue = LinkQueue(nbytes, chunk, device)
        self._closing = self._ended = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()  # held while the queue is read or changed
        self._thread = threading.Thread(target=self._run, name=f"floe {name}", daemon=True)
        self._thread.start()

    @property
    def bytes_moved(self) -> int:
        """Bytes landed so far."""
        return self._queue.bytes_moved

    @property
    def busy_s(self) -> float:
        """See `LinkQueue`."""
        return self._queue.busy_s

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        return self._queue.queued_bytes

    def submit(self, transfer: Transfer) -> None:
        """See `Link`."""
        job = self._accept(transfer)
        with self._changed:
            if self._failure or self._closing:
                raise self._failure or RuntimeError("the link is closed")
            self._queue.put(job, time.perf_counter())
            self._changed.notify_all()

    def wait(self, transfer: Transfer) -> float:
        """See `Link`."""
        begun = time.perf_counter()
        with self._changed:
            if transfer.done:
                return 0.0
            job = self._queue.urge(transfer)
            self._until(lambda: self._reached(job))
            self._settle(job)
        return time.perf_counter() - begun

    def finished(self) -> list[Transfer]:
        """See `Link`."""
        with self._changed:
            return self._queue.finished()

    def drop(self, layer: int | None) -> list[Transfer]:
        """See `Link`."""
        with self._changed:
            return self._queue.drop(layer)

    def drain(self) -> None:
        """Wait until everything submitted has landed, such as before the target is freed.

        Raises:
            Exception: the link's failure.
        """
        with self._changed:
            self._until(self._queue.landed_all)

    def close(self) -> None:
        """See `Link`. No row moves afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @abstractmethod
    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        """Pack the job's rows first..last-1 into a free lane and start sending them."""

    @abstractmethod
    def _arrived(self, lane: int) -> bool:
        """Whether `_land` would not have to wait."""

    @abstractmethod
    def _land(self, lane: int, job: Job, first: int, last: int) -> None:
        """Wait until the lane's rows are in their slots; the lane is free then."""

    def _accept(self, transfer: Transfer) -> Job:
        """In `submit`: check everything."""
        return self._queue.accept(transfer)

    def _reached(self, job: Job) -> bool:
        """Whether `wait` may return."""
        return job.transfer.done

    def _settle(self, job: Job) -> None:
        """Called by `wait` once `_reached`, with the lock held."""
        self._queue.done(job)

    def _lanes_of(self, job: Job) -> list[int]:
        """The lanes that carry its rows; the lock is held."""
        return [_lane(chunk) for chunk in self._queue.flying if chunk.job is job]

    def _until(self, reached: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: reached() or self._ended)
        if not reached():
            raise self._failure or RuntimeError("the link is closed")

    # Tensors made in inference mode by the engine thread may be written only in that mode, which is per thread.
    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # noqa: BLE001
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _step(self) -> bool:
        """Land what has arrived, then send one chunk, else wait for one that is on its way; False at the end."""
        queue = self._queue
        while queue.flying and self._arrived(_lane(queue.flying[0])):
            self._take_in()
        with self._changed:
            self._changed.wait_for(lambda: queue.flying or queue or self._closing)
            free = len(queue.flying) < LANES and not self._closing
            chunk = queue.begin(time.perf_counter()) if free and queue else None
        if chunk is not None:
            self._put_out(chunk)
        elif queue.flying:
            self._take_in()
        else:
            return False
        return True

    def _put_out(self, chunk: Chunk) -> None:
        self._send(_lane(chunk), chunk.job, chunk.first, chunk.last)
        with self._changed:
            self._queue.sent(chunk)
            if chunk.last == chunk.job.total:
                self._changed.notify_all()

    def _take_in(self) -> None:
        chunk = self._queue.flying[0]
        self._land(_lane(chunk), chunk.job, chunk.first, chunk.last)
        now = time.perf_counter()
        with self._changed:
            self._queue.landed(now)
            if chunk.last == chunk.job.total:
                self._changed.notify_all()


def _lane(chunk: Chunk) -> int:
    """A free one: chunks land in the order in which they are sent."""
    return chunk.number % LANES
