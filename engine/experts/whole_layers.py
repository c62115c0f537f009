"""Layers of a mixed placement (`offload/mix.py`) whose experts are all in one place: on the device, or in RAM.

Both run beside offloaded layers and share their device. In a layer in RAM the device computes what is before the
experts, and the CPU the experts; prompts stream them to the device, as in an offloaded layer of which nothing is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.types import Calls, Work
from ...kernels.weights import ExpertRows
from ...models.pack.packed_model import PackedLayer
from ..offload.offload import Offload
from ..telemetry import Telemetry
from .moe_layer import DECODE_TOKENS, Cancelled, Choice, Control, MoELayer, Result
from .offloaded_prefill import StreamedPrompt
from .ruled_layer import RuledLayer, Share


class ResidentLayer(MoELayer):
    """The experts of one layer, all on the device: nothing waits for them."""

    def __init__(
        self, index: int, packed: PackedLayer, shared: Offload, control: Control, telemetry: Telemetry
    ) -> None:
        super().__init__(index, packed, control, telemetry)
        self.shared = shared

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `MoELayer`."""
        with self.shared.device.host("gpu", prompt=hidden.shape[0] > DECODE_TOKENS):
            self.shared.device.dense(hidden.shape[0])
            return super().forward(hidden, top_k_index, top_k_weights)

    def _step(self, hidden: Tensor, choice: Choice) -> Result:
        layer, x_bits = choice.ruled.layer, choice.ruled.preset.x_bits
        return Result(choice, *self.shared.device.whole(hidden, layer.signal, layer.rows, choice.work, x_bits))

    def _many(self, ruled: RuledLayer, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        up, rows = ruled.layer.signal, ruled.layer.rows
        for share in shares:
            if self.control.cancelled.is_set():
                raise Cancelled
            one = up.one(share.expert)
            its = ExpertRows(rows.layout, rows.data[share.expert, None])
            y = self.shared.device.expert(hidden[share.tokens], one, its, *share.limits, ruled.preset.x_bits)
            out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))

    def add_totals(self, ruled: RuledLayer, calls: list[int], computed: int, active: int, kept: int) -> None:
        """See `MoELayer`: all rows were there."""
        super().add_totals(ruled, calls, computed, active, kept)
        found = self.telemetry.layers[self.index]
        found.ready += active
        found.looked += computed
        found.hit += computed


class RamLayer(MoELayer):
    """The experts of one layer, all in RAM.

    Args:
        packed: thresholds on the device, all else in RAM. ram: the same layer, all of it in RAM.
    """

    resident = False

    def __init__(
        self,
        index: int,
        packed: PackedLayer,
        ram: PackedLayer,
        shared: Offload,
        control: Control,
        telemetry: Telemetry,
    ) -> None:
        super().__init__(index, packed, control, telemetry)
        self.ram, self.shared = ram, shared
        self._in_ram = RuledLayer(ram, control.preset, index)
        shared.ring.register(index, ram)

    def in_ram(self) -> RuledLayer:
        """The layer in RAM under the preset in force."""
        if self._in_ram.preset is not self.control.preset:
            self._in_ram = RuledLayer(self.ram, self.control.preset, self.index)
        return self._in_ram

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `MoELayer`. The host waits once for the device, for the inputs of a few tokens."""
        device = self.shared.device
        with device.host("cpu", prompt=hidden.shape[0] > DECODE_TOKENS):
            device.dense(hidden.shape[0])
            if hidden.shape[0] > DECODE_TOKENS:
                return super().forward(hidden, top_k_index, top_k_weights)
            (y,) = device.sent(super().forward(*device.fetched(hidden, top_k_index, top_k_weights)))
            return y

    def choose(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Choice:
        """Of a few tokens on the host, of a prompt on the device."""
        ruled = self.in_ram() if hidden.shape[0] <= DECODE_TOKENS else self.in_force()
        return Choice(ruled, index, weights, ruled.work(index, weights))

    def _step(self, hidden: Tensor, choice: Choice) -> Result:
        """By the CPU, also those experts of a prompt that few of its tokens use."""
        device, ram, work = self.shared.device, self.in_ram(), choice.work
        if not work.calls.experts.numel():
            return Result(choice, torch.zeros_like(hidden), torch.zeros(0, 2, dtype=torch.int64))
        optional = () if work.products is None else (work.products,)
        calls = work.calls
        x, tokens, experts, weights, thresholds, *products = device.fetched(
            hidden, calls.tokens, calls.experts, calls.weights, work.thresholds, *optional
        )
        here = Work(Calls(tokens, experts, weights), thresholds, products[0] if products else None)
        y, counts = device.whole_beside(x, ram.layer.signal, ram.layer.rows, here, ram.preset.x_bits)
        if not hidden.is_cpu:
            (y,) = device.sent(y)
        return Result(choice, y, counts)

    def _many(self, ruled: RuledLayer, hidden: Tensor, shares: Sequence[Share], out: Tensor) -> None:
        StreamedPrompt(self.shared, self.index, ruled, self.in_ram(), hidden, out, self.control).run(shares)

    def add_totals(self, ruled: RuledLayer, calls: list[int], computed: int, active: int, kept: int) -> None:
        """See `MoELayer`: the CPU computed all rows."""
        super().add_totals(ruled, calls, computed, active, kept)
        found = self.telemetry.layers[self.index]
        found.on_cpu += active
        found.looked += computed
