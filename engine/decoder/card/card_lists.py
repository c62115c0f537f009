"""The memory between a card and the host in a step of a layer whose rows are in a pool, and the sums over it as graphs.

What the card has found is in a record and a listing; the host answers with lists of rows. Everything is of one token,
at addresses that stay, and serves all layers whose steps have the same structure (`RuledLayer.structure`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels.cpu.binding import codes
from ....kernels.cpu.offload_steps import StepLists
from ....kernels.listed import Listing, Portion, Total
from ....kernels.offload.placing import Found
from ....kernels.types import Active, Calls, Limits
from ....kernels.weights import ExpertRows
from ...experts.moe_layer import Control
from ...experts.offloaded_layer import expected
from ...experts.ruled_layer import RuledLayer
from ..graphs import Captured, capture, pinned


class Record:
    """Tensors packed into one, on the device and in pinned memory. Captured work writes or reads it.

    Attributes:
        there, here: views of the tensors by name, on the device and on the host. places: where each one's bytes are.
        packed: all bytes on the host.
    """

    def __init__(self, like: dict[str, Tensor], device: torch.device) -> None:
        """`like`: tensors of the types and shapes."""
        # The widest first, so that each is aligned; the largest last.
        self._names = sorted(like, key=lambda name: (-like[name].element_size(), like[name].numel()))
        count = sum(like[name].nbytes for name in self._names)
        self._there = torch.zeros(count, dtype=torch.uint8, device=device)
        self._here = pinned(count, dtype=torch.uint8, device=device)
        self.there, self.here = (self._views(packed, like) for packed in (self._there, self._here))
        ends = [*itertools.accumulate(like[name].nbytes for name in self._names)]
        self.places = {name: slice(end - like[name].nbytes, end) for name, end in zip(self._names, ends, strict=True)}
        self.packed = self._here.numpy()

    def _views(self, packed: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = packed.split([like[name].nbytes for name in self._names])
        named = zip(self._names, parts, strict=True)
        return {name: part.view(like[name].dtype).view(like[name].shape) for name, part in named}

    def write(self, tensors: dict[str, Tensor]) -> None:
        """The same tensors as at the beginning, with other values. The host has them after this."""
        parts = [tensors[name].reshape(-1).view(torch.uint8) for name in self._names]
        torch.cat(parts, out=self._there)
        self._here.copy_(self._there, non_blocking=True)

    def read(self) -> None:
        """Captured: the device has what the host wrote to `here` after this."""
        self._there.copy_(self._here, non_blocking=True)


class Residents:
    """Which experts count as resident, (E,) bool: the host writes it, captured work reads it."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self._here = pinned(experts, dtype=torch.bool, device=device)
        self._there = torch.zeros_like(self._here, device=device)

    def write(self, residents: Tensor) -> None:
        self._here.copy_(residents)

    def read(self) -> Tensor:
        """Captured."""
        return self._there.copy_(self._here, non_blocking=True)


def fields(ruled: RuledLayer, top_k: int, total: Total, heard: Tensor | None) -> dict[str, Tensor]:
    """What a step's record holds, as empty tensors. routed: before resident experts replaced others. heard: the
    router's scores of all experts.
    """
    calls, chosen = total.y.new_empty(top_k * ruled.rule.parts), total.y.new_empty(1, top_k)
    fields = {"hidden": total.y, "reached": total.reached, "routed": chosen.long()}
    fields |= {"chosen": chosen.long(), "scores": chosen.float(), "experts": calls.long()}
    fields |= {"thresholds": calls.float(), "weights": calls.float()}
    if ruled.limits.product is not None:
        fields["products"] = calls.float()
    if ruled.limits.late is not None:
        fields["late"] = calls.float()
    if heard is not None:
        fields["heard"] = heard
    return fields


