"""list_active and add_listed against signal_gemv and sparse_swiglu, with lists poisoned where they hold nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.listed import Listing, Portion, Total
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import BACKENDS, FORMS, INTERPRETED, Form, Layer, Size, Subject, Widths, make_calls, make_layer, make_x

WHERE = ["reference", "native"] * (BACKENDS != ["triton"]) + ["triton"] * ("triton" in BACKENDS)
SIZES: list[Size] = [(3, 7, 40, 20), (1, 1, 1, 1), (3, 19, 128, 64)]
if not INTERPRETED:
    SIZES.extend([(5, 19, 96, 32), (2, 520, 64, 64)])
HOW: list[tuple[Widths, Form]] = [((3, 4, 2), FORMS[0]), ((2, 2, 3), FORMS[2]), ((2, 16, 16), FORMS[1])]
DTYPES = [torch.float32, torch.bfloat16]
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


def reachable(tensor: Tensor, on_backend: Subject) -> Tensor:
    """The host's memory as the device reaches it."""
    return tensor.cpu().pin_memory() if on_backend.device.type == "cuda" else tensor


def step_of(layer: Layer, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Calls, Tensor]:
    """x, calls, thresholds that leave one out."""
    experts = layer.rows.experts
    calls = make_calls([tokens - 1, 0, 0], [experts - 1, 0, experts // 2])
    return make_x(tokens, layer.rows.layout.other.n, dtype), calls, torch.tensor([0.0, 0.2, torch.inf])


def listed(on_backend: Subject) -> Any:
    """On a CPU these operations are made of the others, and only the public functions have them."""
    return on_backend.kernels if on_backend.name == "triton" else kernels


@covering({"on_backend": WHERE, "size": SIZES}, {"how": HOW, "dtype": DTYPES, "tokens": [1, 3]})
def test_what_is_listed_is_what_is_active(
    on_backend: Subject, size: Size, how: tuple[Widths, Form], dtype: torch.dtype, tokens: int
) -> None:
    layer = on_backend.there(make_layer(size, *how))
    x, calls, limits = on_backend.there(step_of(layer, tokens, dtype))
    active = on_backend.back(listed(on_backend).signal_gemv(x, layer.stored, calls, limits))
    made, total = empty_listing(x, 3, size[1]), active.neurons.numel()
    host = (reachable(part, on_backend) for part in (made.offsets, made.neurons, made.copies))
    listing = Listing(made.values, *host)
    listed(on_backend).list_active(x, layer.stored, calls, limits, listing)
    if on_backend.device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(listing.offsets, active.offsets)
    assert torch.equal(listing.neurons[:total], active.neurons.int())
    for values in (listing.values.cpu(), listing.copies):
        assert torch.equal(values[:total], active.values) and values[total:].isnan().all()


@covering(
    {"on_backend": WHERE, "size": SIZES},
    {"how": HOW, "dtype": DTYPES, "tokens": [1, 3], "second": [None, 0.05]},
)
def test_the_parts_of_a_step_add_up_to_it(
    on_backend: Subject,
    size: Size,
    how: tuple[Widths, Form],
    dtype: torch.dtype,
    tokens: int,
    second: float | None,
) -> None:
    own, layer = make_layer(size, *how), on_backend.there(make_layer(size, *how))
    x, calls, thresholds = on_backend.there(step_of(layer, tokens, dtype))
    active = listed(on_backend).signal_gemv(x, layer.stored, calls, thresholds)
    limits = None if second is None else torch.full((3,), second, device=x.device)
    want, reached = listed(on_backend).sparse_swiglu(x, layer.rows, calls, active, limits)
    pool, slots = pool_of(own, on_backend.back(calls), on_backend.back(active))
    total = Total(torch.full_like(x, torch.nan), torch.tensor([5], device=x.device))
    for number, portion in enumerate(portions(on_backend.back(active), slots, 3, 3 * size[1])):
        there = Portion(*(reachable(part, on_backend) for part in (portion.offsets, portion.at, portion.places)))
        given = x, on_backend.there(pool), calls, active.values, there, limits, total
        listed(on_backend).add_listed(*given, first=number == 0)
    assert relative_rms(total.y.cpu(), want.cpu()) <= 2 * on_backend.limit(dtype)
    assert total.reached.tolist() == [5 + int(reached.sum())]


@pytest.mark.usefixtures("on_backend")
def test_arguments_that_do_not_fit_are_refused() -> None:
    layer = make_layer((3, 7, 40, 20), (3, 4, 2))
    x, calls, limits = step_of(layer, 1)
    active = kernels.signal_gemv(x, layer.stored, calls, limits)
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
    refused("rows must be of one expert", rows=layer.rows)
