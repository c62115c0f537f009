"""`floe-chat ask` as a process among others: interrupted by its user, left by whoever reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from floe_chat.models.pack import EXACT

from ..helpers import edit_json, make_checkpoint, make_pack


@pytest.fixture(scope="module")
def long_winded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose answers go on for thousands of tokens: it knows no token that ends one."""
    folder = tmp_path_factory.mktemp("long")
    source = make_checkpoint(folder / "source", window=1 << 15, layers=1)
    edit_json(source / "generation_config.json", lambda fields: fields.clear())
    edit_json(source / "config.json", lambda fields: fields.update(eos_token_id=None))
    edit_json(source / "tokenizer_config.json", lambda fields: fields.pop("eos_token"))
    make_pack(source, folder / "packed", EXACT)
    return folder / "packed"


def start(pack: Path, *options: str) -> subprocess.Popen[bytes]:
    """`floe-chat ask` in a process of its own, answering for a long time."""
    # Whoever runs the tests in the background may have them inherit an ignored SIGINT.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heed}; from floe_chat.app.cli import command; command()"
    options = ("ask", "hi", "-m", str(pack), "--max-tokens", "16000", "--temperature", "5", "--seed", "1", *options)
    command, nothing, pipe = [sys.executable, "-c", program, *options], subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=pipe)


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


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe differently")
@pytest.mark.parametrize("options", [[], ["--json", "--max-tokens", "3"]], ids=["text", "json"])
def test_a_reader_that_leaves_ends_it_quietly(long_winded: Path, options: list[str]) -> None:
    with start(long_winded, *options) as process:
        assert process.stdout and process.stderr
        if not options:
            assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1, -signal.SIGPIPE, 128 + signal.SIGPIPE)
