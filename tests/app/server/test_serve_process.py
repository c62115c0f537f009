"""`floe-chat serve` as a process: where it listens, how it ends or is killed, and a new start on the same port."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from floe_chat.app.cli.serve import listen_at

from ...helpers import explained, run_cli

ENDLESS = {"stream": True, "temperature": 5, "max_tokens": 30_000}
PROGRAM = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from floe_chat.app.start import command
command()"""


@contextmanager
def start(*options: str, **variables: str) -> Generator[subprocess.Popen[str]]:
    """Killed at the end, if it still runs."""
    command = [sys.executable, "-c", PROGRAM, "serve", *options]
    environment, pipe = {**os.environ, **variables}, subprocess.PIPE
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def address(process: subprocess.Popen[str]) -> str:
    """Of a server that has begun."""
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"http://\S+/v1", line)
    assert found, line
    return found[0]


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
def answering(pack: Path, key: Path) -> Generator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A server in the middle of an answer, and the lines that are still to come."""
    with start("--model", str(pack), "--port", "0", "--key-file", str(key)) as process:
        url, headers = address(process), {"Authorization": "Bearer a-secret"}
        assert httpx2.get(f"{url}/models", timeout=60).status_code == 401
        model = httpx2.get(f"{url}/models", headers=headers, timeout=60).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **ENDLESS}
        with httpx2.stream("POST", f"{url}/chat/completions", json=body, headers=headers, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            yield process, lines


@pytest.mark.skipif(os.name == "nt", reason="no such signals to another process on Windows")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.thorough)])
def test_a_signal_ends_it_in_the_middle_of_an_answer(number: signal.Signals, long_winded: Path, tmp_path: Path) -> None:
    """The files are as before. It answers who sends the key in the file."""
    home, before = Path.home(), contents(long_winded)
    (tmp_path / "key").write_text("a-secret\n")
    (tmp_path / "key").chmod(0o600)
    with answering(long_winded, tmp_path / "key") as (process, lines):
        kept, others = contents(home), children(process.pid)
        assert others or not Path(f"/proc/{process.pid}/task/{process.pid}/children").exists()
        process.send_signal(number)
        if number == signal.SIGKILL:
            with pytest.raises(httpx2.RemoteProtocolError):  # no end that could be taken for one
                list(lines)
            assert process.wait(30) == -number
        else:
            *_, last = filter(None, lines)
            assert "the server is ending" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert process.wait(30) == 130
            assert process.stdout and process.stderr and not process.stdout.read()
            assert process.stderr.read().strip() == "floe-chat: interrupted"
    assert contents(long_winded) == before and contents(home) == kept
    for _ in range(600):  # the process of its tokenizer ends with it
        if not any(map(runs, others)):
            break
        time.sleep(0.05)
    assert not any(map(runs, others))


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")
def test_connections_of_a_killed_server_do_not_hold_its_port(long_winded: Path) -> None:
    """Clients that have noticed nothing yet, and one that has sent half of a request."""
    with start("--model", str(long_winded), "--port", "0") as process:
        url = address(process)
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(5)]
        idle[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
        assert httpx2.get(f"{url}/models", timeout=60).status_code == 200
        process.kill()
        process.wait(30)
    with start("--model", str(long_winded), "--port", port) as process:
        assert address(process) == url and httpx2.get(f"{url}/models", timeout=60).status_code == 200
    for one in idle:
        one.close()


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        (("--host", "0.0.0.0"), None, "only with a key"),
        (("--key-file", "missing"), None, "cannot be read"),
        ((), "two words", "does not hold a key"),
        ((), " ", "holds no key"),
        (("--queue", "0"), None, "--queue"),
        (("--preset", "Best"), None, "There is no preset"),
    ],
)
def test_what_cannot_be_is_said(
    tiny_pack: Path, options: tuple[str, ...], key: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv("FLOE_CHAT_KEY", key)
    assert said in explained(run_cli("serve", "--model", str(tiny_pack), "--port", "0", *options), 2)


def test_a_port_that_is_taken(tiny_pack: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        err = explained(run_cli("serve", "--model", str(tiny_pack), "--port", str(port)), 1)
    assert f"127.0.0.1:{port}" in err and "--port" in err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a connection does not inherit this")
def test_connections_notice_a_client_that_vanished() -> None:
    """A machine without power says nothing: the system asks it."""
    with listen_at("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        made, _ = listening.accept()
        with made:
            assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
