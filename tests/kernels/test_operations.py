"""Every operation on experts, on every backend, against the float64 formula: odd sizes, every width and form.

Fresh memory is poisoned, and so are the parts of records that nobody may read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from floe_chat.kernels import reference
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.types import Calls
from floe_chat.kernels.weights import ExpertRows, LinearWeights, SignalWeights
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import (
    BACKENDS,
    FORMS,
    PLACES,
    WIDTHS,
    Form,
    Size,
    Subject,
    Widths,
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

Kind = tuple[torch.dtype, int]
Place = tuple[Subject, Size]
KINDS: list[Kind] = [
    *((torch.float32, x_bits) for x_bits in (22, 15, 8)),
    *((dtype, 22) for dtype in (torch.bfloat16, torch.float16)),
]
WHOLE = {"place": PLACES, "widths": WIDTHS}
SENTINEL = 0xA5
on_every_backend = pytest.mark.parametrize("on_backend", BACKENDS, indirect=True)


def some_calls(experts: int) -> Calls:
    """Tokens out of order, one token with several experts, one expert twice for one token, one token without calls."""
    return make_calls([2, 0, 0, 0], [experts - 1, 0, experts // 2, 0])


def kept_of(values: list[Tensor], limits: list[float]) -> list[Tensor]:
    return [(v.abs() >= limit).nonzero().squeeze(1) for v, limit in zip(values, limits, strict=True)]


@covering(WHOLE, {"kind": KINDS, "form": FORMS})
def test_signal_gemv_finds_the_active_neurons(place: Place, widths: Widths, kind: Kind, form: Form) -> None:
    on_backend, size = place
    layer, x, calls = make_layer(size, widths, form), make_x(3, size[2], kind[0]), some_calls(size[0])
    seen = on_backend.sees(x, layer.stored.layout.vector, kind[1])
    truth, products = signal_values(layer, seen, calls), signal_products(layer, seen, calls)
    limits = [threshold_between(v, keep) for v, keep in zip(truth, (0.5, 0.1, 1.0, 0.0), strict=True)]
    active = on_backend("signal_gemv", x, layer.stored, calls, torch.tensor(limits), x_bits=kind[1])
    assert active.offsets.dtype == torch.int64 and active.offsets.shape == (5,) and active.values.dtype == kind[0]
    for call, (v, limit) in enumerate(zip(truth, limits, strict=True)):
        mine = slice(int(active.offsets[call]), int(active.offsets[call + 1]))
        neurons = active.neurons[mine]
        # What is rounded before and after the function, whose slope is 1.1 at most.
        noise = on_backend.limit(*kind) * float(torch.cat([products[call], v]).abs().max())
        sure = (v.abs() - limit).abs() > noise
        kept = torch.zeros_like(sure).index_fill(0, neurons, True)
        assert (neurons.diff() > 0).all() and torch.equal(kept & sure, (v.abs() >= limit) & sure)
        assert ((active.values[mine].double() - v[neurons]).abs() <= 2 * noise).all()


@covering(WHOLE, {"kind": [(*KINDS[0], None), (*KINDS[0], 0.5), *((*kind, None) for kind in KINDS[1:])], "form": FORMS})
def test_sparse_swiglu_is_the_formula(
    place: Place, widths: Widths, kind: tuple[torch.dtype, int, float | None], form: Form
) -> None:
    on_backend, size = place
    dtype, x_bits, share = kind
    layer, x, calls = make_layer(size, widths, form), make_x(3, size[2], dtype), some_calls(size[0])
    seen = on_backend.sees(x, layer.rows.layout.other, x_bits)
    drawn = torch.Generator().manual_seed(2)
    counts = size[1], 1, (size[1] + 1) // 2, 0
    chosen = [torch.randperm(size[1], generator=drawn)[:count] for count in counts]
    values = [torch.randn(len(neurons), generator=drawn).to(dtype).double() for neurons in chosen]
    active = as_active(chosen, values, dtype)
    # No record of another neuron is read, and no down column of a product below the second threshold.
    unread, untouched = torch.ones(2, *size[:2], dtype=torch.bool).unbind()
    limits = None if share is None else torch.zeros(4)
    for call, (token, expert) in enumerate(zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)):
        unread[expert, chosen[call]] = False
        if limits is not None:
            z = layer.other[expert][chosen[call]] @ seen[token].double()
            product = layer.of_other(expert, z, chosen[call]) * values[call]
            limits[call] = threshold_between(product, (0.5, 1.0, 0.3, 0.0)[call]) if len(product) else 0.0
            reached = product.abs() >= limits[call]
            chosen[call], values[call] = chosen[call][reached], values[call][reached]
        untouched[expert, chosen[call]] = False
    records = layer.rows.data.masked_fill(unread[..., None], 0xFF)
    if on_backend.kind != "reference":
        down = records[..., layer.rows.layout.down_at :]
        down.masked_fill_(untouched[..., None], 0xFF)
    y, kept = on_backend(
        "sparse_swiglu", x, ExpertRows(layer.rows.layout, records), calls, active, limits, x_bits=x_bits
    )
    assert y.dtype == dtype and y.shape == x.shape and not y[1].any()
    assert kept.tolist() == [len(neurons) for neurons in chosen]
    limit = on_backend.limit(dtype, x_bits)
    if on_backend.kind == "native" and x_bits == 8:
        # Of 4-bit down columns the factors are rounded too, to 15 bits relative to the largest of eight.
        limit = 1e-4 if widths[2] == 4 and size[3] % 64 == 0 else 3e-5
    assert relative_rms(y, swiglu(layer, seen, calls, chosen, values)) <= limit


@covering(
    WHOLE, {"kind": KINDS, "form": FORMS, "tokens": [1, 2, 5, 8, 9, 23], "shares": [(1, 1), (0.5, 1), (0.4, 0.5)]}
)
def test_expert_swiglu_is_the_formula(
    place: Place,
    widths: Widths,
    kind: Kind,
    form: Form,
    tokens: int,
    shares: tuple[float, float],
) -> None:
    on_backend, size = place
    dtype, x_bits = kind
    layer, x, expert = make_layer(size, widths, form), make_x(tokens, size[2], dtype), size[0] - 1
    x = x / 8 if dtype is torch.float16 else x  # sums of thousands of products would be more than it holds
    calls = Calls(torch.arange(tokens), torch.full((tokens,), expert), torch.ones(tokens))
    v = torch.stack(signal_values(layer, on_backend.sees(x, layer.stored.layout.vector, x_bits, whole=True), calls))
    seen = on_backend.sees(x, layer.rows.layout.other, x_bits, whole=True)
    other = layer.of_other(expert, seen.double() @ layer.other[expert].to(seen.dtype).double().T)
    # Each token has thresholds of its own, 0 where nothing is left out.
    limits = torch.tensor([threshold_between(own, shares[0]) for own in v])
    active = v.abs() >= limits[:, None]
    products = torch.where(active, other * v, 0.0)
    seconds = None
    if shares[1] < 1:
        seconds = torch.tensor([threshold_between(own, shares[0] * shares[1]) for own in products])
    kept = active if seconds is None else active & (products.abs() >= seconds[:, None])
    y, *counts = on_backend("expert_swiglu", x, layer.stored, layer.rows, expert, limits, seconds, x_bits=x_bits)
    assert y.dtype == dtype and y.shape == x.shape
    limit = on_backend.limit(dtype, x_bits)
    unsure = (v.abs() - limits[:, None]).abs() <= 2 * limit * v.abs().max()
    if seconds is not None:
        unsure |= active & ((products.abs() - seconds[:, None]).abs() <= 4 * limit * products.abs().max())
    for found, mask in zip(counts, (active, kept), strict=True):
        assert abs(found - int(mask.sum())) <= int(unsure.sum())
    # A neuron at a threshold is worth a part of y: only exact sets are compared closely.
    if not unsure.any():
        truth = products.masked_fill(~kept, 0) @ layer.down[expert].to(seen.dtype).double()
        cancelled = 4 if form.activation == "clamped" else 2  # up + 1, where up is near -1
        assert relative_rms(y, truth) <= cancelled * limit


@covering(WHOLE, {"kind": KINDS, "form": FORMS, "second": [None, 0.05]})
def test_moe_step_is_both_operations(
    place: Place, widths: Widths, kind: Kind, form: Form, second: float | None
) -> None:
    on_backend, size = place
    layer, x, calls = make_layer(size, widths, form), make_x(3, size[2], kind[0]), some_calls(size[0])
    limits, seconds = torch.tensor([0.1, 0.5, 0.0, torch.inf]), None if second is None else torch.full((4,), second)
    y, counts = on_backend("moe_step", x, layer.stored, layer.rows, calls, limits, seconds, x_bits=kind[1])
    wide = x if kind[0] == torch.float32 else x.float()  # between the two nothing is rounded
    active = on_backend("signal_gemv", wide, layer.stored, calls, limits, x_bits=kind[1])
    parts, kept = on_backend("sparse_swiglu", wide, layer.rows, calls, active, seconds, x_bits=kind[1])
    assert counts.dtype == torch.int64 and counts[3].tolist() == [0, 0]
    assert y.dtype == kind[0]
    if kind[0] == torch.float32:
        assert torch.equal(counts, torch.stack([active.offsets.diff(), kept], dim=1)) and torch.equal(y, parts)


@covering(
    {"place": PLACES, "bits": [2, 3, 4, 8]},
    {"kind": KINDS, "tokens": [0, 1, 2, 5, 9, 23], "short": [False, True]},
)
def test_linear_is_the_product(place: Place, bits: int, kind: Kind, tokens: int, *, short: bool) -> None:
    on_backend, size = place
    layer, x = make_layer(size, (bits, 4, 4), Form(short=short)), make_x(tokens, size[2], kind[0])
    up = layer.stored
    weights = LinearWeights(up.layout.vector, up.q[0], up.scale[0], up.zero[0])
    y = on_backend("linear", x, weights, x_bits=kind[1])
    assert y.dtype == kind[0] and y.shape == (tokens, size[1])
    seen = on_backend.sees(x, weights.vector, kind[1], whole=tokens > 8)
    truth = seen.double() @ layer.signal[0].to(seen.dtype).double().T
    assert not tokens or relative_rms(y, truth) <= on_backend.limit(*kind)


@covering({"on_backend": BACKENDS, "form": FORMS, "hidden": [40, 320]})
def test_what_is_not_a_number_reaches_its_own_token_alone(on_backend: Subject, form: Form, hidden: int) -> None:
    layer, x = make_layer((3, 7, hidden, hidden // 5), (2, 4, 4), form), make_x(3, hidden, torch.float32)
    clean = on_backend("expert_swiglu", x, layer.stored, layer.rows, 0, each(x, 0.5))[0]
    x[1, 3] = torch.nan
    calls = make_calls([0, 1], [0, 1])
    for seconds in (None, torch.full((2,), 0.5), torch.full((2,), torch.inf)):
        y, counts = on_backend("moe_step", x, layer.stored, layer.rows, calls, torch.full((2,), 0.5), seconds)
        assert y[0].isfinite().all() and y[1].isnan().all() and counts[1].tolist() == [7, 7]
    for second in (0.0, 0.5, torch.inf):
        y, active, kept = on_backend("expert_swiglu", x, layer.stored, layer.rows, 0, each(x, 0.5), each(x, second))
        assert y[[0, 2]].isfinite().all() and y[1].isnan().all() and active >= kept >= 7
        assert second or torch.equal(y[[0, 2]], clean[[0, 2]])
    linear = on_backend("linear", x, LinearWeights(layer.stored.layout.vector, *(t[0] for t in parts_of(layer.stored))))
    assert linear[1].isnan().all() and linear[[0, 2]].isfinite().all()


def parts_of(weights: SignalWeights) -> tuple[Tensor, Tensor, Tensor]:
    return weights.q, weights.scale, weights.zero


@covering({"on_backend": BACKENDS, "size": [(3, 7, 40, 20), (2, 7, 64, 64)]})
def test_nothing_to_do_gives_zeros(on_backend: Subject, size: Size) -> None:
    layer, x = make_layer(size, (2, 4, 4)), make_x(2, size[2], torch.float32)
    for calls, limit in (
        (make_calls([], []), 0.0),
        (make_calls([0, 1], [1, 0]), 1e9),
        (make_calls([0], [1]), torch.inf),
    ):
        limits = torch.full((calls.tokens.numel(),), limit)
        active = on_backend("signal_gemv", x, layer.stored, calls, limits)
        assert active.offsets.tolist() == [0] * (1 + calls.tokens.numel()) and not active.neurons.numel()
        y, _ = on_backend("sparse_swiglu", x, layer.rows, calls, active)
        step, counts = on_backend("moe_step", x, layer.stored, layer.rows, calls, limits)
        assert y.shape == step.shape == x.shape and not y.any() and not step.any() and not counts.any()
    y, *counts = on_backend("expert_swiglu", x[:0], layer.stored, layer.rows, 0, torch.empty(0))
    assert y.shape == (0, size[2]) and counts == [0, 0]
    y, *counts = on_backend("expert_swiglu", x, layer.stored, layer.rows, 0, each(x, 1e30))
    assert counts == [0, 0] and not y.any()


@on_every_backend
def test_a_neuron_at_its_threshold_is_active(on_backend: Subject) -> None:
    matrix = torch.tensor([[1.0, 0.0], [0.0, -2.0], [3.0, 0.0], [0.0, 0.0]]).bfloat16()
    layout = SignalLayout(VectorLayout(2, 16, 1), torch.bfloat16)
    empty = torch.empty(1, 4, 0, dtype=torch.float16)
    up = SignalWeights(layout, matrix.view(torch.uint8)[None], empty, empty)
    active = on_backend("signal_gemv", torch.ones(1, 2), up, make_calls([0, 0], [0, 0]), torch.tensor([2.0, 0.0]))
    assert active.neurons.tolist() == [1, 2, 0, 1, 2, 3]
    assert active.values.tolist() == [-2.0, 3.0, 1.0, -2.0, 3.0, 0.0]


@on_every_backend
def test_only_a_result_can_be_out_of_float16s_range(on_backend: Subject) -> None:
    """The first expert's sum is, until its weight makes it small."""
    layer, x = make_layer((1, 19, 320, 64), (8, 4, 8)), 16 * make_x(1, 320, torch.float16)
    calls, everybody = make_calls([0], [0]), torch.arange(19)
    calls.weights.fill_(1.0)
    (values,) = signal_values(layer, x, calls)
    whole = swiglu(layer, x, calls, [everybody], [values])
    assert whole.abs().max() > torch.finfo(torch.float16).max > values.abs().max()
    calls.weights.fill_(1e4 / float(whole.abs().max()))
    truth = swiglu(layer, x, calls, [everybody], [values])
    y, _ = on_backend("moe_step", x, layer.stored, layer.rows, calls, torch.zeros(1))
    assert relative_rms(y, truth) <= 5e-3
    y, _ = on_backend("sparse_swiglu", x, layer.rows, calls, as_active([everybody], [values], torch.float16))
    assert relative_rms(y, truth) <= 5e-3


