"""What the compiled kernels alone have to do: threads, the numbers between which they count, extreme numbers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from floe_chat.kernels import reference
from floe_chat.kernels.activation import FUNCTIONS, Activation, function_of
from floe_chat.kernels.codes import pack_codes
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.types import Active
from floe_chat.kernels.weights import ExpertRows, LinearWeights
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import Layer, Size, as_active, each, make_calls, make_layer, make_x, swiglu

pytestmark = pytest.mark.usefixtures("two_threads", "poisoned")
every_isa = pytest.mark.usefixtures("isa")


def linear_of(layer: Layer, expert: int = 0) -> LinearWeights:
    """One expert's signal projection as a linear layer."""
    up = layer.stored
    return LinearWeights(up.layout.vector, up.q[expert], up.scale[expert], up.zero[expert])


@every_isa
@covering(
    {"isa": native.ISAS, "bits": [2, 3, 4, 8, 16], "size": [(2, 300, 1152, 64), (2, 37, 130, 26)]}, {"x_bits": [22, 8]}
)
def test_results_do_not_depend_on_the_thread_count(bits: int, size: Size, x_bits: int) -> None:
    layer, x = make_layer(size, (bits, bits, 4)), make_x(13, size[2], torch.float32)
    calls = make_calls([0, 1, 1, 12], [0, 0, 1, 1])
    limits, thresholds = torch.full((4,), 0.2), each(x, 0.2)
    results: list[list[Tensor]] = []
    for threads in (1, 2, 5, 2):
        torch.set_num_threads(threads)
        found = native.signal_gemv(x, layer.stored, calls, limits, x_bits)
        one = [found.offsets, found.neurons, found.values]
        one += native.sparse_swiglu(x, layer.rows, calls, found, None, x_bits)
        one += native.moe_step(x, layer.stored, layer.rows, calls, limits, limits / 4, x_bits)
        y, *counts = native.expert_swiglu(x, layer.stored, layer.rows, 0, thresholds, None, x_bits)
        one += [y, torch.tensor(counts), *([native.linear(x, linear_of(layer), x_bits)] if bits < 16 else [])]
        results.append(one)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@every_isa
@covering(
    {"isa": native.ISAS, "bits": [2, 3, 4, 8], "columns": [64, 256, 448, 1216], "x_bits": [22, 15, 8]},
    {"group": [64, 32]},
)
def test_a_few_tokens_are_each_alone(bits: int, columns: int, x_bits: int, group: int) -> None:
    layer, x = make_layer((2, 21, columns, group), (bits, bits, 4)), make_x(4, columns, torch.float32)
    alone = [native.linear(row, linear_of(layer), x_bits) for row in x.split(1)]
    limits = torch.full((4,), 0.2)
    for order in ([0, 1], [3, 0, 2], [0, 1, 2, 3], [0, 3]):  # of tokens that lie in any order and distance
        together = native.linear(x[order].contiguous(), linear_of(layer), x_bits)
        assert torch.equal(together, torch.cat([alone[t] for t in order])), "to the last bit"
        calls = make_calls(order, [1] * len(order))
        found = native.signal_gemv(x, layer.stored, calls, limits[: len(order)], x_bits)
        for place, token in enumerate(order):
            one = native.signal_gemv(x, layer.stored, make_calls([token], [1]), limits[:1], x_bits)
            mine = slice(int(found.offsets[place]), int(found.offsets[place + 1]))
            assert torch.equal(found.neurons[mine], one.neurons) and torch.equal(found.values[mine], one.values)


@every_isa
@covering(
    {"isa": native.ISAS, "up": [2, 3, 4, 8, 16], "size": [(3, 300, 1152, 64), (2, 1100, 128, 64), (5, 37, 130, 26)]},
    {"x_bits": [22, 15, 8], "limits": [(0.0, 0.0), (0.2, 0.05), (1.0, 0.5)], "tokens": [1, 9, 70]},
)
def test_expert_by_expert_is_the_step(
    up: int, size: Size, x_bits: int, limits: tuple[float, float], tokens: int
) -> None:
    layer, x = make_layer(size, (up, 4, 4)), make_x(tokens, size[2], torch.float32)
    calls = make_calls(
        torch.arange(tokens).repeat_interleave(2).tolist(), torch.randint(size[0], (2 * tokens,)).tolist()
    )
    thresholds, products = (torch.full((2 * tokens,), limit) for limit in limits)
    thresholds[torch.rand(2 * tokens) < 0.2] = torch.inf
    given = x, layer.stored, layer.rows, calls, thresholds, products, x_bits
    (y, counts), (truth, expected) = native.experts_swiglu(*given), native.moe_step(*given)
    # Two ways to add up a product may fall on two sides of a threshold.
    assert (counts - expected).abs().sum() <= 1e-4 * expected.sum() and not counts[thresholds == torch.inf].any()
    assert relative_rms(y, truth.double()) <= (2e-5 if x_bits == 22 else 5e-4)
    torch.set_num_threads(1)
    again, same = native.experts_swiglu(*given)
    assert torch.equal(again, y) and torch.equal(same, counts), "by one thread, to the last bit"


