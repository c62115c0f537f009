"""`floe-chat verify`: check a packed model, and repair it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...models.errors import FloeError
from .. import progress
from ..setup.adding import assistant, assistant_of, source_of
from ..text import units
from ..text.plain_text import printable

if TYPE_CHECKING:
    from ...models.checking.verify import Compared, Damage
    from ...models.pack.manifest import Manifest


@click.command(short_help="Check every byte of a packed model.")
@click.argument("model", default="demo", metavar="[MODEL]")
@click.option(
    "--source",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also compare a few layers with the checkpoint that was packed.",
)
@click.option("--repair", is_flag=True, help="Pack the damaged files again, from --source or the hub.")
@click.option("--pack", metavar="PLACE", help="For --repair: take the files from this ready pack (see setup) instead.")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The calibration text of the pack, for --repair.  [default: the built-in text]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(
    ctx: click.Context,
    model: str,
    source: Path | None,
    repair: bool,
    pack: str | None,
    text_file: Path | None,
    as_json: bool,
) -> None:
    """Check every byte and every tensor of the packed MODEL.

    Files without a recorded checksum (packs of earlier versions) are listed.

    Exit code 0: the model is intact, or was repaired. 1: it is damaged; the output says what to do.
    """
    from ...models.catalog import find
    from ...models.checking.verify import damages
    from ...models.pack.manifest import Manifest

    if text_file is not None and not repair:
        raise click.UsageError("--text is only used with --repair")
    if pack is not None and not repair:
        raise click.UsageError("--pack is only used with --repair")
    folder = find(model)
    manifest = Manifest.read(folder)
    if repair and source is None and pack is None and manifest.source.commit is None:
        raise click.UsageError(
            "This model was packed from a folder or a GGUF file; give it with --source PATH, "
            "or the same pack with --pack PLACE"
        )
    damaged = damages(folder, manifest, _step)
    repaired: list[str] = []
    if repair and damaged and pack is not None:
        repaired = _take_again(folder, manifest, pack, damaged)
        damaged = damages(folder, manifest, _step)
    elif repair and damaged:
        repaired = _repair(folder, manifest, source, text_file, damaged)
        damaged = damages(folder, manifest := Manifest.read(folder), _step)
    compared = _compared(folder, manifest, source) if source is not None and not damaged else []
    progress.clear()
    good = not damaged and all(matrix.good for matrix in compared)
    if as_json:
        found = _fields(folder, manifest, good, damaged, repaired, compared)
        click.echo(json.dumps(progress.rounded(found)))
    else:
        click.echo("\n".join(printable(line) for line in _lines(folder, manifest, damaged, repaired, compared, source)))
    ctx.exit(0 if good else 1)


def _step(step: str, share: float) -> None:
    progress.step(f"{step} ({share:.0%})")


def _compared(folder: Path, manifest: Manifest, source: Path) -> list[Compared]:
    from ...models.checking.verify import compare
    from ...models.gguf.shelf import opened
    from ...models.pack.packed_model import PackedModel

    layers = manifest.architecture.layers
    few = sorted({0, layers // 2, layers - 1})
    with opened(source) as checkpoint:
        return compare(PackedModel(folder, manifest), checkpoint, few, _step)


def _repair(
    folder: Path, manifest: Manifest, source: Path | None, text_file: Path | None, damaged: list[Damage]
) -> list[str]:
    from ...models.checking.repair import add_draft, repair
    from ...models.pack.manifest import DRAFT
    from ..setup.packing_progress import tokens_of

    names = [damage.file for damage in damaged if damage.file in manifest.files]
    drafts = any(damage.file == DRAFT for damage in damaged)
    if not names and not drafts:
        return []

    def told(step: str, share: float, _left: float | None) -> None:
        _step(step, share)

    changed = list[str]()
    assisted = drafts and manifest.family.assistant is not None
    if names or not assisted:
        with source_of(folder, manifest, source) as checkpoint:
            if names:
                changed = repair(checkpoint, folder, names, tokens_of(checkpoint.folder, text_file), told)
            if drafts and not assisted:
                add_draft(checkpoint, folder, told)
    if assisted:
        with assistant(assistant_of(manifest), folder, manifest) as checkpoint:
            add_draft(checkpoint, folder, told)
    for name in changed:
        progress.note(
            f"{name} was packed again and differs from before: the text or the number of threads differs. "
            "The pack is intact."
        )
    return names + [DRAFT] * drafts


def _take_again(folder: Path, manifest: Manifest, pack: str, damaged: list[Damage]) -> list[str]:
    """Replace the damaged files by those of the same ready pack."""
    from ..setup.taking import take_again

    names = [damage.file for damage in damaged]
    try:
        take_again(pack, folder, manifest, names, _step)
    except OSError as error:
        raise FloeError(f"{folder} cannot be repaired", f"{error.strerror or error}.") from error
    return names


def _count(manifest: Manifest) -> int:
    """Files that have a checksum."""
    return len(manifest.files) + len(manifest.beside) + manifest.sealed


def _fields(
    folder: Path,
    manifest: Manifest,
    good: bool,
    damaged: list[Damage],
    repaired: list[str],
    compared: list[Compared],
) -> dict[str, Any]:
    from ...models.catalog import name_of
    from ...models.checking.verify import unrecorded

    return {
        "model": name_of(folder, manifest.name),
        "folder": str(folder),
        "good": good,
        "files": _count(manifest),
        "bytes": manifest.nbytes,
        "damaged": [dataclasses.asdict(damage) for damage in damaged],
        "repaired": repaired,
        "unrecorded": unrecorded(folder, manifest),
        "compared": [{**dataclasses.asdict(matrix), "good": matrix.good} for matrix in compared],
    }


def _lines(
    folder: Path,
    manifest: Manifest,
    damaged: list[Damage],
    repaired: list[str],
    compared: list[Compared],
    source: Path | None,
) -> list[str]:
    from ...models.catalog import name_of
    from ...models.checking.verify import unrecorded
    from ...models.pack.manifest import DRAFT

    size = units.size(manifest.nbytes)
    lines = [f"repaired  {name}" for name in repaired]
    if damaged:
        lines += [f"damaged   {damage.file}: {damage.cause}" for damage in damaged]
        lines += [f"{len(damaged)} of {_count(manifest)} files are damaged; the others are intact.", ""]
        if any(damage.file in {*manifest.files, DRAFT} for damage in damaged):
            here = source is None and manifest.source.commit
            lines += [f"Pack these files again {'from the hub' if here else 'from the checkpoint that was packed'}:"]
            given = "" if here else f" --source {shlex.quote(str(source)) if source else 'FOLDER'}"
            lines += [f"  floe-chat verify {shlex.quote(str(folder))} --repair{given}"]
            lines += ["or restore them from a copy. Those of a ready pack come again with --repair --pack PLACE."]
        return lines
    lines += [f"{name_of(folder, manifest.name)}: all {_count(manifest)} files are intact, {size}."]
    lines += [
        f"unknown   {name}: an earlier version recorded no checksum for it, so damage cannot be detected."
        for name in unrecorded(folder, manifest)
    ]
    if compared:
        lines += [
            f"{matrix.name}: differs by {matrix.error:.3g}, more than the limit of {matrix.limit:.3g}"
            for matrix in compared
            if not matrix.good
        ]
        worst = max(compared, key=lambda matrix: matrix.error / matrix.limit)
        bad = sum(not matrix.good for matrix in compared)
        lines += [
            f"Compared {len(compared)} matrices with the source's: {bad} differ by more than quantization explains. "
            f"Closest to its limit: {worst.name} ({worst.bits} bit), with a relative error of {worst.error:.3g}."
        ]
        if bad:
            lines += [f"Either {source} is another checkpoint, or packing failed; pack it again."]
    return lines
