"""expert_swiglu and linear against the float64 formula."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.codes import pack_codes
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.triton import dense
from floe_chat.kernels.types import Calls
from floe_chat.kernels.weights import LinearWeights

from ..oracle import FORMS, Form, each, make_x, signal_values, swiglu, threshold_between
from .layers import FAST_SIZES, TOLERANCE, Size, Widths, calls_on, layer_on, relative_rms, size_id

SIZES: list[Size] = [(1, 1, 1, 1), (2, 70, 40, 20), (2, 7, 130, 26), *FAST_SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize(("widths", "form"), [((2, 4, 3), FORMS[2]), ((16, 16, 8), FORMS[1])], ids=str)
def test_expert_swiglu_is_the_formula(
    widths: Widths,
    form: Form,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dense, "SCRATCH", 1)  # the smallest blocks there are
    layer, x, expert = layer_on(device, size, widths, form), make_x(5, size[2], dtype), size[0] - 1
    calls = Calls(torch.arange(5), torch.full((5,), expert), torch.ones(5))
    # What is multiplied are weights in the type of x.
    truth = signal_values(layer, x, calls)
    threshold = threshold_between(torch.cat(truth), 0.4)
    y, active, reached = kernels.expert_swiglu(
        x.to(device), layer.stored, layer.rows, expert, each(x.to(device), threshold)
    )
    assert reached == active
    assert y.dtype == dtype and y.shape == x.shape
    kept = [(v.abs() >= threshold).nonzero().squeeze(1) for v in truth]
    unsure = sum(int(((v.abs() - threshold).abs() <= 2**-7 * v.abs().max()).sum()) for v in truth)
    expected = sum(n.numel() for n in kept)
    if dtype == torch.float32:
        assert active == expected
    else:
        assert abs(active - expected) <= unsure
    if dtype == torch.float32 or not unsure:
        formula = swiglu(layer, x, calls, kept, [v[n] for v, n in zip(truth, kept, strict=True)])
        # In bfloat16 weights, v, gate and h are rounded each, as the reference rounds them.
        assert relative_rms(y, formula) <= (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_expert_swiglu_equals_the_sparse_operations(form: Form, device: torch.device) -> None:
    layer, x = layer_on(device, (3, 37, 192, 64), (2, 4, 4), form), make_x(3, 192, torch.float32).to(device)
    calls = calls_on(device, Calls(torch.arange(3), torch.full((3,), 1), torch.ones(3)))
    thresholds = torch.tensor([3.0, 4.0, 5.0], device=device)
    for limits in (None, 2 * thresholds):
        y, active, kept = kernels.expert_swiglu(x, layer.stored, layer.rows, 1, thresholds, limits)
        step, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, thresholds, limits)
        assert counts.sum(0).tolist() == [active, kept] and 0 < active < 3 * 37
        assert (kept < active) == (limits is not None)
        assert relative_rms(step, y.cpu()) <= 2e-6


def test_no_tokens_and_not_a_number(device: torch.device) -> None:
    layer = layer_on(device, (2, 7, 40, 20), (2, 4, 4))
    y, *counts = kernels.expert_swiglu(
        torch.zeros(0, 40, device=device), layer.stored, layer.rows, 0, torch.zeros(0, device=device)
    )
    assert y.shape == (0, 40) and counts == [0, 0]
    x = make_x(2, 40, torch.float32)
    x[0, 3] = float("nan")
    y, active, kept = kernels.expert_swiglu(
        x.to(device), layer.stored, layer.rows, 0, each(x.to(device), 1.0), each(x.to(device), torch.inf)
    )
    assert y[0].isnan().all() and not y[1].any() and active >= kept == 7


def test_blocks_stay_within_their_memory() -> None:
    block = dense.block_rows(torch.empty(512, 4096, dtype=torch.bfloat16), 14336, 4096 + 8 * 512)
    assert block % 64 == 0 and 0 < block * 2 * (4096 + 8 * 512) <= dense.SCRATCH


LINEAR = [(1, 1, 1), (19, 40, 20), (7, 130, 26), (17, 128, 32), (7, 320, 64)]


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_linear_is_a_matrix_product(
    bits: int, shape: tuple[int, int, int], tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "SCRATCH", 1)
    outputs, inputs, group = shape
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(outputs, inputs // group, generator=generator) * 0.2 + 0.05).half()
    zero = (torch.rand(outputs, inputs // group, generator=generator) * (1 << bits)).half()
    wide = [part.double().repeat_interleave(group, dim=1) for part in (scale, zero)]
    stored = [part.to(device) for part in (pack_codes(codes, bits), scale, zero)]
    x = make_x(tokens, inputs, torch.float32)
    y = kernels.linear(x.to(device), LinearWeights(VectorLayout(inputs, bits, group), *stored))
    assert y.shape == (tokens, outputs)
    truth = x.double() @ ((codes.double() - wide[1]) * wide[0]).T
    assert relative_rms(y, truth) <= TOLERANCE[torch.float32]
