"""The compiled CPU kernels against a float64 formula: every width, every instruction set of this CPU, odd sizes.

With the address sanitizer (also what CI runs):
    python kernels/cpu/build.py /tmp/floe_asan.so -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
        FLOE_CPU_LIBRARY=/tmp/floe_asan.so pytest tests/kernels/test_cpu_native.py
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.codes import WIDTHS, group_size, pack_codes, widened
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from torch import Tensor

from ..covering import covering
from .oracle import silu

SIZES = [(40, 7, 20), (96, 37, 32), (130, 1, 20), (320, 37, 64), (4096, 200, 64), (512, 20, 128)]
PAIRS = [(2, 4), (3, 2), (4, 3), (4, 4), (8, 4), (8, 8), (16, 8), (4, 16), (16, 16)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3}  # bfloat16's own rounding is 1.7e-3
pytestmark = pytest.mark.usefixtures("two_threads")


def vectors(seed: int, shape: tuple[int, ...], layout: VectorLayout, float16: torch.dtype) -> tuple[Tensor, ...]:
    """Random packed codes (*shape, bytes), scale and zero (*shape, groups), and the (*shape, n) float64 they mean."""
    g = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape).prod())
    if layout.bits == 16:
        raw = torch.randn(count, layout.n, generator=g).to(float16)
        none = torch.empty(*shape, 0, dtype=torch.float16)
        return raw.view(torch.uint8).view(*shape, -1), none, none, raw.double().view(*shape, -1)
    codes = torch.randint(0, 1 << layout.bits, (count, layout.n), dtype=torch.uint8, generator=g)
    scale = 0.2 + torch.rand(count, layout.groups, generator=g)
    zero = torch.rand(count, layout.groups, generator=g) * ((1 << layout.bits) - 1)
    scale, zero = layout.nearest(scale, zero)
    grouped = codes.double().view(count, layout.groups, layout.group)
    factor, shift = (part.double()[..., None] for part in widened(scale, zero, layout.bits))
    dense = (grouped - shift) * factor
    packed = pack_codes(codes, layout.bits)
    return tuple(t.reshape(*shape, -1) for t in (packed, scale, zero, dense))


@cache
def make_up(e: int, f: int, row: VectorLayout, float16: torch.dtype = torch.bfloat16) -> tuple[SignalWeights, Tensor]:
    q, scale, zero, dense = vectors(1, (e, f), row, float16)
    return SignalWeights(SignalLayout(row, float16), q, scale, zero), dense


@cache
def make_rows(
    e: int, f: int, gate: VectorLayout, down: VectorLayout, float16: torch.dtype
) -> tuple[ExpertRows, Tensor, Tensor]:
    layout = RowLayout(gate, down, float16)
    halves: list[Tensor] = []
    dense: list[Tensor] = []
    for seed, vector in ((2, gate), (3, down)):
        q, scale, zero, values = vectors(seed, (e * f,), vector, float16)
        halves.append(q if vector.bits == 16 else vector.join_packed(q, scale, zero))
        dense.append(values.view(e, f, -1))
    return ExpertRows(layout, layout.join(*halves).view(e, f, -1)), dense[0], dense[1]


def make_calls(b: int, e: int, p: int) -> Calls:
    g = torch.Generator().manual_seed(4)
    tokens = torch.arange(p) % b
    return Calls(tokens, torch.randint(0, e, (p,), generator=g), torch.rand(p, generator=g))


def make_x(b: int, h: int) -> Tensor:
    """Gaussian with a few large values, as hidden states have them."""
    x = torch.randn(b, h, generator=torch.Generator().manual_seed(5))
    x[:, :: max(1, h // 3)] *= 30
    return x


def relative(ours: Tensor, exact: Tensor) -> float:
    """Relative RMS error."""
    assert ours.shape == exact.shape
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def poison(n: int) -> None:
    """Leave NaN in freed memory of a size that the next outputs may get."""
    for size in (n, 4 * n):
        torch.full((size,), float("nan"))


def exact_up(x: Tensor, dense: Tensor, calls: Calls) -> list[Tensor]:
    return [dense[e] @ x[t].double() for t, e in zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)]


def exact_swiglu(
    x: Tensor, other: Tensor, down: Tensor, calls: Calls, active: Active, floor: float = 0.0, signal: Projection = "up"
) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for p, (t, e) in enumerate(zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)):
        chosen = slice(int(active.offsets[p]), int(active.offsets[p + 1]))
        n = active.neurons[chosen]
        z = other[e, n] @ x[t].double()
        h = (z if signal == "gate" else silu(z)) * active.values[chosen].double()
        y[t] += calls.weights[p].double() * ((h * (h.abs() >= floor)) @ down[e, n])
    return y


def choose_active(p: int, f: int, share: float, *, shuffled: bool) -> Active:
    g = torch.Generator().manual_seed(6)
    lists = [torch.randperm(f, generator=g)[: round(share * f)] for _ in range(p)]
    lists = lists if shuffled else [n.sort().values for n in lists]
    offsets = torch.tensor([0, *(n.numel() for n in lists)]).cumsum(0)
    return Active(offsets, torch.cat(lists), torch.randn(int(offsets[-1]), generator=g))


@covering({"isa": native.ISAS, "bits": WIDTHS, "size": SIZES, "short": [False, True]}, {"signal": ["up", "gate"]})
def test_signal_gemv_equals_float64(
    isa: str, size: tuple[int, int, int], bits: int, signal: Projection, *, short: bool
) -> None:
    h, f, group = size
    up, dense = make_up(3, f, VectorLayout(h, bits, group_size(h, group), short))
    x, calls = make_x(3, h), make_calls(3, 3, 5)
    poison(5 * f)
    up = replace(up, layout=replace(up.layout, projection=signal))
    found = native.signal_gemv(x, up, calls, torch.zeros(5))
    assert found.offsets.tolist() == [i * f for i in range(6)]
    assert found.neurons.tolist() == list(range(f)) * 5
    exact = torch.cat(exact_up(x, dense, calls))
    assert relative(found.values, silu(exact) if signal == "gate" else exact) <= TOLERANCE[x.dtype]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_signal_gemv_takes_16_bit_x(isa: str, dtype: torch.dtype, bits: int) -> None:
    up, dense = make_up(2, 200, VectorLayout(512, bits, 64), torch.float16)
    x, calls = make_x(1, 512).to(dtype), make_calls(1, 2, 2)
    found = native.signal_gemv(x, up, calls, torch.zeros(2))
    exact = torch.cat(exact_up(x, dense, calls))
    assert found.values.dtype == dtype and relative(found.values, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("signal", ["up", "gate"])
def test_signal_gemv_keeps_what_reaches_the_threshold(isa: str, signal: Projection) -> None:
    up, dense = make_up(4, 700, VectorLayout(256, 2, 64))
    x, calls = make_x(2, 256), make_calls(2, 4, 6)
    exact = exact_up(x, dense, calls)
    up = replace(up, layout=replace(up.layout, projection=signal))
    exact = [silu(z) for z in exact] if signal == "gate" else exact
    shares = (0, 0.2, 0.5, 0.9, 1, 1)
    limits = torch.tensor([float(v.abs().quantile(share)) for v, share in zip(exact, shares, strict=True)])
    limits[5] = float("inf")
    found = native.signal_gemv(x, up, calls, limits)
    for p, v in enumerate(exact):
        chosen = slice(int(found.offsets[p]), int(found.offsets[p + 1]))
        neurons = found.neurons[chosen]
        assert bool((neurons.diff() > 0).all())
        error = 1e-5 * float(v.norm())  # closer to the threshold than this, either answer is right
        kept = torch.zeros(v.numel(), dtype=torch.bool)
        kept[neurons] = True
        assert bool((kept == (v.abs() >= limits[p]))[(v.abs() - limits[p]).abs() > error].all())
        assert bool(((found.values[chosen] - v[neurons]).abs() <= error).all())


@covering(
    {"isa": native.ISAS, "widths": PAIRS, "size": SIZES, "short": [False, True]},
    {"share": [1.0, 0.4], "signal": ["up", "gate"]},
)
def test_sparse_swiglu_equals_float64(
    isa: str, size: tuple[int, int, int], widths: tuple[int, int], share: float, signal: Projection, *, short: bool
) -> None:
    h, f, group = size
    gate, down = (VectorLayout(h, bits, group_size(h, group), short) for bits in widths)
    rows, dense_gate, dense_down = make_rows(3, f, gate, down, torch.bfloat16)
    x, calls, active = make_x(3, h), make_calls(3, 3, 4), choose_active(4, f, share, shuffled=share < 1)
    x *= 0.02
    poison(3 * h)
    y, _ = native.sparse_swiglu(x, replace(rows, layout=replace(rows.layout, signal=signal)), calls, active)
    assert relative(y, exact_swiglu(x, dense_gate, dense_down, calls, active, 0.0, signal)) <= TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sparse_swiglu_takes_16_bit_x(isa: str, dtype: torch.dtype) -> None:
    vector = VectorLayout(512, 4, 64)
    rows, gate, down = make_rows(2, 100, vector, vector, torch.float16)
    x, calls = (make_x(8, 512) * 0.02).to(dtype), make_calls(8, 2, 16)
    active = choose_active(16, 100, 0.3, shuffled=False)
    active = replace(active, values=active.values.to(dtype))
    y, _ = native.sparse_swiglu(x, rows, calls, active)
    assert y.dtype == dtype and relative(y, exact_swiglu(x, gate, down, calls, active)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("widths", [(4, 4), (3, 4), (2, 3), (8, 8)])
@pytest.mark.parametrize("h", [512, 576, 4096])
@pytest.mark.parametrize("short", [False, True])
def test_sparse_swiglu_with_fewer_bits(isa: str, h: int, widths: tuple[int, int], *, short: bool) -> None:
    gate, down = (VectorLayout(h, bits, 64, short) for bits in widths)
    rows, dense_gate, dense_down = make_rows(3, 37, gate, down, torch.bfloat16)
    x, calls, active = make_x(3, h) * 0.02, make_calls(3, 3, 4), choose_active(4, 37, 0.7, shuffled=False)
    poison(3 * h)
    y, _ = native.sparse_swiglu(x, rows, calls, active, x_bits=15)
    assert relative(y, exact_swiglu(x, dense_gate, dense_down, calls, active)) <= 5e-4


def test_a_scale_that_is_not_finite_stays_in_its_group(isa: str) -> None:
    vector, h = VectorLayout(1024, 4, 64), 1024
    rows, gate, down = make_rows(1, 20, vector, vector, torch.bfloat16)
    data = rows.data.clone()
    data[0, 3, vector.nbytes + 2 * 9 : vector.nbytes + 2 * 10].view(torch.float16).fill_(float("inf"))
    x, calls, active = make_x(1, h) * 0.02, make_calls(1, 1, 1), choose_active(1, 20, 1.0, shuffled=False)
    y, _ = native.sparse_swiglu(x, ExpertRows(rows.layout, data), calls, active, x_bits=15)
    hurt = torch.arange(h) // 64 == 9
    assert not y[:, hurt].isfinite().any()
    assert relative(y[:, ~hurt], exact_swiglu(x, gate, down, calls, active)[:, ~hurt]) <= 5e-4


@pytest.mark.parametrize("bits", WIDTHS)
def test_second_threshold_leaves_small_products_out(isa: str, bits: int) -> None:
    vector = VectorLayout(256, bits, 64)
    rows, gate, down = make_rows(2, 150, vector, vector, torch.bfloat16)
    x, calls, active = make_x(2, 256) * 0.02, make_calls(2, 2, 3), choose_active(3, 150, 0.7, shuffled=False)
    everything, _ = native.sparse_swiglu(x, rows, calls, active, torch.zeros(3))
    assert relative(everything, exact_swiglu(x, gate, down, calls, active)) <= TOLERANCE[x.dtype]
    limit = 100.0 if bits == 8 else 1.0
    exact = exact_swiglu(x, gate, down, calls, active, limit)
    assert relative(native.sparse_swiglu(x, rows, calls, active, torch.full((3,), limit))[0], exact) <= 1e-4
    assert relative(everything, exact) > 1e-3
    nothing, _ = native.sparse_swiglu(x, rows, calls, active, torch.full((3,), float("inf")))
    assert not nothing.any()


@pytest.mark.parametrize("bits", WIDTHS)
def test_results_do_not_depend_on_the_thread_count(isa: str, bits: int) -> None:
    vector = VectorLayout(512, bits, 64)
    up, _ = make_up(4, 900, vector)
    rows, _, _ = make_rows(4, 900, vector, vector, torch.bfloat16)
    x, calls = make_x(2, 512), make_calls(2, 4, 5)
    outputs: list[tuple[Tensor, ...]] = []
    for threads in (1, 2, 3, 2, 1):
        torch.set_num_threads(threads)
        active = native.signal_gemv(x, up, calls, torch.full((5,), 20.0))
        y, _ = native.sparse_swiglu(x, rows, calls, active)
        outputs.append((active.offsets, active.neurons, active.values, y))
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_nothing_to_do(isa: str) -> None:
    vector = VectorLayout(96, 4, 32)
    up, _ = make_up(2, 5, vector)
    rows, _, _ = make_rows(2, 5, vector, vector, torch.bfloat16)
    nobody = Calls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0))
    active = native.signal_gemv(make_x(2, 96), up, nobody, torch.empty(0))
    assert active.offsets.tolist() == [0]
    poison(2 * 96)
    assert not native.sparse_swiglu(make_x(2, 96), rows, nobody, active)[0].any()
    calls = make_calls(2, 2, 2)
    active = native.signal_gemv(make_x(2, 96), up, calls, torch.full((2,), float("inf")))
    assert active.offsets.tolist() == [0, 0, 0]
    assert not native.sparse_swiglu(make_x(2, 96), rows, calls, active)[0].any()


def test_a_threads_first_step_may_have_nothing_to_do(isa: str) -> None:
    vector = VectorLayout(96, 4, 32)
    up, _ = make_up(2, 5, vector)
    rows, _, _ = make_rows(2, 5, vector, vector, torch.bfloat16)
    nobody = Calls(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0))
    for calls in (nobody, make_calls(2, 2, 2)):
        limits = torch.full((calls.experts.numel(),), float("inf"))
        with ThreadPoolExecutor(1) as fresh:  # its buffers are empty
            y, counts = fresh.submit(native.moe_step, make_x(2, 96), up, rows, calls, limits).result()
        assert not y.any() and counts.tolist() == [[0, 0]] * calls.experts.numel()


@pytest.mark.parametrize("value", [0.0, 1e-35, 1e30, float("nan"), float("inf")])
def test_extreme_x(isa: str, value: float) -> None:
    up, dense = make_up(1, 9, VectorLayout(256, 2, 64))
    x, calls = make_x(1, 256), make_calls(1, 1, 1)
    x[0, 64:128] = value
    found = native.signal_gemv(x, up, calls, torch.zeros(1))
    if value != value or value == float("inf"):
        assert found.neurons.numel() == 0 or not found.values.isfinite().any()
    else:
        assert relative(found.values, exact_up(x, dense, calls)[0]) <= 1e-5


@pytest.mark.parametrize("nbytes", [64, 192, 4608])
def test_rows_move(isa: str, nbytes: int) -> None:
    g = torch.Generator().manual_seed(7)
    data = torch.randint(0, 256, (2, 300, nbytes), dtype=torch.uint8, generator=g)
    half = VectorLayout(nbytes // 4, 16, nbytes // 4)
    rows = ExpertRows(RowLayout(half, half, torch.bfloat16), data)
    for neurons in (torch.empty(0, dtype=torch.int64), torch.randperm(300, generator=g)[:123]):
        out = torch.full((neurons.numel(), nbytes), 255, dtype=torch.uint8)
        native.gather_rows(rows, 1, neurons, out)
        assert torch.equal(out, data[1][neurons])
        pool = torch.full((400, nbytes), 255, dtype=torch.uint8)
        slots = torch.randperm(400, generator=g)[: neurons.numel()]
        native.pool_scatter(pool, slots, out)
        expected = torch.full((400, nbytes), 255, dtype=torch.uint8).index_copy(0, slots, out)
        assert torch.equal(pool, expected)


def test_bad_indices_are_refused() -> None:
    vector = VectorLayout(96, 4, 32)
    up, _ = make_up(2, 5, vector)
    rows, _, _ = make_rows(2, 5, vector, vector, torch.bfloat16)
    x, one = make_x(2, 96), torch.ones(1)
    for token, expert in ((2, 0), (-1, 0), (0, 2), (0, -1)):
        calls = Calls(torch.tensor([token]), torch.tensor([expert]), one)
        with pytest.raises(ValueError, match="out of range"):
            native.signal_gemv(x, up, calls, torch.zeros(1))
        with pytest.raises(ValueError, match="out of range"):
            native.sparse_swiglu(x, rows, calls, Active(torch.tensor([0, 1]), torch.tensor([0]), one))
    calls = Calls(torch.tensor([0]), torch.tensor([0]), one)
    for neurons, words in (([5], "out of range"), ([-1], "out of range"), ([3, 1, 3], "twice")):
        active = Active(torch.tensor([0, len(neurons)]), torch.tensor(neurons), torch.ones(len(neurons)))
        with pytest.raises(ValueError, match=words):
            native.sparse_swiglu(x, rows, calls, active)
    for offsets in ([1, 2], [0, 3], [0, -1]):
        with pytest.raises(ValueError, match="offsets"):
            native.sparse_swiglu(x, rows, calls, Active(torch.tensor(offsets), torch.tensor([0, 1]), torch.ones(2)))
    out = torch.empty(1, rows.layout.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="out of range"):
        native.gather_rows(rows, 0, torch.tensor([5]), out)
    with pytest.raises(ValueError, match="out of range"):
        native.pool_scatter(out, torch.tensor([1]), out.clone())


def test_callers_in_several_threads() -> None:
    vector = VectorLayout(256, 2, 64)
    up, _ = make_up(2, 500, vector)
    x, calls = make_x(1, 256), make_calls(1, 2, 2)
    expected = native.signal_gemv(x, up, calls, torch.full((2,), 20.0))
    wrong: list[str] = []

    def call_often() -> None:
        torch.set_num_threads(2)
        for _ in range(50):
            found = native.signal_gemv(x, up, calls, torch.full((2,), 20.0))
            if not (torch.equal(found.neurons, expected.neurons) and torch.equal(found.values, expected.values)):
                wrong.append("differs")

    threads = [threading.Thread(target=call_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
