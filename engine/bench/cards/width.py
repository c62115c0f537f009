"""The sizes of a replayed model and its bits per weight: bytes as packing would lay them out, layers without memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ....kernels.codes import group_size
from ....kernels.layouts import RowLayout, SignalLayout, VectorLayout
from ....kernels.weights import ExpertRows, SignalWeights
from ....models.catalog_entry import Sizes
from ....models.families import family_of
from ....models.pack.packed_model import PackedLayer
from ....models.packing.pack import PackSpec
from ...context import CONTEXT
from ...planning.footprint import Footprint, kv_bytes

_PACKED = PackSpec()


@dataclass(frozen=True)
class Width:
    """A published model at some bits per weight.

    Attributes:
        sizes: of the whole model; budgets are scaled to the layers of a trace. spec: by default a pack's.
    """

    sizes: Sizes
    spec: PackSpec = _PACKED

    def at(self, up: int, rows: int, dense: int) -> Width:
        """The same model at other widths."""
        return replace(self, spec=PackSpec(up, rows, rows, dense))

    @cached_property  # read at each step of a replay
    def footprint(self) -> Footprint:
        """Its bytes."""
        return Footprint.of(self.sizes, self.spec)

    @property
    def hidden(self) -> int:
        """Of the residual stream."""
        return self.sizes.hidden

    @property
    def neurons(self) -> int:
        """Of one expert."""
        return self.sizes.intermediate

    @property
    def layers(self) -> int:
        """Those with experts."""
        return self.sizes.layers

    @property
    def dense_weights(self) -> int:
        """Of one layer, besides experts."""
        return self.sizes.attention

    @property
    def dense_bytes(self) -> int:
        """Of them."""
        return self.footprint.attention

    @property
    def head_bytes(self) -> int:
        """Read once a token; of a tied embedding too."""
        return self.footprint.head or 2 * self.sizes.embedding

    @property
    def expert_bytes(self) -> int:
        """One whole expert: its signal projection and its rows."""
        takes = self.footprint
        return takes.up + self.neurons * takes.row

    @property
    def fixed(self) -> int:
        """Bytes of the whole model that a card holds besides experts, with keys and values of the usual context."""
        return self.footprint.dense + kv_bytes(self.sizes, 16).of(CONTEXT)

    def layer(self, thresholds: Tensor) -> PackedLayer:
        """A layer of these sizes, without memory."""
        experts, spec = len(thresholds), self.spec
        signal, other, down = (
            VectorLayout(self.hidden, bits, group_size(self.hidden, spec.group), spec.short)
            for bits in (spec.up, spec.gate, spec.down)
        )
        biased = family_of(self.sizes.model_type).biased
        layout = RowLayout(other, down, torch.bfloat16, biased=biased)
        up = SignalLayout(signal, torch.bfloat16)

        def nothing(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(1, dtype=dtype).expand(experts, self.neurons, width)

        weights = SignalWeights(
            up,
            nothing(up.row_bytes, torch.uint8),
            nothing(signal.groups, signal.scale_dtype),
            nothing(signal.groups, signal.scale_dtype),
            torch.zeros(1, 1).expand(experts, self.neurons) if biased else None,
        )
        # A link takes only contiguous rows. These are never touched, so that no page is allocated.
        rows = torch.empty(experts, self.neurons, layout.nbytes, dtype=torch.uint8)
        return PackedLayer(weights, ExpertRows(layout, rows), thresholds, thresholds)
