"""Quantization of rows, beside hqq's, packed into our layouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from floe_chat.kernels.codes import dequantize, pack_codes, unpack_codes
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.models.pack.quantize import MOST_BITS, by_hqq, quantize, store

from ..helpers import relative_rms

GAUSSIAN = {2: 0.45, 3: 0.20, 4: 0.10, 8: 0.006}  # relative error on Gaussian rows, group 64, with a little room


def gaussian(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("tails", ["light", "heavy"])
@pytest.mark.parametrize("bits", GAUSSIAN)
def test_no_more_is_lost_than_by_hqq(bits: int, tails: str) -> None:
    from hqq.core.quantize import Quantizer

    matrix = gaussian(200, 256)
    matrix = matrix if tails == "light" else matrix * (1 + gaussian(201, 256)[:200].abs().square())
    codes, meta = Quantizer.quantize(
        matrix, nbits=bits, group_size=64, axis=1, bitpack=False, compute_dtype=torch.float32, device="cpu"
    )
    theirs = relative_rms(Quantizer.dequantize(codes, meta).view(200, 256), matrix)
    assert relative_rms(quantize(matrix, bits, 64).dense(), matrix) <= (1.01 if bits == MOST_BITS else 0.98) * theirs


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
@pytest.mark.parametrize(("rows", "length", "group"), [(5, 64, 64), (131, 96, 32), (3, 36, 36)])
@pytest.mark.parametrize("bits", GAUSSIAN)
def test_what_is_stored_of_hqqs_codes_is_what_hqq_makes_of_them(
    bits: int, rows: int, length: int, group: int, device: str
) -> None:
    """To within float16, which holds its scales and zeros."""
    from hqq.core.quantize import Quantizer

    matrix = (3 * gaussian(rows, length)).to(device)
    codes, meta = Quantizer.quantize(
        matrix, nbits=bits, group_size=group, axis=1, bitpack=False, compute_dtype=torch.float32, device=device
    )
    theirs = Quantizer.dequantize(codes, meta).view(rows, length).cpu()
    layout = VectorLayout(length, bits, group)
    stored = store(matrix, layout, torch.bfloat16, partial(by_hqq, values=torch.float32))
    back = layout.read(stored.vectors(layout), torch.bfloat16, torch.float32)
    assert torch.equal(back, stored.dense())
    step = meta["scale"].view(rows, -1, 1).abs().cpu() * (meta["zero"].view(rows, -1, 1).abs().cpu() + 2**bits)
    assert bool(((back - theirs).abs().view(rows, -1, group) <= 2**-10 * step).all())
    assert relative_rms(back, theirs) <= 1e-3


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_error_is_what_the_width_allows(bits: int) -> None:
    matrix = gaussian(131, 128)
    codes, scale, zero, _ = quantize(matrix, bits, 64)
    back = dequantize(pack_codes(codes, bits), scale, zero, 128, bits, torch.float32)
    assert relative_rms(back, matrix) <= GAUSSIAN[bits]


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_rows_do_not_depend_on_their_neighbours(bits: int) -> None:
    matrix = gaussian(70, 128)
    whole = quantize(matrix, bits, 64)
    parts = zip(*(quantize(part, bits, 64) for part in matrix.split(33)), strict=True)
    assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole[:3], list(parts)[:3], strict=True))


@pytest.mark.parametrize(
    ("matrix", "bits"),
    [
        pytest.param(torch.zeros(3, 64), 2, id="zeros"),
        pytest.param(torch.full((3, 64), 0.3), 4, id="constant"),
        pytest.param(10 + 1e-4 * gaussian(3, 64), 4, id="nearly-constant"),
        pytest.param(10 + 1e-4 * gaussian(3, 64), 8, id="nearly-constant-8-bit"),
    ],
)
def test_rows_of_little_spread_stay_near_their_values(matrix: torch.Tensor, bits: int) -> None:
    codes, scale, zero, _ = quantize(matrix, bits, 64)
    back = dequantize(pack_codes(codes, bits), scale, zero, 64, bits, torch.float32)
    spread = float(matrix.max() - matrix.min())
    assert float((back - matrix).abs().max()) <= spread + 1e-3 * float(matrix.abs().max())


def test_values_whose_scales_float16_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError):
        quantize(1e6 * gaussian(3, 64), 2, 64)
    with pytest.raises(ValueError):
        quantize(torch.full((3, 5), 1e6), 4, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    matrix = gaussian(3, 64)
    matrix[1, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(matrix, 4, 64)


@pytest.mark.parametrize("float16", [torch.bfloat16, torch.float16])
def test_sixteen_bits_keep_every_bit(float16: torch.dtype) -> None:
    matrix = gaussian(5, 40).to(float16)
    layout = VectorLayout(40, 16, 20)
    stored = store(matrix, layout, float16, values=torch.float32)
    assert torch.equal(stored.packed.view(float16), matrix) and stored.scale.shape == stored.zero.shape == (5, 0)
    assert torch.equal(stored.vectors(layout).view(float16), matrix)
    assert torch.equal(stored.dense(), matrix.float())


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_stored_vector_is_scales_zeros_codes(bits: int) -> None:
    matrix, layout = gaussian(5, 130), VectorLayout(130, bits, 26)
    codes, scale, zero, _ = quantize(matrix, bits, 26)
    stored = store(matrix, layout, torch.bfloat16).vectors(layout)
    assert stored.shape == (5, layout.nbytes)
    assert torch.equal(stored[:, :10].clone().view(torch.float16), scale)
    assert torch.equal(stored[:, 10:20].clone().view(torch.float16), zero)
    assert torch.equal(unpack_codes(stored[:, 20:], 130, bits), codes)
