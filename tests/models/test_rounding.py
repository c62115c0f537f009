"""Rounding of rows next to hqq's, and for the inputs that calibration text gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from floe_chat.kernels.codes import dequantize, pack_codes, unpack_codes
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.models.pack.quantize import MOST_BITS, Codes, by_hqq, quantize, store
from floe_chat.models.packing.rounding import DAMPING, hessian, round_down, round_for
from floe_chat.models.transformers_import import import_hqq
from torch import Tensor

from ..helpers import relative_rms

Rounding = Callable[[Tensor, int, int], Codes]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def related(tokens: int, inputs: int) -> Tensor:
    """Inputs that move together, some more than others, as a layer's do."""
    return drawn(tokens, inputs // 4) @ drawn(inputs // 4, inputs, seed=1) + 0.3 * drawn(tokens, inputs, seed=2)


def share(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


@pytest.mark.parametrize(("inputs", "group"), [(256, 64), (130, 26), (37, 37)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_a_matrix_gives_suffers_less_than_by_grids_alone(bits: int, inputs: int, group: int) -> None:
    x, matrix = related(600, inputs), drawn(90, inputs, seed=3)
    fresh = related(900, inputs)[600:]  # of the same kind, but not seen
    ours, theirs = (
        share(fresh @ by(matrix, bits, group).dense().T, fresh @ matrix.T)
        for by in (partial(round_for, hessian(x)), quantize)
    )
    assert ours <= 0.8 * theirs


@pytest.mark.parametrize(("neurons", "hidden", "group"), [(96, 64, 64), (70, 130, 26), (2500, 8, 8)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_down_gives_suffers_less_than_by_grids_alone(bits: int, neurons: int, hidden: int, group: int) -> None:
    # 2,500 neurons do not all take up each other's errors.
    tokens, down = 700, drawn(neurons, hidden, seed=3)
    h = torch.nn.functional.silu(related(tokens + 200, neurons))
    seen, fresh = h[:tokens], h[tokens:]
    ours, theirs = (
        share(fresh @ by(down, bits, group).dense(), fresh @ down) for by in (partial(round_down, seen), quantize)
    )
    assert ours <= 0.95 * theirs


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_hardly_harm_the_rest(tokens: int) -> None:
    """What was seen must not be bought with what was not."""
    x, matrix = related(tokens, 128), drawn(60, 128, seed=3)
    others = drawn(500, 128, seed=9)
    ours, theirs = (
        share(others @ by(matrix, 4, 64).dense().T, others @ matrix.T)
        for by in (partial(round_for, hessian(x)), quantize)
    )
    assert ours <= 1.6 * theirs


@pytest.mark.parametrize("x", [torch.zeros(4, 64), torch.eye(64)[:1] * 1e-20], ids=["nothing", "next-to-nothing"])
def test_inputs_that_say_nothing_are_borne(x: Tensor) -> None:
    matrix = drawn(20, 64, seed=3)
    assert share(round_for(hessian(x), matrix, 4, 64).dense(), matrix) <= 0.1
    assert share(round_down(torch.zeros(4, 20), matrix, 4, 64).dense(), matrix) <= 0.1


def test_an_input_that_dwarfs_all_others_is_borne() -> None:
    x = drawn(200, 64)
    x[:, 5] *= 1e4
    matrix = drawn(20, 64, seed=3)
    got = round_for(hessian(x), matrix, 4, 64).dense()
    assert share(x @ got.T, x @ matrix.T) <= 0.02 and share(got, matrix) <= 0.3


def test_errors_flow_as_the_moments_factor_says() -> None:
    x = related(500, 40)
    moments = (x.T @ x).double()
    moments /= moments.diagonal().mean()
    found = hessian(x)
    lower = found.feedback.lower.double()
    assert torch.equal(lower, lower.tril()) and torch.equal(lower.diagonal(), torch.ones(40).double())
    inverse = torch.linalg.inv(lower)
    between = inverse.T @ (moments + DAMPING * torch.eye(40)) @ inverse
    rest = between - between.diagonal().diag()
    assert float(rest.abs().max()) <= 1e-4 * float(between.diagonal().max())
    torch.testing.assert_close(found.weight.double(), moments.diagonal(), rtol=1e-4, atol=0)


def test_eight_bits_are_by_grids_alone() -> None:
    matrix, x = drawn(30, 64), related(50, 64)
    for by in (partial(round_for, hessian(x)), partial(round_down, related(50, 30))):
        assert all(torch.equal(a, b) for a, b in zip(by(matrix, 8, 64)[:3], quantize(matrix, 8, 64)[:3], strict=True))


@pytest.mark.parametrize("by", [partial(round_for, hessian(related(90, 64))), partial(round_down, related(90, 64))])
def test_weights_that_cannot_be_rounded_are_refused(by: Rounding) -> None:
    matrix = drawn(64, 64)
    for value in (float("nan"), float("inf")):
        broken = matrix.clone()
        broken[3, 5] = value
        with pytest.raises(ValueError, match="not finite"):
            by(broken, 4, 64)
    with pytest.raises(ValueError, match="too large"):
        by(1e7 * matrix, 4, 64)


def test_inputs_that_are_not_finite_are_refused() -> None:
    x = related(90, 64)
    x[5, 3] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        hessian(x)


def test_what_is_given_stays_as_it_is() -> None:
    matrix, x = drawn(64, 64), related(90, 64)
    kept, seen = matrix.clone(), x.clone()
    round_for(hessian(x), matrix, 4, 64)
    round_down(x, matrix, 4, 64)
    assert torch.equal(matrix, kept) and torch.equal(x, seen)


GAUSSIAN = {2: 0.45, 3: 0.20, 4: 0.10, 8: 0.006}  # relative error on Gaussian rows, group 64, with a little room


def gaussian(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("tails", ["light", "heavy"])
@pytest.mark.parametrize("bits", GAUSSIAN)
def test_no_more_is_lost_than_by_hqq(bits: int, tails: str) -> None:
    import_hqq()
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
    import_hqq()
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
