"""`floe-chat bench`: how fast this machine is. A table on stdout and JSON as its last line; progress on stderr."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ....models.errors import UsageError
from ....models.quantities import memory_size
from ...arguments import read_text
from ...progress import rounded
from ...settings.file import read, settings_file
from ..command_names import SuggestingGroup
from ..options import PUBLISHED_NAMES
from ..quality.dials import rule_of, with_dials
from .models import decode, prefill
from .options import TIMING, WIDTHS, chosen_device, with_options
from .table import finish, measuring


@click.group(cls=SuggestingGroup, short_help="Measure how fast the engine and its parts are.")
def bench() -> None:
    """Measure how fast the engine and its parts are on this machine.

    Results are saved on this machine. A later run reports what became slower than in an earlier release.

    Example: floe-chat bench kernels --quick
    """


@bench.command(short_help="Time the kernels at a model's width.")
@click.option(
    "--synthetic",
    default="mixtral-8x7b",
    show_default=True,
    metavar="NAME",
    help=f"Whose width: {WIDTHS}.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What to measure.  [default: cuda if there is one]")
@with_options(*TIMING)
def kernels(
    synthetic: str, device: str | None, threads: int | None, runs: int | None, quick: bool, as_json: bool
) -> None:
    """Time the kernels at a model's width, by default Mixtral's, compared with the speed of memory.

    On a CPU it takes about a minute (--quick, only the default widths: half of that) and 3 GB of memory, on a GPU
    5 GB of its memory. Nothing is downloaded. Close other programs first; a disturbed section is marked.

    Example: floe-chat bench kernels --synthetic qwen3-30b-a3b --quick
    """
    on_gpu = chosen_device(device) == "cuda"
    if on_gpu and (threads or runs):
        raise UsageError("--threads and --runs are for the CPU", "They do not apply to a GPU.", "Add --device cpu.")
    from ....engine.bench.synthetic import shapes_of

    shapes = shapes_of(synthetic)
    with measuring() as report:
        if on_gpu:
            from ....engine.bench.kernels import gpu

            table = gpu.run(quick=quick, shapes=shapes, report=report)
        else:
            from ....engine.bench.kernels import cpu

            table = cpu.run(threads=threads, runs=runs or 5, quick=quick, shapes=shapes, report=report)
    finish(table, as_json=as_json)


@bench.command(short_help="Time how rows are packed and copied to the GPU.")
@with_options(*TIMING)
def transfer(threads: int | None, runs: int | None, quick: bool, as_json: bool) -> None:
    """Time how active neurons are packed and copied, by chunk size, compared with one large copy.

    At Mixtral's width, 4- and 16-bit rows (--quick: 4-bit rows, three chunk sizes). Without a CUDA device only the
    packing is measured. It takes about a minute and 2 GB of memory.

    Example: floe-chat bench transfer --quick
    """
    from ....engine.bench import transfer as bench_transfer
    from ....engine.machine import gpus

    there, reason = gpus.of_torch()
    with measuring() as report:
        table = bench_transfer.run(
            threads=threads, runs=runs or 5, quick=quick, gpu="cuda" if there else None, no_gpu=reason, report=report
        )
    finish(table, as_json=as_json)


@bench.command(short_help="Compare engines on cards smaller than the model.")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--synthetic",
    default="mixtral-8x7b",
    show_default=True,
    metavar="NAME",
    help=f"At whose width: {WIDTHS}.",
)
@click.option(
    "--card",
    "cards",
    multiple=True,
    metavar="NAME",
    help="A virtual card, such as sim:rtx3060-12gb@8gb; A,B are two in one machine, against the first alone.",
)
@click.option(
    "--trace",
    "answer",
    type=click.Path(path_type=Path),
    metavar="ANSWER",
    help="Replay what an answer wants: a file with its text, or an exported chat.",
)
@click.option("--tokens", type=click.IntRange(12), default=96, show_default=True, help="Tokens that the model reads.")
@click.option(
    "--skew", type=click.FloatRange(0), help="Draw experts at random with this skew, instead of by the model's router."
)
@click.option(
    "--preset",
    "-p",
    "presets",
    multiple=True,
    metavar="NAME",
    help=f"Play this preset too, or a published rule ({PUBLISHED_NAMES}); may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
def offload(
    model: str,
    synthetic: str,
    cards: tuple[str, ...],
    answer: Path | None,
    tokens: int,
    skew: float | None,
    presets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compare engines where the model is larger than the card, on virtual cards.

    MODEL reads a text, and its routing drives this engine and others at a published model's width. Where that has more
    experts, each block of them is routed as MODEL was elsewhere in the text. Nothing is downloaded and no GPU is
    needed. Times are virtual, with and without the time of floe-chat's own code. A card takes two minutes.

    With --trace it reads one of your answers: the experts and neurons that each of its tokens wanted, on any card.

    Example: floe-chat bench offload --card sim:rtx3060-12gb

    Example: floe-chat bench offload --trace answer.md --card sim:rtx4060-8gb
    """
    from ....engine.bench.cards import offload as bench_offload
    from ....models.catalog import asset, find

    text = asset("calibration.txt").read_text(encoding="utf-8") if answer is None else read_text(answer)
    pack = find(model)
    with measuring() as report:
        table = bench_offload.run(
            pack,
            model,
            text,
            cards or bench_offload.CARDS,
            tokens=tokens,
            skew=skew,
            synthetic=synthetic,
            presets=presets,
            report=report,
        )
    finish(table, as_json=as_json)


@bench.command(short_help="Write a small JSON of a chat's speed, to post.")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--preset",
    "-p",
    metavar="NAME",
    help=f"Exact, High, Balanced or Fast, or a published rule: {PUBLISHED_NAMES}.  [default: Balanced]",
)
@with_dials()
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, cpu, cuda or cuda:N; sim:NAME simulates a card in virtual time.",
)
@click.option("--vram", metavar="SIZE", help="Use at most this much GPU memory, such as 10gb.  [default: what is free]")
@click.option(
    "--prompt", type=click.IntRange(1), default=128, show_default=True, help="Length of the prompt, in tokens."
)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Length of an answer, in tokens.")
@click.option("--answers", type=click.IntRange(1), default=3, show_default=True, help="Answers, after one to warm up.")
def share(
    model: str,
    preset: str | None,
    device: str,
    vram: str | None,
    prompt: int,
    tokens: int,
    answers: int,
    **by_hand: float | None,
) -> None:
    """Write one small JSON of what a chat with MODEL gives on this machine, that you can post.

    It has the machine's parts, the model's sizes, the preset, tokens per second, the time to the first token, the
    prompt's speed, bytes, hits and versions; medians of the answers. It has no text and no name of yours: a model that
    was not published is not named. The text that is read is built in, and nothing is sent anywhere.

    Example: floe-chat bench share mixtral --preset Fast > mine.json
    """
    rule = rule_of(by_hand)
    if rule is not None and preset is not None:
        raise UsageError("A preset and a quality set by hand exclude each other", "", "Leave out one of them.")
    from ....engine.bench.share import ShareRun, run
    from ....models.catalog import asset, find

    kept, most = read(settings_file()).settings.advanced, memory_size(vram)
    plan = ShareRun(find(model), preset, rule, device, most, kept, prompt, tokens, answers)
    with measuring() as report:
        found = run(plan, asset("calibration.txt").read_text(encoding="utf-8"), report)
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in rounded(found).items()]
    click.echo("{\n" + ",\n".join(lines) + "\n}")


for command in (decode, prefill):
    bench.add_command(command)