@on_every_backend
def test_16_bit_weights_may_be_float16(on_backend: Subject) -> None:
    layer, x = make_layer((2, 17, 128, 64), (16, 16, 16)), make_x(1, 128, torch.float32)
    up, gate, down = (part.half() for part in (layer.signal, layer.other, layer.down))
    layout = RowLayout(layer.rows.layout.other, layer.rows.layout.down, torch.float16)
    records = layout.join(*(part.flatten(0, 1).contiguous().view(torch.uint8) for part in (gate, down)))
    stored = replace(
        layer.stored, layout=SignalLayout(layer.stored.layout.vector, torch.float16), q=up.view(torch.uint8)
    )
    exact = replace(layer, signal=up.double(), other=gate.double(), down=down.double())
    calls, rows = make_calls([0, 0], [1, 0]), ExpertRows(layout, records.view(2, 17, -1))
    y, _ = on_backend("moe_step", x, stored, rows, calls, torch.zeros(2))
    everybody = [torch.arange(17)] * 2
    truth = swiglu(exact, x.double(), calls, everybody, signal_values(exact, x.double(), calls))
    assert relative_rms(y, truth) <= on_backend.limit(torch.float32)


@covering({"on_backend": BACKENDS, "form": FORMS})
def test_functions_are_the_formulas_on_both_sides_of_their_limits(on_backend: Subject, form: Form) -> None:
    """Every pair of products, each alone in one neuron, whose output is a number of its own."""
    ends = torch.tensor([-1000.0, -10.25, -7.25, -0.5, 6.75, 7.25, 9.75, 10.25])
    count = len(ends) ** 2
    layer = make_layer((1, count, count, 1), (16, 16, 16), Form(form.signal, form.activation))
    x, matrices = torch.eye(1, count), torch.zeros(3, count, count)
    matrices[:2, :, 0], matrices[2] = torch.cartesian_prod(ends, ends).T, torch.eye(count)
    truth = layer.of_signal(0, matrices[0, :, 0].double()) * layer.of_other(0, matrices[1, :, 0].double())
    signal, other, down = matrices.bfloat16().view(torch.uint8)
    stored, layout = replace(layer.stored, q=signal[None]), layer.rows.layout
    rows = replace(layer.rows, data=layout.join(other[:, : layout.other.nbytes], down)[None])
    calls = Calls(torch.tensor([0]), torch.tensor([0]), torch.ones(1))
    step, _ = on_backend("moe_step", x, stored, rows, calls, torch.zeros(1))
    whole, *_ = on_backend("expert_swiglu", x, stored, rows, 0, torch.zeros(1))
    for y in (step, whole):
        torch.testing.assert_close(y[0].double(), truth, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_formula_is_the_models_own(form: Form) -> None:
    """SwiGLU; Gemma's; gpt-oss's, with biases; DeepSeek-V4's."""
    layer, x = make_layer((2, 37, 96, 32), (16, 16, 16), form), 8 * make_x(3, 96, torch.float32).double()
    both = [x @ part[1].T + bias[1] for part, bias in zip((layer.signal, layer.other), layer.biases, strict=True)]
    gate, up = both if form.signal == "gate" else reversed(both)
    if form.activation == "clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        whole = (up + 1) * (gate * torch.sigmoid(1.702 * gate)) @ layer.down[1]
    elif form.activation == "limited":
        assert min(gate.max(), up.max(), -up.min()) > 10
        whole = F.silu(gate.clamp(max=10)) * up.clamp(-10, 10) @ layer.down[1]
    elif form.activation == "relu2":
        whole = F.relu(up).square() @ layer.down[1]
    else:
        act = F.silu(gate) if form.activation == "silu" else F.gelu(gate, approximate="tanh")
        whole = (act * up) @ layer.down[1]
    calls = Calls(torch.arange(3), torch.ones(3, dtype=torch.int64), torch.ones(3))
    truth = swiglu(layer, x, calls, [torch.arange(37)] * 3, signal_values(layer, x, calls))
    assert relative_rms(truth, whole) <= 1e-12


@covering({"on_backend": BACKENDS, "widths": [(2, 2, 3), (2, 4, 4), (2, 16, 8)], "hidden": [1, 40, 1088]})
def test_records_move_whole_and_nothing_beside_them(on_backend: Subject, widths: Widths, hidden: int) -> None:
    rows = make_layer((3, 7, hidden, 64 if hidden > 64 else 1), widths).rows
    data, device = rows.data, on_backend.device
    there = on_backend.there(rows)
    for neurons in ([], [6], [5, 0, 3], [2, 2, 2], list(range(7))):
        buffer = torch.full((len(neurons) + 2, data.shape[2]), SENTINEL, dtype=torch.uint8, device=device)
        index = torch.tensor(neurons, dtype=torch.long, device=device)
        on_backend.kernels.gather_rows(there, 1, index, buffer[1:-1])
        assert torch.equal(buffer[1:-1].cpu(), data[1][neurons]) and bool((buffer[[0, -1]] == SENTINEL).all())
    for slots in ([], [9], [3, 0, 7], list(range(10))):
        pool = torch.full((10, data.shape[2]), SENTINEL, dtype=torch.uint8, device=device)
        expected = pool.clone()
        records = torch.randint(0, 256, (len(slots), data.shape[2]), dtype=torch.uint8).to(device)
        index = torch.tensor(slots, dtype=torch.long, device=device)
        on_backend.kernels.pool_scatter(pool, index, records)
        expected[index] = records
        assert torch.equal(pool, expected)


@pytest.mark.skipif(BACKENDS == ["triton"], reason="of the reference")
def test_fewer_bits_of_x_cost_what_the_definition_says() -> None:
    x = torch.randn(200, 4096, generator=torch.Generator().manual_seed(0))
    error = relative_rms(reference.rounded(x[:32], 8), x[:32].double())
    assert 0.0055 <= error <= 0.0068 and relative_rms(reference.rounded(x[:32], 15), x[:32].double()) <= error / 120
    part = x[:, :64].clone()
    part[:100, 3] *= 1000  # the worst neighbour: all others are rounded to nothing
    assert float(((reference.rounded(part, 8) - part).norm(dim=1) / part.norm(dim=1)).max()) <= 0.032
    odd = x[:1, :192].clone()
    odd[0, :64], odd[0, 70], odd[0, 130] = 0, torch.nan, torch.inf
    found = reference.rounded(odd, 8)[0]
    assert not found[:64].any() and found[64:].isnan().all()
    assert torch.equal(reference.rounded(part, 22), part)
