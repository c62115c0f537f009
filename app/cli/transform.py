"""`floe-chat transform`: a published checkpoint with its experts cut into finer ones."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from ..progress import note
from ..setup.packing_progress import tokens_of
from ..text.plain_text import printable


@click.command(short_help="Cut a checkpoint's experts into finer ones.")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--parts", type=click.Choice(("2", "4")), required=True, help="Parts of each expert.")
@click.option(
    "--order",
    type=click.Choice(("none", "importance")),
    default="none",
    show_default=True,
    help="How neurons are ordered before an expert is cut; importance: those that do most come into the first part.",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure importance on this UTF-8 text.  [default: the built-in text]",
)
def transform(source: Path, destination: Path, parts: str, order: str, text_file: Path | None) -> None:
    """Write the checkpoint SOURCE into folder DESTINATION, with more and smaller experts.

    SOURCE is a folder with config.json and *.safetensors as published; it is only read. Each expert becomes 2 or 4, of
    which a token always uses all, so the answers stay the same; the new checkpoint can be fine-tuned, packed, and
    loaded by transformers and by other programs. This is the complete transformation of DualSparse-MoE (section 3.1).

    The same command continues after an interruption.
    """
    if text_file is not None and order == "none":
        raise click.UsageError("--text needs --order importance. Add it, or leave --text out.")
    with click.progressbar(length=1000, label="Reading", file=sys.stderr, show_pos=False, show_eta=False) as bar:
        shown = 0
        from ...models.finer.transform import suitable
        from ...models.finer.transform import transform as write

        def say(step: str, share: float) -> None:
            nonlocal shown
            bar.label = printable(step)
            bar.update(int(share * 1000) - shown)
            shown = int(share * 1000)

        tokens = None
        if order == "importance":
            suitable(source, int(parts))  # before its tokenizer is needed
            tokens = tokens_of(source, text_file)
        done = write(source, destination, int(parts), tokens, say)
        say("Done", 1.0)
    if done.without_guessing:
        note("Its layers that guess further tokens have experts of the old size and were left out.")
    uses = f"{done.top_k} of {done.experts} experts of {done.neurons:,} neurons per token"
    click.echo(printable(f"{destination}: {uses}, {done.nbytes / 1e9:.3g} GB"), err=True)
    packed = f"{str(destination).rstrip('/')}-packed"
    click.echo(printable(f"Pack it: floe-chat pack {shlex.quote(str(destination))} {shlex.quote(packed)}"), err=True)
