"""Reading a packed model: checks first, then tensors that are views of the mapped files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...kernels.rule import NEVER
from ...kernels.weights import ExpertRows, SignalWeights
from .. import private_file
from ..errors import FloeError, PackError, UsageError, damaged
from . import draft_head, learned_predictor, tensor_file
from .assistant import PackedAssistant
from .draft_head import PackedHead
from .manifest import AHEAD, DOWN_BIAS, DRAFT, FileEntry, Manifest, file_entry, layer_file, signal_names
from .packed_layer import PackedLayer as PackedLayer


class PackedModel:
    """A packed folder that passed its checks. Tensors are memory-mapped: opening costs no RAM."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ahead: dict[str, Tensor] | None = None
        self._draft: PackedHead | PackedAssistant | str | None = None

    @classmethod
    def open(cls, folder: Path, *, recheck: bool = False) -> PackedModel:
        """Open a packed folder after checking it against its manifest.

        Every file's size is compared each time. Every file's sha256 is compared the first time, and again if its size,
        its times or its hash in the manifest changed since it last passed, or if `recheck` is set.

        Raises:
            PackError: the folder is incomplete, of another version, or damaged.
        """
        manifest = Manifest.read(folder)
        try:
            cls._check(folder, manifest, recheck)
        except OSError as error:
            raise damaged(folder, f"{error.filename or 'A file'} cannot be read: {error.strerror or error}.") from error
        return cls(folder, manifest)

    @staticmethod
    def _check(folder: Path, manifest: Manifest, recheck: bool) -> None:
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise damaged(folder, f"{name} is missing.")
            if (size := path.stat().st_size) != entry.size:
                raise damaged(folder, f"{name} has {size:,} bytes instead of {entry.size:,}.")
        stamp = _Stamp(folder, manifest.files)
        for name in manifest.files if recheck else stamp.unproven:
            try:
                found = file_entry(folder / name)
            except OSError as error:
                raise damaged(folder, f"{name} cannot be read: {error.strerror or error}.") from error
            if found.sha256 != manifest.files[name].sha256:
                raise damaged(folder, f"The content of {name} changed: its sha256 differs from the manifest's.")
        stamp.write()

    def layer(self, layer: int) -> PackedLayer:
        """The experts of one layer, as views of the mapped file."""
        m, name = self.manifest, layer_file(layer)
        tensors = self._tensors(name)
        signal = m.signal_of(layer)
        for tensor, (dtype, shape) in m.layer_plan(signal).items():
            found = tensors.get(tensor)
            if found is None or found.dtype != dtype or tuple(found.shape) != shape:
                have = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise damaged(self.folder, f"{name} holds {have} as {tensor} instead of {dtype} {shape}.")
        plain = tensors["plain"] if m.calibration.plain else None
        for tensor in ("threshold", "product", *(() if plain is None else ("plain",))):
            if not rising(tensors[tensor]):
                raise damaged(self.folder, f"{tensor} in {name} is not a table of rising quantiles.")
        q, scale, zero = (tensors[name] for name in signal_names(signal))
        signals = SignalWeights(m.signal_layout(signal), q, scale, zero, tensors.get(f"{signal}.bias"))
        rows = ExpertRows(m.row_layout(signal), tensors["rows"])
        bias = tensors.get(DOWN_BIAS)
        return PackedLayer(signals, rows, tensors["threshold"], tensors["product"], bias, plain, layer in m.whole)

    def head(self) -> PackedHead | PackedAssistant | None:
        """The head that guesses further tokens, or None: the pack has none, or `headless` says why not."""
        if self._draft is None:
            self._draft = self._opened_head() if DRAFT in self.manifest.beside else ""
        return None if isinstance(self._draft, str) else self._draft

    @property
    def headless(self) -> str:
        """Why `head` gives none though the pack has one, in a sentence; else ""."""
        return "" if self.head() is not None or not isinstance(self._draft, str) else self._draft

    def _opened_head(self) -> PackedHead | PackedAssistant | str:
        path, entry = self.folder / DRAFT, self.manifest.beside[DRAFT]
        try:
            stamp = _Stamp(self.folder, {DRAFT: entry}, DRAFT)
            if stamp.unproven and file_entry(path) != entry:
                return f"{DRAFT} is damaged: its size or sha256 differs from the manifest's."
            stamp.write()
            return draft_head.load(self.folder, self.manifest)
        except FloeError as error:
            return error.cause or f"{error.title}."
        except OSError as error:
            return f"{DRAFT} cannot be read: {error.strerror or error}."

    def rows_place(self, layer: int) -> tuple[Path, int]:
        """The file with a layer's rows, and where in it they begin."""
        path = self.folder / layer_file(layer)
        return path, tensor_file.place_of(path, "rows")

    def dense(self) -> dict[str, Tensor]:
        """Embeddings, attention, norms, routers and head by published names; for low bits see quantized_linears.py."""
        return self._tensors("dense.safetensors")

    def profile(self) -> dict[str, Tensor]:
        """popularity (L, E) and router_score (L, Q), float32, from calibration; and see lookahead.

        Raises:
            PackError: these are not there, of another shape or dtype, or not finite.
        """
        found, a = self._tensors("profile.safetensors"), self.manifest.architecture
        for name, count in (("popularity", a.experts), ("router_score", self.manifest.calibration.quantiles)):
            own, shape = found.get(name), (a.layers, count)
            if own is None or own.dtype != torch.float32 or own.shape != shape or not bool(own.isfinite().all()):
                cause = f"{name} in profile.safetensors is missing, no float32 of {shape}, or not finite."
                raise damaged(self.folder, cause)
        return found

    def has_lookahead(self) -> bool:
        """Whether the pack has learned predictors; packs of earlier versions and those calibrated on very little text
        have none.
        """
        return learned_predictor.RECALL in self._foresight()

    def _foresight(self) -> dict[str, Tensor]:
        """What was learned of a person's text, or else of the calibration's, for which a damaged file is left."""
        if self._ahead is None:
            self._ahead = self.profile()
            entry = self.manifest.beside.get(AHEAD)
            with suppress(PackError, OSError):
                if entry is not None and file_entry(self.folder / AHEAD) == entry:
                    self._ahead = self._tensors(AHEAD)
        return self._ahead

    def lookahead(self) -> list[learned_predictor.Lookahead]:
        """The learned predictors of the next layer's experts, one for each layer but the last.

        Raises:
            UsageError: this pack has none. PackError: they do not fit the model.
        """
        a = self.manifest.architecture
        try:
            found = learned_predictor.load(self._foresight(), a.layers, a.hidden, a.experts)
        except ValueError as error:
            raise damaged(self.folder, f"profile.safetensors holds {error}.") from error
        if not found:
            raise UsageError(
                "This pack has no learned predictor",
                "It was packed by an earlier floe-chat, on too little text, or the model has a single layer.",
                'Choose the predictor "gate", which needs no training, or pack the source checkpoint again.',
            )
        return found

    def lookahead_far(self) -> list[bool]:
        """For which of them the next router found less than half the experts, and they more; none if there are none.

        Raises:
            PackError: what was measured does not fit the model.
        """
        if not self.has_lookahead():
            return []
        routers = self._foresight()[learned_predictor.RECALL][:, 1]
        return [gains and router < 0.5 for gains, router in zip(self.lookahead_gains(), routers.tolist(), strict=True)]

    def lookahead_gains(self) -> list[bool]:
        """Which of them named more experts than the next router, on calibration text that they had not learned from.

        Raises:
            PackError: what was measured does not fit the model.
        """
        try:
            return learned_predictor.gains(self._foresight(), self.manifest.architecture.layers)
        except ValueError as error:
            raise damaged(self.folder, f"profile.safetensors holds {error}.") from error

    def _tensors(self, name: str) -> dict[str, Tensor]:
        try:
            with safe_open(self.folder / name, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys() if not key.startswith("_pad.")}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise damaged(self.folder, f"{name} cannot be read: {error}") from error


