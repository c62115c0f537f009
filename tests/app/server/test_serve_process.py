"""`floe-chat serve` as a process: where it listens, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from floe_chat.app.cli.serve import listen_at

from ...helpers import explained, run_cli

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


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process on Windows")
def test_an_interrupt_ends_it_in_the_middle_of_an_answer(long_winded: Path, tmp_path: Path) -> None:
    """It answers who sends the key in the file."""
    (tmp_path / "key").write_text("a-secret\n")
    (tmp_path / "key").chmod(0o600)
    with start("--model", str(long_winded), "--port", "0", "--key-file", str(tmp_path / "key")) as process:
        url, headers = address(process), {"Authorization": "Bearer a-secret"}
        assert httpx2.get(f"{url}/models").status_code == 401
        model = httpx2.get(f"{url}/models", headers=headers).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 5}
        with httpx2.stream("POST", f"{url}/chat/completions", json=body, headers=headers, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines)
            process.send_signal(signal.SIGINT)
            *_, last = filter(None, lines)
            assert "the server is ending" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert process.wait(30) == 130
        assert process.stdout and process.stderr and not process.stdout.read()
        assert process.stderr.read().strip() == "floe-chat: interrupted"


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
