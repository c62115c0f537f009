"""The stages by name, and what all of them share."""

from __future__ import annotations

import importlib
import json
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
        place: "cuda", or "virtual": tiny sizes on what stands in for a card. folder: for results and test packs.
        until: when it has to end, by time.monotonic(). rows: of the result's table; a row with "ok" False makes the
            stage fail. notes: lines under the table. unfinished: why the stage has more to do in another run.
    """

    place: str
    folder: Path
    until: float
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])
    unfinished: str = ""

    @property
    def real(self) -> bool:
        return self.place == "cuda"

    def left(self) -> float:
        """Seconds that it may still take."""
        return self.until - time.monotonic()

    def row(self, **values: str | float | int | bool | None) -> None:
        """Add a row; underscores in the columns' names are shown as spaces."""
        self.rows.append({name.replace("_", " "): value for name, value in values.items()})


class SkippedError(Exception):
    """This stage cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage.

    Attributes:
        about: in words. module, function: where it is; it is imported when it runs. argument: what it is called with.
    """

    name: str
    about: str
    module: str
    function: str
    argument: Any = None

    def run(self, context: Context) -> None:
        """Run it; what it found is in the context."""
        function: Callable[..., None] = getattr(importlib.import_module(f"tests.card.{self.module}"), self.function)
        function(context) if self.argument is None else function(context, self.argument)


STAGES = (
    Stage("kernels", "every Triton kernel against float64, at odd sizes and all widths", "suite_parts", "kernels"),
    Stage("gpu-tests", "the tests that need a GPU: links, waits, graphs", "suite_parts", "engine"),
    Stage("sizes", "every operation against its definition, at full sizes", "full_sizes", "run"),
    Stage("tokens", "the same tokens as the CPU, and at every size of the pool", "same_tokens", "run"),
    Stage("graphs", "layers in a pool by graphs, compared with one by one: captured, alike, faster", "captured", "run"),
    Stage("experts", "FloE table 1: a sparse expert compared with a dense one", "figures", "experts"),
    Stage("link", "FloE figure 7: share of the link's peak by chunk", "figures", "link"),
    Stage("bandwidth", "share of the memory's bandwidth, operation by operation", "figures", "bandwidth"),
    *(
        Stage(f"decode-{gib}", f"an answer of 32 layers of Mixtral's width in {gib} GiB", "decode", "run", gib)
        for gib in (8, 10, 12, 16, 24)
    ),
    Stage("peer", "llama.cpp with --n-cpu-moe on the same card", "peer", "run"),
)


def run_one(name: str, place: str, out: Path, seconds: int) -> int:
    """Run a stage in this process and write its result; the exit code."""
    stage = next(stage for stage in STAGES if stage.name == name)
    context = Context(place, out, time.monotonic() + seconds)
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
    result = {"state": state, "reason": reason, "rows": context.rows, "notes": context.notes}
    report.file_of(out, name).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0
