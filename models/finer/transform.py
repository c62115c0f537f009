"""Writes a checkpoint of finer experts, shard by shard: what of it is there is whole, and config.json comes last."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import private_file
from ..checkpoint import Checkpoint
from ..checkpoint_files import INDEX
from ..errors import CheckpointError, FloeError, UsageError
from ..packing.dense_part import DensePart
from ..packing.journal import text_digest
from ..packing.workplace import locked
from .cutting import unit
from .fields import finer_fields
from .ordering import ordered
from .routers import finer_router
from .shard import Making

PARTS = (2, 4)
WORK = "transforming"  # the folder in a checkpoint that is not finished
_SETTINGS, _LOCK, _ORDER = "settings.json", "lock", "order.safetensors"
_VERSION = 1
_SMALL = (".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken", "")  # ends of files beside the weights
_LARGEST = 256 << 20  # bytes of such a file
_SPARE = 64 << 20  # bytes of disk for them

Say = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Transformed:
    """What was written: how many experts a layer has, how many of them a token uses, how many neurons one has, bytes of
    weights, and whether layers that guess further tokens were left out.
    """

    experts: int
    top_k: int
    neurons: int
    nbytes: int
    without_guessing: bool


def transform(source: Path, folder: Path, parts: int, tokens: Tensor | None, say: Say) -> Transformed:
    """Write the checkpoint in `source` into `folder` with every expert cut into `parts` experts (complete
    transformation, DualSparse-MoE section 3.1); outputs differ by rounding alone. An interrupted run is continued.

    Args:
        tokens: (N, T) int64 calibration text: neurons are ordered by their importance on it before they are cut, so
            that the first part of an expert is its major one; None: they stay as they are.
        say: called with a sentence and the share done, 0..1.

    Raises:
        UsageError: `folder` holds something else, or was begun with other settings. CheckpointError: the source cannot
            be read, or has no such form. TryAgainError: another process writes there. FloeError: the disk is too small
            or fails.
    """
    checkpoint = suitable(source, parts)
    making = Making(checkpoint, parts)
    fields = finer_fields(checkpoint, parts, without_guessing=bool(making.left_out))
    settings = {
        "version": _VERSION,
        "parts": parts,
        "weights": checkpoint.fingerprint(),
        "text": None if tokens is None else text_digest(tokens),
    }
    sizes = {file: making.nbytes(file) for file in making.files}
    try:
        with _claimed(folder, source, settings):
            missing = [file for file, size in sizes.items() if _size(folder / file) != size]
            _need_room(folder, sum(sizes[file] for file in missing) + _working_bytes(checkpoint, tokens))
            if missing and tokens is not None:
                making.order = ordered(checkpoint, tokens, folder / WORK / _ORDER, lambda step: say(step, 0.0))
            whole, there = sum(sizes.values()), sum(sizes[file] for file in sizes if file not in missing)
            for file in missing:
                say(f"Writing {file}", there / whole)
                making.write(folder / file, file)
                there += sizes[file]
            _write_small(checkpoint, folder, fields, making.index())
            Checkpoint(folder)  # what was written is what it says
    except OSError as error:
        raise FloeError(
            f"Writing into {folder} failed",
            f"{error.strerror or error}.",
            "Free some space if the disk is full, then run the same command again to continue.",
        ) from error
    top_k = checkpoint.config.num_experts_per_tok * parts
    neurons = checkpoint.neurons // parts
    return Transformed(checkpoint.experts * parts, top_k, neurons, sum(sizes.values()), bool(making.left_out))


def suitable(source: Path, parts: int) -> Checkpoint:
    """The source, of which everything that can be known beforehand has been checked.

    Raises:
        UsageError, CheckpointError: as `transform`.
    """
    if parts not in PARTS:
        raise UsageError(f"An expert cannot be cut into {parts} parts", "", "Choose 2 or 4.")
    if source.is_file():
        raise UsageError(
            f"{source} is a file", "", "Give the folder of a published checkpoint with *.safetensors files."
        )
    checkpoint = Checkpoint(source)
    finer_router(checkpoint.family, checkpoint.config, parts)
    together = unit(checkpoint.storage)
    if checkpoint.neurons % (parts * together):
        blocks = f" in blocks of {together}" if together > 1 else ""
        raise CheckpointError(
            f"The experts of {checkpoint.shelf.name} cannot be cut into {parts} parts",
            f"They have {checkpoint.neurons:,} neurons{blocks}, which {parts} does not divide.",
            "Choose fewer parts." if parts > min(PARTS) else "Skip neurons instead: floe-chat pack SOURCE FOLDER",
        )
    DensePart(checkpoint, 16)  # every other weight is there, too
    return checkpoint


@contextmanager
def _claimed(folder: Path, source: Path, settings: dict[str, Any]) -> Generator[None]:
    """Hold `folder` for this checkpoint; afterwards, if all went well, it is an ordinary one."""
    ours, theirs = folder.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents:
        raise UsageError("The new checkpoint cannot be written into its source", "", "Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "", "Choose a folder that is empty or does not exist.")
    work = folder / WORK
    begun = (work / _SETTINGS).is_file()
    if not begun and folder.exists() and (strangers := sorted({path.name for path in folder.iterdir()} - {WORK})):
        raise UsageError(
            f"{folder} holds other files",
            f"For example {strangers[0]}.",
            "Choose an empty folder: nothing was changed.",
        )
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / _LOCK, f"Another floe-chat is writing into {folder}"):
        if not begun:
            private_file.replace(work / _SETTINGS, json.dumps(settings), private_file.SHARED)
        elif _settings(work / _SETTINGS) != settings:
            raise UsageError(
                f"{folder} was begun from other weights, or with other options",
                "",
                "Give the same ones to continue, or delete that folder.",
            )
        yield
    shutil.rmtree(work)


def _settings(path: Path) -> Any:
    try:
        return private_file.read_json(path)
    except ValueError:
        return None


def _write_small(source: Checkpoint, folder: Path, fields: dict[str, Any], index: dict[str, object]) -> None:
    """Everything beside the weights; config.json, without which this is no checkpoint, last."""
    for path in sorted(source.folder.iterdir()):
        wanted = path.suffix in _SMALL and not path.name.startswith(".") and path.name not in (INDEX, "config.json")
        if wanted and path.is_file() and path.stat().st_size <= _LARGEST:
            with private_file.replacing(folder / path.name, private_file.SHARED) as partial:
                shutil.copyfile(path, partial)
    for name, content in ((INDEX, index), ("config.json", fields)):
        private_file.replace(folder / name, json.dumps(content, indent=2) + "\n", private_file.SHARED)


def _working_bytes(source: Checkpoint, tokens: Tensor | None) -> int:
    """Disk for what is kept of the measuring, twice while it is replaced, and for small files."""
    if tokens is None:
        return _SPARE
    order = len(source.layers) * source.experts * source.neurons
    return _SPARE + 2 * 4 * (order + tokens.numel() * source.config.hidden_size)


def _need_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FloeError(
            f"The disk of {folder} is too small",
            f"The checkpoint takes {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free.",
            "Free some space or choose another disk.",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
