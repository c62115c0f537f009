"""manifest.json: what a packed folder holds. It is written last, so a folder without one is an unfinished pack."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from ..kernels.layouts import WIDTHS, RowLayout, UpLayout, VectorLayout
from .errors import PackError

FORMAT = "floe-chat packed model"
VERSION = 3  # 2 had no quantiles of products, 1 packed codes in another order
FILE_NAME = "manifest.json"
UNFINISHED = "packing.json"  # lies in the folder from the first byte until the manifest is written
COPIED = (  # as published, where the source has them
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_FLOAT16 = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DENSE_WIDTHS = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes that the packed tensors follow (DESIGN section 1: words and shapes)."""

    model_type: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits per weight of the three expert matrices and of the dense linear layers (16: as published).

    `float16` says what 16-bit expert values are: "bfloat16" or "float16".
    """

    up: int
    gate: int
    down: int
    dense: int
    float16: str
    group: int

    def describe(self) -> str:
        """In words, for a screen: "up 2 bit, rows 4 bit, dense 8 bit"."""
        rows = f"rows {self.gate} bit" if self.gate == self.down else f"gate {self.gate} bit, down {self.down} bit"
        return f"up {self.up} bit, {rows}, dense {self.dense} bit"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights came from. `exact` is False when a wider source was rounded to 16 bit."""

    name: str
    commit: str | None
    exact: bool


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 of one file of the folder."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that the threshold tables were measured on: its tokens, and how many entries each table has."""

    tokens: int
    quantiles: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """A preset that `floe-chat tune` derived for this very pack.

    Attributes:
        sparsity, product, drop, major: what a token may skip, see engine/quality.py.
        kl: mean KL divergence from the source that this pack was measured to have there, nats.
        bytes_per_token: of experts' weights that it was measured to read.
    """

    name: str
    sparsity: float
    product: float
    drop: float
    major: float
    kl: float
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a packed model that is not a tensor. `tuned` is empty until its presets have been measured."""

    name: str
    source: Source
    architecture: Architecture
    widths: Widths
    calibration: Calibration
    files: dict[str, FileEntry]
    tuned: tuple[Tuned, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether all weights are the source's own 16-bit ones, so that preset Exact means what it says."""
        w = self.widths
        return self.source.exact and w.up == w.gate == w.down == w.dense == 16

    @property
    def up_layout(self) -> UpLayout:
        a, w = self.architecture, self.widths
        return UpLayout(VectorLayout(a.hidden, w.up, w.group), _FLOAT16[w.float16])

    @property
    def row_layout(self) -> RowLayout:
        a, w = self.architecture, self.widths
        return RowLayout(
            VectorLayout(a.hidden, w.gate, w.group),
            VectorLayout(a.hidden, w.down, w.group),
            _FLOAT16[w.float16],
        )

    def write(self, folder: Path) -> None:
        """Write manifest.json so that it is there whole or not at all, also after a power cut."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2)
        partial = folder / (FILE_NAME + ".part")
        with partial.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / FILE_NAME)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a packed folder.

        Raises:
            PackError: no folder, no manifest, another format or version, or a manifest that does not make sense.
        """
        if not folder.is_dir():
            raise PackError(
                f"There is no packed model at {folder}",
                "The folder does not exist.",
                "Check the path, or pack one.",
            )
        try:
            fields = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise _unfinished(folder) from None
        except (OSError, ValueError, RecursionError) as error:
            raise damaged(folder, f"{FILE_NAME} cannot be read: {error}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise damaged(folder, f"{FILE_NAME} is not the manifest of a packed model.")
        if fields.get("version") != VERSION:
            raise PackError(
                f"The packed model at {folder} has another format version",
                f"It is version {fields.get('version')!r}; this program reads version {VERSION}.",
                "Update floe-chat, or pack the source checkpoint again with this version.",
            )
        try:
            return _parse(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(folder, f"{FILE_NAME} lacks or garbles {error}.") from error


def file_entry(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _unfinished(folder: Path) -> PackError:
    if (folder / UNFINISHED).exists():
        return PackError(
            f"The packed model at {folder} is incomplete",
            "Its manifest, written last, is missing: packing was interrupted.",
            "Pack it again into the same folder: floe-chat pack SRC DST.",
        )
    if (folder / "config.json").exists():
        return PackError(
            f"{folder} is not packed",
            "It looks like a checkpoint as published: it has a config.json but no manifest.json.",
            f"Pack it first: floe-chat pack {folder} DST, then use DST.",
        )
    return PackError(
        f"{folder} holds no packed model",
        "It has no manifest.json.",
        "Check the path, or pack a checkpoint into it.",
    )


def damaged(folder: Path, cause: str) -> PackError:
    """The error for a packed folder whose content cannot be trusted."""
    return PackError(
        f"The packed model at {folder} is damaged",
        cause,
        "Pack the source checkpoint again, or restore a copy.",
    )


def _parse(fields: dict[str, Any]) -> Manifest:
    if type(fields["tuned"]) is not list:
        raise TypeError("tuned")
    manifest = Manifest(
        name=str(fields["name"]),
        source=_typed(Source, fields["source"]),
        architecture=_typed(Architecture, fields["architecture"]),
        widths=_typed(Widths, fields["widths"]),
        calibration=_typed(Calibration, fields["calibration"]),
        files={name: _typed(FileEntry, entry) for name, entry in dict(fields["files"]).items()},
        tuned=tuple(_typed(Tuned, entry) for entry in fields["tuned"]),
    )
    a, w = manifest.architecture, manifest.widths
    if min(a.layers, a.experts, a.top_k, a.hidden, a.intermediate, w.group) < 1 or a.top_k > a.experts:
        raise ValueError("its sizes")
    known = w.dense in DENSE_WIDTHS and not {w.up, w.gate, w.down} - set(WIDTHS)
    if not known or w.float16 not in _FLOAT16 or a.hidden % w.group:
        raise ValueError("its bit widths")
    for preset in manifest.tuned:
        shares = (preset.sparsity, preset.product, preset.drop, preset.major)
        if not all(0 <= share <= 1 for share in shares) or (preset.major > preset.drop and a.intermediate % 2):
            raise ValueError(f"the preset {preset.name!r}")
    for name in manifest.files:
        if PurePosixPath(name).name != name or set("\\:\0") & set(name) or name in ("", ".", ".."):
            raise ValueError(f"the file name {name!r}")
    layers = sum(name.startswith("layer_") for name in manifest.files)
    if layers != a.layers:  # compared before any name is made: the number may be absurd
        raise ValueError(f"the entries of {a.layers} layers")
    needed = {"dense.safetensors", "profile.safetensors", "config.json", *map(layer_file, range(a.layers))}
    if missing := sorted(needed - manifest.files.keys()):
        raise ValueError(f"the entry of {missing[0]}")
    return manifest


_Part = TypeVar("_Part", Source, Architecture, Widths, Calibration, FileEntry, Tuned)
_TYPES = {"int": (int,), "float": (float, int), "str": (str,), "bool": (bool,), "str | None": (str, type(None))}


def _typed(kind: type[_Part], fields: dict[str, Any]) -> _Part:
    """A part of the manifest, each of its fields of the very type that it is declared with."""
    for field in dataclasses.fields(kind):
        if type(fields[field.name]) not in _TYPES[str(field.type)]:
            raise TypeError(f"{field.name}")
    return kind(**fields)


def layer_file(layer: int) -> str:
    """The file name of one layer's experts."""
    return f"layer_{layer:02d}.safetensors"
