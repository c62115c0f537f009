"""Who the processes of a group are, and which of them is to blame when one does not answer."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
import psutil
import torch.distributed as dist

from ...models.errors import FloeError, UsageError
from .messages import PROTOCOL, Hello
from .world import World

_JOIN = timedelta(seconds=300)  # a process on another machine is started by hand
_NOTE = timedelta(seconds=2)  # what a store takes that answers
_GRACE_S = 15.0  # for the others to notice a loss too: a busy machine takes its time
_STUCK_S = 5.0  # after process 0 has noticed a loss
_LOOK_S = 1.0  # between two looks at process 0
_ALIVE = "I noticed a loss"


class GroupLost(FloeError):  # noqa: N818 - what the user sees is that a process is gone
    """A process of the group ended, failed, or does not answer: no answer can be computed any more."""


class Members:
    """The processes of a group, and the notes that they leave for each other in torch's store.

    Attributes:
        all: by rank.
    """

    def __init__(self, world: World, store: dist.Store) -> None:
        """Waits until all have come.

        Raises:
            FloeError: one does not come. UsageError: one is of another version.
        """
        self._world, self._store = world, store
        with psutil.Process().oneshot():
            mine = Hello(PROTOCOL, platform.node(), os.getpid(), psutil.Process().create_time())
        store.set(f"hello/{world.rank}", msgspec.json.encode(mine).decode())
        names = [f"hello/{rank}" for rank in range(world.size)]
        try:
            store.wait(names, _JOIN)
        except RuntimeError as error:  # which is what torch's own kinds of errors are
            raise FloeError(
                "Not all processes have come",
                f"{world.size} were to be started; this is number {world.rank}.",
                "Start the others too, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE.",
            ) from error
        self.all: Sequence[Hello] = [msgspec.json.decode(store.get(name), type=Hello) for name in names]
        if any(one.protocol != PROTOCOL for one in self.all):
            raise UsageError(
                "The processes are different versions of floe-chat", "", "Install the same version on all machines."
            )

    @property
    def beside(self) -> int:
        """Processes on this machine, this one included."""
        return sum(one.host == self.all[self._world.rank].host for one in self.all)

    def note(self, text: str) -> None:
        """Say why this process ends."""
        with suppress(RuntimeError):  # the store ended with process 0
            self._store.set(f"note/{self._world.rank}", text)

    def lost(self, error: BaseException | None) -> GroupLost:
        """After an operation that failed: which process is to blame, as far as can be known."""
        self.note(_ALIVE)
        until, blamed = time.monotonic() + _GRACE_S, None
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        while blamed is None and others and time.monotonic() < until:
            blamed = next((found for rank in others if (found := self._blamed(rank)) is not None), None)
            others = [rank for rank in others if self._noted(rank) != _ALIVE]
            time.sleep(0.02)
        if blamed is None and others:
            several = f"; nor {'does' if len(others) == 2 else 'do'} {', '.join(map(str, others[1:]))}"
            why = "Its machine or the network may be too busy."
            blamed = self._sentence(others[0], f"does not answer{several if others[1:] else ''}", why)
        if blamed is None:
            first = str(error).split(". This is typically")[0]
            blamed = GroupLost("The processes lost each other", f"{first}.", _AGAIN)
        return blamed

    def watch(self, stuck: Callable[[GroupLost], None]) -> None:
        """Call `stuck` if this process goes on some seconds after process 0 has noticed a loss, or has ended.

        Gloo may wait for a process that ended just before: until the stall limit, or for ever where there is none.
        """
        while self._noted(0) != _ALIVE and self._blamed(0) is None:
            time.sleep(_LOOK_S)
        time.sleep(_STUCK_S)
        stuck(self.lost(None))

    def _blamed(self, rank: int) -> GroupLost | None:
        if noted := self._noted(rank):  # one that noticed the loss too is not its cause, whether it has ended or not
            return None if noted == _ALIVE else self._sentence(rank, "has failed", noted)
        who = self.all[rank]
        if who.host != self.all[self._world.rank].host:
            return None
        try:
            process = psutil.Process(who.pid)
            state = process.status()
            if abs(process.create_time() - who.started) < 1:
                if state == psutil.STATUS_STOPPED:
                    return self._sentence(rank, "does not answer", "It is suspended.")
                if state not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    return None
        except psutil.Error:
            pass
        # A process that fails says why, just before it ends.
        if noted := self._noted(rank):
            return None if noted == _ALIVE else self._sentence(rank, "has failed", noted)
        return self._sentence(rank, "has ended", "It was stopped, or its machine ran out of memory.")

    def _noted(self, rank: int) -> str:
        name = f"note/{rank}"
        try:
            self._store.set_timeout(_NOTE)
            return self._store.get(name).decode() if self._store.check([name]) else ""
        except RuntimeError:
            return ""

    def _sentence(self, rank: int, what: str, why: str) -> GroupLost:
        title = f"Process {rank} of {self._world.size}, on {self.all[rank].host}, {what}"
        return GroupLost(title, f"{why} The answer stops here: a part of the experts is there.", _AGAIN)


_AGAIN = "Start floe-chat again in all processes."
