"""Prompts where rows are in RAM: whole experts stream through a ring on the device while others are computed.

A prompt needs nearly all neurons of nearly all experts, so single rows are not worth choosing. While the device
computes one expert the next ones are copied, across layers as well. The CPU computes experts with few tokens where that
is faster (Fiddler).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from ...kernels.weights import ExpertRows, SignalWeights
from ..offload import missing_rows
from ..offload.device import Partial
from ..offload.expert_ring import Piece
from ..offload.missing_rows import Lane
from ..offload.offload import Offload
from .moe_layer import Cancelled, Control
from .ruled_layer import RuledLayer, Share

NEARLY_ALL = 0.9  # share of a layer's experts: if a prompt uses so many, the next layer's are copied before its choice


@dataclass(slots=True)
class StreamedPrompt:
    """Many tokens in one layer.

    Attributes:
        index: the layer's number in the model. ruled, ram: the layer under the preset, on the device as far as it is
            there, and in RAM.
        hidden: (B, H). out: (B, H), to which the experts add.
    """

    shared: Offload
    index: int
    ruled: RuledLayer
    ram: RuledLayer
    hidden: Tensor
    out: Tensor
    control: Control

    def run(self, shares: Sequence[Share]) -> None:
        """Compute these experts.

        Raises:
            Cancelled: the answer was stopped.
        """
        try:
            self._run({share.expert: share for share in shares})
        except Exception:  # whatever it was, `Cancelled` too: until the transfers end they write to the ring
            self.shared.ring.clear()
            raise

    def _run(self, shares: Mapping[int, Share]) -> None:
        shared, device, ring = self.shared, self.shared.device, self.shared.ring
        shared.scheduler.settle()
        ring.begin(self.index, self._neurons, shares)
        ahead = {one.piece.expert for one in ring.coming}
        lanes, absent = self._lanes(shares, ahead)
        on_cpu = [expert for expert, lane in lanes.items() if lane is Lane.CPU]
        staged = [expert for expert, lane in lanes.items() if lane is not Lane.CPU and expert not in ahead]
        # Those of which few rows are absent come first: the device computes them while the link copies others.
        staged.sort(key=lambda expert: absent[expert])
        wanted = chain((Piece(self.index, expert, self._neurons) for expert in staged), self._following(len(shares)))
        ring.fill(wanted)
        started = [(expert, self._beside(shares[expert])) for expert in on_cpu]
        found, missing = dict[int, Tensor](), deque(shares.values())
        for _ in range(len(ahead) + len(staged)):
            if self.control.cancelled.is_set():
                raise Cancelled
            piece, up, data = ring.arrived()
            share = shares[piece.expert]
            found[share.expert] = self._computed(share, up or self._up(share.expert), data)
            self._add(found, missing)
            ring.used()
            ring.fill(wanted)
        for expert, result in started:
            found[expert] = device.joined(result)[0]
        self._add(found, missing)
        shared.scheduler.collect()

    def _following(self, used: int) -> Iterator[Piece]:
        """The next layer's experts, the likeliest first; only that one where prompts like this use few of them."""
        ring, pool = self.shared.ring, self.shared.pool
        layer = ring.layers.get(self.index + 1)
        if layer is None:
            return
        pieces = layer.pieces(self._neurons)
        nearly_all, parts = used >= NEARLY_ALL * pieces, pool.slots.shape[2] // self._neurons
        experts = range(pieces // parts) if layer.pooled is None else pool.favoured(layer.pooled)
        for part in range(parts):
            for expert in experts:
                yield Piece(self.index + 1, expert * parts + part, self._neurons)
                if not nearly_all:
                    return

    def _lanes(self, shares: Mapping[int, Share], ahead: Collection[int]) -> tuple[dict[int, Lane], dict[int, float]]:
        """Where each expert is computed, and the share of its rows that the device lacks; `ahead`: they are coming."""
        shared, device, neurons = self.shared, self.shared.device, self._neurons
        absent, each = dict.fromkeys(shares, 1.0), neurons * self.ram.layer.rows.layout.nbytes
        pooled = shared.ring.layers[self.index].pooled
        if pooled is None:
            each += self.ram.layer.signal.bytes_per_expert()
        else:
            lacking = (shared.pool.slots[pooled].reshape(-1, neurons) < 0).mean(1).tolist()
            absent = {expert: lacking[expert] for expert in shares}
        tokens, resident = [len(share.tokens) for share in shares.values()], [1 - absent[one] for one in shares]
        for at, expert in enumerate(shares):
            resident[at] = 1.0 if expert in ahead else resident[at]
        queued = device.link.queued_bytes() / device.rates.link_bytes_s
        cap = device.cpu_share if shared.parts.cpu else 0.0
        lanes = missing_rows.prefill(tokens, resident, len(tokens) * [float(each)], device.rates, queued, cap)
        return dict(zip(shares, lanes, strict=True)), absent

    @property
    def _neurons(self) -> int:
        return self.ruled.layer.rows.data.shape[1]

    def _up(self, expert: int) -> SignalWeights:
        """One up projection on the device."""
        return self.ruled.layer.signal.one(expert)

    def _computed(self, share: Share, up: SignalWeights, data: Tensor) -> Tensor:
        rows, x_bits = ExpertRows(self.ruled.layer.rows.layout, data[None]), self.ruled.preset.x_bits
        return self.shared.device.expert(self.hidden[share.tokens], up, rows, *share.limits, x_bits)

    def _beside(self, share: Share) -> Future[Partial]:
        x, layer = self.hidden[share.tokens].cpu(), self.ram.layer
        first, second = share.limits
        limits = first.cpu(), None if second is None else second.cpu()
        return self.shared.device.expert_beside(
            x, layer.signal, layer.rows, share.expert, limits, self.ruled.preset.x_bits
        )

    def _add(self, found: dict[int, Tensor], missing: deque[Share]) -> None:
        """Add what is found, in the order of `missing`: where rows are decides which comes first, never the sum."""
        while missing and (y := found.pop(missing[0].expert, None)) is not None:
            share = missing.popleft()
            self.out.index_add_(0, share.tokens, y * share.weights.to(y.dtype))
