"""manifest.json: the content of a packed folder. It is written last, so a folder without one is an unfinished pack."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import torch

from ...kernels.activation import Activation, Projection, gated
from ...kernels.codes import WIDTHS
from ...kernels.layouts import RowLayout, SignalLayout, VectorLayout
from ...kernels.rule import Rule
from .. import config_limits, private_file
from ..errors import NoPackError, PackError
from ..families import Family, family_of
from ..visible import as_name
from . import marks
from .dial_loss import DialLoss
from .marks import FETCHING as FETCHING
from .marks import FILE_NAME as FILE_NAME
from .marks import UNFINISHED as UNFINISHED
from .tensor_file import TensorShapes
from .widths import CALIBRATED, Widths

FORMAT = "floe-chat packed model"
VERSION = 3  # 2 had no quantiles of products, 1 packed codes in another order
FRONTIER = "frontier.json"  # what `floe-chat tune` measured, beside the pack's own files: nothing runs by it
AHEAD = "predictors.safetensors"  # what it has learned of a person's text, which predicts instead of the profile's
DRAFT = "draft.safetensors"  # the head that guesses further tokens (draft_head.py)
DOWN_BIAS = "down.bias"  # of a layer's experts
_NAMED = 6  # layers, at the most
LARGEST = 16 << 20  # bytes of a manifest
_SIGNALS_VERSION = 5  # of packs in some of whose layers the gate is the signal
_WEIGHED_VERSION = 6  # of packs with tables of weighed values
_SHORT_VERSION = 7  # of packs whose experts' scales are bytes
_WHOLE_VERSION = 8  # of packs in some of whose layers no neuron may be skipped
_TABLES_VERSION = 9  # of packs with tables in files of their own
_MIXED_VERSION = 4  # of packs some of whose experts had fewer bits than the others
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
    """The sizes that the packed tensors follow.

    Attributes:
        experts_by: what experts compute, of a family without a record.
    """

    model_type: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    experts_by: Activation = "silu"


@dataclass(frozen=True, slots=True)
class PackSource:
    """Where the weights came from.

    Attributes:
        exact: False when 16 bits did not hold all of a wider source, or it was rounded before. rounding: to what, such
            as "Q4_K_M"; "" where it was as published. loses: a tensor that 16 bits do not hold, "" where none is known.
    """

    name: str
    commit: str | None
    exact: bool
    rounding: str = ""
    loses: str = ""

    @property
    def called(self) -> str:
        """For people: its name, and what it was rounded to."""
        return f"{self.name} ({self.rounding})" if self.rounding else self.name


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 of one file of the folder."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that the threshold tables were measured on: its tokens, and how many entries each table has.

    Attributes:
        weighed: whether the tables are of values times the router's relative weight, as those that weighed thresholds
            are compared with. In packs of before they are of the values alone, so that weighed thresholds skip more or
            fewer neurons than a rule says.
        plain: whether there are tables of the signal's values alone too, for rules that do not weigh.
    """

    tokens: int
    quantiles: int
    weighed: bool = False
    plain: bool = False


SOURCE: Literal["source"] = "source"
PACK: Literal["pack"] = "pack"


