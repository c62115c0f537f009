"""The program itself, started as several processes, as torchrun or a person starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from floe_chat.engine.parallel.place import Place
from floe_chat.models.errors import UsageError

from ...helpers import explained, run_cli
from .processes import DEADLINE_S, free_port

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


def test_what_cannot_be(tmp_path: Path):
    assert "There are no other processes" in explained(run_cli(*ASK, "--parallel", "tp"), 2)
    first, other = run((*ASK, "--parallel", "s-etp:3"), [tmp_path, tmp_path])
    assert first[0] == 2 and "2 processes cannot hold 3 slices" in first[2] and "2 processes cannot hold" in other[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"RANK": "two"}, "RANK is 'two'"), ({"RANK": "0", "MASTER_PORT": ""}, "MASTER_PORT is not set")],
)
def test_an_environment_that_makes_no_sense_is_explained(given: dict[str, str], said: str):
    with pytest.raises(UsageError, match=said) as refused:
        Place.of({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **given})
    assert "torchrun" in refused.value.hint


def test_other_commands_run_once(tmp_path: Path):
    first, other = run(("paths",), [tmp_path, tmp_path])
    assert first[0] == other[0] == 0
    assert first[1] and other[1:] == ("", "")
