"""The installed floe-chat in a real terminal: keys, resizing, signals, a terminal that goes away, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

if sys.platform == "win32":
    pytest.skip("Windows has no pseudo terminals of this kind", allow_module_level=True)

from floe_chat.app.history import History, Message, history_file
from floe_chat.app.settings.file import settings_file
from floe_chat.app.setup.setups import Setups
from floe_chat.app.setup.wish import Wish
from floe_chat.models.packing.pack import PackSpec

from ..bench.window import Window
from ..helpers import edit_tensors, make_checkpoint, make_pack
from ..models.fakehub import ALWAYS, FakeHub, Fault
from .scripted import ScriptedClient, app_for, screen_text
from .scripted import until as until_shown
from .wizardry import REPO

INTERRUPT, ENTER, QUIT, ESCAPE = "\x03", "\r", "\x11", "\x1b"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments with which an answer lasts for minutes: a model that says nothing but small letters."""
    folder = tmp_path_factory.mktemp("endless")
    checkpoint = make_checkpoint(folder / "checkpoint", window=32768)
    vocab = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    letters = [vocab[letter] for letter in string.ascii_lowercase]

    def without_others(name: str, tensor: Tensor) -> Tensor:
        if name != "lm_head.weight":
            return tensor
        kept = torch.zeros_like(tensor)
        kept[letters] = tensor[letters]
        return kept

    edit_tensors(checkpoint, without_others)
    make_pack(checkpoint, folder / "endless", PackSpec(), "endless")
    return ["--model", str(folder / "endless"), "--temperature", "0", "--max-tokens", "30000"]


@pytest.fixture(autouse=True)
def not_the_first_run(own_folders: Path) -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().touch()


@pytest.fixture
def history() -> Iterator[History]:
    """What the program keeps, seen from outside."""
    history = History(history_file())
    yield history
    history.close()


def last_answer(history: History) -> Message:
    newest = history.newest()
    assert newest is not None
    return history.messages(history.branch(newest.head))[-1]


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def is_gone(window: Window) -> bool:
    """Whether no process of the program is left."""
    try:
        os.killpg(window.process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def begin_answer(window: Window, history: History, words: str) -> str:
    """Ask, and wait until some of the answer is on the disk; returns that."""
    window.type(words + ENTER)
    window.until("● writing")
    until(lambda: last_answer(history).role == "assistant" and len(last_answer(history).text) > 20, "no answer is kept")
    return last_answer(history).text


@pytest.mark.slow
def test_one_terminal_after_the_other(endless: list[str], history: History) -> None:
    with Window(endless) as window:
        window.type("typed too ea")  # before there is a screen
        window.until("starting")
        window.type("rly")
        window.until(lambda text: "● ready" in text and "Memory" in text)
        window.until("typed too early")
        shown = begin_answer(window, history, "")
        window.resize(60, 20)
        window.until(lambda text: "● writing" in text and "Memory" not in text)
        window.type("it waits" + ENTER)
        window.until("queued until the answer has ended")
        window.type("never sent")
        until(lambda: len(last_answer(history).text) > len(shown), "the answer stands still")
        until(lambda: "never sent" in str(history.unsent(lambda _start, _process: False)), "the draft is not kept")
        shown = last_answer(history).text
        assert window.end(signal.SIGKILL) == -signal.SIGKILL
    assert history.messages(history.branch(last_answer(history).parent))[-1].text == "typed too early"

    with Window(endless) as window:
        window.until("An answer was cut off when floe-chat last ended")
        window.until(lambda text: "it waits" in text and "never sent" in text)
        assert (last_answer(history).state, last_answer(history).stats) == ("stopped", None)
        assert last_answer(history).text.startswith(shown)
        window.until("● loading")  # which quitting does not wait for
        window.type(QUIT)
        assert (window.end(), window.is_as_before(), is_gone(window)) == (0, True, True)


@pytest.mark.thorough
def test_an_interrupt_stops_the_answer_and_a_hangup_the_program(endless: list[str], history: History) -> None:
    with Window(endless) as window:
        window.until("● ready")
        begin_answer(window, history, "first")
        window.type("half a thou" + INTERRUPT)
        window.until("● stopped")
        window.until("Press Ctrl+C again")
        assert "half a thou" in window.text and window.process.poll() is None
        shown = begin_answer(window, history, "ght")
        window.close()
        assert (window.end(), is_gone(window)) == (129, True)
    assert last_answer(history).state == "stopped" and last_answer(history).text.startswith(shown)
    asked = [message.text for message in history.messages(history.branch(last_answer(history).parent))]
    assert asked[0] == "first" and asked[-1] == "half a thought" and len(history.conversations()) == 1


_HOLDING = """
import os, signal, threading, time
from floe_chat.app.terminal.terminal import Terminal

lock = threading.Lock()
with Terminal() as terminal:
    terminal.serve(lambda code: None, lock.acquire)
    {first}
    with lock:
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.2)
print("the interrupted thread ended it")
"""


@pytest.mark.parametrize(("name", "first"), [("SIGHUP", ""), ("SIGTERM", "terminal.screen_ended()")])
def test_a_signal_ends_it_although_saving_needs_what_it_interrupts(name: str, first: str) -> None:
    script = _HOLDING.format(name=name, first=first)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (128 + getattr(signal, name), "")


@pytest.mark.thorough
def test_a_signal_ends_it_before_there_is_a_screen(endless: list[str]) -> None:
    with Window(endless) as window:
        window.until("starting")
        assert (window.end(signal.SIGINT), window.is_as_before(), is_gone(window)) == (130, True, True)


async def test_quitting_does_not_wait_for_a_download_that_stands_still(
    hub: FakeHub, setups: Setups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floe_chat.app.setup.setups._LEAVING_S", 0.1)
    hub.faults.append(Fault("GET /storage/", times=ALWAYS, stall_after=100))
    app = app_for(ScriptedClient())
    app.setups = setups
    async with app.run_test() as pilot:
        setups.start(Wish(REPO, "tiny"))
        await app._switch(None)  # pyright: ignore[reportPrivateUsage] - as leaving the wizard does
        await until_shown(pilot, lambda: "tiny: " in screen_text(pilot))
        await pilot.press("ctrl+q")
        await until_shown(pilot, lambda: not app.is_running)
    setups.close()
    assert app.return_value == 0 and not hub.unstalled.is_set()


@pytest.mark.thorough
def test_what_could_not_be_saved_is_the_exit_code(endless: list[str], history: History) -> None:
    with Window(endless) as window:
        window.until("● ready")
        begin_answer(window, history, "first")
        window.type(ESCAPE)
        window.until("stopped by you")
        with closing(sqlite3.connect(history_file(), isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            window.type("second" + ENTER)
            window.until("● writing")
            window.type(QUIT)
            window.until("Waiting up to")
            assert window.end(signal.SIGINT) == 1
        window.until("was not saved, or not all of it")
    assert last_answer(history).role == "assistant"
