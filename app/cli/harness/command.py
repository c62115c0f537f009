"""`floe-chat harness`: tasks of lm-evaluation-harness, a table and JSON on stdout; progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ....models.errors import UsageError
from ...progress import rounded
from ...text.plain_text import printable

if TYPE_CHECKING:
    from .harness_tasks import Score

_NAME, _VALUE = 26, 15
_LEGEND = (
    "±        standard error of the mean over the samples",
    "acc      share of the samples whose right answer is the likeliest; acc_norm: per byte of the answer",
)


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The scores, and what they were measured on. `cut` counts, over all presets, the requests that were longer than
    the window.
    """

    lm_eval: str
    model: str
    source: str
    widths: str
    device: str
    backend: str
    window: int
    chat: bool
    limit: int | None
    cut: int
    presets: tuple[str, ...]
    figures: tuple[Score, ...]


@click.command(short_help="Run lm-evaluation-harness tasks, such as arc_easy.")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--tasks", "-t", "names", required=True, metavar="NAME,...", help="Tasks, groups or tags; * is a wildcard."
)
@click.option(
    "--preset",
    "-p",
    "presets",
    multiple=True,
    metavar="NAME",
    help='Exact, High, Balanced, Fast or "No sparsity"; may be repeated.  [default: Balanced]',
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Run only the first N samples of each task.")
@click.option(
    "--fewshot",
    type=click.IntRange(0),
    metavar="N",
    help="Solved examples before each question.  [default: the task's]",
)
@click.option("--chat", is_flag=True, help="Put each question into the model's chat template.")
@click.option(
    "--tasks-folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Tasks of your own: YAML files, their data and their Python code, which is run.",
)
@click.option("--download", is_flag=True, help="Download the tasks' data sets from the Hugging Face hub.")
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def harness(
    model: str,
    names: str,
    presets: tuple[str, ...],
    limit: int | None,
    fewshot: int | None,
    chat: bool,
    tasks_folder: Path | None,
    download: bool,
    device: str,
    as_json: bool,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness, such as arc_easy, on a packed MODEL.

    It needs the package lm-eval. Data sets are downloaded only with --download, and only once. Code from the hub is
    never run.

    Example: floe-chat harness mixtral --tasks arc_challenge,hellaswag --preset Fast --limit 200 --download
    """
    wanted = [name for name in (part.strip() for part in names.split(",")) if name]
    if not wanted:
        raise UsageError("There is no task to run", "", "Name one: --tasks arc_easy")
    tell = _teller()
    try:
        found = run(model, wanted, presets, limit, fewshot, tasks_folder, device, tell, chat=chat, download=download)
    finally:
        tell("")
    if found.cut:
        note = (
            f"{found.cut} requests were longer than the window of {found.window} tokens. Their beginning was cut off."
        )
        click.echo(f"floe-chat: {note}", err=True)
    if not as_json:
        click.echo(table(found))
        return
    click.echo(json.dumps({"version": version("floe-chat"), **rounded(dataclasses.asdict(found))}))


def run(
    model: str,
    names: list[str],
    presets: tuple[str, ...],
    limit: int | None,
    fewshot: int | None,
    folder: Path | None,
    device: str,
    tell: Callable[[str], None],
    *,
    chat: bool,
    download: bool,
) -> TaskScores:
    """Measure a pack on tasks, preset by preset.

    Raises:
        UsageError: a model, preset, task or device that does not exist.
        FloeError: the harness is not installed, a task's data cannot be had, or the pack cannot be used.
    """
    from ....models.catalog import find
    from ....models.pack.manifest import Manifest
    from . import harness_tasks

    pack = find(model)
    tell("Starting the harness")
    lm_eval = harness_tasks.prepare(download=download)
    from ....engine import quality_presets
    from ....engine.loader import load
    from ....engine.quality.evaluate import choose_presets
    from .harness_model import PackLM, read_tokenizer

    chosen = choose_presets(presets or (quality_presets.DEFAULT,), Manifest.read(pack))
    tokenizer, stop_ids = read_tokenizer(pack)
    tell("Reading the tasks")
    tasks = harness_tasks.load(names, folder, fewshot, download=download)
    loaded, facts = load(pack, None, device, lambda step, _share: tell(step), library=True)
    lm = PackLM(loaded, tokenizer, stop_ids, tell)
    figures: list[Score] = []
    for preset in chosen:
        lm.preset, loaded.control.preset = preset.name, preset
        figures += harness_tasks.measure(lm, tasks, limit, chat=chat, download=download)
    return TaskScores(
        lm_eval=lm_eval,
        model=facts.model,
        source=facts.source,
        widths=facts.widths,
        device=facts.device,
        backend=facts.backend,
        window=facts.context_window,
        chat=chat,
        limit=limit,
        cut=lm.cut,
        presets=tuple(preset.name for preset in chosen),
        figures=tuple(figures),
    )


def table(found: TaskScores) -> str:
    """The figures for people: a section for each task, a line for each metric, a column for each preset."""
    how = "in the chat template" if found.chat else "as plain text"
    lines = [
        f"floe-chat {version('floe-chat')}, {found.model}, lm-evaluation-harness {found.lm_eval}",
        f"  pack      {found.widths}; on {found.device}, {found.backend}",
        f"  prompts   {how}" + ("" if found.limit is None else f"; the first {found.limit} samples of each task only"),
        "",
        f"{'':{_NAME}}" + "".join(f"{preset:>{_VALUE}}" for preset in found.presets),
    ]
    names = list(dict.fromkeys(figure.task for figure in found.figures))
    for name in names:
        lines += _section([figure for figure in found.figures if figure.task == name])
    return printable("\n".join([*lines, "", *_LEGEND]))


def _section(figures: list[Score]) -> Iterable[str]:
    first = figures[0]
    size = "group" if first.samples is None else "1 sample" if first.samples == 1 else f"{first.samples} samples"
    yield f"{first.task}  ({size}" + ("" if first.fewshot is None else f", {first.fewshot} shots") + ")"

    def metric(figure: Score) -> str:
        return figure.metric if figure.filter == "none" else f"{figure.metric}, {figure.filter}"

    for name, row in groupby(sorted(figures, key=metric), metric):
        yield f"{'  ' + name:{_NAME}}" + "".join(f"{_value(figure):>{_VALUE}}" for figure in row)


def _value(figure: Score) -> str:
    value = f"{figure.value:.4f}" if abs(figure.value) < 10 else f"{figure.value:.5g}"
    return value if figure.stderr is None or math.isnan(figure.stderr) else f"{value} ±{figure.stderr:.2g}"


def _teller() -> Callable[[str], None]:
    """Shows a step on the terminal, over the one before. The harness is silenced; this stream is the real one."""
    stream = sys.stderr

    def tell(step: str) -> None:
        if stream.isatty():
            click.echo(f"\r{printable(step)[:99]:<99}" + ("" if step else "\r"), nl=False, file=stream)

    return tell