@every_isa
def test_a_threads_first_step_may_have_nothing_to_do() -> None:
    layer, x = make_layer((2, 5, 96, 32), (4, 4, 4)), make_x(2, 96, torch.float32)
    for calls in (make_calls([], []), make_calls([0, 1], [1, 0])):
        limits = torch.full((calls.experts.numel(),), torch.inf)
        with ThreadPoolExecutor(1) as fresh:  # its buffers are empty
            y, counts = fresh.submit(native.moe_step, x, layer.stored, layer.rows, calls, limits).result()
        assert not y.any() and counts.tolist() == [[0, 0]] * calls.experts.numel()


def test_only_functions_of_one_activation_go_together() -> None:
    """What `check_roles` refuses first."""
    layer, x = make_layer((1, 3, 40, 20), (2, 4, 4)), make_x(1, 40, torch.float32)
    wholes = [{function_of("gate", each), function_of("up", each)} for each in get_args(Activation)]
    for one, other in product(FUNCTIONS, FUNCTIONS):
        signal, rows = replace(layer.stored.layout), replace(layer.rows.layout)
        object.__setattr__(signal, "function", one)
        object.__setattr__(rows, "function", other)
        given = replace(layer.stored, layout=signal), replace(layer.rows, layout=rows)
        with (
            nullcontext()
            if one != "one" and {one, other} in wholes
            else pytest.raises(ValueError, match="fit each other")
        ):
            native.moe_step(x, *given, make_calls([0], [0]), torch.zeros(1))


def test_callers_in_several_threads() -> None:
    layer, x, calls = (
        make_layer((2, 500, 256, 64), (2, 2, 2)),
        make_x(1, 256, torch.float32),
        make_calls([0, 0], [1, 0]),
    )
    limits = torch.full((2,), 0.1)
    expected = native.signal_gemv(x, layer.stored, calls, limits)
    wrong: list[str] = []

    def call_often() -> None:
        torch.set_num_threads(2)
        for _ in range(50):
            found = native.signal_gemv(x, layer.stored, calls, limits)
            if not (torch.equal(found.neurons, expected.neurons) and torch.equal(found.values, expected.values)):
                wrong.append("differs")

    threads = [threading.Thread(target=call_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_isa
def test_a_scale_that_is_not_finite_stays_in_its_group() -> None:
    layer, x = make_layer((1, 20, 1024, 64), (4, 4, 4)), make_x(1, 1024, torch.float32)
    vector, data = layer.rows.layout.down, layer.rows.data.clone()
    data[0, 3, vector.nbytes + 2 * 9 : vector.nbytes + 2 * 10].view(torch.float16).fill_(torch.inf)
    calls, everybody, ones = make_calls([0], [0]), [torch.arange(20)], [torch.ones(20, dtype=torch.float64)]
    active = as_active(everybody, ones, torch.float32)
    y, _ = native.sparse_swiglu(x, ExpertRows(layer.rows.layout, data), calls, active, x_bits=15)
    hurt = torch.arange(1024) // 64 == 9
    assert not y[:, hurt].isfinite().any()
    assert relative_rms(y[:, ~hurt], swiglu(layer, x.double(), calls, everybody, ones)[:, ~hurt]) <= 5e-4


@every_isa
@covering({"isa": native.ISAS, "value": [0.0, 1e-35, 1e30, torch.nan, torch.inf]}, {"x_bits": [22, 8]})
def test_extreme_x(value: float, x_bits: int) -> None:
    layer, x = make_layer((1, 9, 256, 64), (2, 4, 4)), make_x(3, 256, torch.float32)
    calls, everything = make_calls([0, 1, 2], [0, 0, 0]), torch.zeros(3)
    clean = native.linear(x, linear_of(layer), x_bits)
    x[1, 64:128] = value
    y = native.linear(x, linear_of(layer), x_bits)
    found = native.signal_gemv(x, layer.stored, calls, everything, x_bits).values.view(3, 9)
    expert, *_ = native.expert_swiglu(x, layer.stored, layer.rows, 0, everything, None, x_bits)
    assert torch.equal(y[[0, 2]], clean[[0, 2]]) and expert[[0, 2]].isfinite().all()
    if value < torch.inf:
        truth = reference.rounded(x, x_bits).double() @ layer.signal[0].T
        assert relative_rms(y[1], truth[1]) <= 1e-5 and relative_rms(found[1], truth[1]) <= 1e-5
    else:
        assert not y[1].isfinite().any() and not found[1].isfinite().any() and not expert[1].isfinite().any()


@every_isa
@covering(
    {"isa": native.ISAS, "bits": [2, 3, 4, 8], "tokens": [1, 4, 13]},
    {"signs": ["all", "alternating", "halves"], "x_bits": [8, 15, 22]},
)
def test_the_largest_codes_and_digits_do_not_overflow(bits: int, signs: str, tokens: int, x_bits: int) -> None:
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
    y = native.linear(x, LinearWeights(vector, pack_codes(codes, bits), scale, zero), x_bits)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_x_is_rounded_too(dtype: torch.dtype) -> None:
    layer, x = make_layer((1, 70, 320, 64), (4, 4, 4)), make_x(3, 320, dtype)
    y = native.linear(x, linear_of(layer), 8)
    assert y.dtype == dtype
    assert torch.equal(y, native.linear(x.float(), linear_of(layer), 8).to(dtype))
