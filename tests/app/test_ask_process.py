"""`floe-chat ask` as a process among others: interrupted by its user, left by whoever reads it; what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from floe_chat.app.history import History, Message, history_file


def start(pack: Path, *options: str, heeding: str = "", stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """`floe-chat ask` in a process of its own, answering for a long time.

    It says so when it begins to heed a signal.
    """
    # Whoever runs the tests in the background may have them inherit an ignored SIGINT, or with nohup an ignored SIGHUP.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    if os.name != "nt":
        heed += "; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    if heeding:
        heed += f"""
from floe_chat.app.client.chat_client import ChatClient
begin = ChatClient.start
def start(client):
    begin(client)
    assert signal.getsignal(signal.{heeding}) is not signal.SIG_DFL
    print("heeded", flush=True)
ChatClient.start = start
"""
    program = f"{heed}\nfrom floe_chat.app.start import command; command()"
    options = ("ask", "hi", "-m", str(pack), "--max-tokens", "16000", "--temperature", "5", "--seed", "1", *options)
    command, nothing = [sys.executable, "-c", program, *options], subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=stdout, stderr=subprocess.PIPE)


def answers() -> list[Message]:
    """What the history has of answers."""
    history = History(history_file())
    try:
        newest = history.newest()
        branch = [] if newest is None else history.messages(history.branch(newest.head))
        return [message for message in branch if message.role == "assistant"]
    finally:
        history.close()


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process on Windows")
def test_an_interrupt_ends_a_running_answer(long_winded: Path) -> None:
    with start(long_winded) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        err = process.stderr.read().decode()
    assert process.returncode == 130
    assert err.strip() == "floe-chat: interrupted"


@pytest.mark.skipif(os.name == "nt", reason="no such signals to another process on Windows")
def test_a_hangup_ends_it_in_order_and_keeps_what_came(long_winded: Path) -> None:
    with start(long_winded) as process:
        assert process.stdout and process.stderr
        came = process.stdout.read(1)
        process.send_signal(signal.SIGHUP)
        came += process.stdout.read()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGHUP
    (answer,) = answers()
    assert answer.state == "stopped" and answer.text == came.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pipes of a page")
def test_a_signal_ends_it_while_nobody_reads(long_winded: Path) -> None:
    import fcntl

    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"-" * 4095)
    with start(long_winded, stdout=writing) as process:
        os.close(writing)
        assert process.stderr
        while not any(answer.text for answer in answers()):
            time.sleep(0.1)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stderr.read()) == (143, b"")
    os.close(reading)
    assert [answer.state for answer in answers()] == ["stopped"]


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM to another process on Windows")
def test_a_signal_ends_it_while_the_model_loads(long_winded: Path) -> None:
    with start(long_winded, heeding="SIGTERM") as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"heeded\n"
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stdout.read(), process.stderr.read()) == (143, b"", b"")
    assert answers() == []


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe differently")
def test_a_reader_that_leaves_ends_it_quietly(long_winded: Path) -> None:
    with start(long_winded) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1, -signal.SIGPIPE, 128 + signal.SIGPIPE)
    (answer,) = answers()
    assert answer.state == "stopped" and answer.text


# What a chat does not need is not imported: it would take longer than the answer


HEAVY = (
    *("transformers", "huggingface_hub", "hqq", "textual", "torch._dynamo", "torch.distributed.tensor", "sympy"),
    *("scipy", "httpx2", "floe_chat.app.client.remote.client", "floe_chat.app.client.remote.http"),
)
PROGRAM = """
import os, sys
from floe_chat.app.cli.main import command

def told(code):
    print(code, *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
    sys.stderr.flush()
    end(code)

end, os._exit = os._exit, told
command()
"""


def test_an_answer_waits_for_its_input_and_imports_nothing_heavy(tiny_pack: Path) -> None:
    options = ["--repetition-penalty", "1.1", "--top-k", "40", "--top-p", "0.9", "--max-tokens", "3", "--seed", "1"]
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), "ask", "hi", "-m", str(tiny_pack), *options]
    piped = subprocess.PIPE
    with subprocess.Popen(command, stdin=piped, stdout=piped, stderr=piped) as process:
        assert process.stdin and process.stdout and process.stderr
        assert b"waiting for piped input to end" in process.stderr.readline()
        process.stdin.close()
        assert process.stdout.read().strip() and process.stderr.read().split() == [b"0"]
