"""Pack only the damaged files of a finished pack again, or add the head that it lacks.

A repair is treated as an interrupted pack whose other files are finished: calibration text passes through the packed
layers up to the last damaged one, so the same text and source give the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import private_file
from ..checkpoint import Checkpoint, read_config
from ..errors import CheckpointError, FloeError
from ..pack import learned_predictor
from ..pack.manifest import COPIED, DRAFT, FETCHING, UNFINISHED, Manifest, file_entry, layer_file
from ..pack.packed_model import PackedModel
from ..packing.assistant_part import AssistantPart, AssistantSource
from ..packing.dense_part import FILE as DENSE_FILE
from ..packing.dense_part import DensePart
from ..packing.draft_part import DraftPart, has_head
from ..packing.journal import FOLDER, Journal
from ..packing.pack import PackSpec, make_manifest, settings_of
from ..packing.pack_experts import measures_name
from ..packing.pack_run import PROFILE, Packing, PackReport, ahead_name
from ..packing.reading_order import ReadingOrder
from ..packing.workplace import locked


def repair(source: Checkpoint, folder: Path, files: list[str], tokens: Tensor, progress: PackReport) -> list[str]:
    """Pack the named files of a finished pack again, in their places.

    If the profile is damaged, all layers are packed again, since it holds their measurements.

    Args:
        tokens: (N, T) the calibration text of the pack. progress: as for `pack`.

    Returns:
        the files that are intact now but differ from before: the text or the number of threads differed.

    Raises:
        CheckpointError: the source is another model, or cannot be read. TryAgainError: another process uses the folder.
    """
    before = Manifest.read(folder)
    w, spec = before.widths, _need_source(source, before, tokens)
    marker, old = folder / UNFINISHED, dict(before.files)
    with locked(marker, f"Another floe-chat is packing into {folder}"):
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        try:
            journal = Journal.open(folder, settings_of(source, spec, tokens))
            dense = DensePart(source, w.dense)
            until = _declare(journal, folder, before, source, dense, files)
            small = [path for file in COPIED if file in files and (path := source.shelf.small(file)) is not None]
            packing = Packing(source, before, folder, journal, dense, spec.device, progress, until)
            packing.run(tokens, small)
        finally:
            shutil.rmtree(folder / FOLDER)
    marker.unlink()
    return [name for name in files if before.files[name].sha256 != old[name].sha256]


def add_draft(source: Checkpoint, folder: Path, progress: PackReport) -> None:
    """Pack the drafting head of a finished pack's source, or an assistant, and add it to the pack, which can be used
    meanwhile.

    A head's bytes are what packing the model with it gives. One that is there is replaced.

    Raises:
        CheckpointError: the source is another model, has no head, or cannot be read. TryAgainError: another process
        adds one. FloeError: the disk is too small or fails.
    """
    before = Manifest.read(folder)
    if isinstance(source, AssistantSource):
        part = AssistantPart(source, before, read_config(folder))
    else:
        _need_source(source, before, torch.empty(0, dtype=torch.long))
        if not has_head(source):
            raise CheckpointError(f"{source.shelf.name} has no drafting head", "Its publisher left it out.")
        part = DraftPart(source, before)
    order = ReadingOrder(source, part.steps())

    def read(step: Hashable, share: float) -> None:
        order.finished(step)
        progress("Packing the drafting head", share, None)

    marker = folder / FETCHING  # a pack that is not finished has UNFINISHED
    try:
        with locked(marker, f"Another floe-chat is writing into {folder}"):
            if (free := shutil.disk_usage(folder).free) < part.nbytes:
                cause = f"The head takes {part.nbytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free."
                raise FloeError(f"The disk of {folder} is too small", cause, "Free some space.")
            with private_file.replacing(folder / DRAFT, private_file.SHARED) as new:
                part.write(new, read)
            now = Manifest.read(folder)  # which may have been written since
            replace(now, beside={**now.beside, DRAFT: file_entry(folder / DRAFT)}).write(folder)
        marker.unlink(missing_ok=True)
    except OSError as error:
        cause = f"{error.strerror or error}."
        raise FloeError("The drafting head could not be added", cause, "The pack is as it was.") from error


def _need_source(source: Checkpoint, before: Manifest, tokens: Tensor) -> PackSpec:
    """Raises: CheckpointError: the pack was made from something else. Else how it was made."""
    w = before.widths
    spec = PackSpec(
        w.up, w.gate, w.down, w.dense, w.group, short=w.short, rounding=w.rounding
    )  # signals, and what is not skipped, are as they were
    manifest = make_manifest(source, spec, tokens, before.name)
    if (manifest.architecture, manifest.widths) != (before.architecture, w):
        raise CheckpointError(
            f"{source.folder} is not the source of this pack",
            f"The pack was made from {before.source.name}.",
            "Give the checkpoint that this pack was made from.",
        )
    return spec


def _declare(
    journal: Journal, folder: Path, manifest: Manifest, source: Checkpoint, dense: DensePart, files: list[str]
) -> int | None:
    """Record in the journal what is finished; returns how many layers the text has to pass through, None for all."""
    a = manifest.architecture
    sound = PROFILE not in files
    damaged = [layer for layer in range(a.layers) if not sound or layer_file(layer) in files]
    for layer in range(a.layers):
        journal.note_signal(layer, manifest.signal_of(layer))
        journal.note_whole(layer, layer in manifest.whole)
    if DENSE_FILE not in files:
        journal.note_dense(name for stage in dense.stages for name in stage)
    for table in dense.tables:
        if table.file not in files:
            journal.note_dense(source.tables[table.name])
    if sound:
        packed = PackedModel(folder, manifest)
        _keep_measures(journal, packed)
        for layer in set(range(a.layers)) - set(damaged):
            for expert in range(a.experts):
                journal.note_expert(layer, expert)
    for name, entry in manifest.files.items():
        if name not in files and (sound or not name.startswith("layer_")):
            journal.note_file(name, entry)
    if DENSE_FILE in files and any(map(dense.rounded, range(len(dense.stages)))):
        return None
    return max(damaged, default=-1) + 1


def _keep_measures(journal: Journal, packed: PackedModel) -> None:
    """Store the profile's tensors as packing does while it runs."""
    profile, a = packed.profile(), packed.manifest.architecture
    for layer in range(a.layers):
        names = ("popularity", "router_score")
        journal.keep(measures_name(layer), {name: profile[name][layer] for name in names}, sealed=False)
    if packed.has_lookahead():
        recalls = profile[learned_predictor.RECALL].tolist()
        for layer, (found, recall) in enumerate(zip(packed.lookahead(), recalls, strict=True)):
            journal.keep(ahead_name(layer), learned_predictor.to_tensors((found, recall[0], recall[1])))
