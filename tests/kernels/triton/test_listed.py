"""list_active and add_listed against signal_gemv, and against the float64 formula."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.listed import Listing, Portion, Total
from torch import Tensor

from ..listing import empty_listing, pool_of, portions
from ..oracle import FORMS, Form, make_calls, make_x, signal_values, swiglu
from .layers import ROUNDING, TOLERANCE, Size, calls_on, layer_on, relative_rms, size_id

SIZES: list[Size] = [(3, 7, 40, 20), (3, 19, 128, 64), (1, 1, 1, 1), (2, 520, 64, 64)]


def reachable(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's memory as the device reaches it."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize(("dtype", "form"), [(torch.float32, FORMS[2]), (torch.bfloat16, FORMS[0])], ids=str)
def test_what_is_listed_is_what_is_active(size: Size, dtype: torch.dtype, form: Form, device: torch.device) -> None:
    layer, x = layer_on(device, size, (3, 2, 2), form), make_x(2, size[2], dtype).to(device)
    calls = calls_on(device, make_calls([1, 0, 0], [size[0] - 1, 0, size[0] // 2]))
    limits = torch.tensor([0.5, torch.inf, 0.0], device=device)
    want = kernels.signal_gemv(x, layer.stored, calls, limits)
    made = empty_listing(x, 3, size[1])
    listing = Listing(
        made.values, *(reachable(part.cpu(), device) for part in (made.offsets, made.neurons, made.copies))
    )
    kernels.list_active(x, layer.stored, calls, limits, listing)
    if device.type == "cuda":
        torch.cuda.synchronize()
    total = want.neurons.numel()
    assert torch.equal(listing.offsets, want.offsets) and torch.equal(
        listing.neurons[:total].long(), want.neurons.cpu()
    )
    for values in (listing.values, listing.copies):
        assert torch.equal(values[:total].cpu(), want.values.cpu()) and values[total:].isnan().all()


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize(
    ("widths", "form"), [((2, 4, 4), FORMS[0]), ((2, 2, 3), FORMS[2]), ((2, 16, 16), FORMS[1])], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second", [None, 0.4])
def test_parts_add_up_to_the_formula(
    size: Size,
    widths: tuple[int, int, int],
    form: Form,
    dtype: torch.dtype,
    second: float | None,
    device: torch.device,
) -> None:
    layer, x = layer_on(device, size, widths, form), make_x(2, size[2], dtype)
    calls = make_calls([1, 0, 0], [size[0] - 1, 0, size[0] // 2])
    mine, limits = calls_on(device, calls), torch.tensor([0.5, torch.inf, 0.0], device=device)
    active = kernels.signal_gemv(x.to(device), layer.stored, mine, limits)
    pool, slots = pool_of(layer, calls, active)
    seconds = None if second is None else torch.full((3,), second, device=device)
    total = Total(torch.full_like(x, torch.nan).to(device), torch.full((1,), 7, device=device))
    for number, portion in enumerate(portions(active, slots, 3, 3 * size[1])):
        there = Portion(*(reachable(part, device) for part in (portion.offsets, portion.at, portion.places)))
        given = x.to(device), pool, mine, active.values, there, seconds, total
        kernels.add_listed(*given, first=number == 0)
    whole, reached = kernels.sparse_swiglu(x.to(device), layer.rows, mine, active, seconds)
    assert total.reached.tolist() == [7 + int(reached.sum())]
    error = relative_rms(total.y, whole.cpu())
    assert error <= TOLERANCE[dtype] + 2 * ROUNDING[dtype]
    if second is None:
        bounds = active.offsets.tolist()
        chosen = [active.neurons[begin:end].cpu() for begin, end in pairwise(bounds)]
        truth = [v[n] for v, n in zip(signal_values(layer, x.double(), calls), chosen, strict=True)]
        formula = swiglu(layer, x.double(), calls, chosen, truth)
        assert relative_rms(total.y, formula) <= TOLERANCE[dtype] + 4 * ROUNDING[dtype]


def test_an_empty_list_sets_zeros_or_nothing(device: torch.device) -> None:
    layer, x = layer_on(device, (2, 9, 64, 64), (2, 4, 4)), make_x(1, 64, torch.float32).to(device)
    calls = calls_on(device, make_calls([0, 0], [1, 0]))
    lists = [reachable(torch.full((18,), 1 << 24, dtype=torch.int32), device) for _ in range(2)]
    portion = Portion(reachable(torch.zeros(3, dtype=torch.int64), device), *lists)
    total = Total(torch.full_like(x, torch.nan), torch.zeros(1, dtype=torch.int64, device=device))
    rows = type(layer.rows)(layer.rows.layout, layer.rows.data[:1])
    kernels.add_listed(x, rows, calls, x.new_empty(18), portion, None, total, first=True)
    assert not total.y.any()
    total.y.fill_(3.0)
    kernels.add_listed(x, rows, calls, x.new_empty(18), portion, None, total, first=False)
    assert (total.y == 3.0).all() and not total.reached.any()
