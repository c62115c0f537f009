"""`floe-chat tune`: the presets of one pack from what was measured on its own source (engine/quality/frontier.py).

The frontier is computed from the source's weights rounded to the pack's widths. What it derives is then measured again
on the pack itself, through the kernels that will run, and these figures go into the manifest beside the presets. All
points are saved in the pack's folder as frontier.json, for reference only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models import private_file
from ...models.catalog import asset
from ...models.checkpoint import Checkpoint
from ...models.pack.dial_loss import DialLoss
from ...models.pack.manifest import FRONTIER, FileEntry, TunedPreset, file_entry
from ...models.packing import calibration
from ...models.transformers_import import import_model_code
from .. import quality_presets
from ..loader import load
from . import frontier, own_predictors
from .candidates import Candidate
from .evaluate import continuation, measured_divergence
from .frontier import Frontier, Point
from .own_predictors import OwnPredictors
from .own_presets import dial_losses, need_writable
from .references import NO_SPARSITY, PackReference, SourceReference
from .source_model import identify
from .text_windows import cut, cut_prompts
from .told import Told


@dataclass(frozen=True, slots=True)
class TunedPresets:
    """The result. `unskipped_kl` is the pack's own KL with nothing left out; `scored` tokens were predicted.

    `dials`: what each dial of a quality set by hand adds to it. `predictors`: see `own_predictors.run`.
    """

    model: str
    source: str
    widths: str
    frontier: Frontier
    presets: tuple[TunedPreset, ...]
    dials: DialLoss
    unskipped_kl: float
    scored: int
    predictors: OwnPredictors | None = None


def run(
    pack: Path,
    source: Path,
    ids: Sequence[int],
    tokens: int,
    told: Told,
    *,
    text: str,
    widths: bool,
    device: str = "auto",
    learn: bool = False,
) -> TunedPresets:
    """Search the frontier of a pack, and write the presets that follow into it.

    Args:
        ids: the text by the pack's tokenizer, without a start token; as much of it is used as `tokens` says.
        text: the name of the text, saved with the pack's presets.
        widths: whether other widths than the pack's are tried too. device: for the pack, as `load` takes it.
        learn: train the predictors on all of the text too.

    Raises:
        UsageError: too few or too many tokens, a text too short, another source.
        CheckpointError, PackError: the source or the pack cannot be read, or the pack cannot be written to.
    """
    need_writable(pack)
    told.step("Starting transformers")
    import_model_code()
    checkpoint = Checkpoint(source)
    windows, keep = cut(ids, checkpoint.config, tokens)
    loaded, facts = load(pack, None, device, lambda step, _share: told.step(step), library=True)
    identity = identify(checkpoint, loaded.packed)
    manifest = loaded.packed.manifest
    w, signals = manifest.widths, manifest.signals
    own = Candidate(w.up, w.gate, w.down)
    passages = in_rows(calibration.read_tokens(pack, asset("calibration.txt").read_text(encoding="utf-8")), windows)
    # Before the long search: report a source or pack with non-finite values, and where.
    expected = SourceReference(checkpoint, identity, told).logits(windows[:, :-1], keep)
    prompts = cut_prompts(ids, checkpoint.config)
    unskipped_kl = measured_divergence(loaded, NO_SPARSITY, windows, expected, told).kl_mean
    with torch.inference_mode():
        given = (checkpoint, own, passages, windows, keep, told.step)
        found = frontier.search(*given, widths=widths, signals=signals, short=w.short, whole=manifest.whole)
    presets: list[TunedPreset] = []
    for name, point in found.presets().items():
        preset = quality_presets.ruled(name, point.setting.rule)
        kl = measured_divergence(loaded, preset, windows, expected, told).kl_mean
        taken = continuation(loaded, preset, prompts, told).bytes_per_token
        presets.append(TunedPreset(name, point.setting.rule, kl, taken or 0.0, text, len(windows) * keep))
    others = {name: entry for name, entry in manifest.beside.items() if name != FRONTIER}
    manifest = dataclasses.replace(manifest, tuned=tuple(presets), beside=others | _keep(pack, found, told))
    unskipped = PackReference(loaded, told).logits(windows[:, :-1], keep)
    dials = dial_losses(loaded, manifest, windows, unskipped, told, text)
    dataclasses.replace(manifest, dials=dials).write(pack)
    return TunedPresets(
        model=facts.model,
        source=facts.source,
        widths=facts.widths,
        frontier=found,
        presets=tuple(presets),
        dials=dials,
        unskipped_kl=unskipped_kl,
        scored=windows.shape[0] * keep,
        predictors=own_predictors.run(loaded, ids, told) if learn else None,
    )


def fields_of(point: Point) -> dict[str, Any]:
    """A point as JSON has it."""
    d = point.divergence
    return {
        "setting": frontier.described(point.setting),
        "kl": d.kl_mean,
        "kl_99": d.kl_99,
        "same_top": d.same_top,
        "perplexity": d.perplexity,
        "bytes_per_token": point.read,
        "missed_bytes_per_token": point.missed,
        "bits": point.bits,
    }


def in_rows(passages: Tensor, windows: Tensor) -> Tensor:
    """The passages, end to end, in rows as long as the windows without their last token."""
    length = windows.shape[1] - 1
    flat = passages.flatten()
    flat = flat.repeat(-(-length // len(flat)))  # repeated only if they do not fill one row
    return flat[: len(flat) // length * length].view(-1, length)


def _keep(pack: Path, found: Frontier, told: Told) -> dict[str, FileEntry]:
    pareto = {point.setting for own in (False, True) for point in found.pareto(own=own)}
    points = [fields_of(point) | {"pareto": point.setting in pareto} for point in found.points]
    text = json.dumps({"format": "floe-chat frontier", "points": points}) + "\n"
    try:
        private_file.replace(pack / FRONTIER, text, private_file.SHARED)
        return {FRONTIER: file_entry(pack / FRONTIER)}
    except OSError as error:
        told.note(f"The points of the frontier could not be saved in the pack: {error.strerror or error}.")
        return {}
