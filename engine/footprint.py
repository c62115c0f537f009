"""What a model takes at given widths, in bytes: by its architecture alone, as packing would lay it out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.layouts import RowLayout, VectorLayout, group_size, packed_bytes
from ..models import foresight
from ..models.calibration import MEASURES
from ..models.linears import layout_of, width_of
from ..models.pack import PackSpec
from ..models.published import Sizes
from ..models.widths import Narrow


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, of one layer where the name does not say otherwise.

    Attributes:
        attention: the four projections. head: of the whole model. kept: embedding, routers and norms of the whole
            model, which stay at 16 bits. up: one expert's up projection. row: one neuron's record.
        kv: keys and values of one token in all layers, per byte of an activation.
        narrow: how many of a layer's experts are narrow; narrow_up, narrow_row: theirs, up and row the others'.
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

    @classmethod
    def of(cls, sizes: Sizes, spec: PackSpec) -> Footprint:
        """At the widths of `spec`; of 16-bit layers too."""
        group = group_size(sizes.hidden, spec.group)
        up, row = _expert(sizes, group, spec)
        narrow_up, narrow_row = _expert(sizes, group, spec.narrow or spec)
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
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
            narrow=spec.narrow.count(sizes.experts) if spec.narrow else 0,
            narrow_up=narrow_up,
            narrow_row=narrow_row,
        )

    @property
    def dense(self) -> int:
        """All that is no expert's, as it lies on the disk."""
        return self.sizes.layers * self.attention + self.head + self.kept

    @property
    def ups(self) -> int:
        """The up projections of all layers."""
        sizes = self.sizes
        return sizes.layers * ((sizes.experts - self.narrow) * self.up + self.narrow * self.narrow_up)

    @property
    def row_count(self) -> int:
        """Neurons of all experts of all layers."""
        return self.sizes.layers * self.sizes.experts * self.sizes.intermediate

    @property
    def rows(self) -> int:
        """Bytes of all rows."""
        sizes = self.sizes
        layer = (sizes.experts - self.narrow) * self.row + self.narrow * self.narrow_row
        return sizes.layers * sizes.intermediate * layer

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


def _expert(sizes: Sizes, group: int, bits: PackSpec | Narrow) -> tuple[int, int]:
    """Bytes of an expert's up projection, and of a neuron's record."""
    gate, down, up = (VectorLayout(sizes.hidden, width, group) for width in (bits.gate, bits.down, bits.up))
    row = RowLayout(gate, down, torch.bfloat16).nbytes
    return sizes.intermediate * (packed_bytes(sizes.hidden, bits.up) + 4 * up.groups), row


def _vector(columns: int, bits: int) -> int:
    """Bytes of one row of a dense layer."""
    return 2 * columns if bits == 16 else layout_of(columns, bits).nbytes
