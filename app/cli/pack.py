"""`floe-chat pack`: pack a checkpoint folder or a GGUF file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ...models.errors import UsageError
from ..progress import note

if TYPE_CHECKING:
    from ...models.pack.manifest import Manifest
    from ...models.packing.pack import PackSpec
    from ...models.packing.pack_run import PackReport
from ..setup.packing_progress import TooShortError, time_left, tokens_of


@click.command(short_help="Pack a checkpoint folder or a GGUF file.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--up", type=int, default=3, show_default=True, help="Bits of the signal: 2, 3, 4, 8 or 16.")
@click.option("--rows", type=int, default=4, show_default=True, help="Bits of the rows: 2, 3, 4, 8 or 16.")
@click.option("--gate", type=int, help="Bits of the rows' first half.  [default: those of --rows]")
@click.option("--down", type=int, help="Bits of down.  [default: those of --rows]")
@click.option("--dense", type=int, help="Bits of attention: 4, 8 or 16.  [default: 4, or 16 if all others are 16]")
@click.option(
    "--signal",
    type=click.Choice(("auto", "up", "gate")),
    default="auto",
    show_default=True,
    help="The projection by which neurons are skipped; auto: in each layer the one that loses less.",
)
@click.option(
    "--rounding",
    type=click.Choice(("calibrated", "hqq")),
    help="How codes are found: for the inputs that the calibration text gives the weights, or by HQQ, which needs no "
    "text, loses more, and takes hours on a CPU (see --device).  [default: calibrated, or hqq if --text is too short]",
)
@click.option("--name", help="The model's name.  [default: the destination folder's name]")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Calibrate on this UTF-8 text.  [default: the built-in text]",
)
@click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="Device that quantizes: cpu, cuda or cuda:N."
)
@click.option("--no-draft", is_flag=True, help="Leave out the head that guesses further tokens, where there is one.")
@click.option(
    "--assistant",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="For Gemma 4: the checkpoint of the model that guesses its tokens, to pack with it.",
)
@click.option("--fresh", is_flag=True, help="Start again instead of continuing an interrupted pack.")
def pack(
    source: Path,
    destination: Path,
    up: int,
    rows: int,
    gate: int | None,
    down: int | None,
    dense: int | None,
    signal: Literal["auto", "up", "gate"],
    rounding: Literal["calibrated", "hqq"] | None,
    name: str | None,
    text_file: Path | None,
    device: str,
    no_draft: bool,
    assistant: Path | None,
    fresh: bool,
) -> None:
    """Pack the checkpoint SOURCE into folder DESTINATION.

    SOURCE is a folder with config.json, tokenizer.json and *.safetensors as published, or a GGUF file, best of Q8_0 or
    F16; it is only read. Bits are bits per weight;
    fewer are smaller and faster, and less exact. The signal is an expert's up or gate projection, by which it is known
    which neurons a token can skip; a row is a neuron's part of the other one, and of down. With --up 16 --rows 16
    nothing is quantized, and the preset Exact gives the original model's answers. `floe-chat tune` measures size and
    quality loss of other widths.

    The same command continues a pack that was interrupted.
    """
    if name is not None and not (name.strip() and name.isprintable()):
        raise UsageError(
            f"A model cannot be called {name!r}", "", "Give a name of letters, digits, '-' and '_' with --name."
        )
    gate, down = rows if gate is None else gate, rows if down is None else down
    if dense is None:
        dense = 16 if up == gate == down == 16 else 4
    with click.progressbar(length=1000, label="Reading", file=sys.stderr, show_pos=False, show_eta=False) as bar:
        shown = 0
        from ...models.pack.widths import CALIBRATED
        from ...models.packing.draft_part import WITHOUT
        from ...models.packing.pack import PackSpec
        from ...models.packing.pack_run import CONTINUES

        def progress(step: str, share: float, left: float | None) -> None:
            nonlocal shown
            if step == CONTINUES or step.startswith(WITHOUT):
                note(f"{step.removesuffix('.')}.")
            bar.label = step if left is None else f"{step}, {time_left(left)}"
            bar.update(int(share * 1000) - shown)
            shown = int(share * 1000)

        widths, by = (up, gate, down, dense), rounding or CALIBRATED
        spec = PackSpec(*widths, device=device, signal=signal, rounding=by, draft=not no_draft)
        called = name or destination.resolve().name
        manifest, size = pack_folder(
            *(source, destination, spec, called, progress, text_file),
            fresh=fresh,
            text_needed=rounding == CALIBRATED,
            assistant=assistant,
        )
    click.echo(f"{destination}: {manifest.describe()}, {size / 1e9:.3g} GB", err=True)
    if why := manifest.inexact:
        click.echo(f"Without preset Exact: {why}", err=True)
    click.echo(f"Chat with it: floe-chat --model {destination}", err=True)
    click.echo(f"Measure its own presets: floe-chat tune {destination}", err=True)


def pack_folder(
    source: Path,
    destination: Path,
    spec: PackSpec,
    name: str,
    progress: PackReport,
    text_file: Path | None = None,
    *,
    fresh: bool = False,
    text_needed: bool = False,
    assistant: Path | None = None,
) -> tuple[Manifest, int]:
    """Pack `source`, calibrating on a text file or the built-in text; returns the manifest and the pack's bytes.

    If the text file is too short, and not needed, the weights are rounded without it, and thresholds are measured on
    the built-in text.

    Args:
        assistant: the checkpoint of the model's assistant, which is packed with it.

    Raises:
        FloeError: as `Checkpoint`, `pack` and `add_draft`. UsageError: also if the text cannot be read, or is needed
            and too short.
    """
    from ...models.checking.repair import add_draft
    from ...models.gguf.shelf import opened
    from ...models.pack.manifest import Manifest
    from ...models.pack.widths import HQQ
    from ...models.packing.assistant_part import AssistantPart, AssistantSource
    from ...models.packing.pack import make_manifest
    from ...models.packing.pack import pack as write_pack

    with opened(source) as checkpoint:
        try:
            tokens = tokens_of(checkpoint.folder, text_file)
        except TooShortError as error:
            if text_needed:
                raise
            tokens, spec = tokens_of(checkpoint.folder, None), replace(spec, rounding=HQQ)
            note(f"{error.title}: {error.cause} The weights are rounded by HQQ, and thresholds use the built-in text.")
        if assistant is not None:  # which is known to fit before the hours of packing
            guesser = AssistantSource(assistant, checkpoint.family)
            AssistantPart(guesser, make_manifest(checkpoint, spec, tokens, name), checkpoint.config)
        manifest = write_pack(checkpoint, destination, spec, tokens, name, progress, fresh=fresh)
        if assistant is not None:
            add_draft(AssistantSource(assistant, checkpoint.family), destination, progress)
            manifest = Manifest.read(destination)
    return manifest, manifest.nbytes
