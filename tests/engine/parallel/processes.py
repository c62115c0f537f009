"""Real processes that compute one model together: `leader.py`, and others as `floe-chat` starts them."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEADLINE_S = 120.0
HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Processes:
    """A group of this size. Each process has the environment that torchrun sets.

    Args:
        forked: process 0 starts the others, which it can do sooner; `all` has it alone. modules: what it imports first.
    """

    def __init__(
        self, size: int, folder: Path, stall: int = 60, *, forked: bool = False, modules: Sequence[str] = ()
    ) -> None:
        self.size, self._folder, self._count = size, folder, 0
        self._asked, self._opened = dict[str, Any](), dict[str, Any]()
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "FLOE_CHAT_STALL_S": str(stall),
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
        }
        self.errors = [folder / f"stderr-{rank}" for rank in range(size)]
        self.all: list[subprocess.Popen[str]] = []
        for rank in range(1 if forked else size):
            leader = [str(HERE / "leader.py"), *([str(size), str(folder), *modules] if forked else [])]
            command = leader if rank == 0 else ["-m", "floe_chat.app", "ask", "unused"]
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self.errors[rank].open("w") as errors:
                started = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    text=True,
                    start_new_session=True,
                )
            self.all.append(started)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        out = self.all[0].stdout
        assert out is not None
        for line in out:
            self._lines.put(line)
        self._lines.put("")

    def send(self, do: str, **given: Any) -> None:
        """Ask process 0 to do something."""
        if do == "open":
            self._asked = {}
        into = self.all[0].stdin
        assert into is not None
        into.write(json.dumps({"do": do, **given}) + "\n")
        into.flush()

    def reply(self) -> dict[str, Any]:
        """What came of it."""
        line = self._lines.get(timeout=DEADLINE_S)
        assert line, f"process 0 ended: {self.stderr(0)}"
        return json.loads(line)

    def do(self, do: str, **given: Any) -> dict[str, Any]:
        """Both."""
        self.send(do, **given)
        found = self.reply()
        assert "error" not in found, f"{found['error']}\n{[self.stderr(rank) for rank in range(self.size)]}"
        return found

    def open(self, pack: Path, pattern: str, **how: Any) -> dict[str, Any]:
        """See `Leader.open`; nothing is done where it is open already."""
        asked = {"pack": str(pack), "pattern": pattern, **how}
        if asked != self._asked:
            self._opened = self.do("open", **asked)
            self._asked = asked
        return self._opened

    def answer(
        self,
        prompt: Sequence[int],
        new: int = 6,
        *,
        rule: dict[str, Any] | None = None,
        fresh: bool = True,
        stop_after: int = -1,
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """See `Leader.answer`; with the logits (V,) of each pass."""
        self._count += 1
        into = self._folder / f"logits-{self._count}"
        given = {"rule": rule or {}, "fresh": fresh, "stop_after": stop_after}
        found = self.do("answer", prompt=list(prompt), new=new, into=str(into), **given)
        return found, torch.load(into)

    def stderr(self, rank: int) -> str:
        return self.errors[rank].read_text()

    def end(self) -> list[int]:
        """Process 0 is told to end; the exit codes of all."""
        into = self.all[0].stdin
        assert into is not None
        into.close()
        return [process.wait(DEADLINE_S) for process in self.all]

    def kill(self) -> None:
        """End those that still run."""
        for process in self.all:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it forked
            process.wait(DEADLINE_S)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