@dataclass(frozen=True, slots=True)
class TunedPreset:
    """A preset that `floe-chat tune` derived for this pack.

    Attributes:
        rule: what a token may skip.
        kl: mean KL divergence as measured on this pack, nats; from the source, or from the pack with nothing left out.
        bytes_per_token: of experts' weights that it was measured to read.
        text: what `kl` was measured on, "" where that was not noted. tokens: how many of it were predicted.
        against: what `kl` is the divergence from, SOURCE or PACK.
    """

    name: str
    rule: Rule
    kl: float
    bytes_per_token: float
    text: str = ""
    tokens: int = 0
    against: Literal["source", "pack"] = SOURCE


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a packed model that is not a tensor. `tuned` is empty until its presets have been measured.

    Attributes:
        dials: what each dial of a quality set by hand adds, as measured with `tuned`.
        files: those that the model needs. beside: other files with a checksum.
        signals: of each layer, the projection by which neurons are skipped; empty: up in all of them.
        whole: layers, by rising number, in which no neuron may be skipped, whatever a rule says.
        sealed: whether it was read from a manifest.json with a checksum of its own, which earlier ones lack.
    """

    name: str
    source: PackSource
    architecture: Architecture
    widths: Widths
    calibration: Calibration
    files: dict[str, FileEntry]
    tuned: tuple[TunedPreset, ...] = ()
    beside: dict[str, FileEntry] = dataclasses.field(default_factory=dict[str, FileEntry])
    signals: tuple[Projection, ...] = ()
    whole: tuple[int, ...] = ()
    dials: DialLoss | None = None
    sealed: bool = dataclasses.field(default=True, compare=False)

    @property
    def unquantized(self) -> bool:
        """Whether all weights are the source's own 16-bit ones, so that preset Exact means what it says."""
        w = self.widths
        return self.source.exact and w.up == w.gate == w.down == w.dense == 16

    @property
    def inexact(self) -> str:
        """Why 16-bit weights are not all that the source has, in a sentence; "" where they are, or have fewer bits."""
        w, name = self.widths, self.source.loses
        whole = w.up == w.gate == w.down == w.dense == 16
        return f"{name} of its source has numbers that 16 bits do not hold." if whole and name else ""

    @property
    def float16(self) -> torch.dtype:
        """What 16-bit values of experts are."""
        return _FLOAT16[self.widths.float16]

    @property
    def family(self) -> Family:
        """The model's."""
        return family_of(self.architecture.model_type, self.architecture.experts_by)

    @property
    def unskipped(self) -> str:
        """In how many layers no neuron is skipped, in words; "" where there is none."""
        if not self.whole:
            return ""
        numbers = ", ".join(str(layer + 1) for layer in self.whole[:_NAMED])
        more = " and more" if len(self.whole) > _NAMED else ""
        return f"no neurons are skipped in {len(self.whole)} of {self.architecture.layers} layers ({numbers}{more})"

    def describe(self) -> str:
        """Its widths in words, and what is not skipped."""
        return "; ".join(filter(None, (self.widths.describe(gated=gated(self.family.experts_by)), self.unskipped)))

    def signal_of(self, layer: int) -> Projection:
        """The projection that is a layer's signal."""
        return self.signals[layer] if self.signals else "up"

    def signal_layout(self, signal: Projection = "up") -> SignalLayout:
        """Of the signal projections, whichever these are."""
        return SignalLayout(self._vector(self.widths.up), self.float16, signal, self.family.experts_by)

    def row_layout(self, signal: Projection = "up") -> RowLayout:
        """Of the neurons' rows, which hold the other projection."""
        other, down = self._vector(self.widths.gate), self._vector(self.widths.down)
        family = self.family
        return RowLayout(other, down, self.float16, signal, family.experts_by, family.biased)

    def _vector(self, bits: int) -> VectorLayout:
        return VectorLayout(self.architecture.hidden, bits, self.widths.group, self.widths.short)

    def layer_plan(self, signal: Projection = "up") -> TensorShapes:
        """The tensors of the file of a layer with this signal."""
        a, of = self.architecture, self.signal_layout(signal)
        q, scale, zero = signal_names(signal)
        shape = a.experts, a.intermediate
        table = (torch.float32, (a.experts, self.calibration.quantiles))
        return {
            "rows": (torch.uint8, (*shape, self.row_layout(signal).nbytes)),
            q: (torch.uint8, (*shape, of.row_bytes)),
            scale: (of.vector.scale_dtype, (*shape, of.vector.groups)),
            zero: (of.vector.scale_dtype, (*shape, of.vector.groups)),
            "threshold": table,
            "product": table,
            **({"plain": table} if self.calibration.plain else {}),
            **(_bias_plan(a, signal) if self.family.biased else {}),
        }

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest's own."""
        return sum(entry.size for entry in {**self.files, **self.beside}.values())

    @property
    def tables(self) -> list[str]:
        """Files of tables (table.py)."""
        return [name for name in self.files if name.startswith("table_")]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's experts, without its tables."""
        a, signal = self.architecture, self.signal_layout()
        neuron = self.row_layout().nbytes + signal.vector.nbytes_apart
        biases = 4 * (a.intermediate + a.hidden) if self.family.biased else 0
        return a.experts * (a.intermediate * neuron + biases)

    def write(self, folder: Path) -> None:
        """Write manifest.json atomically, even in case of a power cut."""
        fields = dataclasses.asdict(self)
        del fields["sealed"]
        for name in ("beside", "signals", "whole", "dials"):
            if not fields[name]:
                del fields[name]
        for name in ("rounding", "loses"):
            if not fields["source"][name]:
                del fields["source"][name]
        for name in ("weighed", "plain"):
            if not fields["calibration"][name]:
                del fields["calibration"][name]
        if self.architecture.experts_by == "silu":
            del fields["architecture"]["experts_by"]
        if not self.widths.short:
            del fields["widths"]["short"]
        if self.widths.rounding == CALIBRATED:
            del fields["widths"]["rounding"]
        fields = {"format": FORMAT, "version": self.version, **fields}
        text = json.dumps({**fields, "sha256": _seal(fields)}, indent=2) + "\n"
        private_file.replace(folder / FILE_NAME, text, private_file.SHARED)

    @property
    def version(self) -> int:
        """The first one that can read this."""
        if self.tables:
            return _TABLES_VERSION
        if self.whole:
            return _WHOLE_VERSION
        if self.widths.short:
            return _SHORT_VERSION
        return _WEIGHED_VERSION if self.calibration.weighed else _SIGNALS_VERSION if self.signals else VERSION

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
            content = private_file.read(folder / FILE_NAME, LARGEST)
        except FileNotFoundError:
            raise marks.unfinished(folder) from None
        except OSError as error:
            raise marks.garbled(folder, f"{FILE_NAME} cannot be read: {error.strerror or error}") from error
        return Manifest.parse(content, folder)

    @staticmethod
    def parse(content: bytes, folder: Path | str) -> Manifest:
        """The manifest with this content; `folder` names its pack in errors.

        Raises:
            PackError: another format or version, or it does not make sense.
        """
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            cause = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise marks.garbled(folder, f"{FILE_NAME} cannot be read: {cause}") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise marks.garbled(folder, f"{FILE_NAME} is not the manifest of a packed model.")
        seal = fields.pop("sha256", None)
        version = fields.get("version")
        if version == _MIXED_VERSION:
            raise PackError(
                f"The packed model at {folder} cannot be read any more",
                "Some of its experts have fewer bits than the others, which this version no longer supports.",
                "Pack the checkpoint again: floe-chat pack SOURCE DESTINATION",
            )
        known = VERSION, _SIGNALS_VERSION, _WEIGHED_VERSION, _SHORT_VERSION, _WHOLE_VERSION, _TABLES_VERSION
        if version not in known:
            raise PackError(
                f"The packed model at {folder} has another format version",
                f"It is version {as_name(repr(version))}; this program reads version {_TABLES_VERSION}.",
                "Update floe-chat, or pack the checkpoint again: floe-chat pack SOURCE DESTINATION",
            )
        if seal not in (None, _seal(fields)):
            raise marks.garbled(folder, f"{FILE_NAME} was changed: its sha256 does not match.")
        try:
            found = dataclasses.replace(_parse(fields), sealed=seal is not None)
            if found.version != version or (found.widths.short and not found.calibration.weighed):
                raise ValueError("its version")
            return found
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise marks.garbled(folder, f"{FILE_NAME} has missing or invalid fields: {error}.") from error


