"""Low-bit linear layers and experts over many tokens on the CPU kernels: every instruction set, width and odd size."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels.cpu import native
from floe_chat.kernels.weights import LinearWeights
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import FORMS, Form, Layer, each, make_layer, make_x, threshold_between

pytestmark = pytest.mark.usefixtures("two_threads")

# (experts, neurons, hidden, group): unchunked, chunked, tails of every kind, several sections and column tiles.
SIZES = [(2, 7, 40, 20), (1, 65, 130, 26), (1, 70, 320, 64), (1, 130, 1152, 64), (2, 33, 512, 128), (1, 5, 64, 64)]
WIDTHS = [(2, 4, 4), (3, 3, 2), (4, 2, 3), (8, 8, 8), (16, 16, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3}

every_isa = pytest.mark.usefixtures("isa")
COUNTS = [1, 2, 5, 8, 9, 23]
BITS = [2, 3, 4, 8]


def linear_of(layer: Layer, expert: int) -> LinearWeights:
    """One expert's up projection as a linear layer."""
    up = layer.stored
    return LinearWeights(up.layout.vector, up.q[expert], up.scale[expert], up.zero[expert])


def swiglu(layer: Layer, expert: int, x: Tensor, threshold: float) -> tuple[Tensor, int]:
    """The expert's output (B, H) in float64, and how many neurons are active over all tokens."""
    v, other = both(layer, expert, x)
    kept = v.abs() >= threshold
    return torch.where(kept, other * v, 0.0) @ layer.down[expert], int(kept.sum())


def both(layer: Layer, expert: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """v, and what it is multiplied with, (B, F) each in float64."""
    v, other = (x.double() @ part[expert].T for part in (layer.signal, layer.other))
    return layer.of_signal(expert, v), layer.of_other(expert, other)


def quiet_threshold(layer: Layer, expert: int, x: Tensor, sparsity: float) -> float:
    """A threshold at about this quantile of |v|, in the widest gap nearby, so that rounding decides nothing."""
    v = both(layer, expert, x)[0].abs().flatten().sort().values
    if sparsity == 0:
        return 0.0
    middle = min(int(sparsity * len(v)), len(v) - 2)
    near = v[max(0, middle - 8) : middle + 9]
    near = near if float(near[-1] - near[0]) > 1e-3 * float(v[-1]) else v  # clamped values are all alike
    gap = int(near.diff().argmax())
    return float((near[gap] + near[gap + 1]) / 2)


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "size": SIZES}, {"tokens": COUNTS})
def test_linear_is_the_product(size: tuple[int, int, int, int], bits: int, tokens: int) -> None:
    layer, x = make_layer(size, (bits, 4, 4)), make_x(tokens, size[2], torch.float32)
    torch.full((tokens * size[1],), float("nan"))  # freed memory that the output may get
    assert relative_rms(native.linear(x, linear_of(layer, 0)), x.double() @ layer.signal[0].T) <= 1e-5


@every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_linear_of_16_bit_x(bits: int, dtype: torch.dtype) -> None:
    layer, x = make_layer((1, 70, 320, 64), (bits, 4, 4)), make_x(11, 320, dtype)
    y = native.linear(x, linear_of(layer, 0))
    assert y.dtype == dtype
    assert relative_rms(y, x.double() @ layer.signal[0].T) <= TOLERANCE[dtype]


@every_isa
@covering({"isa": native.ISAS, "bits": BITS, "size": SIZES}, {"tokens": [1, 2, 11]})
def test_linear_with_fewer_bits_of_x(size: tuple[int, int, int, int], bits: int, tokens: int) -> None:
    layer, x = make_layer(size, (bits, 4, 4)), make_x(tokens, size[2], torch.float32)
    torch.full((tokens * size[1],), float("nan"))  # freed memory that the output may get
    y = native.linear(x, linear_of(layer, 0), x_bits=15)
    assert relative_rms(y, x.double() @ layer.signal[0].T) <= 1e-4


@every_isa
@covering(
    {"isa": native.ISAS, "widths": WIDTHS, "size": SIZES},
    {"tokens": COUNTS, "sparsity": [0.0, 0.6, 0.95], "form": FORMS},
)
def test_expert_is_the_formula(
    size: tuple[int, int, int, int], widths: tuple[int, int, int], tokens: int, sparsity: float, form: Form
) -> None:
    layer, x, expert = make_layer(size, widths, form), make_x(tokens, size[2], torch.float32), size[0] - 1
    threshold = quiet_threshold(layer, expert, x, sparsity)
    truth, kept = swiglu(layer, expert, x, threshold)
    torch.full(x.shape, float("nan"))  # freed memory that the output may get
    y, *counts = native.expert_swiglu(x, layer.stored, layer.rows, expert, each(x, threshold))
    assert counts == [kept, kept]
    assert relative_rms(y, truth) <= 1e-5