def rising(table: Tensor) -> bool:
    """Whether each row of a table (E, Q) rises from 0 or more, all of it finite, or says that nothing is skipped."""
    begins = (table[:, 0] >= 0) | (table == NEVER).all(dim=1)
    return bool(table.isfinite().all()) and bool((table.diff(dim=1) >= 0).all()) and bool(begins.all())


class _Stamp:
    """A note in the user's cache of which files passed their sha256, so that 30 GB are not read at each start.

    A file is believed as long as its size, times and place on the disk, and its hash in the manifest, are those noted.
    What else comes into the manifest, such as a drafting head or presets, makes no other file unproven.

    Attributes:
        unproven: names of the files that have to be compared with their hashes.

    Raises:
        OSError: a file is not there.
    """

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry], called: str = "") -> None:
        key = hashlib.sha256(f"{folder.resolve()}{called}".encode()).hexdigest()[:32]
        self._path = Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "verified" / f"{key}.json"
        # Seen before files are read, so that a change meanwhile makes them unproven.
        self._now: dict[str, list[object]] = {}
        for name, entry in entries.items():
            stat = (folder / name).stat()
            self._now[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, entry.sha256]
        self._noted: Any = None
        with suppress(OSError, ValueError):
            self._noted = private_file.read_json(self._path) if private_file.is_ours(self._path) else None
        noted: dict[str, Any] = self._noted if isinstance(self._noted, dict) else {}
        self.unproven = [name for name, seen in self._now.items() if noted.get(name) != seen]

    def write(self) -> None:
        """Note that all have passed."""
        if self._noted != self._now:
            with suppress(OSError):  # in a read-only or full cache: the next start checks again
                private_file.own_folder(self._path.parent)
                private_file.replace(self._path, json.dumps(self._now))
