"""signal_gemv, sparse_swiglu and moe_step against the float64 formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.triton import launch, operations
from floe_chat.kernels.triton.gemv import compact_kernel
from floe_chat.kernels.types import Calls
from torch import Tensor

from ..oracle import (
    FORMS,
    WIDTHS,
    Form,
    Layer,
    as_active,
    make_calls,
    make_x,
    signal_values,
    swiglu,
    threshold_between,
)
from .layers import (
    ALL_SIZES,
    ROUNDING,
    TOLERANCE,
    Size,
    Widths,
    active_on,
    calls_on,
    float16_layer,
    layer_on,
    relative_rms,
    size_id,
)

# Every width of every part, each in the general and the fast path.
SWIGLU_WIDTHS: list[Widths] = [(2, 2, 3), (2, 3, 2), (2, 4, 8), (2, 8, 4), (2, 16, 16)]


def form_of(bits: int, size: Size) -> Form:
    """A form, so that all cases have about as many of each, whatever the width and the size. Codes of 8 bits make such
    large values here that a clamped form has many alike, between which no threshold is.
    """
    return FORMS[(5 * bits + size[2] + size[3]) % 7 % (2 if bits == 8 else 4)]


def some_calls(experts: int) -> Calls:
    """Tokens out of order, one token with several experts, one expert twice for one token, one token without calls."""
    return make_calls([2, 0, 0, 0], [experts - 1, 0, experts // 2, 0])


@pytest.mark.parametrize("size", ALL_SIZES, ids=size_id)
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_signal_gemv_finds_the_active_neurons(bits: int, size: Size, device: torch.device) -> None:
    layer = layer_on(device, size, (bits, 2, 2), form_of(bits, size))
    x, calls = make_x(3, size[2], torch.float32), some_calls(size[0])
    truth = signal_values(layer, x.double(), calls)
    limits = [threshold_between(v, keep) for v, keep in zip(truth, (0.5, 0.1, 1.0, 0.0), strict=True)]
    active = kernels.signal_gemv(x.to(device), layer.stored, calls_on(device, calls), torch.tensor(limits))
    assert active.offsets.device.type == "cpu" and active.offsets.dtype == active.neurons.dtype == torch.int64
    kept = [(v.abs() >= limit).nonzero().squeeze(1) for v, limit in zip(truth, limits, strict=True)]
    assert active.offsets.diff().tolist() == [n.numel() for n in kept]
    assert active.neurons.tolist() == torch.cat(kept).tolist()
    expected = torch.cat([v[n] for v, n in zip(truth, kept, strict=True)])
    assert relative_rms(active.values, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("bits", [2, 3, 16])
def test_up_list_is_up_gemv_and_leaves_out_what_nothing_reaches(bits: int, device: torch.device) -> None:
    size = (3, 17, 128, 64)
    layer, x, calls = layer_on(device, size, (bits, 2, 2)), make_x(3, size[2], torch.float32), some_calls(size[0])
    truth = signal_values(layer, x.double(), calls)
    limits = torch.tensor([threshold_between(v, 0.5) for v in truth])
    limits[1] = torch.inf
    given = (x.to(device), layer.stored, calls_on(device, calls), limits)
    want = kernels.signal_gemv(*given)
    ends, neurons, values = kernels.up_list(*given)
    assert ends.device == neurons.device == values.device == given[0].device
    assert ends.tolist() == want.offsets[1:].tolist() and want.offsets.diff()[1] == 0 < want.offsets.diff()[0]
    total = int(ends[-1])
    assert neurons[:total].tolist() == want.neurons.tolist() and torch.equal(values[:total], want.values)
    assert neurons.numel() == values.numel() == calls.experts.numel() * truth[0].numel()


@pytest.mark.parametrize("size", ALL_SIZES, ids=size_id)
@pytest.mark.parametrize("widths", SWIGLU_WIDTHS, ids=str)
def test_sparse_swiglu_is_the_formula(widths: Widths, size: Size, device: torch.device) -> None:
    layer = layer_on(device, size, widths, form_of(widths[1], size))
    x, calls = make_x(3, size[2], torch.float32), some_calls(size[0])
    chosen, values = some_active(signal_values(layer, x.double(), calls))
    active = active_on(device, as_active(chosen, values, torch.float32))
    y, _ = kernels.sparse_swiglu(x.to(device), layer.rows, calls_on(device, calls), active)
    assert y.dtype == x.dtype and y.shape == x.shape and not y[1].any()
    assert relative_rms(y, swiglu(layer, x.double(), calls, chosen, values)) <= TOLERANCE[torch.float32]


def some_active(v: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All neurons of the first call, one of the second, half of the third, none of the fourth; out of order."""
    neurons, generator = v[0].numel(), torch.Generator().manual_seed(1)
    counts = (neurons, 1, (neurons + 1) // 2, 0)
    chosen = [torch.randperm(neurons, generator=generator)[:count] for count in counts]
    return chosen, [call[mine] for call, mine in zip(v, chosen, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(3, 9, 40, 20), (3, 17, 128, 64)], ids=size_id)
@pytest.mark.parametrize("widths", [(2, 4, 4), (3, 16, 2), (8, 3, 16)], ids=str)
def test_16_bit_activations(widths: Widths, size: Size, dtype: torch.dtype, device: torch.device) -> None:
    layer = layer_on(device, size, widths, form_of(widths[0], size))
    x, calls = make_x(3, size[2], dtype), some_calls(size[0])
    if dtype == torch.float16:
        x, calls = x / 16, replace(calls, weights=calls.weights / 16)  # random 16-bit weights are large
    check_step(layer, x, calls, device)


@pytest.mark.parametrize("size", [(2, 9, 40, 20), (2, 17, 128, 64)], ids=size_id)
def test_float16_weights(size: Size, device: torch.device) -> None:
    check_step(float16_layer(device, size), make_x(3, size[2], torch.float32), some_calls(size[0]), device)


def check_step(layer: Layer, x: Tensor, calls: Calls, device: torch.device) -> None:
    """signal_gemv and sparse_swiglu on all neurons, against the formula."""
    truth = signal_values(layer, x.double(), calls)
    mine = calls_on(device, calls)
    active = kernels.signal_gemv(x.to(device), layer.stored, mine, torch.zeros(len(truth)))
    assert active.values.dtype == x.dtype
    assert relative_rms(active.values, torch.cat(truth)) <= TOLERANCE[x.dtype]
    everybody = [torch.arange(v.numel()) for v in truth]
    y, _ = kernels.sparse_swiglu(x.to(device), layer.rows, mine, active)
    assert y.dtype == x.dtype
    # v is handed on in the type of x: rounded once more.
    error = relative_rms(y, swiglu(layer, x.double(), calls, everybody, truth))
    assert error <= TOLERANCE[x.dtype] + ROUNDING[x.dtype]


@pytest.mark.parametrize("size", [(3, 7, 40, 20), (3, 19, 64, 64)], ids=size_id)
def test_eight_tokens_share_experts(size: Size, device: torch.device) -> None:
    layer, x = layer_on(device, size, (2, 4, 4), FORMS[2]), make_x(8, size[2], torch.float32)
    calls = make_calls([t for t in range(8) for _ in range(2)], [e % 3 for t in range(8) for e in (t, t + 1)])
    check_step(layer, x, calls, device)


@pytest.mark.parametrize(("tokens", "signal"), [(1, "up"), (1, "gate"), (3, "gate")])
@pytest.mark.parametrize("size", [(3, 19, 40, 20), (3, 7, 64, 64)], ids=size_id)
def test_moe_step_is_both_in_one(size: Size, tokens: int, signal: Projection, device: torch.device) -> None:
    layer, x = layer_on(device, size, (3, 4, 2), Form(signal)), make_x(tokens, size[2], torch.float32).to(device)
    calls = calls_on(device, make_calls([0, 0, tokens - 1], [1, 2, 1]))
    least = {"up": 3.0, "gate": 0.01}[signal]  # silu leaves little of most gates
    limits, seconds = torch.tensor([least, 0.0, 1e9], device=device), torch.tensor([1.0, 0.0, 0.0], device=device)
    active = kernels.signal_gemv(x, layer.stored, calls, limits)
    for second in (None, seconds):
        y, counts = kernels.moe_step(x, layer.stored, layer.rows, calls, limits, second)
        assert counts.device.type == device.type and counts[:, 0].tolist() == active.offsets.diff().tolist()
        assert torch.equal(y, kernels.sparse_swiglu(x, layer.rows, calls, active, second)[0])
        assert bool(counts[0, 1] < counts[0, 0]) == (second is not None) and counts[1:, 0].equal(counts[1:, 1])


@pytest.mark.parametrize("size", [(2, 21, 40, 20), (2, 21, 64, 64)], ids=size_id)
@pytest.mark.parametrize(("widths", "form"), [((2, 4, 4), FORMS[0]), ((2, 2, 3), FORMS[2])], ids=str)
def test_below_the_second_threshold_down_is_not_read(
    widths: Widths, form: Form, size: Size, device: torch.device
) -> None:
    layer, x = layer_on(device, size, widths, form), make_x(2, size[2], torch.float32)
    calls = make_calls([0, 0], [1, 0])
    v = signal_values(layer, x.double(), calls)
    products = [
        layer.of_other(expert, layer.other[expert] @ x[0].double()) * own for expert, own in zip((1, 0), v, strict=True)
    ]
    limits = [threshold_between(product, 0.5) for product in products]
    kept = [(product.abs() >= limit).nonzero().squeeze(1) for product, limit in zip(products, limits, strict=True)]
    poisoned = layer.rows.data.clone()
    for expert, mine in zip((1, 0), kept, strict=True):
        idle = torch.ones(size[1], dtype=torch.bool).index_fill(0, mine, False).to(device)
        part = poisoned[expert, :, layer.rows.layout.down_at :]
        poisoned[expert, :, layer.rows.layout.down_at :] = part.masked_fill(idle[:, None], 0xFF)
    active = active_on(device, as_active([torch.arange(size[1])] * 2, v, torch.float32))
    rows = replace(layer.rows, data=poisoned)
    y, _ = kernels.sparse_swiglu(x.to(device), rows, calls_on(device, calls), active, torch.tensor(limits))
    truth = swiglu(layer, x.double(), calls, kept, [own[mine] for own, mine in zip(v, kept, strict=True)])
    assert relative_rms(y, truth) <= TOLERANCE[torch.float32]
    step = x.to(device), layer.stored, rows, calls_on(device, calls), torch.zeros(2), torch.tensor(limits)
    assert kernels.moe_step(*step)[1].tolist() == [[size[1], mine.numel()] for mine in kept]


@pytest.mark.parametrize("size", [(2, 7, 40, 20), (2, 7, 64, 64)], ids=size_id)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_not_a_number_shows_in_the_result(size: Size, form: Form, device: torch.device) -> None:
    layer, x = layer_on(device, size, (2, 4, 4), form), make_x(2, size[2], torch.float32)
    x[0, 3] = float("nan")
    calls, limits = calls_on(device, make_calls([0, 1], [0, 1])), torch.tensor([1.0, 1.0])
    y, counts = kernels.moe_step(x.to(device), layer.stored, layer.rows, calls, limits)
    assert y[0].isnan().all() and not y[1].isnan().any()
    assert counts[0].tolist() == [size[1], size[1]]


@pytest.mark.parametrize("size", [(2, 7, 40, 20), (2, 7, 64, 64)], ids=size_id)
def test_nothing_to_do_gives_zeros(size: Size, device: torch.device) -> None:
    layer, x = layer_on(device, size, (2, 4, 4)), make_x(2, size[2], torch.float32).to(device)
    for calls, limit in ((make_calls([], []), 0.0), (make_calls([0, 1], [1, 0]), 1e9)):
        limits = torch.full((calls.tokens.numel(),), limit)
        active = kernels.signal_gemv(x, layer.stored, calls_on(device, calls), limits)
        assert active.offsets.tolist() == [0] * (1 + calls.tokens.numel()) and active.neurons.numel() == 0
        y, _ = kernels.sparse_swiglu(x, layer.rows, calls_on(device, calls), active)
        step, counts = kernels.moe_step(x, layer.stored, layer.rows, calls_on(device, calls), limits)
        assert y.shape == step.shape == x.shape and not y.any() and not step.any() and not counts.any()


@pytest.mark.parametrize("packed", [True, False])
def test_compaction_of_whole_experts(packed: bool, device: torch.device) -> None:
    calls, neurons = 3, 14336
    v = torch.randn(calls, neurons, generator=torch.Generator().manual_seed(0))
    v[1] = 0
    limits = torch.tensor([0.7, 0.1, 0.0])
    keep = v.abs() >= limits[:, None]
    blocks = neurons // launch.GEMV_ROWS
    kept = keep.view(calls, blocks, -1).sum(-1).int()
    found, values = torch.empty(calls * neurons, dtype=torch.int64), torch.empty(calls * neurons)
    spans, copies = torch.empty(2, calls, dtype=torch.int64), torch.empty(calls * neurons)
    mine = [part.to(device) for part in (v, limits, kept, *spans, found, values, copies)]
    compact_kernel[(calls, neurons // launch.COMPACT)](
        *mine, neurons, blocks, packed, True, launch.GEMV_ROWS, launch.COMPACT, 2 * launch.COMPACT
    )
    counts, begin, end = keep.sum(1).tolist(), mine[3].tolist(), mine[4].tolist()
    assert begin == ([0, counts[0], counts[0]] if packed else [0, neurons, 2 * neurons])
    for call in range(calls):
        assert end[call] - begin[call] == counts[call]
        expected = keep[call].nonzero().squeeze(1)
        assert torch.equal(mine[5][begin[call] : end[call]].cpu(), expected)
        for found in mine[6:]:
            assert torch.equal(found[begin[call] : end[call]].cpu(), v[call][expected])


def test_mixtral_width(device: torch.device) -> None:
    layer, x = layer_on(device, (2, 5, 4096, 64), (2, 4, 4)), make_x(1, 4096, torch.float32)
    check_step(layer, x, make_calls([0, 0], [1, 0]), device)


@pytest.mark.parametrize("widths", WIDTHS[:2], ids=str)
def test_weights_at_odd_addresses(widths: Widths, device: torch.device) -> None:
    layer, x = layer_on(device, (2, 5, 64, 32), widths), make_x(1, 64, torch.float32)
    shifted = torch.zeros(layer.rows.data.numel() + 1, dtype=torch.uint8, device=device)[1:].view(layer.rows.data.shape)
    shifted.copy_(layer.rows.data)
    layer = replace(layer, rows=replace(layer.rows, data=shifted))
    check_step(layer, x, make_calls([0], [1]), device)


def test_refusals_say_what_to_do(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, calls = layer_on(device, (2, 5, 64, 32), (2, 4, 4)), torch.zeros(1, 64), make_calls([0], [1])
    with pytest.raises(ValueError, match="pageable host memory"):
        launch.check_weights(torch.device("cuda", 0), "rows", torch.zeros(4, dtype=torch.uint8))
    strided = replace(layer.rows, data=layer.rows.data.transpose(0, 1))
    with pytest.raises(ValueError, match="contiguous uint8"):
        kernels.moe_step(x.to(device), layer.stored, strided, calls, torch.zeros(1))
    monkeypatch.setattr(launch.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="run on CUDA devices only"):
        kernels.signal_gemv(x, layer.stored, calls, torch.zeros(1))


@pytest.mark.gpu
def test_pinned_rows_are_read_in_place(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory needs a CUDA device")
    layer, x = layer_on(device, (2, 37, 128, 64), (2, 4, 4)), make_x(1, 128, torch.float32).to(device)
    calls, limits = calls_on(device, make_calls([0, 0], [1, 0])), torch.zeros(2, device=device)
    pinned = replace(layer.rows, data=layer.rows.data.cpu().pin_memory())
    y, _ = kernels.moe_step(x, layer.stored, layer.rows, calls, limits)
    zero_copy, _ = kernels.moe_step(x, layer.stored, pinned, calls, limits)
    assert torch.equal(y, zero_copy)


@pytest.mark.gpu
def test_moe_step_never_waits_and_up_gemv_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("only a CUDA device can be waited for")
    layer, x = layer_on(device, (2, 37, 128, 64), (2, 4, 4)), make_x(1, 128, torch.float32).to(device)
    calls, limits = calls_on(device, make_calls([0, 0], [1, 0])), torch.zeros(2, device=device)
    kernels.moe_step(x, layer.stored, layer.rows, calls, limits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.moe_step(x, layer.stored, layer.rows, calls, limits)
        with pytest.raises(RuntimeError, match="synchroniz"):
            operations.signal_gemv(x, layer.stored, calls, limits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
