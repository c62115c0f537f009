"""`floe-chat paper`: the papers' tables and figures, made here and shown with the printed ones; or their list."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...engine.paper.papers import Entry, Grid, entries, entry
from ...models.errors import UsageError
from .. import progress
from ..progress import rounded
from ..text.plain_text import printable
from .printing.scatter_plot import scatter
from .printing.wrapping import columns, wrapped
from .quality.comparison import check_source, text_ids, text_name

if TYPE_CHECKING:
    from ...engine.events import Rule
    from ...engine.loader import LoadedModel
    from ...engine.paper.papers import Made
    from ...engine.paper.study import Answered

TOKENS = 1024
_PLOT = (72, 14)
_BAR = 50
_MARKS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SHADES = " .:-=+*#%@"
_CELL = 9
_WIDE = 30  # largest figure over the smallest, from which on an axis is logarithmic


@click.command(short_help="Make the papers' tables and figures on your own model.")
@click.argument("table", required=False, metavar="[TABLE]")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The 16-bit checkpoint that was packed.  [default: the pack's own weights stand for it]",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The text to read, in UTF-8.  [default: as for eval; own conversations in floe-f6 and fiddler-f2]",
)
@click.option(
    "--tokens", type=click.IntRange(12), default=TOKENS, show_default=True, help="How many tokens of the text to read."
)
@click.option("--card", default="", metavar="NAME", help="The card to simulate, where one is.  [default: the paper's]")
@click.option(
    "--synthetic",
    default="",
    metavar="NAME",
    help="At whose width kernels, links and cards are measured: mixtral-8x7b, qwen3-30b-a3b, gpt-oss-20b or "
    "deepseek-v2-lite.  [default: the paper's]",
)
@click.option(
    "--tasks",
    metavar="NAME,...",
    help="In a table about tasks, run these of lm-evaluation-harness too; `paper` for those of the paper.  [default: "
    "none]",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Run only the first N samples of each task.")
@click.option(
    "--tasks-folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Tasks of your own: YAML files, their data and their Python code, which is run.",
)
@click.option("--download", is_flag=True, help="Download the tasks' data sets from the Hugging Face hub.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def paper(
    table: str | None,
    model: str,
    source: Path | None,
    text_file: Path | None,
    tokens: int,
    card: str,
    synthetic: str,
    tasks: str | None,
    limit: int | None,
    tasks_folder: Path | None,
    download: bool,
    as_json: bool,
) -> None:
    """Make TABLE, such as floe-t8, on MODEL, with the paper's printed figures below; without TABLE, list them all.

    Nothing is downloaded unless --download allows the tasks' questions. Quality is computed on the CPU. Times of cards
    are simulated, and the page says where.

    \b
    Examples: floe-chat paper
              floe-chat paper floe-t8 mixtral --source ~/Downloads/Mixtral-8x7B-Instruct-v0.1
    """
    if table is None:
        fields = [asdict(one) for one in entries().values()]
        click.echo(json.dumps(rounded(fields)) if as_json else listed(entries().values()))
        return
    wanted = entry(table)
    if source is not None:
        check_source(source)
    answered = _tasks(wanted, model, tasks, limit, tasks_folder, download=download)
    from ...engine.paper.study import Study
    from ...engine.paper.tables import make
    from ...engine.quality.told import Told
    from ...models.catalog import asset, find

    pack = find(model)
    called = Path(text_name(pack, text_file)).name
    if text_file is None and wanted.text:
        text_file, called = asset(wanted.text), "24 conversations of our own"
    told = Told(progress.step, progress.note)
    ids = text_ids(pack, text_file)
    try:
        study = Study(pack, model, source, ids, called, tokens, card, synthetic, told, answered=answered)
        made = make(wanted.id, study)
    finally:
        progress.clear()
    if as_json:
        click.echo(json.dumps(rounded({"version": version("floe-chat"), **asdict(wanted), "made": asdict(made)})))
        return
    click.echo(page(wanted, made))


def _tasks(
    wanted: Entry, model: str, names: str | None, limit: int | None, folder: Path | None, *, download: bool
) -> Answered | None:
    """What answers tasks with a pack; None if nobody asked for it.

    Raises:
        UsageError: a table that is about none, or a task that does not exist.
        FloeError: the harness is not installed, or a task's data cannot be had.
    """
    if names is None:
        return None
    if not wanted.tasks:
        raise UsageError(f"{wanted.called} is not about tasks", "", "Leave out --tasks.")
    chosen = wanted.tasks if names == "paper" else names
    from ...models.catalog import find
    from .harness import harness_tasks

    pack = find(model)
    harness_tasks.prepare(download=download)
    from ...engine.paper.papers import Grid
    from ...engine.quality_presets import Preset
    from .harness.harness_model import PackLM, read_tokenizer

    found = harness_tasks.load([name.strip() for name in chosen.split(",")], folder, None, download=download)

    def answered(loaded: LoadedModel, rules: Mapping[str, Rule]) -> Grid:
        lm = PackLM(loaded, *read_tokenizer(pack), progress.step)
        rows: dict[str, dict[str, float]] = {}
        for name, rule in rules.items():
            lm.preset, loaded.control.preset = name, Preset(name, rule)
            scores = harness_tasks.measure(lm, found, limit, chat=False, download=download)
            # Of each task the first metric, which is accuracy where it has one.
            rows[name] = {score.task: score.value for score in reversed(scores)}
        columns = tuple(dict.fromkeys(task for row in rows.values() for task in reversed(row)))
        cells = {name: tuple(row.get(task) for task in columns) for name, row in rows.items()}
        return Grid("tasks, the pack's own bits and signals", columns, cells)

    return answered


def listed(all_of_them: Iterable[Entry]) -> str:
    """One line each, by paper."""
    lines = ["floe-chat paper TABLE [MODEL] makes one of these on your model, next to the printed figures."]
    for name, own in itertools.groupby(all_of_them, lambda one: one.paper):
        lines += ["", name]
        for one in own:
            lines.append(f"  {one.id:<16}{'' if not one.why_not else 'not made: '}{one.shows}")
            if one.why_not:
                lines.append(wrapped(one.why_not, " " * 18, " " * 18))
    return printable("\n".join(lines))


def page(wanted: Entry, made: Made) -> str:
    """One of them for people: figures made here, printed figures of the same columns below them, and a plot."""
    head = f"floe-chat {version('floe-chat')}, {wanted.called}: {wanted.shows}"
    differs = wrapped(f"{made.here}. The paper: {wanted.setup}.", "  here      ", " " * 12)
    blocks = [[head, differs]]
    left = list(wanted.printed)
    for grid in made.grids:
        blocks.append(_grid(grid))
        same = [one for one in left if one.columns == grid.columns and one.title.startswith(grid.title)]
        left = [one for one in left if one not in same]
        blocks += [_grid(one, "printed: ") for one in same]
    blocks += [_grid(one, "printed: ") for one in left]
    if wanted.says:
        blocks.append([wrapped(wanted.says, "In the paper: ", " " * 14)])
    blocks += [plot(made)] if made.plot or made.grids else []
    blocks += [_heat(made.heat)] if made.heat else []
    blocks.append([wrapped(note) for note in made.notes])
    return printable("\n".join("\n".join([*block, ""]) for block in blocks if block).rstrip())


def _grid(grid: Grid, words: str = "") -> list[str]:
    """Its lines, in blocks of as many columns as the page has room for."""
    name = max(len(row) for row in (*grid.rows, f"{words}{grid.title}")) + 2
    widths = [max(_CELL, len(column) + 2) for column in grid.columns]
    lines: list[str] = []
    first = 0
    while first < len(widths):
        last = first + 1
        while last < len(widths) and name + sum(widths[first : last + 1]) <= columns():
            last += 1
        part = slice(first, last)

        def line(begin: str, cells: Sequence[str], part: slice = part) -> str:
            return f"{begin:<{name}}" + "".join(f"{c:>{w}}" for c, w in zip(cells[part], widths[part], strict=True))

        lines.append(line(f"{words}{grid.title}", grid.columns))
        lines += [line(f"  {row}", [_cell(cell) for cell in cells]) for row, cells in grid.rows.items()]
        first = last
    return lines


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def plot(made: Made) -> list[str]:
    """The series as points; the rows of the first grid where there are none; bars where its columns are no numbers."""
    series, axes = made.plot, made.axes
    if not series:
        grid = made.grids[0]
        numbers = [_number(column) for column in grid.columns]
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers) or len(known) == 1:
            return _bars(grid)
        series = {
            name: [(x, y) for x, y in zip(known, row, strict=True) if y is not None] for name, row in grid.rows.items()
        }
        axes = ("", grid.title)
    return _points(series, axes)


def _number(column: str) -> float | None:
    try:
        return float(column.removeprefix("INT").removeprefix("<").removesuffix("%"))
    except ValueError:
        return None


def _points(series: Mapping[str, Sequence[tuple[float, float]]], axes: tuple[str, str]) -> list[str]:
    marks = dict(zip(series, itertools.cycle(_MARKS), strict=False))
    points = [(x, y, marks[name]) for name, own in series.items() for x, y in own if y >= 0]
    above = [y for _, y, _ in points if y > 0]
    if not above:
        return []
    if log := max(above) > _WIDE * min(above):
        points = [point for point in points if point[1] > 0]
    return [
        *scatter(points, *_PLOT, *axes, log=log),
        wrapped("   ".join(f"{mark} {name}" for name, mark in marks.items()), "  ", "  "),
    ]


def _bars(grid: Grid) -> list[str]:
    """The first column of each row; of a single row all columns, where they have one unit, which is the title."""
    head, values = grid.columns[0], {name: row[0] or 0.0 for name, row in grid.rows.items()}
    if grid.title and len(grid.rows) == 1:
        (row,) = grid.rows.values()
        head, values = grid.title, {name: cell or 0.0 for name, cell in zip(grid.columns, row, strict=True)}
    most, width = max((*values.values(), 1e-12)), max(map(len, values))
    return [
        head,
        *(f"  {name:<{width}} {'#' * round(_BAR * max(0.0, one) / most)} {_cell(one)}" for name, one in values.items()),
    ]


def _heat(rows: Mapping[str, Sequence[float]]) -> list[str]:
    width = max(map(len, rows))
    last = len(_SHADES) - 1
    return [
        f"{name:<{width}} {''.join(_SHADES[round(last * min(1.0, max(0.0, share)))] for share in row)}"
        for name, row in rows.items()
    ]
