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
from ..options import PUBLISHED_NAMES
from ..printing.wrapping import wrapped
from ..quality.dials import LENIENT, meaning, rule_of, with_dials
from ..quality.evaluate import LENIENT_WORDS

if TYPE_CHECKING:
    from ....engine.events import Rule
    from .harness_tasks import Score

_NAME, _VALUE = 26, 15
_LEGEND = (
    "±        standard error of the mean over the samples",
    "acc      share of the samples whose right answer is the likeliest; acc_norm: per byte of the answer",
)


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The scores, and what they were measured on.

    Attributes:
        cut: over all presets, the requests that were longer than the window. rule: the quality set by hand; its
            column is the last one. lenient, kv_bits, notes: see `Evaluation`.
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
    rule: Rule | None
    lenient: bool
    kv_bits: int | None
    notes: tuple[str, ...]


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
    help=f'Exact, High, Balanced, Fast, "No sparsity", or a published rule ({PUBLISHED_NAMES}); may be repeated.  '
    "[default: Balanced, or the quality set by hand]",
)
@with_dials()
@click.option(
    "--kv-bits",
    type=click.Choice(["16", "8"]),
    help="Store keys and values with this many bits, as a chat does, for likelihoods too; slower.  [default: as a "
    "chat chooses, for answers only]",
)
@LENIENT
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
    kv_bits: str | None,
    lenient: bool,
    **by_hand: float | None,
) -> None:
    """Run tasks of EleutherAI's lm-evaluation-harness, such as arc_easy, on a packed MODEL.

    It needs the package lm-eval. Data sets are downloaded only with --download, and only once. Code from the hub is
    never run.

    \b
    Examples: floe-chat harness mixtral --tasks arc_challenge,hellaswag --preset Fast --limit 200 --download
              floe-chat harness demo --tasks mine --tasks-folder TASKS --preset "FloE 80 %" --sparsity 70%
    """
    wanted = [name for name in (part.strip() for part in names.split(",")) if name]
    if not wanted:
        raise UsageError("There is no task to run", "", "Name one: --tasks arc_easy")
    tell = _teller()
    try:
        found = run(
            *(model, wanted, presets, limit, fewshot, tasks_folder, device, tell),
            chat=chat,
            download=download,
            rule=rule_of(by_hand),
            lenient=lenient,
            kv_bits=None if kv_bits is None else int(kv_bits),
        )
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
    rule: Rule | None = None,
    lenient: bool = False,
    kv_bits: int | None = None,
) -> TaskScores:
    """Measure a pack on tasks, preset by preset; rule, lenient and kv_bits as for `eval`.

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
    from ....engine.quality.evaluate import opened, presets_of
    from ....engine.quality.half_resident import half_resident
    from ....engine.quality.told import Told
    from .harness_model import PackLM, read_tokenizer

    manifest, names_or_default = Manifest.read(pack), presets or (() if rule else (quality_presets.DEFAULT,))
    chosen = presets_of(names_or_default, rule, manifest, lenient=lenient, kv_bits=kv_bits)
    tokenizer, stop_ids = read_tokenizer(pack)
    tell("Reading the tasks")
    tasks = harness_tasks.load(names, folder, fewshot, download=download)
    loaded, facts = opened(pack, device, kv_bits, Told(tell, tell))
    lm = PackLM(loaded, tokenizer, stop_ids, tell, kv_bits)
    figures: list[Score] = []
    for one in chosen:
        with half_resident(loaded, one) as (lm.loaded, preset):
            lm.preset, loaded.control.preset = one.name, preset
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
        rule=rule,
        lenient=lenient,
        kv_bits=kv_bits,
        notes=quality_presets.notes(chosen, manifest),
    )


def table(found: TaskScores) -> str:
    """The figures for people: a section for each task, a line for each metric, a column for each preset."""
    how = "in the chat template" if found.chat else "as plain text"
    lines = [
        f"floe-chat {version('floe-chat')}, {found.model}, lm-evaluation-harness {found.lm_eval}",
        f"  pack      {found.widths}; on {found.device}, {found.backend}",
        f"  prompts   {how}" + ("" if found.limit is None else f"; the first {found.limit} samples of each task only"),
        *((f"  keys      and values stored with {found.kv_bits} bits, as in a chat",) if found.kv_bits else ()),
        *((LENIENT_WORDS,) if found.lenient else ()),
        "",
        f"{'':{_NAME}}" + "".join(f"{preset:>{_VALUE}}" for preset in found.presets),
    ]
    names = list(dict.fromkeys(figure.task for figure in found.figures))
    for name in names:
        lines += _section([figure for figure in found.figures if figure.task == name])
    lines += [] if found.rule is None else [meaning(found.rule)]
    lines += [wrapped(note, "", "  ") for note in found.notes]
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
