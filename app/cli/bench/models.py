"""`floe-chat bench decode` and `prefill`: the speed of a whole model, a pack or one with random weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....models.errors import UsageError
from ..quality.dials import rule_of, with_dials
from .options import MODEL, TIMING, Option, chosen_device, with_options
from .table import finish, measuring

if TYPE_CHECKING:
    from ....engine.bench.measure import MeasureReport, ResultTable
    from ....engine.bench.speed import Peer, SpeedRun
    from ....engine.bench.subject import Subject
    from ....engine.bench.synthetic import Spec

_SPARED = ("sparsity", "product", "drop", "major")  # dials that spare work
_SPEED: tuple[Option, ...] = (
    *MODEL,
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), help="Where the model runs.  [default: cuda if there is one]"
    ),
    click.option(
        "--preset",
        "-p",
        "presets",
        multiple=True,
        metavar="NAME",
        help='Measure only this preset, or "No sparsity"; may be repeated.  [default: every preset the model can run]',
    ),
    click.option(
        "--peer",
        metavar="PYTHON",
        help="Compare with llama.cpp: a Python with llama-cpp-python and gguf.  [default: this one, if it has them]",
    ),
    click.option(
        "--peer-files",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where llama.cpp's files are stored: 2 to 9 GB for a model.  [default: the cache folder]",
    ),
    *TIMING,
)


@click.command(short_help="Time how fast MODEL answers.")
@with_options(*_SPEED)
@with_dials(*_SPARED)
@click.option("--tokens", type=click.IntRange(1), default=8, show_default=True, help="Length of the prompt, in tokens.")
@click.option("--draft", is_flag=True, help="Time passes of several tokens instead: what guessing them may gain.")
@click.option("--drafter", metavar="NAME|FOLDER", help="With --draft, count the time of this smaller model's guesses.")
def decode(**options: Any) -> None:
    """Time how fast MODEL answers, token by token: whole, per layer, and until its first token.

    With --draft, how long a pass of 1 to 4 tokens takes, and how many times as many tokens that makes where guesses
    are right always, or less often.

    A synthetic Mixtral takes 0.8 GB of memory per layer and 1 GB more; llama.cpp takes another 7.4 GB. --quick measures
    only the default preset.

    Example: floe-chat bench decode --synthetic mixtral-8x7b --peer PEER/bin/python
    """
    _speed("decode", **options)


@click.command(short_help="Time how fast MODEL reads a prompt.")
@with_options(*_SPEED)
@with_dials(*_SPARED)
@click.option(
    "--tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of the prompt, in tokens."
)
def prefill(**options: Any) -> None:
    """Time how fast MODEL reads a prompt: whole, per layer, and until its first token.

    Memory and --quick are as for decode.

    Example: floe-chat bench prefill demo --tokens 256
    """
    _speed("prefill", **options)


def _speed(
    bench: str,
    *,
    model: str | None,
    synthetic: str | None,
    device: str | None,
    presets: tuple[str, ...],
    tokens: int,
    threads: int | None,
    runs: int | None,
    quick: bool,
    peer: str | None,
    peer_files: Path | None,
    as_json: bool,
    draft: bool = False,
    drafter: str | None = None,
    **given: Any,
) -> None:
    if draft and peer:
        raise UsageError("--draft times passes without a peer", "", "Leave out --peer.")
    if drafter and (not draft or synthetic):
        hint = "Name a packed model." if synthetic else "Add --draft."
        raise UsageError("--drafter guesses for a packed model, with --draft", "", hint)
    from ....engine.bench.speed import SpeedRun

    rule = rule_of({name: given.pop(name) for name in _SPARED})
    spec = _spec(synthetic, model, given)
    place = chosen_device(device)
    published = spec.published_layers if spec else None
    plan = SpeedRun(bench, presets, tokens, threads, runs or 5, quick, published, rule)
    with measuring() as report:
        if draft:
            from ....engine.bench import drafts

            subject = _subject(model, spec, place, report)
            table = drafts.run(subject, plan, report, _drafter(drafter, model) if drafter else None)
        else:
            table = _measured(model, spec, place, plan, peer, peer_files, report)
    finish(table, as_json=as_json)


def _measured(
    model: str | None,
    spec: Spec | None,
    device: str,
    plan: SpeedRun,
    python: str | None,
    files: Path | None,
    report: MeasureReport,
) -> ResultTable:
    from ....engine.bench import speed
    from ....engine.bench.peer import llama as peer
    from ....engine.bench.peer.recipes import PeerSizes
    from ....engine.machine import conditions

    if python:
        peer.version_of(python)
    compared = python or (sys.executable if find_spec("llama_cpp") and find_spec("gguf") else None)
    with ExitStack() as stack:
        beside = peer.memory_bytes(PeerSizes.of(spec.config())) if spec and compared else 0
        subject = _subject(model, spec, device, report, beside)
        peers: Sequence[Peer] = ()
        if compared and (python or PeerSizes.possible(subject.model.config)):
            a = subject.manifest.architecture
            threads = conditions.threads_for(plan.threads, a.hidden, a.intermediate)
            widths, folder = PeerSizes.of(subject.model.config), files or peer.default_folder()
            peers = stack.enter_context(peer.running(compared, widths, folder, threads, plan.tokens, report))
        return speed.run(subject, plan, peers, report)


def _spec(name: str | None, model: str | None, widths: dict[str, int | None]) -> Spec | None:
    """What --synthetic and its options ask for; None without it.

    Raises:
        UsageError: a model as well, options of a synthetic model without one, or what it cannot have.
    """
    given = {option: value for option, value in widths.items() if value is not None}
    if name is None:
        if given:
            raise UsageError(f"--{next(iter(given))} is for a synthetic model", "", "Add --synthetic mixtral-8x7b.")
        return None
    if model is not None:
        raise UsageError("A pack and a synthetic model were both given", "", f"Leave out {model} or --synthetic.")
    from ....engine.bench.synthetic import Spec, usual_layers

    return Spec(name, **{"layers": usual_layers(name), **given})


def _drafter(name: str, model: str | None) -> Subject:
    """The pack called `name`, in RAM.

    Raises:
        FloeError: there is none, or it cannot guess tokens for the model.
    """
    from ....engine.bench import subject
    from ....engine.context import CONTEXT
    from ....engine.planning import drafter
    from ....models.catalog import DEMO, asset, find

    folder, _ = drafter.of_packs(name, find(model or DEMO), CONTEXT)
    return subject.from_pack(folder, "cpu", asset("calibration.txt").read_text(encoding="utf-8"))


def _subject(model: str | None, spec: Spec | None, device: str, report: MeasureReport, beside: int = 0) -> Subject:
    """The model: of random weights if there is a `spec`. beside: bytes of memory that others need."""
    from ....engine.bench import subject, synthetic
    from ....models.catalog import DEMO, asset, find

    if spec:
        return synthetic.make(spec, device, lambda step: report(step, 0, 1), beside=beside)
    return subject.from_pack(find(model or DEMO), device, asset("calibration.txt").read_text(encoding="utf-8"))
