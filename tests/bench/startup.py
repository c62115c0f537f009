"""Start-up times: `floe-chat ask` as a whole, its parts in fresh processes, and the first token of a loaded model.

A fresh process runs this file again with the pack's folder, to time what it imports and loads itself.

Run: .venv/bin/python tests/bench/startup.py [MODEL] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from floe_chat.engine.bench.measure import ResultTable, Section, Timed, in_turn, summarise
from floe_chat.engine.torch_import import import_torch
from floe_chat.models.errors import FloeError

WARM = 1  # the first run fills the system's file cache
GOALS = {"first token": 1.0, "ask": 4.0}  # seconds, for the demo
_PARTS = ("python", "import torch", "load the model")


def run(ask: Sequence[str], pack: Path, model: str, *, runs: int) -> ResultTable:
    """Measure.

    Args:
        ask: the command line of one question whose answer is JSON. pack: the folder of the model that it asks.

    Raises:
        FloeError: a process failed.
    """
    from floe_chat.engine.machine import conditions
    from floe_chat.engine.machine.load import Others

    def asked() -> Mapping[str, float]:
        start = time.perf_counter()
        answer = json.loads(_output(ask))
        taken = time.perf_counter() - start
        return {"ask": taken, "first token": answer["first_token_s"]}

    def parts() -> Mapping[str, float]:
        start = time.perf_counter()
        found: dict[str, float] = json.loads(_output([sys.executable, "-P", __file__, "--milestones", str(pack)]))
        found["python"] = time.perf_counter() - start - sum(found.values())
        return found

    others = Others(own=_own_seconds)
    found = in_turn([asked, parts], warm=WARM, runs=runs)
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
    from floe_chat.engine.loader import load

    load(pack, None, "auto", lambda _step, _share: None)
    mark()
    return {name: after - before for name, before, after in zip(_PARTS[1:], marks, marks[1:], strict=False)}


def main() -> None:
    from floe_chat.app.cli.bench.table import finish
    from floe_chat.models.catalog import DEMO, find

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--milestones", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.milestones:
        sys.stdout.write(json.dumps(_milestones(Path(options.model))))
        sys.stdout.flush()
        os._exit(0)  # as the command does: torch takes seconds to shut down
    pack = find(options.model)
    program = [sys.executable, "-c", "from floe_chat.app.start import command; command()"]
    question = ["ask", "--json", "--seed", "1", "--max-tokens", "16", "--model", str(pack), "What is an expert?"]
    finish(run([*program, *question], pack, options.model, runs=options.runs), as_json=False)


if __name__ == "__main__":
    main()
