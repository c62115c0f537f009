"""A benchmark's results, for people and as JSON, and its progress."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from ....engine.bench.measure import NAMES
from ...text import units
from ...text.plain_text import printable
from ..printing.wrapping import wrapped

if TYPE_CHECKING:
    from ....engine.bench.history import Verdict
    from ....engine.bench.measure import MeasureReport, ResultTable, Row, Section

_NAME, _TIME, _RATE, _SHARE, _SPREAD = NAMES + 2, 10, 13, 10, 9
_HEAD = f"{'':{_NAME}}{'time':>{_TIME}}{'rate':>{_RATE}}{'of floor':>{_SHARE}}{'spread':>{_SPREAD}}"
_LEGEND = (
    "time      of one call, the median of all runs",
    "of floor  its rate over the rate of the row named floor, compared run by run",
    "spread    the middle half of the runs over the median; marked ! above 15 %, as on a busy machine",
    "2.00x A   twice as fast as row A of the same section",
)


@contextmanager
def measuring() -> Generator[MeasureReport]:
    """Shows progress while something is measured: one line on a terminal's stderr, wiped at the end."""

    def report(what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            line = f"{what}, round {done} of {total}" if done else what
            click.echo(f"\r{line[:99]:<99}", nl=False, err=True)

    try:
        yield report
    finally:
        if sys.stderr.isatty():
            click.echo(f"\r{'':99}\r", nl=False, err=True)


def finish(table: ResultTable, *, as_json: bool) -> None:
    """Compare with earlier runs on this machine, save this one, and print."""
    fields = {"version": version("floe-chat"), **dataclasses.asdict(table, dict_factory=_rounded)}
    verdict = _remember(fields)
    if not as_json:
        click.echo("\n".join([text(table), "", *map(printable, verdict.told()), ""]))
    history = {"compared_with": verdict.version, "regressions": verdict.regressions}
    click.echo(json.dumps({**fields, "history": history}))


def text(table: ResultTable) -> str:
    """The table for people: facts and notes as wide as the page, rows up to 100 columns but for the names of peers."""
    title = f"floe-chat {version('floe-chat')}, {table.bench} on {table.device}"
    facts = [wrapped(f"  {name.replace('_', ' '):<9} {value}", others=" " * 12) for name, value in table.facts.items()]
    sections = [line for section in table.sections for line in _section(section)]
    notes = ["", *(wrapped(note) for note in table.notes)] if table.notes else []
    return printable("\n".join([title, *facts, "", _HEAD, *sections[1:], "", *_LEGEND, *notes]))


def _remember(fields: dict[str, Any]) -> Verdict:
    from ....engine.bench import history
    from ....engine.machine.hardware import machine_id

    file = history.file_of(machine_id(), fields["bench"])
    verdict = history.compare(fields, history.read(file))
    try:
        history.append(file, {"time": datetime.now(UTC).isoformat(timespec="seconds"), **fields})
    except OSError as error:
        click.echo(f"floe-chat: this run was not saved: {error.strerror or error}: {file}", err=True)
    return verdict


def _section(section: Section) -> list[str]:
    from ....engine.machine.load import BUSY

    others = section.other_cores or 0.0
    lines = ["", section.title, *map(_row, section.rows)]
    if others > BUSY:
        lines.append(f"  ! other programs kept {others:.1f} cores busy meanwhile: do not trust this section")
    return lines


def _row(row: Row) -> str:
    time = f"{_digits(row.ms)} ms" if row.ms < 999.5 else f"{_digits(row.ms / 1000)} s "
    rate = f"{units.rate(row.tokens_s)} tok/s" if row.tokens_s else f"{units.rate(row.gb_s)} GB/s" if row.gb_s else ""
    of_floor = "" if row.of_floor is None else units.share(row.of_floor)
    spread = "one run" if row.spread is None else units.share(row.spread)
    peer = "" if row.speedup is None else f"{units.rate(row.speedup)}x {row.peer}"
    beside = ", ".join(part for part in (peer, row.note) if part)
    line = f"{'  ' + row.name:{_NAME}}{time:>{_TIME}}{rate:>{_RATE}}{of_floor:>{_SHARE}}{spread:>{_SPREAD}}"
    return f"{line}{' !' if row.noisy else '  '}  {beside}".rstrip()


def _digits(value: float) -> str:
    """Three significant ones: 0.958, 9.58, 95.8, 958."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:.0f}"


def _rounded(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in items}
