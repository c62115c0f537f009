"""`floe-chat bench`: what this machine reaches. A table on stdout and JSON as its last line; progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from ..models.errors import UsageError
from .widgets import units
from .widgets.plain import printable

if TYPE_CHECKING:
    from ..engine.bench.measure import Row, Section, Table

_NAME, _TIME, _RATE, _SHARE, _SPREAD = 34, 10, 12, 10, 9
_HEAD = f"{'':{_NAME}}{'time':>{_TIME}}{'rate':>{_RATE}}{'of floor':>{_SHARE}}{'spread':>{_SPREAD}}"
_LEGEND = (
    "time      of one call, the median of all runs",
    "of floor  its rate over the rate of the row named floor, compared run by run",
    "spread    the middle half of the runs over the median; above 15 % it is marked !: busy machine?",
    "2.00x A   twice as fast as row A of the same section",
)


@click.group()
def bench() -> None:
    """Measure this machine: what the engine's parts reach on it.

    Example: floe-chat bench kernels --quick
    """


@bench.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What to measure.  [default: cuda if there is one]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: as many as the engine would use]")
@click.option("--runs", type=click.IntRange(1), help="Timed runs of each CPU figure, after 3 to warm up.  [default: 5]")
@click.option("--quick", is_flag=True, help="Only the default widths: 2-bit up, 4-bit rows.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
def kernels(device: str | None, threads: int | None, runs: int | None, quick: bool, as_json: bool) -> None:
    """Time the kernels at Mixtral's width beside what the memory delivers.

    On a CPU it takes about a minute (--quick: half of that) and 3 GB of memory, on a GPU 5 GB of its memory.
    Nothing is downloaded. Close other programs first; a section that they disturbed says so.

    Example: floe-chat bench kernels --quick --json > kernels.json
    """
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise UsageError("There is no CUDA device to measure", f"On this machine {reason}.", "Use --device cpu.")
    on_gpu = there and device != "cpu"
    if on_gpu and (threads or runs):
        raise UsageError("--threads and --runs are for the CPU", "A GPU would be measured.", "Add --device cpu.")
    try:
        if on_gpu:
            from ..engine.bench import kernels_gpu

            table = kernels_gpu.run(quick=quick, report=_report)
        else:
            from ..engine.bench import kernels_cpu

            table = kernels_cpu.run(threads=threads, runs=runs or 5, quick=quick, report=_report)
    finally:
        _clear()
    if not as_json:
        click.echo(text(table) + "\n")
    click.echo(json.dumps({"version": version("floe-chat"), **dataclasses.asdict(table, dict_factory=_rounded)}))


def text(table: Table) -> str:
    """The table for people, 100 columns wide."""
    title = f"floe-chat {version('floe-chat')}, {table.bench} on {table.device}"
    facts = [_wrapped(f"  {name.replace('_', ' '):<9} {value}", 12) for name, value in table.facts.items()]
    sections = [line for section in table.sections for line in _section(section)]
    notes = ["", *(_wrapped(note, 0) for note in table.notes)] if table.notes else []
    return printable("\n".join([title, *facts, "", _HEAD, *sections[1:], "", *_LEGEND, *notes]))


def _section(section: Section) -> list[str]:
    from ..engine.bench.load import BUSY

    others = section.other_cores or 0.0
    lines = ["", section.title, *map(_row, section.rows)]
    if others > BUSY:
        lines.append(f"  ! other programs kept {others:.1f} cores busy meanwhile: do not trust this section")
    return lines


def _wrapped(line: str, indent: int) -> str:
    return textwrap.fill(line, 100, subsequent_indent=" " * indent, drop_whitespace=True, replace_whitespace=False)


def _row(row: Row) -> str:
    time = f"{_digits(row.ms)} ms" if row.ms < 999.5 else f"{_digits(row.ms / 1000)} s "
    rate = f"{units.rate(row.tokens_s)} tok/s" if row.tokens_s else f"{units.rate(row.gb_s)} GB/s" if row.gb_s else ""
    of_floor = "" if row.of_floor is None else units.share(row.of_floor)
    spread = "one run" if row.spread is None else units.share(row.spread)
    peer = "" if row.speedup is None else f"  {units.rate(row.speedup)}x {row.peer}"
    line = f"{'  ' + row.name:{_NAME}}{time:>{_TIME}}{rate:>{_RATE}}{of_floor:>{_SHARE}}{spread:>{_SPREAD}}"
    return f"{line}{' !' if row.noisy else '  '}{peer}".rstrip()


def _digits(value: float) -> str:
    """Three significant ones: 0.958, 9.58, 95.8, 958."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def _rounded(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in items}


def _report(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        line = f"{what}, round {done} of {total}" if done else what
        click.echo(f"\r{line[:99]:<99}", nl=False, err=True)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{'':99}\r", nl=False, err=True)
