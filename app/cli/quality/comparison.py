"""What `eval` and `tune` need: a pack's 16-bit source and a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ....models.errors import UsageError
from ...arguments import read_text

Command = Callable[..., Any]
TOKENS = 2048  # of a text that are read
OWN_TOKENS = 1024  # likewise, where a pack is read again and again
_BESIDE = (
    "The 16-bit checkpoint that was packed, the reference.  [default: the folder of that name beside the pack; where "
    "there is none, the pack itself with nothing left out]"
)


def _options(source: str, tokens: str) -> tuple[Callable[[Command], Command], ...]:
    return (
        click.argument("model", default="demo", metavar="[MODEL]"),
        click.option("--source", type=click.Path(path_type=Path), metavar="FOLDER", help=source),
        click.option(
            "--text",
            "text_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="The text to predict, in UTF-8.  [default: heldout.md beside the pack, else the parts of the built-in "
            "text that packing did not use]",
        ),
        click.option(
            "--tokens", type=click.IntRange(1), help=f"How many tokens of the text to read.  [default: {tokens}]"
        ),
        click.option("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, cuda or cuda:N."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table."),
    )


def comparing(*, source: str = _BESIDE, tokens: str = str(TOKENS)) -> Callable[[Command], Command]:
    """The model and the options of a command that compares a pack with its source.

    Args:
        source: the help of --source. tokens: the default of --tokens, in words.
    """

    def extended(command: Command) -> Command:
        for option in reversed(_options(source, tokens)):
            command = option(command)
        return command

    return extended


def source_of(pack: Path, given: Path | None) -> Path | None:
    """The checkpoint that was packed: the folder given, or the folder beside the pack with the name of its source, if
    that is there.

    Raises:
        UsageError: the folder given is a pack.
    """
    if given is not None:
        check_source(given)
        return given
    from ....models.pack.manifest import Manifest

    name = Manifest.read(pack).source.name
    beside = pack.resolve().parent / Path(name).name
    there = (beside / "config.json").is_file() and not (beside / "manifest.json").exists()
    return beside if there else None


def check_source(given: Path) -> None:
    """Raises: UsageError: the folder given is a pack."""
    if (given / "manifest.json").exists():
        raise UsageError(
            f"{given} is itself packed", "", "Give the folder of the 16-bit checkpoint that was packed as --source."
        )


HELD_OUT = "heldout.md"
"""A text beside a pack that neither its training nor its packing has seen: the default to measure on."""


def _beside(pack: Path) -> Path | None:
    file = pack.resolve().parent / HELD_OUT
    return file if file.is_file() else None


def text_name(pack: Path, file: Path | None) -> str:
    """What to call the text: its file's name, or that it is the built-in one."""
    return str(file) if file is not None else HELD_OUT if _beside(pack) else "the built-in text"


def text_ids(pack: Path, file: Path | None) -> list[int]:
    """The text as the pack's tokenizer encodes it: `file`, or the one beside the pack, or the built-in one.

    The built-in one lacks the passages that thresholds were measured on.

    Raises:
        PackError: the tokenizer cannot be used. UsageError: the file cannot be read.
    """
    from ....models.catalog import asset
    from ....models.packing.calibration import passages
    from ....models.tokenizer.chat_process import encode

    file = file or _beside(pack)
    text = asset("calibration.txt").read_text(encoding="utf-8") if file is None else read_text(file)
    ids = encode(pack, text)
    return ids if file is not None or not ids else _without(ids, passages(ids))


def _without(ids: list[int], passages: list[list[int]]) -> list[int]:
    """`ids` without `passages`, which occur in it in order."""
    left: list[int] = []
    begin = 0
    for passage in passages:
        at = next(place for place in range(begin, len(ids)) if ids[place : place + len(passage)] == passage)
        left += ids[begin:at]
        begin = at + len(passage)
    return left + ids[begin:]
