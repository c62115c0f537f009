"""The CPU's share of a step, started beside its caller: what `sparse_swiglu` gives, bit for bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.offload.links.link import Link
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu.offload_steps import Beside, OffloadSteps, Share
from floe_chat.kernels.cpu.pool_table import PoolTable
from floe_chat.kernels.layouts import RowLayout, VectorLayout
from floe_chat.kernels.offload.placing import Found, Way
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows

from .test_pool import RULE, both

LAYERS, EXPERTS, NEURONS, HIDDEN = 3, 4, 30, 128


def rows(rng: np.random.Generator, dtype: torch.dtype) -> ExpertRows:
    vector = VectorLayout(HIDDEN, 16, HIDDEN)
    values = torch.from_numpy(rng.standard_normal((EXPERTS, NEURONS, 2 * HIDDEN)).astype(np.float32)).to(dtype)
    return ExpertRows(RowLayout(vector, vector, dtype), values.view(torch.uint8))


def steps(table: PoolTable, link: Link, nbytes: int) -> OffloadSteps:
    rates = Rates(1e9, 1e-6, 1e12, 1e9, 1e-9, 1e10, 1e-6).record()
    return OffloadSteps(table, link.handle, row_bytes=nbytes, spared=32, rates=rates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_a_share_is_what_the_operation_gives(dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = both(RULE, 40, seed)[1]
    assert isinstance(table, PoolTable) and table.width == EXPERTS * NEURONS
    weights = rows(rng, torch.float16)
    link = Link("none", "share", weights.layout.nbytes, content=False)
    way = Way(link.handle, None, None, table.width, table.capacity, 200, 4, pooled=True)
    made, shares = steps(table, link, weights.layout.nbytes), 0
    for step in range(30):
        tokens = int(rng.integers(1, 4))
        x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN)).astype(np.float32)).to(dtype)
        chosen = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:2] for _ in range(tokens)]))
        calls = Calls(torch.arange(tokens).repeat_interleave(2), chosen.flatten(), torch.rand(2 * tokens).to(dtype))
        neurons = [np.flatnonzero(rng.random(NEURONS) < 0.7).astype(np.int32) for _ in range(2 * tokens)]
        ends = torch.tensor([0, *np.cumsum([part.size for part in neurons])])
        values = torch.from_numpy(rng.standard_normal(int(ends[-1])).astype(np.float32)).to(dtype)
        active = Active(ends, torch.from_numpy(np.concatenate(neurons)), values)
        found = Found(step % LAYERS, NEURONS, active, calls.experts, calls.weights, chosen, calls.weights.view(-1, 2))
        limits = torch.rand(2 * tokens) if seed else None
        share = Share(Beside(weights, x, calls, limits, 22))
        share.y.fill_(torch.nan)
        placed = made.start(found, way, 1.0, share)
        if step % 4 == 3:
            continue  # the step is given up: the next one starts anyway
        for _ in made.finish(way, lambda: None):
            pass
        if not placed.sizes[3]:
            continue
        assert made.join_share(share) > 0
        at = torch.from_numpy(placed.beside.at).long()
        offsets = torch.from_numpy(placed.beside.offsets)
        part = Active(offsets, active.neurons[at], values[at])
        y, kept = kernels.sparse_swiglu(x, weights, calls, part, limits, x_bits=22)
        assert torch.equal(share.y.to(dtype), y) and torch.equal(share.kept, kept)
        shares += 1
    assert shares > 10


def test_what_does_not_fit_is_refused() -> None:
    table = both(RULE, 40)[1]
    assert isinstance(table, PoolTable)
    rng, link = np.random.default_rng(1), Link("none", "share", 64, content=False)
    way = Way(link.handle, None, None, table.width, table.capacity, 200, 4, pooled=True)
    weights, made = rows(rng, torch.float16), steps(table, link, 64)
    calls = Calls(torch.tensor([7]), torch.tensor([1]), torch.ones(1))  # there is no such token
    active = Active(torch.tensor([0, 3]), torch.tensor([1, 2, 5], dtype=torch.int32), torch.ones(3))
    found = Found(0, NEURONS, active, calls.experts, calls.weights, torch.tensor([[1]]), torch.ones(1, 1))
    share: Any = Share(Beside(weights, torch.zeros(1, HIDDEN), calls, None, 22))
    with pytest.raises(ValueError, match=r"out of range|do not fit"):
        made.start(found, way, 1.0, share)
    with pytest.raises(ValueError, match="do not fit"):
        made.join_share(share)
    made.start(found, way, 1.0, None)
    del made
    gc.collect()
