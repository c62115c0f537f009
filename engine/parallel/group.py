"""Several processes that compute one model: torch.distributed, with sentences where that fails.

Messages go over TCP (gloo), and so do tensors, by way of RAM where they are on a card; where each process has a card of
its own, tensors go over NCCL, which has not been run on real cards yet.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ...models.errors import FloeError
from . import messages
from .members import GroupLost, Members
from .messages import End, Message
from .world import World


@dataclass(slots=True)
class Count:
    """Of one kind: operations that all processes take part in, messages, and bytes."""

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Traffic:
    """What this process sent since it was last cleared.

    Attributes:
        kinds: "told" (what to compute), "summed" (outputs that are added up), "headers" (how many rows follow), "rows"
            (tokens' states on their way to experts), "results" (the way back), "shared" (keys and values of a
            divided prompt; or outputs, where each process computes the dense part of all tokens).

    Sums count as a ring sends them: 2 (R - 1) messages of 1 / R of the bytes from each of R processes. All else is
    point to point and counted as it is; a message without content is none.
    """

    kinds: dict[str, Count] = field(default_factory=dict[str, Count])

    def add(self, kind: str, messages: int, nbytes: int) -> None:
        """One collective of this kind."""
        count = self.kinds.setdefault(kind, Count())
        count.collectives += 1
        count.messages += messages
        count.nbytes += nbytes

    def of(self, *kinds: str) -> Count:
        """These kinds together; all of them if none is named."""
        found = [count for kind, count in self.kinds.items() if not kinds or kind in kinds]
        return Count(
            sum(count.collectives for count in found),
            sum(count.messages for count in found),
            sum(count.nbytes for count in found),
        )

    def clear(self) -> None:
        """Count from zero."""
        self.kinds.clear()


_CALM = timedelta(days=365)  # a person may think that long before the next question
_MET = timedelta(seconds=300)
_FRAME = 512  # bytes that are sent at once: what a token needs


@dataclass(frozen=True, slots=True)
class Line:
    """Some of the processes, in the order in which operations divide tensors among them.

    Attributes:
        handle: torch's, of the processes in `ranks`; None for a line of one.
    """

    ranks: tuple[int, ...]
    handle: Any


class Group:
    """This process and the others.

    An operation must be called by all processes of its line, in the same order. All of them raise GroupLost if a
    process ended, failed, or takes longer than `World.stall` seconds; so do all operations after that.

    Attributes:
        traffic: what this process sent. everyone: the line of all.
    """

    def __init__(self, world: World) -> None:
        """Raises FloeError: the others do not come, or cannot be reached."""
        self.world, self.traffic, self.lost = world, Traffic(), GroupLost("")
        self._broken = False
        self._card: str | None = None  # of this process, where tensors go over NCCL
        _stay_local(world)
        try:
            store = next(iter(dist.rendezvous("env://", world.rank, world.size, timeout=_MET)))[0]
            store = dist.PrefixStore("floe-chat", store)
            self.members = Members(world, store)
            dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=_CALM)
            self._stall = timedelta(seconds=world.stall)
            # Others wait for process 0 as long as a person thinks; it does not wait for one that hears nothing.
            patience = self._stall if world.rank == 0 else _CALM
            self._told: Any = dist.new_group(timeout=patience, backend="gloo")
            self.everyone = self.line(range(world.size))
        except (RuntimeError, ValueError, OSError) as error:
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise FloeError(
                "The processes cannot reach each other",
                f"They meet at {at}: {str(error).splitlines()[0]}",
                "Check that address and port, and that no firewall is between the machines.",
            ) from error

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def line(self, ranks: Sequence[int]) -> Line:
        """A line of these processes; all processes of the group must call it."""
        members, backend = tuple(ranks), "gloo" if self._card is None else "nccl"
        with self._guarded():
            handle = dist.new_group(list(members), timeout=self._stall, backend=backend) if len(members) > 1 else None
        return Line(members, handle)

    def settle(self, places: Sequence[str]) -> None:
        """Renew the line of all for tensors of these devices, by rank; all processes of the group must call it."""
        cards = {(one.host, place) for one, place in zip(self.members.all, places, strict=True) if place != "cpu"}
        own = places[self.rank] if len(cards) == self.size and dist.is_nccl_available() else None
        if own != self._card:
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else an operation that fails ends the process
            self._card = own
            if own is not None:
                torch.accelerator.set_device_index(own)
            self.everyone = self.line(range(self.size))

    def tell(self, message: Message) -> None:
        """From process 0 to all others, each of which waits in `hear`."""
        with self._guarded():
            content = messages.written(message)
            frame = torch.zeros(_FRAME, dtype=torch.uint8)
            frame[:8] = torch.tensor([len(content)]).view(torch.uint8)
            whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            frame[8 : 8 + len(whole)] = whole[: _FRAME - 8]
            dist.broadcast(frame, 0, group=self._told)
            rest = whole[_FRAME - 8 :]
            if len(rest):
                dist.broadcast(rest, 0, group=self._told)
            others = self.size - 1
            self.traffic.add("told", others * (2 if len(rest) else 1), others * (_FRAME + len(rest)))

    def hear(self) -> Message:
        """The next message of process 0, whenever it comes."""
        with self._guarded():
            frame = torch.empty(_FRAME, dtype=torch.uint8)
            dist.broadcast(frame, 0, group=self._told)
            length = int(frame[:8].view(torch.int64))
            rest = torch.empty(max(0, length - (_FRAME - 8)), dtype=torch.uint8)
            if len(rest):
                dist.broadcast(rest, 0, group=self._told)
        return messages.read(bytes(torch.cat([frame[8:], rest])[:length].numpy()))

    def gathered(self, content: bytes) -> list[bytes]:
        """What each process gives, by rank; as long as they take."""
        with self._guarded():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(content)]))
            longest = max(int(each) for each in lengths)
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            found = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(found, own)
        return [bytes(each[: int(length)].numpy()) for each, length in zip(found, lengths, strict=True)]

    def sum(self, values: Tensor, line: Line | None = None) -> Tensor:
        """The sum of what all processes give; equal on all of them to the last bit. `values` may be overwritten."""
        line = line or self.everyone
        if line.handle is None:
            return values
        own = self._sendable(values)
        with self._guarded():
            dist.all_reduce(own, group=line.handle)
        size = len(line.ranks)
        self.traffic.add("summed", 2 * (size - 1), 2 * (size - 1) * own.nbytes // size)
        return own.to(values.device)

    def swap(self, kind: str, rows: Tensor, send: Sequence[int], receive: Sequence[int], line: Line) -> Tensor:
        """All to all: the first send[0] of rows (N, ...) to the first process of the line, the next to the second.

        Args:
            receive: how many rows each sends to this one. kind: see `Traffic`.

        Returns:
            (sum of receive, ...), the first process's rows first.
        """
        if line.handle is None:
            return rows
        own = self._sendable(rows).contiguous()
        found = own.new_empty((sum(receive), *own.shape[1:]))
        with self._guarded():
            dist.all_to_all_single(found, own, list(receive), list(send), group=line.handle)
        others = [count for count, rank in zip(send, line.ranks, strict=True) if count and rank != self.rank]
        row = own[0].nbytes if len(own) else 0
        self.traffic.add(kind, len(others), row * sum(others))
        return found.to(rows.device)

    def give_up(self, why: str) -> None:
        """This process cannot go on: say why to the others, who notice soon."""
        self.members.note(why)
        self._lose(GroupLost("This process has left the others", why, "Start floe-chat again in all processes."))

    def end(self) -> None:
        """Process 0 ends, and the others with it."""
        if not self._broken:
            self.tell(End())

    def _sendable(self, values: Tensor) -> Tensor:
        """Where the lines' library reads it."""
        return values.to(self._card or "cpu")

    def _lose(self, error: GroupLost) -> None:
        self.lost, self._broken = error, True

    @contextmanager
    def _guarded(self) -> Generator[None]:
        if self._broken:
            raise self.lost
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            self._lose(self.members.lost(error))
            raise self.lost from error


def _stay_local(world: World) -> None:
    """Processes of one machine talk over its loopback, unless the environment names an interface."""
    alone = os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost", "::1") or world.beside == world.size
    if alone and "GLOO_SOCKET_IFNAME" not in os.environ:
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == "127.0.0.1" for each in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
