"""`kill -9` in the middle of an answer, and a new start on the same port."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from .test_serve_process import address, start

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")
ENDLESS = {"stream": True, "temperature": 5, "max_tokens": 30_000}


def contents(*folders: Path) -> dict[str, str]:
    """Each file below, and what is in it."""
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def children(process: int) -> list[int]:
    """Of a process, with theirs; none where the system does not say."""
    listed = Path(f"/proc/{process}/task").glob("*/children")  # by the thread that started them
    mine = [int(word) for each in listed for word in each.read_text().split()]
    return [*mine, *(grandchild for child in mine for grandchild in children(child))]


def runs(process: int) -> bool:
    """Whether it does; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def killed_in_an_answer(pack: Path, port: str) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """A server in the middle of one; where it answers."""
    with start("--model", str(pack), "--port", port) as process:
        url = address(process)
        model = httpx2.get(f"{url}/models").json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **ENDLESS}
        with httpx2.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            yield url, process
            process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx2.RemoteProtocolError):  # no end that could be taken for one
                list(lines)
        assert process.wait(30) == -signal.SIGKILL


def test_it_starts_again_on_the_same_port_and_nothing_is_damaged(long_winded: Path) -> None:
    home, before = Path.home(), contents(long_winded)
    assert run_once(long_winded, "0")  # the first start writes what later ones find
    kept = contents(home)
    with killed_in_an_answer(long_winded, "0") as (url, process):
        others = children(process.pid)
        assert others or not Path(f"/proc/{process.pid}/task/{process.pid}/children").exists()
    with killed_in_an_answer(long_winded, url.rpartition(":")[2].removesuffix("/v1")) as (again, _):
        assert again == url
    assert contents(long_winded) == before and contents(home) == kept
    for _ in range(600):  # the process of its tokenizer ends with it
        if not any(map(runs, others)):
            break
        time.sleep(0.05)
    assert not any(map(runs, others))


def run_once(pack: Path, port: str) -> str:
    with start("--model", str(pack), "--port", port) as process:
        return address(process)


@pytest.mark.thorough
def test_connections_of_a_killed_server_do_not_hold_its_port(long_winded: Path) -> None:
    """Clients that have noticed nothing yet, and one that has sent half of a request."""
    with start("--model", str(long_winded), "--port", "0") as process:
        url = address(process)
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(5)]
        idle[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
        assert httpx2.get(f"{url}/models").status_code == 200
        process.kill()
        process.wait(30)
    with start("--model", str(long_winded), "--port", port) as process:
        assert address(process) == url and httpx2.get(f"{url}/models").status_code == 200
    for one in idle:
        one.close()
