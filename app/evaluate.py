"""`floe-chat eval`: a table of what each preset costs in quality, JSON as its last line; progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..models.errors import PackError, UsageError
from .widgets import units
from .widgets.plain import printable

if TYPE_CHECKING:
    from ..engine.evaluate import Evaluation, Measured

_HEAD = (
    f"{'preset':<12}{'perplexity':>11}{'KL mean':>10}{'KL 99 %':>10}{'KL max':>10}{'same top':>10}{'rms dp':>8}"
    f"{'greedy':>13}{'active':>8}{'bytes':>8}"
)
_LEGEND = (
    "perplexity  of the next token; the source's own stands above",
    "KL          divergence of the pack's next-token distribution from the source's, nats",
    "same top    how often both find the same token likeliest",
    "rms dp      root-mean-square change of the probability of the token that really follows",
    "greedy      after how many of {continued} tokens each continuation leaves the source's; - never",
    "active      share of the chosen experts' neurons that were computed while continuing",
    "bytes       of experts' weights that each of those tokens took",
)


@click.command(name="eval")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The checkpoint that was packed.  [default: the folder of that name beside the pack]",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What to predict, as UTF-8.  [default: the parts of the built-in text that packing did not use]",
)
@click.option(
    "--preset",
    "-p",
    "presets",
    multiple=True,
    metavar="NAME",
    help='Only this one, or "No sparsity"; may be repeated.  [default: all that the pack can run]',
)
@click.option("--tokens", type=click.IntRange(1), default=2048, show_default=True, help="How much of the text to read.")
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
def evaluate(
    model: str,
    source: Path | None,
    text_file: Path | None,
    presets: tuple[str, ...],
    tokens: int,
    device: str,
    as_json: bool,
) -> None:
    """Measure what packing and sparsity cost in quality: MODEL against the 16-bit checkpoint it was packed from.

    The text is read in windows of 512 tokens; the second half of each is predicted. The checkpoint is read twice,
    layer by layer, so it may be larger than memory; what it predicts is kept in the cache folder (at most 2.1 GB).

    Example: floe-chat eval demo --preset Balanced --tokens 1024
    """
    from ..engine.evaluate import Told, run
    from ..models.catalog import find

    pack = find(model)
    origin = _source(pack, source)
    ids = _text_ids(pack, text_file)
    try:
        found = run(pack, origin, ids, presets, tokens, device, Told(_step, _note))
    finally:
        _clear()
    if not as_json:
        click.echo(table(found) + "\n")
    text = "built-in" if text_file is None else str(text_file)
    click.echo(json.dumps({"version": version("floe-chat"), "text": text, **_fields(found)}))


def table(found: Evaluation) -> str:
    """The figures for people, 100 columns wide."""
    first = found.presets[0].divergence
    windows = "one window" if found.windows == 1 else f"{found.windows} windows"
    read = f"{found.tokens} tokens in {windows} of {found.window}, {found.scored} of them predicted"
    lines = [
        f"floe-chat {version('floe-chat')}, {found.model} against its 16-bit source {found.source}",
        f"  pack      {found.widths}; on {found.device}, {found.backend}",
        f"  text      {read}",
        f"  source    perplexity {first.source_perplexity:.5g}",
        "",
        _HEAD,
        *map(_row, found.presets),
        "",
        *(line.format(continued=found.continued) for line in _LEGEND),
    ]
    return printable("\n".join(lines))


def _row(row: Measured) -> str:
    d = row.divergence
    greedy = " ".join("-" if place is None else str(place) for place in row.first_divergence)
    return (
        f"{row.preset:<12}{d.perplexity:>11.5g}{d.kl_mean:>10.2e}{d.kl_99:>10.2e}{d.kl_max:>10.2e}"
        f"{d.same_top * 100:>8.2f} %{d.dp_rms:>8.4f}{greedy:>13}{units.share(row.active_neurons):>8}"
        f"{units.size(row.bytes_per_token):>8}"
    )


def _source(pack: Path, given: Path | None) -> Path:
    """Raises UsageError: the folder given is a pack, or none was given and none lies beside the pack."""
    if given is not None:
        if (given / "manifest.json").exists():
            raise UsageError(
                f"{given} is itself packed", "", "Give the folder of the 16-bit checkpoint that was packed as --source."
            )
        return given
    from ..models.manifest import Manifest

    name = Manifest.read(pack).source.name
    beside = pack.resolve().parent / Path(name).name
    if (beside / "config.json").is_file() and not (beside / "manifest.json").exists():
        return beside
    raise UsageError(
        "The source of the pack is not known",
        f"It was packed from a folder called {name}, and there is no checkpoint at {beside}.",
        "Give that folder: --source FOLDER.",
    )


def _text_ids(pack: Path, file: Path | None) -> list[int]:
    """The text by the pack's tokenizer. The built-in one lacks the passages that thresholds were measured on."""
    from tokenizers import Tokenizer

    from ..models.calibration import read_tokens
    from ..models.catalog import asset

    path = pack / "tokenizer.json"
    text = asset("calibration.txt").read_text(encoding="utf-8") if file is None else _read(file)
    try:
        ids: list[int] = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    # tokenizers reports a damaged file as a bare Exception, so nothing narrower can be caught here.
    except Exception as error:
        raise PackError(f"{path} cannot be read", str(error), "Restore it from the source checkpoint.") from error
    return ids if file is not None else _without(ids, read_tokens(pack, text).tolist())


def _without(ids: list[int], passages: list[list[int]]) -> list[int]:
    """`ids` without `passages`, which lie in it in order."""
    left: list[int] = []
    begin = 0
    for passage in passages:
        at = next(place for place in range(begin, len(ids)) if ids[place : place + len(passage)] == passage)
        left += ids[begin:at]
        begin = at + len(passage)
    return left + ids[begin:]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file} cannot be read", f"{error.strerror}.", "Give the path of a text file.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text", "It is not UTF-8.", "Give a text file.") from error


def _fields(found: Evaluation) -> dict[str, Any]:
    fields: dict[str, Any] = dataclasses.asdict(found)
    fields["presets"] = [row | row.pop("divergence") for row in fields["presets"]]
    return _rounded(fields)


def _rounded(value: Any) -> Any:
    """Six digits of every number; what is infinite, such as the perplexity of an absurd model, is null."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _step(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{what[:99]:<99}", nl=False, err=True)


def _note(what: str) -> None:
    _clear()
    click.echo(f"floe-chat: {printable(what)}", err=True)


def _clear() -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{'':99}\r", nl=False, err=True)
