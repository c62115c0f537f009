"""What operations keep of x when they are told to keep less: against the float64 formula on x rounded alike."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels import reference
from floe_chat.kernels.codes import pack_codes
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.types import Active
from floe_chat.kernels.weights import ExpertRows, LinearWeights
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import Form, Layer, each, make_calls, make_layer, make_x

pytestmark = pytest.mark.usefixtures("two_threads")

# (experts, neurons, hidden, group): not chunked, one chunk, tails of a step and of a section, two chunks in a group.
SIZES = [(1, 7, 130, 26), (1, 5, 64, 64), (1, 70, 320, 64), (1, 37, 512, 128), (2, 33, 1152, 64), (1, 20, 4096, 64)]

every_isa = pytest.mark.usefixtures("isa")
BITS = [2, 3, 4, 8]


def seen(x: Tensor, group: int) -> Tensor:
    """x as 8-bit kernels see it, float64; groups that 64 does not divide are read in floats."""
    return reference.rounded(x, 8).double() if group % 64 == 0 else x.double()


def linear_of(layer: Layer, expert: int = 0) -> LinearWeights:
    up = layer.stored
    return LinearWeights(up.layout.vector, up.q[expert], up.scale[expert], up.zero[expert])


def silu(g: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g))


def test_eight_bits_cost_what_the_definition_says() -> None:
    x = make_x(32, 4096, torch.float32)
    error = relative_rms(reference.rounded(x, 8), x.double())
    assert 0.0055 <= error <= 0.0068
    assert relative_rms(reference.rounded(x, 15), x.double()) <= error / 120


def test_no_chunk_loses_more_than_the_bound() -> None:
    x = make_x(200, 64, torch.float32)
    x[:100, 3] *= 1000  # the worst neighbour: all others are rounded to nothing
    lost = (reference.rounded(x, 8) - x).norm(dim=1) / x.norm(dim=1)
    assert float(lost.max()) <= 0.032


def test_rounding_of_nothing_and_of_no_number() -> None:
    x = make_x(1, 192, torch.float32)
    x[0, :64], x[0, 70], x[0, 130] = 0, float("nan"), float("inf")
    found = reference.rounded(x, 8)[0]
    assert not found[:64].any() and found[64:].isnan().all()
    assert torch.equal(reference.rounded(x[:, :64], 22), x[:, :64])


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "size": SIZES}, {"tokens": [1, 2, 5, 9], "short": [False, True]})
def test_linear_is_the_product_of_rounded_x(
    size: tuple[int, int, int, int], bits: int, tokens: int, *, short: bool
) -> None:
    layer, x = make_layer(size, (bits, 4, 4), Form(short=short)), make_x(tokens, size[2], torch.float32)
    x[:, ::37] *= 30  # hidden states have a few large values
    torch.full((tokens * size[1],), float("nan"))  # freed memory that the output may get
    y = native.linear(x, linear_of(layer), 8)
    assert relative_rms(y, seen(x, size[3]) @ layer.signal[0].T) <= 1e-5


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "size": SIZES, "short": [False, True]})
def test_up_gemv_is_the_product_of_rounded_x(size: tuple[int, int, int, int], bits: int, *, short: bool) -> None:
    layer, x = make_layer(size, (bits, 4, 4), Form(short=short)), make_x(3, size[2], torch.float32)
    calls = make_calls([0, 1, 2], [0, size[0] - 1, 0])
    torch.full((3 * size[1],), float("nan"))
    found = native.signal_gemv(x, layer.stored, calls, torch.zeros(3), 8)
    pairs = zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)
    truth = [layer.signal[expert] @ seen(x, size[3])[token] for token, expert in pairs]
    assert relative_rms(found.values, torch.cat(truth)) <= 1e-5


@every_isa
@covering(
    {"isa": native.ISAS, "widths": [(4, 4), (3, 8), (2, 3), (8, 2), (4, 16)], "size": SIZES, "short": [False, True]},
    {"share": [1.0, 0.3]},
)
def test_sparse_swiglu_of_rounded_x(
    size: tuple[int, int, int, int], widths: tuple[int, int], share: float, *, short: bool
) -> None:
    layer, x = make_layer(size, (2, *widths), Form(short=short)), make_x(1, size[2], torch.float32) * 0.05
    neurons = torch.arange(size[1])[: max(1, round(share * size[1]))]
    v = torch.randn(len(neurons), generator=torch.Generator().manual_seed(1))
    active = Active(torch.tensor([0, len(neurons)]), neurons, v)
    torch.full(x.shape, float("nan"))
    y, kept = native.sparse_swiglu(x, layer.rows, make_calls([0], [0]), active, None, 8)
    gate, rough = layer.other[0, neurons], seen(x, size[3])[0]
    h = silu(gate @ rough) * v.double()
    truth = make_calls([0], [0]).weights[0].double() * (h @ layer.down[0, neurons])
    assert kept.tolist() == [len(neurons)]
    # A neuron may be a small difference of large sums, which float32 knows to some 2^-25 of all that is added up.
    noise = 2**-25 * (gate.abs() @ rough.abs()) * v.double()
    spread = (noise.square() @ layer.down[0, neurons].square()).mean().sqrt() * 0.1 / truth.square().mean().sqrt()
    # Of 4-bit down columns the factors are rounded too, relative to the largest of eight.
    assert relative_rms(y[0], truth) <= (8e-3 if widths[1] == 4 and size[3] == 64 else 1e-5 + float(spread))


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "size": SIZES}, {"tokens": [1, 9], "short": [False, True]})
def test_expert_of_rounded_x(size: tuple[int, int, int, int], bits: int, tokens: int, *, short: bool) -> None:
    layer, x = make_layer(size, (bits, bits, 4), Form(short=short)), make_x(tokens, size[2], torch.float32)
    torch.full(x.shape, float("nan"))
    y, *_ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.0), None, 8)
    rough = seen(x, size[3])
    h = silu(rough @ layer.other[0].T) * (rough @ layer.signal[0].T)
    assert relative_rms(y, h @ layer.down[0]) <= 2e-5


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "tokens": [1, 4]}, {"signs": ["all", "alternating", "halves"]})
def test_the_largest_codes_and_digits_do_not_overflow(bits: int, signs: str, tokens: int) -> None:
    hidden, rows = 1024, 9
    vector = VectorLayout(hidden, bits, 64)
    codes = torch.full((rows, hidden), (1 << bits) - 1, dtype=torch.uint8)
    scale, zero = torch.ones(rows, 16).half(), torch.zeros(rows, 16).half()
    sign = torch.ones(hidden)
    if signs == "alternating":
        sign[1::2] = -1
    elif signs == "halves":
        sign[hidden // 2 :] = -1
    x = (127 * sign).repeat(tokens, 1)
    y = native.linear(x, LinearWeights(vector, pack_codes(codes, bits), scale, zero), 8)
    truth = codes.double() @ (127 * sign).double()
    assert torch.equal(y.double(), truth.repeat(tokens, 1))


@every_isa
def test_the_largest_codes_and_factors_do_not_overflow() -> None:
    hidden, neurons = 1024, 16
    vector = VectorLayout(hidden, 4, 64)
    rows = make_layer((1, neurons, hidden, 64), (2, 4, 4)).rows
    one, nothing = torch.ones(neurons, 16).half(), torch.zeros(neurons, 16).half()
    zeros, full = (torch.full((neurons, hidden), code, dtype=torch.uint8) for code in (0, 15))
    records = rows.layout.join(vector.join(zeros, one, nothing), vector.join(full, one, nothing))
    records[:, : vector.nbytes] = vector.join(zeros, one, torch.full_like(nothing, -1))  # gate weights of 1
    x = torch.full((1, hidden), 1.0)
    active = Active(torch.tensor([0, neurons]), torch.arange(neurons), torch.ones(neurons))
    calls = make_calls([0], [0])
    y, _ = native.sparse_swiglu(x, ExpertRows(rows.layout, records[None]), calls, active, None, 8)
    assert relative_rms(y[0], torch.full((hidden,), 15.0 * neurons * hidden * float(calls.weights[0])).double()) <= 1e-5


@every_isa
@pytest.mark.parametrize("value", [0.0, 1e-35, 1e30, float("nan"), float("inf")])
def test_extreme_x_in_eight_bits(value: float) -> None:
    layer, x = make_layer((1, 9, 256, 64), (2, 4, 4)), make_x(3, 256, torch.float32)
    clean = native.linear(x, linear_of(layer), 8)
    x[1, 64:128] = value
    y = native.linear(x, linear_of(layer), 8)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    if value != value or value == float("inf"):
        assert not y[1].isfinite().any()
    else:
        assert relative_rms(y[1], reference.rounded(x, 8)[1].double() @ layer.signal[0].T) <= 1e-5


@every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_x_is_rounded_too(dtype: torch.dtype) -> None:
    layer, x = make_layer((1, 70, 320, 64), (4, 4, 4)), make_x(3, 320, dtype)
    y = native.linear(x, linear_of(layer), 8)
    assert y.dtype == dtype
    assert torch.equal(y, native.linear(x.float(), linear_of(layer), 8).to(dtype))


@every_isa
def test_the_number_of_threads_changes_nothing_in_eight_bits() -> None:
    layer, x = make_layer((2, 300, 512, 64), (3, 4, 4)), make_x(2, 512, torch.float32)
    calls, limits = make_calls([0, 1, 1], [0, 0, 1]), torch.full((3,), 5.0)
    results: list[tuple[Tensor, Tensor]] = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(native.moe_step(x, layer.stored, layer.rows, calls, limits, limits, 8))
    for y, counts in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(counts, results[0][1])


def test_other_precisions_are_refused() -> None:
    layer = make_layer((1, 5, 64, 64), (2, 4, 4))
    with pytest.raises(ValueError, match="one of 22, 15, 8, not 16"):
        kernels.linear(torch.ones(1, 64), linear_of(layer), x_bits=16)
