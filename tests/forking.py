"""Processes of tokenizers, forked from one that has imported what they need: starting Python hundreds of times took a
tenth of all tests' time. Some of `tests/models/test_chat_process.py` start as the program does.

Run as a program, this file is the process that they are forked from.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any


class Nursery:
    """Forks chat_worker.py; started with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def fork(self, _command: list[str], *, env: dict[str, str], **_pipes: Any) -> Forked:
        """In place of `subprocess.Popen`."""
        requests, into = os.pipe()
        out, replies = os.pipe()
        told, tell = os.pipe()
        with self._lock:
            if self._socket is None:
                self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-W", "ignore", __file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=env,
                    start_new_session=True,
                )
                theirs.close()
            socket.send_fds(self._socket, [json.dumps(env).encode()], [requests, replies, tell])
        for descriptor in (requests, replies, tell):
            os.close(descriptor)
        return Forked(into, out, told)

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


class Forked:
    """What `ChatProcess` uses of a `subprocess.Popen`."""

    def __init__(self, into: int, out: int, told: int) -> None:
        self.stdin, self.stdout = os.fdopen(into, "wb"), os.fdopen(out, "rb")
        self._lock = threading.Lock()
        self._told = os.fdopen(told, "rb", 0)
        self._code: int | None = None
        self.pid = int(self._told.read(20))

    def poll(self) -> int | None:
        with self._lock:
            ended = self._code is None and select.select([self._told], [], [], 0)[0]
        return self.wait() if ended else self._code

    def wait(self) -> int:
        with self._lock:
            if self._code is None:
                self._code = int(self._told.read(20))
                self._told.close()
            return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Fork for each environment and pipes that come on the socket, which is the standard input."""
    gc.disable()
    from floe_chat.models.tokenizer import chat_worker
    from floe_chat.models.tokenizer.chat_template import ChatTemplate

    ChatTemplate("")  # Jinja compiles the expressions of its lexer once
    gc.freeze()
    gc.enable()
    ours = socket.socket(fileno=os.dup(0))
    while True:
        env, descriptors, _flags, _address = socket.recv_fds(ours, 1 << 20, 3)
        if not env:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            while True:  # so that their time counts as this one's
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break
            continue
        requests, replies, tell = descriptors
        if pid := os.fork():  # this one says how the other ends, as only its parent can
            for descriptor in (requests, replies):
                os.close(descriptor)
            with suppress(OSError):  # nobody listens any more
                os.write(tell, str(pid).rjust(20).encode())
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(tell, str(code).rjust(20).encode())
            os._exit(0)
        os.setsid()
        os.dup2(requests, 0)
        os.dup2(replies, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.closerange(3, 64)
        os.environ.clear()
        os.environ.update(json.loads(env))
        try:
            chat_worker.main()
        except BaseException:  # noqa: BLE001 - as Python ends
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    main()
