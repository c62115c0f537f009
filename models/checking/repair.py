"""Pack only the damaged files of a finished pack again.

A repair is treated as an interrupted pack whose other files are finished: calibration text passes through the packed
layers up to the last damaged one, so the same text and source give the same bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from ..checkpoint import Checkpoint
from ..errors import CheckpointError
from ..pack import learned_predictor
from ..pack.manifest import COPIED, UNFINISHED, Manifest, layer_file
from ..pack.packed_model import PackedModel
from ..packing.dense_part import FILE as DENSE_FILE
from ..packing.dense_part import DensePart
from ..packing.journal import FOLDER, Journal
from ..packing.pack import PackSpec, make_manifest, settings_of
from ..packing.pack_experts import measures_name
from ..packing.pack_run import PROFILE, Packing, PackReport, ahead_name
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
