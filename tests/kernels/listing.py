"""Lists for the operations of `kernels/listed.py`, poisoned where they hold nothing."""

from __future__ import annotations

import torch
from floe_chat.kernels.listed import Listing, Portion
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows
from torch import Tensor

from .oracle import Layer

BAD = 1 << 24  # no such neuron, position or row


def empty_listing(x: Tensor, calls: int, neurons: int) -> Listing:
    """Room for all neurons, poisoned."""
    room = calls * neurons
    values = torch.full((room,), torch.nan, dtype=x.dtype, device=x.device)
    offsets = torch.full((calls + 1,), BAD, dtype=torch.int64)
    offsets[0] = 0
    return Listing(values, offsets, torch.full((room,), BAD, dtype=torch.int32), torch.full_like(values, torch.nan))


def pool_of(layer: Layer, calls: Calls, active: Active) -> tuple[ExpertRows, Tensor]:
    """A pool with the rows of a step in a random order, NaN in between; and where each one's is (N,) int32."""
    count = active.neurons.numel()
    slots = torch.randperm(2 * count + 1, generator=torch.Generator().manual_seed(3))[:count]
    rows = layer.rows.data.cpu()
    pool = torch.full((1, 2 * count + 1, rows.shape[2]), 0xFF, dtype=torch.uint8)
    of = torch.repeat_interleave(calls.experts.cpu(), active.offsets.diff())
    pool[0, slots] = rows[of, active.neurons.cpu().long()]
    return ExpertRows(layer.rows.layout, pool.to(layer.rows.data.device)), slots.int()


def portions(active: Active, slots: Tensor, parts: int, room: int) -> list[Portion]:
    """All active neurons, each in one of so many parts at random; the last one of several is empty."""
    part_of = torch.randint(max(1, parts - 1), slots.shape, generator=torch.Generator().manual_seed(parts))
    made: list[Portion] = []
    for part in range(parts):
        mine = part_of == part
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mine.cumsum(0)])[active.offsets]
        at, places = (torch.full((room,), BAD, dtype=torch.int32) for _ in range(2))
        where = mine.nonzero().squeeze(1)
        at[: where.numel()], places[: where.numel()] = where.int(), slots[where]
        made.append(Portion(offsets, at, places))
    return made
