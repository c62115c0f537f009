"""manifest.json: what a packed folder holds. It is written last, so a folder without one is an unfinished pack."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch

from ..kernels.layouts import WIDTHS, RowLayout, UpLayout, VectorLayout
from . import limits, private_file
from .errors import NoPackError, PackError
from .tensorfile import Plan
from .visible import as_name
from .widths import Narrow, Rare, Stored, Widths

FORMAT = "floe-chat packed model"
VERSION = 3  # 2 had no quantiles of products, 1 packed codes in another order
MIXED_VERSION = 4  # of packs some of whose experts are narrower, which programs that read 3 do not know
FILE_NAME = "manifest.json"
FRONTIER = "frontier.json"  # what `floe-chat tune` measured, beside the pack's own files: nothing runs by it
UNFINISHED = "packing.json"  # is in the folder from the first byte until the manifest is written
_LARGEST = 16 << 20  # bytes of a manifest: narrow experts are listed one by one
_MOST_QUANTILES = 1 << 16
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
        weighed: whether its thresholds rise as the router's weight falls; packs tuned before there was that do not say.
        text: what `kl` was measured on, "" where that was not noted. tokens: how many of it were predicted.
    """

    name: str
    sparsity: float
    product: float
    drop: float
    major: float
    kl: float
    bytes_per_token: float
    weighed: bool = False
    text: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a packed model that is not a tensor. `tuned` is empty until its presets have been measured.

    Attributes:
        files: what the model needs. beside: what else lies there and has a checksum.
        sealed: whether it was read from a manifest.json with a checksum of its own, which earlier ones lack.
    """

    name: str
    source: Source
    architecture: Architecture
    widths: Widths
    calibration: Calibration
    files: dict[str, FileEntry]
    tuned: tuple[Tuned, ...] = ()
    rare: list[Rare] = dataclasses.field(default_factory=list[Rare])  # layer by layer, where some experts are narrow
    beside: dict[str, FileEntry] = dataclasses.field(default_factory=dict[str, FileEntry])
    sealed: bool = dataclasses.field(default=True, compare=False)

    @property
    def lossless(self) -> bool:
        """Whether all weights are the source's own 16-bit ones, so that preset Exact means what it says."""
        w = self.widths
        return self.source.exact and w.up == w.gate == w.down == w.dense == 16 and w.narrow is None

    @property
    def up_layout(self) -> UpLayout:
        """Of experts that are not narrow."""
        return self.stored[0].up

    @property
    def row_layout(self) -> RowLayout:
        """Of experts that are not narrow: the longest rows."""
        return self.stored[0].rows

    @property
    def stored(self) -> tuple[Stored, ...]:
        """How a layer's experts are stored: those of the usual widths, then the narrow ones where there are any."""
        a, w = self.architecture, self.widths
        rare = w.narrow.count(a.experts) if w.narrow else 0
        wide = self._stored("", a.experts - rare, w)
        return (wide,) if w.narrow is None else (wide, self._stored("narrow.", rare, w.narrow))

    def _stored(self, prefix: str, experts: int, bits: Widths | Narrow) -> Stored:
        group, float16 = self.widths.group, _FLOAT16[self.widths.float16]
        up, gate, down = (VectorLayout(self.architecture.hidden, n, group) for n in (bits.up, bits.gate, bits.down))
        return Stored(prefix, experts, UpLayout(up, float16), RowLayout(gate, down, float16))

    def layer_plan(self) -> Plan:
        """The tensors of a layer's file. Its two tables are by the experts' numbers."""
        a, plan = self.architecture, Plan()
        for part in self.stored:
            shape = part.experts, a.intermediate
            plan |= {
                f"{part.prefix}rows": (torch.uint8, (*shape, part.rows.nbytes)),
                f"{part.prefix}up.q": (torch.uint8, (*shape, part.up.row_bytes)),
                f"{part.prefix}up.scale": (torch.float16, (*shape, part.up.vector.groups)),
                f"{part.prefix}up.zero": (torch.float16, (*shape, part.up.vector.groups)),
            }
        table = (torch.float32, (a.experts, self.calibration.quantiles))
        return plan | {"threshold": table, "product": table}

    def order(self, layer: int) -> list[int]:
        """The experts of a layer as they lie: those of the usual widths, then the narrow ones, both by number."""
        return list(self.places(self.rare[layer].experts if self.rare else ()))

    def places(self, rare: Collection[int]) -> dict[int, tuple[Stored, int]]:
        """How each expert of a layer is stored, and as the how manyth of those, given which are narrow."""
        wide, narrow = self.stored[0], self.stored[-1]
        usual = [expert for expert in range(self.architecture.experts) if expert not in rare]
        found = {expert: (wide, place) for place, expert in enumerate(usual)}
        return found | {expert: (narrow, place) for place, expert in enumerate(sorted(rare))}

    def write(self, folder: Path) -> None:
        """Write manifest.json so that it is there whole or not at all, also after a power cut."""
        fields, version = dataclasses.asdict(self), MIXED_VERSION
        del fields["sealed"]
        if self.widths.narrow is None:
            version = VERSION
            del fields["widths"]["narrow"], fields["rare"]
        if not self.beside:
            del fields["beside"]
        fields = {"format": FORMAT, "version": version, **fields}
        text = json.dumps({**fields, "sha256": _seal(fields)}, indent=2)
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
            raise NoPackError(
                f"There is no packed model at {folder}",
                "The folder does not exist.",
                "Check the path, or pack one.",
            )
        try:
            fields = json.loads(private_file.read(folder / FILE_NAME, _LARGEST))
        except FileNotFoundError:
            raise _unfinished(folder) from None
        except (OSError, ValueError, RecursionError) as error:
            cause = (isinstance(error, OSError) and error.strerror) or str(error)
            raise _garbled(folder, f"{FILE_NAME} cannot be read: {cause}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise _garbled(folder, f"{FILE_NAME} is not the manifest of a packed model.")
        seal = fields.pop("sha256", None)
        version = fields.get("version")
        if version not in (VERSION, MIXED_VERSION):
            raise PackError(
                f"The packed model at {folder} has another format version",
                f"It is version {as_name(repr(version))}; this program reads {VERSION} and {MIXED_VERSION}.",
                "Update floe-chat, or pack the source checkpoint again with this version.",
            )
        if seal not in (None, _seal(fields)):
            raise _garbled(folder, f"{FILE_NAME} was changed: its sha256 does not match.")
        try:
            return dataclasses.replace(_parse(fields), sealed=seal is not None)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _garbled(folder, f"{FILE_NAME} has missing or invalid fields: {error}.") from error


def file_entry(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _seal(fields: dict[str, Any]) -> str:
    """sha256 of a manifest's other fields, however they are laid out."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


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
    return NoPackError(
        f"{folder} holds no packed model",
        "It has no manifest.json.",
        "Check the path, or pack a checkpoint into it.",
    )


def _garbled(folder: Path, cause: str) -> PackError:
    # By the manifest alone can a pack be repaired.
    return PackError(
        f"The packed model at {folder} is damaged", cause, "Pack the source checkpoint again, or restore a copy."
    )


def _parse(fields: dict[str, Any]) -> Manifest:
    if type(fields["tuned"]) is not list:
        raise TypeError("tuned")
    manifest = Manifest(
        name=as_name(str(fields["name"])),
        source=_source(fields["source"]),
        architecture=_typed(Architecture, fields["architecture"]),
        widths=_widths(fields["widths"]),
        calibration=_typed(Calibration, fields["calibration"]),
        files={name: _typed(FileEntry, entry) for name, entry in dict(fields["files"]).items()},
        tuned=tuple(_typed(Tuned, entry) for entry in fields["tuned"]),
        rare=[_rare(entry) for entry in list(fields.get("rare", []))],
        beside={name: _typed(FileEntry, entry) for name, entry in dict(fields.get("beside", {})).items()},
    )
    a, w = manifest.architecture, manifest.widths
    if w.group < 1 or not 2 <= manifest.calibration.quantiles <= _MOST_QUANTILES or limits.problem(_named(a)):
        raise ValueError("its sizes")
    bits = {bits for some in (w, w.narrow) if some for bits in (some.up, some.gate, some.down)}
    if w.dense not in DENSE_WIDTHS or bits - set(WIDTHS) or w.float16 not in _FLOAT16 or a.hidden % w.group:
        raise ValueError("its bit widths")
    _check_rare(manifest, mixed=fields["version"] == MIXED_VERSION)
    for preset in manifest.tuned:
        shares = (preset.sparsity, preset.product, preset.drop, preset.major)
        figures = (preset.kl, preset.bytes_per_token)
        sound = all(0 <= share <= 1 for share in shares) and all(0 <= figure < math.inf for figure in figures)
        if not sound or (preset.major > preset.drop and a.intermediate % 2):
            raise ValueError(f"the preset {as_name(preset.name)!r}")
    for name in (*manifest.files, *manifest.beside):
        if PurePosixPath(name).name != name or set("\\:\0") & set(name) or name in ("", ".", ".."):
            raise ValueError(f"the file name {as_name(name)!r}")
    layers = sum(name.startswith("layer_") for name in manifest.files)
    if layers != a.layers:  # compared before any name is made: the number may be absurd
        raise ValueError(f"the entries of {a.layers} layers")
    needed = {"dense.safetensors", "profile.safetensors", "config.json", *map(layer_file, range(a.layers))}
    if missing := sorted(needed - manifest.files.keys()):
        raise ValueError(f"the entry of {missing[0]}")
    return manifest


def _named(a: Architecture) -> dict[str, int]:
    """Sizes by their names in config.json."""
    return {
        "num_hidden_layers": a.layers,
        "num_local_experts": a.experts,
        "num_experts_per_tok": a.top_k,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
    }


def _source(fields: dict[str, Any]) -> Source:
    source = _typed(Source, fields)
    commit = None if source.commit is None else as_name(source.commit)
    return dataclasses.replace(source, name=as_name(source.name), commit=commit)


def _widths(fields: dict[str, Any]) -> Widths:
    if type(fields) is not dict:
        raise TypeError("its bit widths")
    narrow = fields.get("narrow")
    widths = _typed(Widths, {**fields, "narrow": None})
    return widths if narrow is None else dataclasses.replace(widths, narrow=_typed(Narrow, narrow))


def _rare(fields: dict[str, Any]) -> Rare:
    experts, popularity = fields["experts"], fields["popularity"]
    if {type(expert) for expert in experts} - {int} or {type(share) for share in popularity} - {float, int}:
        raise TypeError("its narrow experts")
    if not all(0 <= share <= 1 for share in popularity):
        raise ValueError("the shares of its narrow experts")
    return Rare(tuple(experts), tuple(popularity))


def _narrower(w: Widths) -> bool:
    return w.narrow is not None and w.narrow.up <= w.up and w.narrow.gate <= w.gate and w.narrow.down <= w.down


def _check_rare(manifest: Manifest, *, mixed: bool) -> None:
    """Whether the narrow experts are so many of each layer's as the widths say, and others are left."""
    a, narrow = manifest.architecture, manifest.widths.narrow
    if narrow is None and not manifest.rare and not mixed:
        return
    count = narrow.count(a.experts) if narrow and 0 < narrow.share < 1 else 0
    sound = mixed and 0 < count < a.experts and len(manifest.rare) == a.layers and _narrower(manifest.widths)
    for rare in manifest.rare:
        known = sorted(set(rare.experts)) == list(rare.experts) and all(0 <= e < a.experts for e in rare.experts)
        sound = sound and known and len(rare.experts) == len(rare.popularity) == count
    if not sound:
        raise ValueError("its narrow experts")


_Part = TypeVar("_Part", Source, Architecture, Widths, Narrow, Calibration, FileEntry, Tuned)
_TYPES = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "Narrow | None": (type(None),),  # read apart
}


def _typed(kind: type[_Part], fields: dict[str, Any]) -> _Part:
    """A part of the manifest, each of its fields of the very type that it is declared with."""
    for field in dataclasses.fields(kind):
        if field.name not in fields and field.default is not dataclasses.MISSING:
            continue
        if type(fields[field.name]) not in _TYPES[str(field.type)]:
            raise TypeError(f"{field.name}")
    return kind(**fields)


def layer_file(layer: int) -> str:
    """The file name of one layer's experts."""
    return f"layer_{layer:02d}.safetensors"
