"""A process that ends or stalls ends the answer with a sentence, in all of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from floe_chat.models.catalog import asset

from .processes import Processes

pytestmark = pytest.mark.slow

DEMO = str(asset("demo", "packed"))
PROMPT = list(range(5, 60))
Start = Callable[..., Processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[Processes] = []

    def make(size: int, stall: int = 60) -> Processes:
        begun.append(Processes(size, tmp_path, stall))
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
            assert group.all[other].wait(60) == 1
            assert f"Process {rank} of {group.size}" in group.stderr(other)
    assert group.all[0].poll() is None


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
    group = start(4)
    group.all[2].kill()  # while all others wait for what process 0 says next
    group.all[2].wait()
    assert lost(group, 1 << 30, 0, 0).startswith("Process 2 of 4, on ")
    others_end(group, 2)
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
    group = start(4)
    group.all[0].kill()  # and with it the store in which the others look for each other
    for rank in (1, 2, 3):
        assert group.all[rank].wait(60) == 1
        assert "Process 0 of 4" in group.stderr(rank) and "Traceback" not in group.stderr(rank)


@pytest.mark.thorough
def test_process_0_ends(start: Start):
    group = start(2)
    assert group.end() == [0, 0]
    assert group.stderr(1).splitlines() == [group.stderr(1).strip()]  # that it serves, and nothing else
    assert "process 1 of 2 serves process 0" in group.stderr(1)


def test_a_pass_that_fails_in_process_0(start: Start):
    group = start(2, stall=3)
    given = {"new": 5, "into": "/dev/null", "rule": {}, "fresh": True}
    group.send("answer", prompt=[5, 6, 1 << 40], **given)
    group.all[1].wait(60)
    assert group.all[1].returncode == 1
    assert "IndexError" in group.stderr(1) and "Start floe-chat again" in group.stderr(1)
