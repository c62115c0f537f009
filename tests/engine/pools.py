"""Calls of a pool of neuron rows in the words of a test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool, Slots
from numpy.typing import NDArray

from ..kernels.plain_pool import definition

POLICIES: tuple[Policy, ...] = ("score", "lru", "fifo")


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.int64)


@dataclass(frozen=True)
class Found:
    """Where neurons are: slots (N,) int32, -1 where absent; whether the row is ready, or on its way, (N,) bool."""

    slots: Slots
    ready: NDArray[np.bool_]
    coming: NDArray[np.bool_]


def find(pool: RowPool, layer: int, keys: Keys) -> Found:
    """Where neurons in any order, which may be named twice, are; their use is noted."""
    neurons = pool.slots.shape[2]
    given = layer, keys // neurons, np.arange(keys.size + 1), keys % neurons, neurons
    located = definition(pool.table).locate(*given)
    definition(pool.table).count(*given)
    found = Found(np.full(keys.size, -1, np.int32), np.zeros(keys.size, np.bool_), np.zeros(keys.size, np.bool_))
    for part, mask in ((located.ready, found.ready), (located.coming, found.coming)):
        found.slots[part.at], mask[part.at] = part.places, True
    return found


def bring(pool: RowPool, layer: int, keys: Keys, *, urgent: bool = True) -> Slots:
    """Bring rows when the step that found them missing is over: until then rows of their experts stay."""
    pool.release()
    slots = pool.reserve(layer, keys, urgent=urgent)
    pool.filled(slots)
    return slots


def present(pool: RowPool, layer: int = 0) -> set[int]:
    return set(np.flatnonzero(pool.slots[layer].reshape(-1) >= 0).tolist())
