"""All layers in one call against layer after layer: dense step, selection written down plainly, experts."""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import replace

import pytest
import torch
from floe_chat.kernels.cpu import native
from floe_chat.kernels.cpu.native_step import NativeStep
from floe_chat.kernels.cpu.native_token import NativeToken
from floe_chat.kernels.step import ExpertLayer
from floe_chat.kernels.types import Calls
from torch import Tensor

from .oracle import make_layer as make_experts
from .test_dense_step import Sizes, make_input, make_layer

NAN = float("nan")
SHAPES = {
    "small": (Sizes(), (5, 7, 48, 16), (2, 4, 4)),
    "one of one": (Sizes(hidden=40, experts=1, top_k=1), (1, 3, 40, 20), (8, 4, 2)),
    "all of many": (Sizes(hidden=64, experts=9, top_k=9, bits=4), (9, 6, 64, 64), (3, 4, 4)),
    "16 bit": (Sizes(hidden=96, experts=4, top_k=3, normed="head"), (4, 5, 96, 32), (16, 16, 16)),
}
# parts, drop, major, weighed
CHOICES = [
    *((1, 0.0, 0.0, False), (1, 0.8, 0.8, True), (1, 99.0, 99.0, True)),
    *((2, 0.0, 0.97, False), (2, 0.6, 0.97, True)),
]


def expected(
    dense: list[NativeStep], experts: list[ExpertLayer], x: Tensor, rope: Tensor, kv: list[Tensor], position: int
) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """The stream behind the last layer, the experts of each, and counts of what was computed, call by call."""
    added: Tensor | None = None
    chosen, counts = list[list[int]](), list[list[int]]()
    for step, layer, store in zip(dense, experts, kv, strict=True):
        x, hidden, (index, weights) = step(x, added, rope, store, position)
        numbers, shares, eases = list[int](), list[float](), list[float]()
        row = weights[0].tolist()
        mean = sum(row) / len(row)
        for expert, share in zip(index[0].tolist(), row, strict=True):
            halves = (not share < layer.drop * mean) + (not share < max(layer.drop, layer.major) * mean)
            for part in range(min(halves, layer.parts)):
                numbers.append(layer.parts * expert + part)
                shares.append(share)
                eases.append(min(mean / share, 1000.0) if layer.weighed else 1.0)

        def limits(table: Tensor, numbers: list[int] = numbers, eases: list[float] = eases) -> Tensor:
            return torch.tensor([float(table[n]) * ease for n, ease in zip(numbers, eases, strict=True)])

        calls = Calls(torch.zeros(len(numbers), dtype=torch.int64), torch.tensor(numbers).long(), torch.tensor(shares))
        seconds = None if layer.products is None else limits(layer.products)
        added, found = native.moe_step(hidden, layer.up, layer.rows, calls, limits(layer.thresholds), seconds)
        chosen.append(index[0].tolist())
        counts += found.tolist()
    assert added is not None
    return x + added, chosen, counts


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_layer_after_layer(
    shape: tuple[Sizes, tuple[int, int, int, int], tuple[int, int, int]], choice: tuple[int, float, float, bool]
) -> None:
    sizes, (experts, neurons, hidden, group), widths = shape
    parts, drop, major, weighed = choice
    layers = 3
    dense = [NativeStep(replace(make_layer(sizes), eps=1e-5 * (1 + i))) for i in range(layers)]
    stored = [make_experts((parts * experts, neurons, hidden, group), widths, seed=i) for i in range(layers)]
    limits = torch.rand(2, parts * experts, generator=torch.Generator().manual_seed(7)) / 4
    chosen = [
        ExpertLayer(one.stored_up, one.rows, limits[0], limits[1] if i else None, drop, major, parts, weighed)
        for i, one in enumerate(stored)
    ]
    for position in (0, 5, 200):
        x, _, rope, store = make_input(sizes, position)
        kv = [store.nan_to_num(0.1 * i) for i in range(layers)]
        wanted, index, counts = expected(dense, chosen, x, rope, [part.clone() for part in kv], position)
        found = NativeToken(dense, chosen)(x, rope, kv, position, (22, 22), c_int32(0))
        assert found is not None and torch.equal(found.stream, wanted) and found.chosen.tolist() == index
        computed = [pair for pair in found.counts.view(-1, 2).tolist() if pair[0] >= 0]
        assert computed == counts and (drop < 99 or not counts)
        assert (found.counts[..., 1, :] == -1).all() or parts == 2


def test_what_is_not_a_number_reaches_the_result() -> None:
    sizes, shape, widths = SHAPES["small"]
    dense, one = [NativeStep(make_layer(sizes))], make_experts(shape, widths)
    layer = ExpertLayer(one.stored_up, one.rows, torch.ones(5), torch.ones(5), 0.3, 0.3, 1, weighed=True)
    x, _, rope, kv = make_input(sizes, 2)
    x[0, 3] = NAN
    found = NativeToken(dense, [layer])(x, rope, [kv.nan_to_num(0.1)], 2, (22, 22), c_int32(0))
    assert found is not None and found.stream.isnan().all()
    assert found.counts[0, :, 0].tolist() == [[7, 7], [7, 7]]
