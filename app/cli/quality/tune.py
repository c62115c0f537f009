"""`floe-chat tune`: the measured frontier of a pack as a plot and tables, or JSON; progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....models.pack.dial_loss import POINTS, Curve, DialLoss
from ....models.quantities import divergence
from ... import progress
from ...progress import rounded
from ...text import units
from ...text.plain_text import printable
from ..printing.scatter_plot import scatter
from ..printing.wrapping import wrapped
from .comparison import OWN_TOKENS, TOKENS, check_source, comparing, text_ids, text_name

if TYPE_CHECKING:
    from ....engine.quality.candidates import Candidate
    from ....engine.quality.frontier import Frontier, Point
    from ....engine.quality.own_predictors import OwnPredictors
    from ....engine.quality.own_presets import OwnPresets
    from ....engine.quality.tune import TunedPresets
    from ....models.pack.manifest import TunedPreset

_PLOT = (86, 20)
_HEAD = (
    f"  {'widths':<9}{'rank':>4}{'sparse':>7}{'product':>8}{'drop':>5}{'major':>6}"
    f"{'KL':>10}{'same top':>9}{'bytes':>9}{'bits':>6}{'absent':>7}"
)
_LEGEND = (
    "widths       bits per weight of signal/other/down; rank: of a compensator for the signal",
    "sparse       share of neurons left out by the signal: in each layer up or gate, as it was packed",
    "             what counts is the signal times the router's score (except in FloE's rows)",
    "product      share of neurons whose down half is left out, by |silu(gate · x) up · x|",
    "drop, major  router score over the chosen experts' mean below which an expert, or half, is skipped",
    "KL           how far next-word probabilities move from the 16-bit source's, in nats (mean)",
    "bytes        of experts' weights per token; bits: the same per weight of the chosen experts",
    "+20 %        all four rise from layer to layer, to 20 % above their mean; -20 %: they fall",
    "absent       share of those bytes in experts outside memory, if it holds the half used last",
)

_OWN_LEGEND = {
    "sparse, product": "shares of neurons whose row, or down half, is left out",
    "drop": "router score over the chosen experts' mean below which an expert is left out",
    "adds, allowed": "how far next-word probabilities move by what is left out, in nats (mean)",
    "KL": "the same as it runs: Balanced and Fast round what weights meet to 8 bits too",
    "bytes": "of experts' weights per token",
    "layers": "factors of the first three, by layer: layers that bear less skip less",
}


@click.command(short_help="Find the best presets for a pack, and store them in it.")
@comparing(
    source="The 16-bit checkpoint that was packed, to compare with it instead of with the pack itself.",
    tokens=f"{OWN_TOKENS}; {TOKENS} with --source",
)
@click.option(
    "--widths/--no-widths", default=True, show_default=True, help="With --source, try widths other than the pack's too."
)
@click.option(
    "--predictors/--no-predictors",
    default=True,
    show_default=True,
    help="With --text, train the predictors of the next layer's experts on it too.",
)
def tune(
    model: str,
    source: Path | None,
    text_file: Path | None,
    tokens: int | None,
    widths: bool,
    predictors: bool,
    device: str,
    as_json: bool,
) -> None:
    """Measure what MODEL's presets High, Balanced and Fast may leave out, and set them.

    Each leaves out as much as it may until next-word probabilities move by 0.003, 0.01 and 0.03 nats from those with
    nothing left out. Nothing but the pack is needed. The presets are written into it.

    With --text the predictors of the next layer's experts are trained again on the built-in text and FILE, and kept if
    they name more experts on the last part of FILE.

    With --source the 16-bit checkpoint is the reference: each dial is measured alone, then the most promising
    combinations, at other widths too. It is read layer by layer, as often as memory requires.

    \b
    Examples: floe-chat tune mixtral
              floe-chat tune mixtral --source ~/Downloads/Mixtral-8x7B-Instruct-v0.1
    """
    from ....engine.quality.told import Told
    from ....engine.quality.tune import fields_of, run
    from ....models.catalog import find

    pack = find(model)
    if source is None:
        by_itself(pack, text_file, tokens or OWN_TOKENS, device, as_json=as_json, predictors=predictors)
        return
    check_source(source)
    ids, measured_on = text_ids(pack, text_file), text_name(pack, text_file)
    try:
        given = pack, source, ids, tokens or TOKENS, Told(progress.step, progress.note)
        learn = predictors and text_file is not None
        found = run(*given, text=Path(measured_on).name, widths=widths, device=device, learn=learn)
    finally:
        progress.clear()
    if not as_json:
        click.echo(text(found, measured_on))
        return
    fields = {
        "version": version("floe-chat"),
        "model": found.model,
        "source": found.source,
        "widths": found.widths,
        "text": measured_on,
        "scored": found.scored,
        "unskipped_kl": found.unskipped_kl,
        "presets": [_flat(preset) for preset in found.presets],
        "dials": asdict(found.dials),
        "predictors": _learned(found.predictors),
        "frontier": [fields_of(point) for point in found.frontier.pareto(own=False)],
        "points": [fields_of(point) for point in found.frontier.points],
    }
    click.echo(json.dumps(rounded(fields)))


def by_itself(
    pack: Path,
    text_file: Path | None,
    tokens: int,
    device: str,
    *,
    as_json: bool,
    err: bool = False,
    predictors: bool = True,
) -> None:
    """Give a pack the presets that are measured on itself, and print them; `err`: on stderr. predictors: train these on
    the file too.
    """
    from ....engine.quality import own_presets
    from ....engine.quality.told import Told

    ids, measured_on = text_ids(pack, text_file), text_name(pack, text_file)
    try:
        told = Told(progress.step, progress.note)
        learn = predictors and text_file is not None
        found = own_presets.run(pack, ids, tokens, told, text=Path(measured_on).name, device=device, learn=learn)
    finally:
        progress.clear()
    if as_json:
        fields = {"version": version("floe-chat"), **asdict(found), "text": measured_on}
        fields["predictors"] = _learned(found.predictors)
        fields["presets"] = [
            _flat(preset) | {"adds": adds} for preset, adds in zip(found.presets, fields.pop("adds"), strict=True)
        ]
        click.echo(json.dumps(rounded(fields)))
        return
    click.echo(own_text(found, measured_on), err=err)


def own_text(found: OwnPresets, measured_on: str) -> str:
    """The presets that a pack got by itself, for people."""
    from ....engine.quality_presets import LEVELS

    lines = [
        f"floe-chat {version('floe-chat')}, {found.model} tuned on itself with nothing left out",
        *(f"  {part}" for part in found.widths.split("; ")),
        f"  {found.scored} tokens of {Path(measured_on).name} predicted for each setting, {found.seconds:.0f} s",
        "",
        "preset     sparse  product   drop      adds  allowed        KL     bytes  layers",
    ]
    for p, adds in zip(found.presets, found.adds, strict=True):
        rule = p.rule
        skipped = f"{_part(rule.sparsity):>7}{_part(rule.product):>9}{_part(rule.drop):>7}"
        added = f"{divergence(adds):>10}{LEVELS[p.name]:>9g}{divergence(p.kl):>10}"
        figures = f"{added}{units.size(p.bytes_per_token):>10}"
        span = f"{min(rule.layers):.1f}-{max(rule.layers):.1f}" if rule.layers else "alike"
        lines.append(f"{p.name:<10}{skipped}{figures}  {span}")
    lines += ["", *_dials_alone(found.dials), *_predictors(found.predictors)]
    lines += ["", *(wrapped(said, f"{name:<17}", 17 * " ") for name, said in _OWN_LEGEND.items()), ""]
    lines.append(
        wrapped("What the rounding of the weights costs comes before that: floe-chat eval, with the 16-bit source.")
    )
    return printable("\n".join(lines))


def _dials_alone(dials: DialLoss) -> list[str]:
    """What each dial adds by itself: what F4 estimates the loss of a quality set by hand by."""
    curves = ((name, getattr(dials, name)) for name in POINTS)
    return ["Each dial of F4 alone adds, nats", *(_curve(name, curve) for name, curve in curves if curve)]


def _curve(name: str, curve: Curve) -> str:
    return f"  {name:<11}" + ", ".join(f"{units.share(share)} {divergence(kl)}" for share, kl in curve)


def _predictors(found: OwnPredictors | None) -> list[str]:
    if found is None:
        return []
    kept = "Those trained again are used now." if found.kept else "They are left as they were."
    said = (
        f"Of the next layer's experts, the pack's predictors name {units.share(found.before)} on the last "
        f"{found.tokens:,} tokens of the text; trained on the text before that, {units.share(found.after)}. {kept}"
    )
    return ["", *wrapped(said).splitlines()]


def _learned(found: OwnPredictors | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found) | {"kept": found.kept}


def _flat(preset: TunedPreset) -> dict[str, Any]:
    """A preset's fields, its rule's among them."""
    fields = asdict(preset)
    return {**fields.pop("rule"), **fields}


def text(found: TunedPresets, measured_on: str) -> str:
    """Everything for people, 100 columns wide."""
    from ....engine.quality.frontier import PROBES

    frontier = found.frontier
    presets = {point.setting: name for name, point in frontier.presets().items()}
    measured = {point.setting: point for point in frontier.points}
    probes = {setting: name for setting, name in PROBES.items() if setting in measured}
    wide = any(point.setting not in presets for point in frontier.pareto(own=False)) and probes
    lines = [
        f"floe-chat {version('floe-chat')}, {found.model} tuned on its 16-bit source {found.source}",
        *(f"  {part}" for part in found.widths.split("; ")),
        f"  {len(frontier.points)} settings, {found.scored} tokens of {Path(measured_on).name} predicted",
        "",
        *plot(frontier),
        "",
        "The frontier at this pack's widths",
        *_table(frontier.pareto(own=True), presets),
    ]
    if wide:
        lines += ["", "The frontier over all widths", *_table(frontier.pareto(own=False), presets)]
        lines += ["", "To compare with", *_table([measured[setting] for setting in probes], probes)]
    alone = [point for point in frontier.points if _dials(point) == 1]
    lines += ["", "Each dial alone", *_table(alone, {}), "", *_LEGEND, "", "Presets, measured again on the pack itself"]
    lines.append(f"  {'nothing left out':<18} KL {divergence(found.unskipped_kl)}")
    lines += [
        f"  {p.name:<18} KL {divergence(p.kl):<9} {units.size(p.bytes_per_token)} per token" for p in found.presets
    ]
    lines += ["", *_dials_alone(found.dials), *_predictors(found.predictors)]
    return printable("\n".join(lines))


def plot(frontier: Frontier) -> list[str]:
    """All points, KL over bits: . measured, o the frontier over all widths, x that of the pack's own, H B F presets."""
    marked = [(point, ".") for point in frontier.points if not point.setting.rule.alpha]
    marked += [(point, "o") for point in frontier.pareto(own=False)] + [(p, "x") for p in frontier.pareto(own=True)]
    marked += [(point, name[0]) for name, point in frontier.presets().items()]
    points = [(point.bits, point.kl, mark) for point, mark in marked if point.kl > 0]
    lines = scatter(points, *_PLOT, "bits read per weight of the chosen experts", "KL, nats")
    return [*lines, "  . measured   o frontier   x frontier at this pack's widths   H B F presets"]