@every_isa
@covering(
    {"widths": WIDTHS, "size": SIZES},
    {"isa": native.ISAS, "tokens": [2, 9, 23], "keep": [0.8, 0.1], "form": FORMS},
)
def test_a_second_threshold_leaves_out_small_products(
    size: tuple[int, int, int, int], widths: tuple[int, int, int], tokens: int, keep: float, form: Form
) -> None:
    layer, x, expert = make_layer(size, widths, form), make_x(tokens, size[2], torch.float32), size[0] - 1
    v, other = both(layer, expert, x)
    # Each token has both of its own.
    thresholds = torch.tensor([threshold_between(own, 0.5 + 0.4 * t / tokens) for t, own in enumerate(v)])
    # With wide codes some gates close so far that float32 has only 0 for them.
    thresholds = thresholds.clamp_min(1e-6 * float(v.abs().max()))
    active = v.abs() >= thresholds[:, None]
    products = torch.where(active, other * v, 0.0)
    largest = float(products.abs().max())
    limits = torch.tensor([threshold_between(own[own != 0], keep) for own in products]).clamp_min(1e-6 * largest)
    truth = torch.where(products.abs() >= limits[:, None], products, 0.0)
    torch.full(x.shape, float("nan"))  # freed memory that the output may get
    y, *counts = native.expert_swiglu(x, layer.stored, layer.rows, expert, thresholds, limits)
    assert counts == [int(active.sum()), int(truth.count_nonzero())]
    assert relative_rms(y, truth @ layer.down[expert]) <= 1e-5


@every_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_expert_of_16_bit_x(dtype: torch.dtype) -> None:
    layer, x = make_layer((1, 130, 320, 64), (2, 4, 4)), make_x(11, 320, dtype)
    y, *_ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.0))
    assert y.dtype == dtype
    assert relative_rms(y, swiglu(layer, 0, x, 0.0)[0]) <= TOLERANCE[dtype]


@every_isa
def test_fewer_bits_of_x_cost_little() -> None:
    layer, x = make_layer((1, 130, 320, 64), (2, 4, 4)), make_x(11, 320, torch.float32)
    y, active, _ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.0), x_bits=15)
    assert active == 11 * 130
    assert relative_rms(y, swiglu(layer, 0, x, 0.0)[0]) <= 2e-4


@every_isa
@pytest.mark.parametrize("sparsity", [0.0, 0.6])
def test_the_number_of_threads_changes_nothing(sparsity: float) -> None:
    layer, x = make_layer((1, 300, 1152, 64), (2, 4, 4)), make_x(13, 1152, torch.float32)
    threshold = quiet_threshold(layer, 0, x, sparsity)
    results: list[tuple[Tensor, Tensor, int]] = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        y, active, _ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, threshold))
        results.append((native.linear(x, linear_of(layer, 0)), y, active))
    for linear, y, active in results[1:]:
        assert torch.equal(linear, results[0][0]) and torch.equal(y, results[0][1]) and active == results[0][2]


@every_isa
@pytest.mark.parametrize("hidden", [40, 320])
def test_nan_and_infinity_reach_their_own_token_alone(hidden: int) -> None:
    layer, x = make_layer((1, 37, hidden, hidden // 5), (2, 4, 4)), make_x(5, hidden, torch.float32)
    clean, *_ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.5))
    x[1, 3], x[3, 7] = float("nan"), float("inf")
    y, *_ = native.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.5))
    assert y[1].isnan().all() and not y[3].isfinite().any()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])
    linear = native.linear(x, linear_of(layer, 0))
    assert linear[1].isnan().all() and not linear[3].isfinite().any() and linear[[0, 2, 4]].isfinite().all()


@every_isa
def test_no_tokens_and_no_neurons() -> None:
    layer = make_layer((1, 7, 40, 20), (2, 4, 4))
    y, *counts = native.expert_swiglu(torch.empty(0, 40), layer.stored, layer.rows, 0, torch.empty(0))
    assert y.shape == (0, 40) and counts == [0, 0]
    assert native.linear(torch.empty(0, 40), linear_of(layer, 0)).shape == (0, 7)
    unreachable, *counts = native.expert_swiglu(torch.ones(3, 40), layer.stored, layer.rows, 0, torch.full((3,), 1e30))
    assert counts == [0, 0] and not unreachable.any()