class Guess:
    """Memory of what a layer's captured work predicts of the next layer's step; the host reads it, see `found`. Serves
    all next layers whose steps have the same structure, one after the other.

    Attributes:
        record: the calls, and the experts named. listing: the neurons.
    """

    def __init__(self, like: dict[str, Tensor], room: int, x: Tensor) -> None:
        """`like`: experts and weights (P,) of the calls, and `named`, the experts (1, K). room: neurons of all calls.
        x: (1, H).
        """
        self.record, made = Record(like, x.device), partial(pinned, device=x.device)
        self._tokens = torch.zeros_like(like["experts"])
        self.listing = Listing(
            x.new_zeros(room),
            made(like["experts"].numel() + 1, dtype=torch.int64),
            made(room, dtype=torch.int32),
            made(room, dtype=x.dtype),
        )

    def write(self, x: Tensor, ruled: RuledLayer, best: tuple[Tensor, Tensor], limits: Limits) -> None:
        """Captured: the neurons of the predicted layer for a predicted input x (1, H). best: predicted scores and
        experts (1, K). limits: of the layer, in place.
        """
        scores, named = best
        work, thresholds = expected(named, scores, limits, ruled.rule)
        calls = replace(work.calls, tokens=self._tokens)
        kernels.list_active(x, ruled.layer.signal, calls, thresholds, self.listing, x_bits=8)
        self.record.write({"experts": work.calls.experts, "weights": work.calls.weights.float(), "named": named})

    def found(self, layer: int, width: int) -> Found:
        """The predicted step, with room for all neurons. layer: of the pool's. width: of one of its experts."""
        here, listing = self.record.here, self.listing
        active, nobody = Active(listing.offsets, listing.neurons, listing.copies), here["named"][:0]
        return Found(layer, width, active, here["experts"], here["weights"], nobody, nobody.float())


class Form:
    """Memory and sums of steps that differ in their layer only. Everything is of one token.

    Attributes:
        record: what the host needs. listing: the active neurons. lists: the host's answer. calls: as the sums take
            them. serves: address of the rows that are added up. residents: None where no expert is replaced.
    """

    residents: Residents | None = None

    def __init__(self, like: dict[str, Tensor], room: int, total: Total, control: Control) -> None:
        """`room`: neurons of all calls."""
        hidden, experts = like["hidden"], like["experts"]
        self._total, self._control, self._device = total, control, hidden.device
        self.record = Record(like, hidden.device)
        made, calls = partial(pinned, device=hidden.device), experts.numel()
        self.listing = Listing(
            hidden.new_zeros(room),
            made(calls + 1, dtype=torch.int64),
            made(room, dtype=torch.int32),
            made(room, dtype=hidden.dtype),
        )
        # All programs of a sum read the offsets, so the device gets a copy; they read the other lists once.
        sent = {"offsets": torch.empty(codes.PARTS, calls + 1, dtype=torch.int64), "y": hidden.float()}
        self._sent = Record(sent, hidden.device)
        self.lists = StepLists(
            offsets=self._sent.here["offsets"],
            at=made(codes.PARTS, room, dtype=torch.int32),
            places=made(codes.PARTS, room, dtype=torch.int32),
            keys=torch.zeros(room, dtype=torch.int32),
            slots=torch.zeros(room, dtype=torch.int32),
            y=self._sent.here["y"],
            kept=torch.zeros(calls, dtype=torch.int64),
        )
        there = self.record.there
        self.calls = Calls(torch.zeros_like(experts), there["experts"], there["weights"])
        offsets, parts = self._sent.there["offsets"], (codes.PART_READY, codes.PART_ARRIVED)
        self._ready, self._arrived = (replace(self.lists.portion(part), offsets=offsets[part]) for part in parts)
        self.serves = 0
        self.sums: list[Captured] = []

    def sum(self, rows: ExpertRows) -> None:
        """Capture the sums of these rows, of lists that are empty meanwhile: those that are there, and those that come
        later with what the CPU computed.
        """
        self.sums.clear()
        self.lists.offsets.zero_()
        self.lists.y.zero_()
        for work in (self._add_ready, self._add_late):
            self.sums.append(capture(partial(work, rows), self._device))
        self.serves = rows.data.data_ptr()

    def _add_ready(self, rows: ExpertRows) -> tuple[Tensor, ...]:
        self._sent.there["offsets"].copy_(self.lists.offsets, non_blocking=True)
        return self._add(rows, self._ready, first=True)

    def _add_late(self, rows: ExpertRows) -> tuple[Tensor, ...]:
        self._sent.read()
        self._total.y.add_(self._sent.there["y"])
        return self._add(rows, self._arrived, first=False)

    def _add(self, rows: ExpertRows, portion: Portion, *, first: bool) -> tuple[Tensor, ...]:
        there = self.record.there
        given = there["hidden"], rows, self.calls, self.listing.values, portion, there.get("products"), self._total
        kernels.add_listed(*given, first=first, x_bits=self._control.preset.x_bits)
        return ()