def _dials(point: Point) -> int:
    s, rule = point.setting, point.setting.rule
    widths = (s.up < 16 or s.rank > 0) + (s.gate < 16) + (s.down < 16)
    return widths + bool(rule.sparsity or rule.product) + bool(rule.drop or rule.major) + bool(rule.alpha)


def _table(points: Iterable[Point], names: Mapping[Candidate, str]) -> list[str]:
    return [_HEAD, *(_row(point, names.get(point.setting, "")) for point in points)]


def _row(point: Point, name: str) -> str:
    s, rule, d = point.setting, point.setting.rule, point.divergence
    widths = f"{s.up}/{s.gate}/{s.down}"
    stored = f"  {widths:<9}{s.rank or '-':>4}"
    skipped = f"{_part(rule.sparsity):>7}{_part(rule.product):>8}{_part(rule.drop):>5}{_part(rule.major):>6}"
    figures = f"{divergence(d.kl_mean):>10}{d.same_top * 100:>7.2f} %{units.size(point.read):>9}{point.bits:>6.2f}"
    absent = f"{units.share(point.missed / point.read if point.read else None):>7}"
    slope = f"{(rule.layers[-1] - 1) * 100:+.0f} %" if rule.layers else ""
    remark = name or (f"alpha {rule.alpha:g}" if rule.alpha else "")
    return f"{stored}{skipped}{figures}{absent}  {remark} {slope}".rstrip()


def _part(share: float) -> str:
    return f"{share:g}" if share else "-"
