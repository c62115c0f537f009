"""signal_gemv, sparse_swiglu and expert_swiglu against the float64 formula, on odd sizes and every width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.layouts import SignalLayout, VectorLayout
from floe_chat.kernels.weights import LinearWeights, SignalWeights
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import (
    FORMS,
    SIZES,
    TOLERANCE,
    WIDTHS,
    Form,
    Layer,
    as_active,
    each,
    make_calls,
    make_layer,
    make_x,
    signal_products,
    signal_values,
    swiglu,
    threshold_between,
)

pytestmark = pytest.mark.usefixtures("on_backend")

TOKENS = 3
BACKENDS = ["reference", "native"]
DTYPES = list(TOLERANCE)
Size = tuple[int, int, int, int]
Widths = tuple[int, int, int]


def some_calls(experts: int) -> kernels.Calls:
    """Tokens out of order, one token with several experts, one expert twice for one token, one token without calls."""
    return make_calls([2, 0, 0, 0], [experts - 1, 0, experts // 2, 0])


@covering({"on_backend": BACKENDS, "widths": WIDTHS, "size": SIZES}, {"dtype": DTYPES, "form": FORMS})
def test_signal_gemv_finds_the_active_neurons(size: Size, widths: Widths, dtype: torch.dtype, form: Form) -> None:
    layer, x, calls = make_layer(size, widths, form), make_x(TOKENS, size[2], dtype), some_calls(size[0])
    truth, products = signal_values(layer, x, calls), signal_products(layer, x, calls)
    thresholds = [threshold_between(v, keep) for v, keep in zip(truth, (0.5, 0.1, 1.0, 0.0), strict=True)]
    active = kernels.signal_gemv(x, layer.stored, calls, torch.tensor(thresholds))
    assert active.offsets.dtype == torch.int64 and active.offsets.shape == (5,) and active.values.dtype == dtype
    for call, (v, threshold) in enumerate(zip(truth, thresholds, strict=True)):
        mine = slice(int(active.offsets[call]), int(active.offsets[call + 1]))
        neurons = active.neurons[mine]
        # In bfloat16 a neuron within rounding of the threshold may fall on either side.
        # What is rounded before and after the function, whose slope is 1.1 at most.
        largest = torch.cat([products[call], v]).abs().max()
        unsure = (v.abs() - threshold).abs() <= TOLERANCE[dtype] * largest
        kept = torch.zeros_like(unsure).index_fill(0, neurons, True)
        assert neurons.unique().numel() == neurons.numel()
        assert torch.equal(kept & ~unsure, (v.abs() >= threshold) & ~unsure)
        if neurons.numel():
            error = (active.values[mine].double() - v[neurons]).abs().max()
            assert error <= 2 * TOLERANCE[dtype] * largest


@covering({"on_backend": BACKENDS, "widths": WIDTHS, "size": SIZES}, {"dtype": DTYPES, "form": FORMS})
def test_sparse_swiglu_is_the_formula(size: Size, widths: Widths, dtype: torch.dtype, form: Form) -> None:
    layer, x, calls = make_layer(size, widths, form), make_x(TOKENS, size[2], dtype), some_calls(size[0])
    values = [v.to(dtype).double() for v in signal_values(layer, x, calls)]
    generator = torch.Generator().manual_seed(1)
    chosen = [torch.randperm(size[1], generator=generator)[:count] for count in (size[1], 1, (size[1] + 1) // 2, 2)]
    values = [v[neurons] for v, neurons in zip(values, chosen, strict=True)]
    y, _ = kernels.sparse_swiglu(x, layer.rows, calls, as_active(chosen, values, dtype))
    assert y.dtype == dtype and y.shape == x.shape
    assert not y[1].any()
    assert relative_rms(y, swiglu(layer, x, calls, chosen, values)) <= TOLERANCE[dtype]


def some_active(size: Size) -> tuple[list[Tensor], list[Tensor]]:
    """Neurons of each of `some_calls`, in no order, and random values."""
    generator = torch.Generator().manual_seed(2)
    counts = (size[1], 1, (size[1] + 1) // 2, min(2, size[1]))
    chosen = [torch.randperm(size[1], generator=generator)[:count] for count in counts]
    return chosen, [torch.randn(len(neurons), generator=generator).double() for neurons in chosen]


@covering({"widths": WIDTHS, "size": SIZES}, {"on_backend": BACKENDS, "form": FORMS})
def test_a_second_threshold_leaves_out_small_products(size: Size, widths: Widths, form: Form) -> None:
    layer, x, calls = make_layer(size, widths, form), make_x(TOKENS, size[2], torch.float32), some_calls(size[0])
    chosen, values = some_active(size)
    limits: list[float] = []
    kept: list[Tensor] = []
    for call, (token, expert) in enumerate(zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)):
        z = layer.other[expert][chosen[call]] @ x[token].double()
        product = layer.of_other(expert, z, chosen[call]) * values[call].float().double()
        limits.append(threshold_between(product, (0.5, 1.0, 0.3, 0.0)[call]))
        kept.append(product.abs() >= limits[-1])
    y, _ = kernels.sparse_swiglu(
        x, layer.rows, calls, as_active(chosen, values, torch.float32), down_thresholds=torch.tensor(limits)
    )
    fewer = [[part[mask] for part, mask in zip(parts, kept, strict=True)] for parts in (chosen, values)]
    assert relative_rms(y, swiglu(layer, x, calls, fewer[0], fewer[1])) <= TOLERANCE[torch.float32]


@covering({"on_backend": BACKENDS, "bits": [2, 3, 4, 8], "size": SIZES}, {"dtype": DTYPES, "tokens": [0, 1, 11]})
def test_linear_is_the_product(size: Size, bits: int, tokens: int, dtype: torch.dtype) -> None:
    layer, x = make_layer(size, (bits, 4, 4)), make_x(tokens, size[2], dtype)
    up = layer.stored
    y = kernels.linear(x, LinearWeights(up.layout.vector, up.q[0], up.scale[0], up.zero[0]))
    assert y.dtype == dtype and y.shape == (tokens, size[1])
    if tokens:
        assert relative_rms(y, x.double() @ layer.signal[0].to(dtype).double().T) <= TOLERANCE[dtype]


@covering({"widths": WIDTHS}, {"on_backend": BACKENDS, "dtype": DTYPES})
def test_a_call_without_active_neurons_adds_nothing(widths: Widths, dtype: torch.dtype) -> None:
    layer, x, calls = make_layer((3, 7, 96, 32), widths), make_x(2, 96, dtype), make_calls([0, 1], [1, 2])
    nobody, everybody = torch.empty(0, dtype=torch.long), torch.arange(7)
    values = [torch.empty(0, dtype=torch.float64), torch.ones(7, dtype=torch.float64)]
    y, _ = kernels.sparse_swiglu(x, layer.rows, calls, as_active([nobody, everybody], values, dtype))
    assert not y[0].any()
    truth = swiglu(layer, x, calls, [nobody, everybody], values)
    assert relative_rms(y, truth) <= TOLERANCE[dtype]


@pytest.mark.parametrize("widths", WIDTHS[:3], ids=str)
def test_no_calls_give_zeros(widths: Widths) -> None:
    layer, x, calls = make_layer((3, 7, 40, 20), widths), make_x(2, 40, torch.float32), make_calls([], [])
    active = kernels.signal_gemv(x, layer.stored, calls, torch.empty(0))
    assert active.offsets.tolist() == [0] and active.neurons.numel() == 0
    y, _ = kernels.sparse_swiglu(x, layer.rows, calls, active)
    assert y.shape == x.shape and not y.any()


def dense_expert(layer: Layer, expert: int, x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """(y, v) of one expert over all tokens in float64."""
    signal, other, down = (part[expert].to(x.dtype).double() for part in (layer.signal, layer.other, layer.down))
    v = layer.of_signal(expert, x.double() @ signal.T)
    h = layer.of_other(expert, x.double() @ other.T) * torch.where(v.abs() >= threshold, v, 0.0)
    return h @ down, v


AXES = {"dtype": DTYPES, "keep": [0.0, 0.4, 1.0], "form": FORMS}


@covering({"on_backend": BACKENDS, "widths": WIDTHS, "size": SIZES}, AXES)
def test_expert_swiglu_is_the_formula(size: Size, widths: Widths, dtype: torch.dtype, keep: float, form: Form) -> None:
    layer, x, expert = make_layer(size, widths, form), make_x(TOKENS, size[2], dtype), size[0] - 1
    _, v = dense_expert(layer, expert, x, 0.0)
    threshold = threshold_between(v.flatten(), keep)
    if dtype == torch.bfloat16:
        v = v.bfloat16().double()
    truth, _ = dense_expert(layer, expert, x, threshold)
    y, active, kept = kernels.expert_swiglu(x, layer.stored, layer.rows, expert, each(x, threshold))
    assert kept == active
    unsure = int(((v.abs() - threshold).abs() <= TOLERANCE[dtype] * v.abs().max()).sum())
    assert abs(active - int((v.abs() >= threshold).sum())) <= (unsure if dtype == torch.bfloat16 else 0)
    # A neuron at the threshold is worth at most a threshold's part of y: only exact sets are compared closely.
    if not unsure or dtype == torch.float32:
        cancelled = 4 if form.activation == "clamped" else 1  # up + 1, where up is near -1
        assert relative_rms(y, truth) <= 2 * cancelled * TOLERANCE[dtype]


@covering({"widths": WIDTHS, "size": SIZES}, {"on_backend": BACKENDS, "keep": [0.5, 1.0], "form": FORMS})
def test_expert_swiglu_equals_the_sparse_operations(size: Size, widths: Widths, keep: float, form: Form) -> None:
    layer, x, expert = make_layer(size, widths, form), make_x(TOKENS, size[2], torch.float32), size[0] // 2
    every_token = kernels.Calls(torch.arange(TOKENS), torch.full((TOKENS,), expert), torch.ones(TOKENS))
    v = torch.cat(signal_values(layer, x, every_token))
    thresholds = torch.linspace(0.5, 1.5, TOKENS) * threshold_between(v, 0.6)
    products = layer.of_other(expert, x.double() @ layer.other[expert].T) * v.view(TOKENS, -1)
    limits = torch.tensor([threshold_between(own, 0.6 * keep) for own in products]) if keep < 1 else None
    one_by_one, counts = kernels.moe_step(x, layer.stored, layer.rows, every_token, thresholds, limits)
    together, *count = kernels.expert_swiglu(x, layer.stored, layer.rows, expert, thresholds, limits)
    assert count == counts.sum(0).tolist()
    assert relative_rms(together, one_by_one) <= TOLERANCE[torch.float32]


@covering({"widths": WIDTHS, "size": SIZES}, {"on_backend": BACKENDS, "form": FORMS})
def test_moe_step_is_both_operations(size: Size, widths: Widths, form: Form) -> None:
    layer, x, calls = make_layer(size, widths, form), make_x(TOKENS, size[2], torch.float32), some_calls(size[0])
    thresholds = torch.tensor([0.1, 1.0, 0.0, 1e9])
    active = kernels.signal_gemv(x, layer.stored, calls, thresholds)
    limits = torch.full((4,), 0.05)
    y, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, thresholds, limits)
    assert counts.dtype == torch.int64 and torch.equal(counts[:, 0], active.offsets.diff())
    assert torch.equal(y, kernels.sparse_swiglu(x, layer.rows, calls, active, limits)[0])
    _, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, thresholds)
    assert torch.equal(counts, active.offsets.diff()[:, None].expand(4, 2))


@covering({"widths": WIDTHS, "size": SIZES}, {"on_backend": BACKENDS, "form": FORMS})
def test_moe_step_counts_what_reaches_the_second_threshold(size: Size, widths: Widths, form: Form) -> None:
    layer, x, calls = make_layer(size, widths, form), make_x(TOKENS, size[2], torch.float32), some_calls(size[0])
    limits: list[float] = []
    reached: list[int] = []
    pairs = zip(calls.tokens.tolist(), calls.experts.tolist(), signal_values(layer, x, calls), strict=True)
    for call, (token, expert, v) in enumerate(pairs):
        product = layer.of_other(expert, layer.other[expert] @ x[token].double()) * v
        limits.append(threshold_between(product, (0.5, 1.0, 0.3, 0.0)[call]))
        reached.append(int((product.abs() >= limits[-1]).sum()))
    _, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, torch.zeros(4), torch.tensor(limits))
    assert counts.tolist() == [[size[1], kept] for kept in reached]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nan_reaches_the_result(form: Form) -> None:
    layer, x, calls = (
        make_layer((3, 7, 40, 20), (2, 4, 4), form),
        make_x(2, 40, torch.float32),
        make_calls([0, 1], [0, 1]),
    )
    x[1, 3] = float("nan")
    for seconds in (None, torch.full((2,), 0.5), torch.full((2,), torch.inf)):
        y, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, torch.full((2,), 0.5), seconds)
        assert y[0].isfinite().all() and y[1].isnan().all() and counts[1].tolist() == [7, 7]
    for second in (0.0, 0.5, torch.inf):
        y, active, kept = kernels.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.5), each(x, second))
        assert y[0].isfinite().all() and y[1].isnan().all() and active >= kept >= 7
    assert kept == 7


def test_operations_leave_their_arguments_alone() -> None:
    layer, x, calls = make_layer((3, 7, 40, 20), (2, 4, 4)), make_x(TOKENS, 40, torch.float32), some_calls(3)
    before = x.clone(), layer.rows.data.clone(), layer.stored.q.clone()
    active = kernels.signal_gemv(x, layer.stored, calls, torch.zeros(4))
    values = active.values.clone()
    kernels.sparse_swiglu(x, layer.rows, calls, active)
    kernels.expert_swiglu(x, layer.stored, layer.rows, 0, each(x, 0.1))
    now = x, layer.rows.data, layer.stored.q
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert torch.equal(active.values, values)


def test_a_neuron_at_its_threshold_is_active() -> None:
    matrix = torch.tensor([[1.0, 0.0], [0.0, -2.0], [3.0, 0.0], [0.0, 0.0]]).bfloat16()
    layout = SignalLayout(VectorLayout(2, 16, 1), torch.bfloat16)
    empty = torch.empty(1, 4, 0, dtype=torch.float16)
    up = SignalWeights(layout, matrix.view(torch.uint8)[None], empty, empty)
    x, twice = torch.ones(1, 2), make_calls([0, 0], [0, 0])
    active = kernels.signal_gemv(x, up, twice, torch.tensor([2.0, 0.0]))
    assert active.neurons.tolist() == [1, 2, 0, 1, 2, 3]
    assert active.values.tolist() == [-2.0, 3.0, 1.0, -2.0, 3.0, 0.0]


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_an_expert_is_down_of_silu_of_gate_times_up(form: Form) -> None:
    layer, x = make_layer((2, 37, 96, 32), (16, 16, 16), form), make_x(TOKENS, 96, torch.float32)
    gate, up = (layer.signal, layer.other) if form.signal == "gate" else (layer.other, layer.signal)
    check_whole(layer, x, (F.silu(x.double() @ gate[1].T) * (x.double() @ up[1].T)) @ layer.down[1])


@pytest.mark.parametrize("form", FORMS[4:6], ids=str)
def test_a_gelu_expert_is_gemma(form: Form) -> None:
    layer, x = make_layer((2, 37, 96, 32), (16, 16, 16), form), make_x(TOKENS, 96, torch.float32)
    gate, up = (layer.signal, layer.other) if form.signal == "gate" else (layer.other, layer.signal)
    act = F.gelu(x.double() @ gate[1].T, approximate="tanh")
    check_whole(layer, x, (act * (x.double() @ up[1].T)) @ layer.down[1])


@pytest.mark.parametrize("form", FORMS[2:4], ids=str)
def test_a_clamped_expert_is_gpt_oss(form: Form) -> None:
    layer, x = make_layer((2, 37, 96, 32), (16, 16, 16), form), make_x(TOKENS, 96, torch.float32)
    both = [
        x.double() @ part[1].T + bias[1] for part, bias in zip((layer.signal, layer.other), layer.biases, strict=True)
    ]
    gate, up = both if form.signal == "gate" else reversed(both)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    check_whole(layer, x, ((up + 1) * (gate * torch.sigmoid(1.702 * gate))) @ layer.down[1])


def check_whole(layer: Layer, x: Tensor, whole: Tensor) -> None:
    """Expert 1 with nothing left out is what the model's own formula gives."""
    y, *counts = kernels.expert_swiglu(x, layer.stored, layer.rows, 1, each(x, 0.0))
    assert relative_rms(y, whole) <= TOLERANCE[torch.float32] and counts == [TOKENS * 37] * 2
    calls = kernels.Calls(torch.arange(TOKENS), torch.ones(TOKENS, dtype=torch.int64), torch.ones(TOKENS))
    y, _ = kernels.moe_step(x, layer.stored, layer.rows, calls, torch.zeros(TOKENS))
    assert relative_rms(y, whole) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_made_for_another_signal_are_refused(form: Form) -> None:
    layer, x, calls = make_layer((3, 7, 40, 20), (2, 4, 4), form), make_x(1, 40, torch.float32), make_calls([0], [1])
    for other in FORMS:
        rows = make_layer((3, 7, 40, 20), (2, 4, 4), other).rows
        if (other.signal, other.activation) != (form.signal, form.activation):
            with pytest.raises(ValueError, match="the signal is"):
                kernels.moe_step(x, layer.stored, rows, calls, torch.zeros(1))
            with pytest.raises(ValueError, match="the signal is"):
                kernels.expert_swiglu(x, layer.stored, rows, 1, each(x, 0.0))


def test_only_a_result_can_be_out_of_float16s_range() -> None:
    """The first expert's sum is, until its weight makes it small."""
    layer, x = make_layer((1, 19, 320, 64), (8, 4, 8)), make_x(1, 320, torch.float16)
    calls, everybody = make_calls([0], [0]), torch.arange(19)
    calls.weights.fill_(1.0)
    (values,) = signal_values(layer, x, calls)
    whole = swiglu(layer, x, calls, [everybody], [values])
    assert whole.abs().max() > torch.finfo(torch.float16).max > values.abs().max()
    calls.weights.fill_(1e4 / float(whole.abs().max()))
    truth = swiglu(layer, x, calls, [everybody], [values])
    y, _ = kernels.moe_step(x, layer.stored, layer.rows, calls, torch.zeros(1))
    assert relative_rms(y, truth) <= 5e-3
    y, _ = kernels.sparse_swiglu(x, layer.rows, calls, as_active([everybody], [values], torch.float16))
    assert relative_rms(y, truth) <= 5e-3
