"""The program as several processes, as torchrun or a person starts them.

A process that ends or stalls ends the answer with a sentence, in all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from floe_chat.engine.parallel.world import World
from floe_chat.models.catalog import asset
from floe_chat.models.errors import UsageError

from ...helpers import run_cli
from .processes import DEADLINE_S, Processes, free_port

pytestmark = pytest.mark.slow

ASK = ("ask", "--no-save", "--temperature", "0", "--max-tokens", "12", "What is an expert?")


def run(
    arguments: Sequence[str], homes: Sequence[Path], environment: dict[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """The program in one process for each home: exit codes, stdout and stderr."""
    shared = {"WORLD_SIZE": str(len(homes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun = [
        subprocess.Popen(
            [sys.executable, "-m", "floe_chat.app", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"RANK": str(rank), "HOME": str(home)} | (environment or {}),
        )
        for rank, home in enumerate(homes)
    ]
    try:
        ended = [process.communicate(timeout=DEADLINE_S) for process in begun]
    finally:
        for process in begun:
            process.kill()
    return [(process.returncode, *each) for process, each in zip(begun, ended, strict=True)]


def test_a_question(tmp_path: Path):
    first, other = run((*ASK, "--preset", "High"), [tmp_path, tmp_path])
    assert first[0] == other[0] == 0, (first, other)
    assert other[1] == "" and other[2].count("\n") == 1 and "process 1 of 2 serves process 0" in other[2]
    alone = run_cli(*ASK, "--preset", "High").out
    assert first[1] == alone and len(alone) > 20


@pytest.mark.thorough
def test_torchrun(tmp_path: Path):
    command = ["--standalone", "--nproc-per-node", "2", "-m", "floe_chat.app", *ASK, "--parallel", "ep", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env=os.environ | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answer"]


@pytest.mark.thorough
def test_packs_that_differ(tmp_path: Path, tiny_pack: Path, exact_pack: Path):
    homes = [tmp_path / "first", tmp_path / "other"]
    for home, pack in zip(homes, (tiny_pack, exact_pack), strict=True):
        shutil.copytree(pack, home / ".local/share/floe-chat/models/same")
    found = run((*ASK, "--model", "same"), homes)
    for code, _, said in found:
        assert "Process 1, on " in said and "has another pack" in said and "Copy the model" in said, found
        assert code in (0, 2)
    assert found[0][0] == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [({"RANK": "two"}, "RANK is 'two'"), ({"RANK": "0", "MASTER_PORT": ""}, "MASTER_PORT is not set")],
)
def test_an_environment_that_makes_no_sense_is_explained(given: dict[str, str], said: str):
    with pytest.raises(UsageError, match=said) as refused:
        World.of({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **given})
    assert "torchrun" in refused.value.hint


def test_other_commands_run_once(tmp_path: Path):
    first, other = run(("paths",), [tmp_path, tmp_path])
    assert first[0] == other[0] == 0
    assert first[1] and other[1:] == ("", "")


DEMO = str(asset("demo", "packed"))
PROMPT = list(range(5, 60))
Start = Callable[..., Processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[Processes] = []

    def make(size: int, stall: int = 60, *, forked: bool = True) -> Processes:
        begun.append(Processes(size, tmp_path, stall, forked=forked))
        begun[-1].do("open", pack=DEMO, pattern="ep")
        begun[-1].answer(PROMPT, 2)
        return begun[-1]

    yield make
    for each in begun:
        each.kill()


def others_end(group: Processes, rank: int) -> None:
    """All others but the lost one end while process 0 goes on."""
    for other in range(1, group.size):
        if other != rank:
            assert group.do("ended", rank=other)["code"] == 1
            assert f"Process {rank} of {group.size}" in group.stderr(other)


def lost(group: Processes, passes: int, rank: int, number: int) -> str:
    """The sentence of process 0 about a signal after so many passes."""
    given = {"prompt": PROMPT, "new": 50, "into": "/dev/null", "rule": {}, "fresh": True}
    group.send("answer", **given, signal=[passes, rank, number])
    found = group.reply()
    assert found["kind"] == "GroupLost", found
    return found["error"]


@pytest.mark.parametrize(
    ("size", "rank", "passes"),
    [pytest.param(2, 1, 0, id="in a prompt", marks=pytest.mark.thorough), pytest.param(3, 2, 5, id="in an answer")],
)
def test_a_process_is_killed(start: Start, size: int, rank: int, passes: int):
    group = start(size)
    said = lost(group, passes, rank, signal.SIGKILL)
    assert said.startswith(f"Process {rank} of {size}, on ") and "has ended" in said.splitlines()[0]
    assert "Start floe-chat again" in said
    assert lost(group, 1 << 30, 0, 0) == said  # the next question too
    others_end(group, rank)
    group.end()


@pytest.mark.thorough
def test_a_process_is_killed_between_two_answers(start: Start):
    group = start(4, forked=False)
    group.all[2].kill()  # while all others wait for what process 0 says next
    group.all[2].wait()
    assert lost(group, 1 << 30, 0, 0).startswith("Process 2 of 4, on ")
    for rank in (1, 3):
        assert group.all[rank].wait(60) == 1
        assert "Process 2 of 4" in group.stderr(rank)
    group.end()


@pytest.mark.thorough
@pytest.mark.parametrize("passes", [0, 5], ids=["in a prompt", "in an answer"])
def test_a_process_stalls(start: Start, passes: int):
    group = start(2, stall=3)
    said = lost(group, passes, 1, signal.SIGSTOP)
    assert said.startswith("Process 1 of 2, on ") and "does not answer" in said.splitlines()[0]
    assert "It is suspended." in said


@pytest.mark.thorough
def test_process_0_is_killed(start: Start):
    group = start(4, forked=False)
    group.all[0].kill()  # and with it the store in which the others look for each other
    for rank in (1, 2, 3):
        assert group.all[rank].wait(60) == 1
        assert "Process 0 of 4" in group.stderr(rank) and "Traceback" not in group.stderr(rank)


@pytest.mark.thorough
def test_process_0_ends(start: Start):
    group = start(2, forked=False)
    assert group.end() == [0, 0]
    assert group.stderr(1).splitlines() == [group.stderr(1).strip()]  # that it serves, and nothing else
    assert "process 1 of 2 serves process 0" in group.stderr(1)


@pytest.mark.thorough
def test_a_pass_that_fails_in_process_0(start: Start):
    group = start(2, stall=3)
    given = {"new": 5, "into": "/dev/null", "rule": {}, "fresh": True}
    group.send("answer", prompt=[5, 6, 1 << 40], **given)
    assert group.reply() == {"broke": "IndexError"}
    assert group.do("ended", rank=1)["code"] == 1
    assert "IndexError" in group.stderr(1) and "Start floe-chat again" in group.stderr(1)
