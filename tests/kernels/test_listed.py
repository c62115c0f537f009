"""list_active and add_listed on the CPU, against signal_gemv and sparse_swiglu."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.listed import Portion, Total
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows
from torch import Tensor

from .listing import empty_listing, pool_of, portions
from .oracle import FORMS, Layer, make_calls, make_layer, make_x

Size = tuple[int, int, int, int]


@pytest.fixture(params=zip([(3, 7, 40, 20), (5, 19, 96, 32), (1, 1, 1, 1)], FORMS, strict=False), ids=str)
def layer(request: pytest.FixtureRequest) -> Layer:
    size, form = request.param
    return make_layer(size, (3, 4, 2), form)


def step_of(layer: Layer, tokens: int) -> tuple[Tensor, Calls, Tensor, Active]:
    """x, calls, thresholds that leave one out, and what is active."""
    experts = layer.rows.experts
    calls = make_calls([tokens - 1, 0, 0], [experts - 1, 0, experts // 2])
    x, limits = make_x(tokens, layer.rows.layout.other.n, torch.float32), torch.tensor([0.0, 0.5, torch.inf])
    return x, calls, limits, kernels.signal_gemv(x, layer.stored, calls, limits)


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_is_listed_is_what_is_active(layer: Layer, tokens: int) -> None:
    x, calls, limits, active = step_of(layer, tokens)
    listing, total = empty_listing(x, 3, layer.rows.neurons), active.neurons.numel()
    kernels.list_active(x, layer.stored, calls, limits, listing)
    assert torch.equal(listing.offsets, active.offsets)
    assert torch.equal(listing.neurons[:total], active.neurons.int())
    for values in (listing.values, listing.copies):
        assert torch.equal(values[:total], active.values) and values[total:].isnan().all()


@pytest.mark.parametrize("second", [None, 0.4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_parts_of_a_step_add_up_to_it(layer: Layer, tokens: int, second: float | None) -> None:
    x, calls, _, active = step_of(layer, tokens)
    limits = None if second is None else torch.full((3,), second)
    want, reached = kernels.sparse_swiglu(x, layer.rows, calls, active, limits)
    pool, slots = pool_of(layer, calls, active)
    total = Total(torch.full_like(x, torch.nan), torch.tensor([5]))
    for number, portion in enumerate(portions(active, slots, 3, 3 * layer.rows.neurons)):
        kernels.add_listed(x, pool, calls, active.values, portion, limits, total, first=number == 0)
    torch.testing.assert_close(total.y, want, rtol=1e-5, atol=1e-5)
    assert total.reached.tolist() == [5 + int(reached.sum())]


def test_arguments_that_do_not_fit_are_refused(layer: Layer) -> None:
    x, calls, limits, active = step_of(layer, 1)
    neurons = layer.rows.neurons
    with pytest.raises(ValueError, match="values must be"):
        kernels.list_active(x, layer.stored, calls, limits, empty_listing(x, 2, neurons))
    pool, slots = pool_of(layer, calls, active)
    (whole,) = portions(active, slots, 1, 3 * neurons)
    total = Total(x.clone(), torch.zeros(1, dtype=torch.int64))

    def refused(why: str, portion: Portion = whole, rows: ExpertRows = pool, into: Total = total) -> None:
        before = total.y.clone()
        with pytest.raises(ValueError, match=why):
            kernels.add_listed(x, rows, calls, active.values, portion, None, into, first=True)
        assert torch.equal(total.y, before)

    refused("offsets must rise", Portion(whole.offsets + 1, whole.at, whole.places))
    refused("offsets must rise", Portion(whole.offsets.flip(0), whole.at, whole.places))
    refused("places index out of range", Portion(whole.offsets, whole.at, whole.places + pool.neurons))
    refused("at index out of range", Portion(whole.offsets, whole.at - 1, whole.places))
    refused("at must be", Portion(whole.offsets, whole.at.long(), whole.places))
    refused("reached must be", into=Total(total.y, torch.zeros(2, dtype=torch.int64)))
    if layer.rows.experts > 1:
        refused("rows must be of one expert", rows=layer.rows)
