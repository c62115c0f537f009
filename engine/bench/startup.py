"""Start-up times: `floe-chat ask` as a whole, its parts in fresh processes, and the first token of a loaded model.

Importing this file is cheap: a fresh process runs it (`python -m floe_chat.engine.bench.startup PACK`) to time what
it imports and loads itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...models.errors import FloeError
from ..torch_import import import_torch
from .measure import MeasureReport, ResultTable, Section, Timed, in_turn, summarise

WARM = 1  # the first run fills the system's file cache
GOALS = {"first token": 1.0, "ask": 4.0}  # seconds, for the demo
_PARTS = ("python", "import torch", "load the model")


def run(
    ask: Sequence[str], pack: Path, model: str, *, runs: int, report: MeasureReport = lambda _what, _done, _total: None
) -> ResultTable:
    """Measure.

    Args:
        ask: the command line of one question whose answer is JSON. pack: the folder of the model that it asks.

    Raises:
        FloeError: a process failed.
    """
    from ..machine import conditions
    from ..machine.load import Others

    def asked() -> Mapping[str, float]:
        start = time.perf_counter()
        answer = json.loads(_output(ask))
        taken = time.perf_counter() - start
        return {"ask": taken, "first token": answer["first_token_s"]}

    def parts() -> Mapping[str, float]:
        start = time.perf_counter()
        found: dict[str, float] = json.loads(_output([sys.executable, "-m", __name__, str(pack)]))
        found["python"] = time.perf_counter() - start - sum(found.values())
        return found

    others = Others(own=_own_seconds)
    found = in_turn(
        [asked, parts], warm=WARM, runs=runs, report=lambda done, total: report("Starting floe-chat", done, total)
    )
    cores = others.cores()
    goals = {name: f"goal: under {seconds:.0f} s" for name, seconds in GOALS.items()}
    rows = {name: Timed(name, seconds, [0.0] * runs, note=goals.get(name, "")) for name, seconds in found.items()}
    facts = {"model": model, **conditions.facts(conditions.backend("cpu"), runs=runs, warm_up=WARM)}
    sections = (
        Section("A question of one sentence, answered by 16 tokens at most", summarise([rows["ask"]]), cores),
        Section(
            "A warm start: the model is loaded, the question was just asked", summarise([rows["first token"]]), cores
        ),
        Section("Before the model can answer, in order", summarise([rows[name] for name in _PARTS]), cores),
    )
    return ResultTable("startup", "cpu", facts, sections, ())


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise FloeError("floe-chat could not be started", done.stderr.strip(), "Run `floe-chat ask hello` to see why.")
    return done.stdout


def _own_seconds() -> float:
    """CPU time of this process and of all that it started and that have ended."""
    import psutil

    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _milestones(pack: Path) -> dict[str, float]:
    """Seconds of each import and load, in a fresh process."""
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    import_torch()
    mark()
    from ..loader import load

    load(pack, None, "auto", lambda _step, _share: None)
    mark()
    return {name: after - before for name, before, after in zip(_PARTS[1:], marks, marks[1:], strict=False)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_milestones(Path(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)  # as the command does: torch takes seconds to shut down
