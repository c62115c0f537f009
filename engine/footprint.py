"""What a model takes at given widths, in bytes: by its architecture alone, as packing would lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.layouts import RowLayout, VectorLayout, group_size, packed_bytes
from ..models import foresight
from ..models.calibration import MEASURES
from ..models.linears import layout_of, width_of
from ..models.manifest import Manifest
from ..models.pack import PackSpec
from ..models.published import Entry, Sizes
from ..models.widths import Narrow, Rare


@dataclass(frozen=True, slots=True)
class Width:
    """A layer's experts of one width.

    Attributes:
        experts: how many there are. calls: the share of all expert calls that is theirs.
        up: bytes of one expert's up projection. row: of one neuron's record.
    """

    bits: PackSpec | Narrow
    experts: int
    calls: float
    up: int
    row: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, of one layer where the name does not say otherwise.

    Attributes:
        attention: the four projections. head: of the whole model. kept: embedding, routers and norms of the whole
            model, which stay at 16 bits. up: one expert's up projection. row: one neuron's record.
        kv: keys and values of one token in all layers, per byte of one (see `kv_element`).
        narrow: how many of a layer's experts are narrow; narrow_up, narrow_row: theirs, up and row the others'.
        narrow_calls: the share of expert calls that is theirs.
    """

    sizes: Sizes
    spec: PackSpec
    attention: int
    head: int
    kept: int
    up: int
    row: int
    kv: int
    narrow: int = 0
    narrow_up: int = 0
    narrow_row: int = 0
    narrow_calls: float = 0.0

    @classmethod
    def of(cls, sizes: Sizes, spec: PackSpec, rare: Sequence[Rare] = ()) -> Footprint:
        """At the widths of `spec`; of 16-bit layers too.

        Args:
            rare: layer by layer the narrow experts, as a pack's manifest names them. Before there is a pack they are
                taken to be called as often as others.
        """
        group = group_size(sizes.hidden, spec.group)
        up, row = _expert(sizes, group, spec)
        narrow_up, narrow_row = _expert(sizes, group, spec.narrow or spec)
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        narrow = spec.narrow.count(sizes.experts) if spec.narrow else 0
        calls = sum(sum(layer.popularity) for layer in rare) / len(rare) if rare else narrow / sizes.experts
        inner = (queries + 2 * keys) * _vector(sizes.hidden, spec.dense)
        head = sizes.vocab * _vector(sizes.hidden, width_of("lm_head", spec.dense))
        return cls(
            sizes,
            spec,
            attention=inner + sizes.hidden * _vector(queries, spec.dense),
            head=0 if sizes.tied and spec.dense == 16 else head,
            kept=2 * (sizes.embedding + sizes.small),
            up=up,
            row=row,
            kv=2 * sizes.layers * keys,
            narrow=narrow,
            narrow_up=narrow_up,
            narrow_row=narrow_row,
            narrow_calls=calls,
        )

    @classmethod
    def of_entry(cls, entry: Entry, spec: PackSpec) -> Footprint:
        """Of a model; where it is packed, with its narrow experts called as often as the manifest says.

        Raises:
            PackError: the entry's own pack cannot be read.
        """
        if spec.narrow is None or entry.folder is None or not entry.packed:
            return cls.of(entry.sizes, spec)
        return cls.of(entry.sizes, spec, Manifest.read(entry.folder).rare)

    @property
    def widths(self) -> tuple[Width, ...]:
        """The usual one, and that of narrow experts where there are any."""
        usual = Width(self.spec, self.sizes.experts - self.narrow, 1 - self.narrow_calls, self.up, self.row)
        if self.spec.narrow is None:
            return (usual,)
        return usual, Width(self.spec.narrow, self.narrow, self.narrow_calls, self.narrow_up, self.narrow_row)

    @property
    def called_up(self) -> float:
        """Of the up projection of an expert that is called, on the average."""
        return sum(width.calls * width.up for width in self.widths)

    @property
    def called_row(self) -> float:
        """Likewise of one of its rows."""
        return sum(width.calls * width.row for width in self.widths)

    @property
    def dense(self) -> int:
        """All that is no expert's, as it lies on the disk."""
        return self.sizes.layers * self.attention + self.head + self.kept

    @property
    def ups(self) -> int:
        """The up projections of all layers."""
        return self.sizes.layers * sum(width.experts * width.up for width in self.widths)

    @property
    def row_count(self) -> int:
        """Neurons of all experts of all layers."""
        return self.sizes.layers * self.sizes.experts * self.sizes.intermediate

    @property
    def rows(self) -> int:
        """Bytes of all rows."""
        sizes = self.sizes
        return sizes.layers * sizes.intermediate * sum(width.experts * width.row for width in self.widths)

    @property
    def disk(self) -> int:
        """The whole pack, to within its small files."""
        sizes = self.sizes
        inputs = sizes.hidden + sizes.experts + 1
        predictors = 0
        for layer in range(sizes.layers - 1):
            width = foresight.width(layer, sizes.layers, sizes.hidden, sizes.experts)
            predictors += 2 * (inputs * (sizes.experts + width) + sizes.experts * width)
        return self.dense + self.ups + self.rows + 4 * len(MEASURES) * self.row_count + predictors


def kv_element(dense: int) -> int:
    """Bytes of a number among the keys and values on the CPU, where the dense part has so many bits (see `layers`)."""
    return 4 if dense == 16 else 2


def _expert(sizes: Sizes, group: int, bits: PackSpec | Narrow) -> tuple[int, int]:
    """Bytes of an expert's up projection, and of a neuron's record."""
    gate, down, up = (VectorLayout(sizes.hidden, width, group) for width in (bits.gate, bits.down, bits.up))
    row = RowLayout(gate, down, torch.bfloat16).nbytes
    return sizes.intermediate * (packed_bytes(sizes.hidden, bits.up) + 4 * up.groups), row


def _vector(columns: int, bits: int) -> int:
    """Bytes of one row of a dense layer."""
    return 2 * columns if bits == 16 else layout_of(columns, bits).nbytes
