"""The stages by name, in the order of a run, and what all of them share."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import report

Row = dict[str, str | float | int | bool | None]


@dataclass(slots=True)
class Context:
    """What a stage runs in, and what it has found.

    Attributes:
        name: of the stage. place: "cuda", or "virtual": tiny sizes on what stands in for a card. folder: for results,
            and test packs.
        until: when it has to end, by time.monotonic(). rows: of the result's table; a row with "ok" False makes the
            stage fail. notes: lines under the table. unfinished: why the stage has more to do in another run.
        showed: in one line, what was seen and what follows from it.
    """

    name: str
    place: str
    folder: Path
    until: float
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])
    unfinished: str = ""
    showed: str = ""

    @property
    def real(self) -> bool:
        return self.place == "cuda"

    def left(self) -> float:
        """Seconds that it may still take."""
        return self.until - time.monotonic()

    def row(self, **values: str | float | int | bool | None) -> None:
        """Add a row; underscores in the columns' names are shown as spaces."""
        self.rows.append({name.replace("_", " "): value for name, value in values.items()})
        self.save()

    def save(self, state: str = "unfinished", reason: str = "it was still running") -> None:
        """Write what has been found so far: a stage that is ended has lost nothing but the test that was running."""
        found = {"state": state, "reason": reason, "showed": self.showed, "rows": self.rows, "notes": self.notes}
        report.write(self.folder, self.name, found)


class SkippedError(Exception):
    """This stage cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage.

    Attributes:
        about: in words. module, function: where it is; it is imported when it runs. argument: what it is called with.
        seconds: its part of a run of 12 minutes; 0 if it runs only where it is named. otherwise, then: what follows
            where it fails, and where it passes. meanwhile: other stages run at the same time. alone: it measures, so
            nothing may run then.
    """

    name: str
    about: str
    module: str
    function: str
    seconds: int
    otherwise: str
    then: str
    argument: Any = None
    meanwhile: bool = False
    alone: bool = False

    def run(self, context: Context) -> None:
        """Run it; what it found is in the context."""
        function: Callable[..., None] = getattr(importlib.import_module(f"tests.card.{self.module}"), self.function)
        function(context) if self.argument is None else function(context, self.argument)


_WRONG = "Results are wrong: run no figures before it is mended."
_SLOW = "No figure of it: see the place in its notes; the other stages stand."


def _decode(gib: int, seconds: int) -> Stage:
    about = f"an answer of 32 layers of Mixtral's width in {gib} GiB"
    then = f"Compare it with `floe-chat plan mixtral-8x7b --vram {gib}` of this card; the profile says where time goes"
    return Stage(f"decode-{gib}", about, "decode", "run", seconds, _SLOW, then, gib, alone=True)


STAGES = (
    Stage(
        "smoke", "what only a card shows: graphs, memory, Triton, pinning", "smoke", "run", 40, _WRONG,
        "Graphs, memory and Triton work here: the other stages count",
    ),
    Stage(
        "kernels", "every Triton kernel against float64, every fourth case first", "suite_parts", "kernels", 170,
        "The failed cases name kernel and size: " + _WRONG,
        "The kernels are right on this card", meanwhile=True,
    ),
    Stage(
        "graphs", "layers in a pool by graphs and one by one: captured, alike, faster", "captured", "run", 90,
        "Run it again after a correction, then tokens; figures without graphs say nothing.",
        "Speeds of tokens are those of graphs",
    ),
    Stage(
        "gpu-tests", "the tests that need a GPU: links, waits, graphs", "suite_parts", "engine", 60,
        "Run the failed test alone; while links or waits fail, no figure with a pool counts.",
        "Links and waits are right: figures with a pool count",
    ),
    Stage(
        "bandwidth", "share of the memory's bandwidth, by operation", "figures", "bandwidth", 50, _SLOW,
        "Shares below a half are kernels to mend; the others go into assets/figures.json by REPORT=", alone=True,
    ),
    _decode(12, 75),
    _decode(24, 75),
    Stage(
        "experts", "FloE table 1: a sparse expert and a dense one", "figures", "experts", 45, _SLOW,
        "Compare the speedups with table 1 of the paper in BENCHMARKS.md", alone=True,
    ),
    Stage(
        "tokens", "the same tokens as the CPU, at every size of the pool", "same_tokens", "run", 100, _WRONG,
        "No pool, preset or device changes an answer",
    ),
    Stage(
        "sizes", "every operation against its definition, at full sizes", "full_sizes", "run", 60, _WRONG,
        "Every operation is right at the sizes of real models",
    ),
    Stage(
        "link", "FloE figure 7: share of the link's peak by chunk", "figures", "link", 45, _SLOW,
        "The best chunk is the one for engine/offload/links; pinned rows should reach 80 % of the link", alone=True,
    ),
    *(_decode(gib, 0) for gib in (8, 10, 16)),
    Stage(
        "peer", "llama.cpp with --n-cpu-moe on the same card", "peer", "run", 0, _SLOW,
        "Put it next to decode of the same memory in BENCHMARKS.md", alone=True,
    ),
)  # fmt: skip
"""Those with seconds take less than 12 minutes in all; what decides whether the others are worth anything is first."""


def run_one(name: str, place: str, out: Path, seconds: int) -> int:
    """Run a stage in this process and write its result; the exit code."""
    stage = next(stage for stage in STAGES if stage.name == name)
    context = Context(name, place, out, time.monotonic() + seconds)
    _end_with_the_driver()
    state, reason = "passed", ""
    try:
        stage.run(context)
        if wrong := [row for row in context.rows if row.get("ok") is False]:
            state, reason = "failed", f"{len(wrong)} of {len(context.rows)} rows are not ok"
        elif context.unfinished:
            state, reason = "unfinished", context.unfinished
    except SkippedError as why:
        state, reason = "skipped", str(why)
    except Exception as error:  # noqa: BLE001 -- a stage's failure is a result, with its place
        state, reason = "failed", f"{type(error).__name__}: {error}"
        context.notes += ["```", *traceback.format_exc().splitlines()[-12:], "```"]
    context.showed = context.showed or _seen(context.rows)
    context.save(state, reason)
    return 0


def _seen(rows: list[Row]) -> str:
    """In one line: how many rows are right, and the last one as an example."""
    if not rows:
        return ""
    right = [row["ok"] for row in rows if "ok" in row]
    said = f"{sum(map(bool, right))} of {len(right)} are right" if right else f"{len(rows)} figures"
    last = ((name, value) for name, value in rows[-1].items() if name != "ok" and value is not None)
    values = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in last)
    return f"{said}; the last: {', '.join(itertools.islice(values, 6))}"


def _end_with_the_driver() -> None:
    """Let this stage and what it starts end when the driver is killed: nothing is to go on using the card."""
    driver = os.getppid()

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # the driver gives each stage a group of its own
        threading.Thread(target=watch, daemon=True).start()
