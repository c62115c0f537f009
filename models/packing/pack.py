"""Packing: one forward pass over calibration text in which every layer packs itself when its turn comes.

Layer after layer, its dense tensors are read, rounded and written, the text's hidden states pass through what was
written, and its experts are packed one at a time. So the states that a layer is calibrated on are
those that the packed layers before it produce; memory holds one layer's dense part, one expert of the source and the
states; and a shard of the source is not needed any more once its last tensor is packed. A journal says what is
finished, so that an interrupted pack continues where it stopped and produces the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels.activation import gated
from ...kernels.codes import WIDTHS, group_size
from ..catalog_entry import GROUP
from ..checkpoint import Checkpoint
from ..errors import CheckpointError, FloeError, UsageError
from ..families.derived import Derived
from ..pack.manifest import (
    COPIED,
    DENSE_WIDTHS,
    FILE_NAME,
    VERSION,
    Architecture,
    Calibration,
    Manifest,
    PackSource,
    Widths,
)
from ..pack.widths import CALIBRATED
from . import calibration
from .dense_part import DensePart
from .draft_part import draft_part
from .journal import Settings, text_digest
from .pack_run import Packing, PackReport
from .workplace import claimed

_JOURNAL_VERSION = 10
_STATES = 4  # working copies of the calibration's hidden states that the disk has to hold


@dataclass(frozen=True, slots=True)
class PackSpec:
    """Bits per weight; 16 is the source's own. `group` values of an expert share a scale, fewer where H needs it.

    `dense` is the width of attention projections, in groups of 64 or fewer; the head has at least 8 bit. The defaults
    are what lost least for the bytes that a token reads (BENCHMARKS.md). `device` computes the experts'
    codes; those of a GPU differ in a few places from the CPU's. `signal` is the projection by which neurons are
    skipped; with "auto" each layer's is the one that loses less. `up` is the signal's width, `gate` the other one's.
    `rounding` and `short`: see `Widths`; hqq's scales are float16, as it made them. `draft`: whether to pack the head
    that guesses further tokens, where the source has one.
    """

    up: int = 3
    gate: int = 4
    down: int = 4
    dense: int = 4
    group: int = GROUP
    device: str = "cpu"
    signal: Literal["auto", "up", "gate"] = "auto"
    short: bool = True
    rounding: Literal["calibrated", "hqq"] = CALIBRATED
    draft: bool = True

    def __post_init__(self) -> None:
        for part, bits, valid in (
            ("up", self.up, WIDTHS),
            ("gate", self.gate, WIDTHS),
            ("down", self.down, WIDTHS),
            ("dense", self.dense, DENSE_WIDTHS),
        ):
            if bits not in valid:
                choices = ", ".join(map(str, valid))
                raise UsageError(f"{part} cannot be {bits} bit", "", f"Choose one of {choices}.")


EXACT = PackSpec(up=16, gate=16, down=16, dense=16)


def pack(
    source: Checkpoint,
    folder: Path,
    spec: PackSpec,
    tokens: Tensor,
    name: str,
    progress: PackReport | None = None,
    *,
    fresh: bool = False,
) -> Manifest:
    """Write the packed layout of `source` into `folder`; the manifest comes last.

    An interrupted pack of the same source, text and settings is continued: nothing finished is repeated, and the bytes
    are the same as without the interruption.

    Args:
        tokens: (N, T) int64 calibration text. name: what the model will be called.
        progress: called with a sentence, the share done, 0..1, and the seconds left, None while unknown.
        fresh: start over instead of continuing.

    Raises:
        UsageError: the folder holds something else, a finished pack, or an interrupted one of other settings; or there
            is no such device. CheckpointError: the source is unreadable. TryAgainError: another process packs into it.
        FloeError: the disk is too small or fails.
    """
    _check_device(spec.device)
    manifest = make_manifest(source, spec, tokens, name)
    if tokens.numel() and int(tokens.max()) >= source.config.vocab_size:
        raise CheckpointError(
            "The tokenizer does not belong to this checkpoint",
            f"It has token {int(tokens.max())}; the weights are for {source.config.vocab_size} tokens.",
            "Download the model's own tokenizer files.",
        )
    dense = DensePart(source, spec.dense)
    small = [path for file in COPIED if (path := source.shelf.small(file)) is not None]
    settings = settings_of(source, spec, tokens)
    report = progress or _silent
    draft = draft_part(source, manifest, lambda why: report(why, 0.0, None)) if spec.draft else None
    needed = expected_bytes(manifest, dense.nbytes + (draft.nbytes if draft else 0)) + working_bytes(manifest)
    try:
        with claimed(folder, source.folder, settings, needed, fresh=fresh) as journal:
            if (folder / FILE_NAME).exists():  # only tidying up was interrupted
                return Manifest.read(folder)
            with _threads(int(journal.settings["threads"] or 1)):
                packing = Packing(source, manifest, folder, journal, dense, spec.device, report, draft=draft)
                manifest = packing.run(tokens, small)
    except OSError as error:
        raise FloeError(
            f"Packing into {folder} failed",
            f"{error.strerror or error}.",
            "Free some space if the disk is full, then run the same command again to continue.",
        ) from error
    return manifest


def _silent(step: str, share: float, left: float | None) -> None:
    pass


@contextmanager
def _threads(count: int) -> Generator[None]:
    """Compute with this many threads: how sums are split decides their last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_device(device: str) -> None:
    title, hint = f"There is no device {device!r} to pack with", "Choose cpu, cuda or cuda:N."
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device, re.ASCII):
        raise UsageError(title, "", hint)  # torch knows many more
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(title, str(error).partition("\n")[0], hint) from error


