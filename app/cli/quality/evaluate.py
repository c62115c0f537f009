"""`floe-chat eval`: the quality loss of presets, or of a quality set by hand, as a table or JSON."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....engine.quality_presets import CUSTOM
from ....models.quantities import digits, divergence, memory_size
from ... import progress
from ...progress import rounded
from ...text import units
from ...text.plain_text import printable
from ..options import MIX, PUBLISHED_NAMES, VRAM
from ..printing.wrapping import wrapped
from .comparison import TOKENS, comparing, source_of, text_ids, text_name
from .dials import LENIENT, meaning, rule_of, with_dials

if TYPE_CHECKING:
    from ....engine.quality.divergence import Divergence
    from ....engine.quality.evaluate import Evaluation, PresetLoss

_LOSSES = f"{'preset':<12}{'perplexity':>11}{'KL mean':>10}{'KL 99 %':>10}{'KL max':>10}{'same top':>10}{'rms dp':>8}"
_HEAD = f"{_LOSSES}{'greedy':>13}{'active':>8}{'bytes':>8}"
_KV_TITLE = "Keys and values of 8 bits against 16, both of the pack: what a chat loses that stores 8"
_ITSELF = "  without   the loss of rounding, which --source FOLDER, the 16-bit checkpoint, would show"
LENIENT_WORDS = "  lenient   weak rows left out, as if none of them were ever in GPU memory: the most that it can cost"
_LEGEND = (
    "perplexity  of the next token; the reference's own is above",
    "KL          how far the pack's next-word probabilities move from the reference's, in nats:",
    "            0 is identical, below 0.01 hard to notice, above 0.1 noticeable",
    "same top    how often both find the same token most likely",
    "rms dp      root-mean-square change of the probability of the token that really follows",
    "greedy      tokens, of {continued}, until each continuation differs from the reference's; - never",
    "active      share of the chosen experts' neurons that were computed during the continuations",
    "bytes       of experts' weights read for each of those tokens",
)


@click.command(name="eval", short_help="Measure the quality loss of a pack at each preset, or as set by hand.")
@comparing()
@with_dials()
@click.option(
    "--preset",
    "-p",
    "presets",
    multiple=True,
    metavar="NAME",
    help=f'Measure only this preset, "No sparsity", or a published rule ({PUBLISHED_NAMES}); may be repeated.  '
    "[default: every preset the pack can run]",
)
@click.option(
    "--kv-bits",
    type=click.Choice(["16", "8"]),
    help="Store keys and values as a chat does, with this many bits; 8 is also compared with 16.  [default: none are "
    "stored]",
)
@LENIENT
@VRAM
@MIX
def evaluate(
    model: str,
    source: Path | None,
    text_file: Path | None,
    presets: tuple[str, ...],
    kv_bits: str | None,
    lenient: bool,
    vram: str | None,
    placement: str | None,
    tokens: int | None,
    device: str,
    as_json: bool,
    **by_hand: float | None,
) -> None:
    """Measure the quality loss of MODEL: the pack at each preset against the 16-bit checkpoint it was packed from.

    Without the checkpoint, the pack is compared with itself with nothing left out: that is what presets add to the loss
    of rounding. With --sparsity and the options after it, a quality set by hand is measured, as the dial (F4) sets it.

    With --mix the pack is read with its experts so placed on a card, a simulated one (--device sim:NAME) too: only
    rounding and speed depend on that.

    The text is read in windows of 512 tokens; the second half of each is predicted. The checkpoint is read twice,
    layer by layer, so it may be larger than memory; its predictions are cached (at most 2.1 GB).

    \b
    Examples: floe-chat eval demo --preset Balanced --tokens 1024
              floe-chat eval demo --preset "FloE 80 %" --preset CORM
              floe-chat eval mixtral --sparsity 70% --product 80%
    """
    from ....engine.quality.evaluate import run
    from ....engine.quality.told import Told
    from ....models.catalog import find

    pack = find(model)
    origin = source_of(pack, source)
    ids = text_ids(pack, text_file)
    try:
        told = Told(progress.step, progress.note)
        bits = None if kv_bits is None else int(kv_bits)
        rule, read = rule_of(by_hand), tokens or TOKENS
        found = run(
            pack,
            origin,
            ids,
            presets,
            read,
            device,
            told,
            rule=rule,
            lenient=lenient,
            kv_bits=bits,
            vram=memory_size(vram),
            placement=placement or "auto",
        )
    finally:
        progress.clear()
    text = text_name(pack, text_file)
    if as_json:
        click.echo(json.dumps({"version": version("floe-chat"), "text": text, **_fields(found)}))
    else:
        click.echo(table(found, text))


def table(found: Evaluation, text: str) -> str:
    """The figures for people, 100 columns wide."""
    first = found.presets[0].divergence
    windows = "one window" if found.windows == 1 else f"{found.windows} windows"
    read = f"{found.tokens} tokens in {windows} of {found.window}, {found.scored} of them predicted"
    against = "itself with nothing left out" if found.source is None else f"its 16-bit source {found.source}"
    lines = [
        f"floe-chat {version('floe-chat')}, {found.model} against {against}",
        f"  pack      {found.widths}; on {found.device}, {found.backend}",
        f"  experts   {found.placed}",
        f"  text      {Path(text).name}: {read}",
        f"  reference perplexity {digits(first.source_perplexity)}",
        *((_ITSELF,) if found.source is None else ()),
        *((f"  keys      and values stored with {found.kv_bits} bits, as in a chat",) if found.kv_bits else ()),
        *((LENIENT_WORDS,) if found.lenient else ()),
        "",
        _HEAD,
        *map(_row, found.presets),
        *(meaning(row.rule) for row in found.presets if row.preset == CUSTOM),
        *(wrapped(note, "", "  ") for note in found.notes),
        "",
        *_kv_table(found),
        *(line.format(continued=found.continued) for line in _LEGEND),
    ]
    return printable("\n".join(lines))


def _kv_table(found: Evaluation) -> list[str]:
    """8 bits against 16, if that was measured, and an empty line."""
    rows = [_losses(row.preset, row.kv) for row in found.presets if row.kv is not None]
    return [_KV_TITLE, _LOSSES, *rows, ""] if rows else []


def _row(row: PresetLoss) -> str:
    greedy = " ".join("-" if place is None else str(place) for place in row.first_divergence)
    counted = f"{greedy:>13}{units.share(row.active_neurons):>8}{units.size(row.bytes_per_token):>8}"
    return _losses(row.preset, row.divergence) + counted


def _losses(preset: str, d: Divergence) -> str:
    return (
        f"{preset:<12}{digits(d.perplexity):>11}{divergence(d.kl_mean):>10}{divergence(d.kl_99):>10}"
        f"{divergence(d.kl_max):>10}{d.same_top * 100:>8.2f} %{d.dp_rms:>8.4f}"
    )


def _fields(found: Evaluation) -> dict[str, Any]:
    fields: dict[str, Any] = dataclasses.asdict(found)
    fields["presets"] = [row | row.pop("divergence") for row in fields["presets"]]
    return rounded(fields)