def is_manifest(content: bytes) -> bool:
    """Whether a file of this content says that it is a manifest of ours, of whatever version."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("format") == FORMAT


def file_entry(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _seal(fields: dict[str, Any]) -> str:
    """sha256 of a manifest's other fields, however they are laid out."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _parse(fields: dict[str, Any]) -> Manifest:
    if type(tuned := fields["tuned"]) is list:
        fields["tuned"] = [_with_rule(preset) for preset in tuned]
    manifest = msgspec.convert(fields, Manifest)
    source = manifest.source
    commit = None if source.commit is None else as_name(source.commit)
    plain = {name: as_name(getattr(source, name)) for name in ("name", "rounding", "loses")}
    source = dataclasses.replace(source, commit=commit, **plain)
    manifest = dataclasses.replace(manifest, name=as_name(manifest.name), source=source)
    a, w = manifest.architecture, manifest.widths
    if w.group < 1 or not 2 <= manifest.calibration.quantiles <= _MOST_QUANTILES or config_limits.problem(_named(a)):
        raise ValueError("its sizes")
    if not re.fullmatch("[a-z0-9_]{1,64}", a.model_type):
        raise ValueError(f"the model type {as_name(a.model_type)!r}")
    known = w.dense in DENSE_WIDTHS and {w.up, w.gate, w.down} <= {*WIDTHS} and w.float16 in _FLOAT16
    if not known or a.hidden % w.group:
        raise ValueError("its bit widths")
    if len(manifest.signals) not in (0, a.layers) or {*manifest.signals} - {*manifest.family.signals}:
        raise ValueError("its signals")
    if list(manifest.whole) != sorted(set(manifest.whole) & {*range(a.layers)}):
        raise ValueError("its layers whose neurons are not skipped")
    for preset in manifest.tuned:
        rule, figures = preset.rule, (preset.kl, preset.bytes_per_token)
        sound = not rule.wrong and all(0 <= figure < math.inf for figure in figures)
        if not sound or (rule.parts > 1 and a.intermediate % 2) or len(rule.layers) not in (0, a.layers):
            raise ValueError(f"the preset {as_name(preset.name)!r}")
    if manifest.dials is not None:
        if not manifest.dials.sound:
            raise ValueError("its dials' losses")
        text = as_name(manifest.dials.text)
        manifest = dataclasses.replace(manifest, dials=dataclasses.replace(manifest.dials, text=text))
    for name in (*manifest.files, *manifest.beside):
        if PurePosixPath(name).name != name or set("\\:\0") & set(name) or name in ("", ".", ".."):
            raise ValueError(f"the file name {as_name(name)!r}")
    layers = sum(name.startswith("layer_") for name in manifest.files)
    if layers != a.layers:  # compared before names are generated: the number may be absurd
        raise ValueError(f"the entries of {a.layers} layers")
    needed = {"dense.safetensors", "profile.safetensors", "config.json", *map(layer_file, range(a.layers))}
    needed |= {table_file(index) for index in range(len(manifest.tables))}
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


def _with_rule(preset: dict[str, Any]) -> dict[str, Any]:
    """A preset of a pack; earlier ones have the rule's fields beside the others."""
    return {**preset, "rule": preset.get("rule") or preset}


def _bias_plan(a: Architecture, signal: Projection) -> TensorShapes:
    own, down = (torch.float32, (a.experts, a.intermediate)), (torch.float32, (a.experts, a.hidden))
    return {f"{signal}.bias": own, DOWN_BIAS: down}


def signal_names(signal: Projection) -> tuple[str, str, str]:
    """Names of a layer's signal projections in its file: codes, scales and zeros."""
    return f"{signal}.q", f"{signal}.scale", f"{signal}.zero"


def layer_file(layer: int) -> str:
    """The file name of one layer's experts."""
    return f"layer_{layer:02d}.safetensors"


def table_file(index: int) -> str:
    """The file name of one table."""
    return f"table_{index:02d}.safetensors"