def settings_of(source: Checkpoint, spec: PackSpec, tokens: Tensor) -> Settings:
    """The settings that must be the same to continue an interrupted pack; the drafting head may come or go."""
    settings: Settings = {
        "version": f"{VERSION}.{_JOURNAL_VERSION}",
        "weights": source.fingerprint(),
        "text": text_digest(tokens),
        **asdict(spec),
        "threads": torch.get_num_threads(),
    }
    del settings["draft"]
    return settings


def make_manifest(source: Checkpoint, spec: PackSpec, tokens: Tensor, name: str) -> Manifest:
    config: Any = source.config
    hidden = source.family.expert_hidden(config)
    group = group_size(hidden, spec.group)
    # Where nothing is rounded, it is not by HQQ.
    rounding = CALIBRATED if spec.up == spec.gate == spec.down == spec.dense == 16 else spec.rounding
    float16 = str(source.float16).removeprefix("torch.")
    gate = spec.gate if gated(source.family.experts_by) else spec.down
    return Manifest(
        name=name,
        source=PackSource(source.shelf.name, source.shelf.commit, source.exact, source.shelf.rounding),
        architecture=Architecture(
            model_type=config.model_type,
            layers=len(source.layers),
            experts=source.experts,
            top_k=source.top_k,
            hidden=hidden,
            intermediate=source.neurons,
            experts_by=source.family.experts_by if isinstance(source.family, Derived) else "silu",
        ),
        widths=Widths(
            *(spec.up, gate, spec.down, spec.dense, float16, group),
            short=spec.short and rounding == CALIBRATED,
            rounding=rounding,
        ),
        calibration=Calibration(tokens.numel(), calibration.QUANTILES, weighed=True, plain=True),
        files={},
    )


def expected_bytes(manifest: Manifest, dense_bytes: int) -> int:
    """Disk that the pack will take, to within its small files."""
    a = manifest.architecture
    return dense_bytes + a.layers * manifest.layer_bytes


def working_bytes(manifest: Manifest) -> int:
    """Disk that packing takes beside the pack: states of the calibration's tokens."""
    return _STATES * 4 * manifest.calibration.tokens * manifest.architecture.hidden
