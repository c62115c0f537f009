"""What Triton's kernels alone have: lists that nobody waits for, lanes of a link, memory that is pinned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl
from floe_chat.kernels import backend, maker, reference
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.codes import packed_bytes
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.step import ExpertLayer, Router
from floe_chat.kernels.triton import dense, launch, operations
from floe_chat.kernels.triton.gemv import compact_kernel, marked_until, nth_marked
from floe_chat.kernels.triton.jit import device_code
from floe_chat.kernels.types import Calls, Limits
from floe_chat.kernels.weights import LinearWeights, Norm

from ...helpers import relative_rms
from ..oracle import (
    FORMS,
    Form,
    Layer,
    Widths,
    make_calls,
    make_layer,
    make_x,
    moved,
    signal_values,
    swiglu,
    threshold_between,
)

SENTINEL = 0xA5


def layer_on(device: torch.device, size: tuple[int, int, int, int], widths: Widths, form: Form = FORMS[0]) -> Layer:
    """`make_layer` with its stored weights on a device; the float64 weights stay on the CPU."""
    layer = make_layer(size, widths, form)
    return replace(layer, stored=moved(layer.stored, device), rows=moved(layer.rows, device))


def calls_on(device: torch.device, calls: Calls) -> Calls:
    return moved(calls, device)


def test_the_first_kernel_that_a_backend_tries_runs(device: torch.device) -> None:
    assert backend.failure(str(device)) == ""


@pytest.mark.parametrize("bits", [3, pytest.param(16, marks=pytest.mark.thorough)])
def test_up_list_is_up_gemv_and_leaves_out_what_nothing_reaches(bits: int, device: torch.device) -> None:
    size = (3, 17, 128, 64)
    layer, x, calls = (
        layer_on(device, size, (bits, 2, 2)),
        make_x(3, size[2], torch.float32),
        make_calls([2, 0, 0, 0], [2, 0, 1, 0]),
    )
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


@device_code()
def every_marked(
    marks: Any, out: Any, blocks: Any, total: Any, GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The neurons that a call's marks name, each found by itself."""
    i = tl.arange(0, BLOCK)
    until = marked_until(marks, blocks, GROUPS)
    tl.store(out + i, nth_marked(marks, tl.minimum(i, total - 1), until, GROUPS, ROWS), mask=i < total)


@pytest.mark.parametrize("neurons", [5 * launch.COMPACT, 1301], ids=["whole", "odd"])
def test_marked_neurons_are_found_in_their_order(neurons: int, device: torch.device) -> None:
    calls, rows = 3, launch.GEMV_ROWS
    v = torch.randn(calls, neurons, generator=torch.Generator().manual_seed(0))
    keep = v.abs() >= torch.tensor([[0.7], [torch.inf], [0.0]])
    keep[0, :600], keep[0, -33:] = False, True
    blocks = -(-neurons // rows)
    by_block = torch.zeros(calls, blocks * rows, dtype=torch.int32)
    by_block[:, :neurons] = keep
    marks = torch.zeros(calls, -(-blocks // 32) * 32, dtype=torch.int32)
    marks[:, :blocks] = (by_block.view(calls, blocks, rows) * (2 ** torch.arange(rows) + 2**16)).sum(-1)
    found, values = torch.empty(calls * neurons, dtype=torch.int64), torch.empty(calls * neurons)
    spans, copies = torch.empty(2, calls, dtype=torch.int64), torch.empty(calls * neurons)
    mine = [part.to(device) for part in (v, marks, *spans, found, values, copies)]
    compact_kernel[(calls, -(-neurons // launch.COMPACT))](
        *mine, neurons, blocks, True, rows, launch.COMPACT, 2 * launch.COMPACT
    )
    groups = triton.next_power_of_2(marks.shape[1] // 32)
    counts, begin, end = keep.sum(1).tolist(), mine[2].tolist(), mine[3].tolist()
    assert begin == [0, counts[0], counts[0]] and end == [counts[0], counts[0], sum(counts)]
    for call in range(calls):
        expected = keep[call].nonzero().squeeze(1)
        assert torch.equal(mine[4][begin[call] : end[call]].cpu(), expected)
        one = torch.full((4096,), -1, dtype=torch.int32, device=device)
        if counts[call]:
            every_marked[(1,)](mine[1][call], one, blocks, counts[call], groups, rows, 4096)
        assert torch.equal(one[: counts[call]].cpu(), expected.int()) and (one[counts[call] :] == -1).all()
        for found in mine[5:]:
            assert torch.equal(found[begin[call] : end[call]].cpu(), v[call][expected])


@pytest.mark.parametrize("size", [(2, 5, 4096, 64), (2, 5, 64, 32)], ids=["Mixtral's width", "odd addresses"])
def test_a_step_is_the_formula(size: tuple[int, int, int, int], device: torch.device) -> None:
    layer, x, calls = layer_on(device, size, (3, 4, 4)), make_x(1, size[2], torch.float32), make_calls([0, 0], [1, 0])
    rows = layer.rows.data
    shifted = torch.zeros(rows.numel() + 1, dtype=torch.uint8, device=device)[size[2] == 64 :][: rows.numel()]
    shifted = shifted.view(rows.shape).copy_(rows)
    given = x.to(device), layer.stored, replace(layer.rows, data=shifted), calls_on(device, calls)
    y, _ = kernels.moe_step(*given, torch.zeros(2, device=device))
    truth = swiglu(layer, x.double(), calls, [torch.arange(5)] * 2, signal_values(layer, x.double(), calls))
    assert relative_rms(y.cpu(), truth) <= 1e-5


@pytest.mark.parametrize("rule", [Rule(), Rule(drop=0.4, major=0.9, weighed=True)], ids=["nothing", "all"])
@pytest.mark.parametrize(
    ("size", "widths", "dtype"),
    [
        ((4, 5, 192, 64), (3, 4, 2), torch.float32),
        ((4, 5, 320, 64), (2, 3, 4), torch.bfloat16),
        ((4, 5, 64, 32), (2, 4, 4), torch.float32),
    ],
    ids=["three chunks", "five chunks", "small groups"],
)
def test_a_step_that_selects_is_both_and_the_stream(
    size: tuple[int, int, int, int], widths: Widths, dtype: torch.dtype, rule: Rule, device: torch.device
) -> None:
    layer, x = layer_on(device, size, widths), make_x(2, size[2], dtype).to(device)
    index = (torch.tensor([[0, 3], [3, 2]]) // rule.parts).to(device)
    weights = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).to(device, dtype)
    limits = Limits(*(torch.full((4,), limit, device=device) for limit in ((0.1, 0.02) if rule.weighed else (0.1,))))
    experts, stream = ExpertLayer(layer.stored, layer.rows, limits, rule), x.flip(1)
    work = operations.select(index, weights, limits, rule)
    calls = layer.stored, layer.rows, work.calls, work.thresholds, work.products
    wanted, stated = kernels.moe_step(x, *calls, 8)
    assert stated[:, 0].any() and (not rule.weighed or (stated[:, 1] < stated[:, 0]).any())
    y, counts, thresholds = kernels.experts_step(x, experts, index, weights, stream, 8)
    assert torch.equal(counts, stated) and torch.equal(thresholds, work.thresholds) and y.dtype == dtype
    assert relative_rms(y, stream + wanted) <= (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("hidden", "weighed", "dtype"),
    [(320, False, torch.bfloat16), (130, True, torch.float32), (192, True, torch.float32)],
    ids=["words", "columns", "both thresholds"],
)
def test_tokens_of_a_step_are_each_as_by_itself(
    hidden: int, weighed: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maker, "processors", Mock(return_value=3))  # so that sums are cut
    layer, tokens = layer_on(device, (4, 12, hidden, 64 if hidden % 64 == 0 else 26), (3, 4, 4)), 2
    x = make_x(tokens, hidden, dtype).to(device)
    weight = torch.randn(4, hidden).to(device, dtype)
    index, weights = kernels.route(x, Router(weight, 2, norm_topk_prob=True, dtype=dtype))
    limits = torch.full((4,), 0.1, device=device)
    rule = Rule(drop=0.4, major=0.9, weighed=True) if weighed else Rule(sparsity=0.3)
    if rule.parts == 2:
        index = index // 2
    experts = ExpertLayer(layer.stored, layer.rows, Limits(limits, 0.2 * limits if weighed else None), rule)
    found = kernels.experts_step(x, experts, index, weights, x.flip(1), 22)
    each = [
        kernels.experts_step(x[i : i + 1], experts, index[i : i + 1], weights[i : i + 1], x[i : i + 1].flip(1), 22)
        for i in range(tokens)
    ]
    assert found[1].sum() > 4 and (found[0] - x.flip(1)).abs().amax(1).min() > 0
    assert all(
        torch.equal(whole, torch.cat(parts)) for whole, parts in zip(found, zip(*each, strict=True), strict=True)
    )
    chosen = [kernels.route(x[i : i + 1], Router(weight, 2, norm_topk_prob=True, dtype=dtype)) for i in range(tokens)]
    assert torch.equal(weights, torch.cat([one[1] for one in chosen]))


def test_blocks_stay_within_their_memory() -> None:
    block = dense.block_rows(torch.empty(512, 4096, dtype=torch.bfloat16), 14336, 4096 + 8 * 512)
    assert block % 64 == 0 and 0 < block * 2 * (4096 + 8 * 512) <= dense.SCRATCH


@pytest.mark.parametrize(
    ("size", "widths", "dtype", "form", "second"),
    [
        ((3, 37, 130, 26), (2, 3, 4), torch.float32, FORMS[3], True),
        ((3, 70, 128, 64), (3, 4, 2), torch.float16, FORMS[0], False),
        ((2, 10, 64, 16), (8, 16, 3), torch.float32, FORMS[1], True),
        ((2, 10, 192, 32), (4, 2, 8), torch.bfloat16, FORMS[2], False),
    ],
    ids=["odd", "float16", "small groups", "bfloat16"],
)
def test_all_experts_at_once_are_the_step(
    size: tuple[int, int, int, int],
    widths: Widths,
    dtype: torch.dtype,
    form: Form,
    second: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, among = 17, 2
    layer, x = make_layer(size, widths, form), make_x(tokens, size[2], dtype)
    chosen = torch.randint(size[0], (tokens * among,)).where(torch.rand(tokens * among) < 0.3, 0)
    chosen[chosen == 1] = 0  # the first expert has most calls, the second one none
    calls = make_calls(torch.arange(tokens).repeat_interleave(among).tolist(), chosen.tolist())
    truth = torch.cat([values.abs() for values in signal_values(layer, x.double(), calls)])
    limits = torch.full((tokens * among,), threshold_between(truth, 0.5))
    limits[torch.rand(tokens * among) < 0.2] = torch.inf
    limits[: 2 * among] = torch.inf  # two tokens without a call
    products = torch.full((tokens * among,), 0.05) if second else None
    wanted, expected = reference.moe_step(x.double(), layer.stored, layer.rows, calls, limits, products)
    there = layer_on(device, size, widths, form)
    given = (x.to(device), there.stored, there.rows, calls_on(device, calls), limits.to(device))
    seconds = None if products is None else products.to(device)
    y, counts = kernels.experts_swiglu(*given, seconds)
    assert y.dtype == dtype and not y[:2].any() and not counts.cpu()[limits == torch.inf].any()
    rounded = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[dtype]
    # A value that rounds to the other side of a threshold is one of many.
    assert (counts.cpu() - expected).abs().sum() <= rounded * expected.sum()
    assert relative_rms(y.cpu(), wanted) <= rounded
    monkeypatch.setattr(dense, "SCRATCH", 17 * x.element_size() * (size[1] + size[2]))
    sliced, same = kernels.experts_swiglu(*given, seconds)
    assert torch.equal(same, counts) and relative_rms(sliced.cpu(), y.cpu().double()) <= rounded
    each = limits[:tokens], None if products is None else products[:tokens]
    alone, _, _ = reference.expert_swiglu(x.double(), layer.stored, layer.rows, 0, *each)
    one = there.stored.one(0), replace(there.rows, data=there.rows.data[:1])
    second_limits = None if seconds is None else seconds[:tokens]
    for most in (dense.SCRATCH, 2**30):  # in slices, too
        monkeypatch.setattr(dense, "SCRATCH", most * 5 // 17)
        y = kernels.expert_at_once(given[0], *one, given[4][:tokens], second_limits)
        assert y.dtype == dtype and relative_rms(y.cpu(), alone) <= rounded


def test_memory_of_all_experts_at_once_is_bounded() -> None:
    x, calls = torch.empty(2048, 4096, dtype=torch.bfloat16), 2048 * 8
    size = dense.slice_of(x, calls, 14336)
    assert 16 * dense.MOST_CALLS <= size < calls and size * 2 * (4096 + 14336) <= dense.SCRATCH


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
def test_whole_experts_never_wait_and_up_gemv_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("only a CUDA device can be waited for")
    layer, x = layer_on(device, (2, 37, 128, 64), (2, 4, 4)), make_x(1, 128, torch.float32).to(device)
    calls, limits = calls_on(device, make_calls([0, 0], [1, 0])), torch.zeros(2, device=device)
    for operation in (kernels.moe_step, kernels.experts_swiglu):
        operation(x, layer.stored, layer.rows, calls, limits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for operation in (kernels.moe_step, kernels.experts_swiglu):
            operation(x, layer.stored, layer.rows, calls, limits)
        with pytest.raises(RuntimeError, match="synchroniz"):
            operations.signal_gemv(x, layer.stored, calls, limits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in-place"])
@pytest.mark.parametrize(("count", "chunk"), [(0, 5), (1, 1), (3, 5), (50, 50), (13, 64)], ids=str)
@pytest.mark.parametrize("nbytes", [64, 192])
def test_a_lane_lands_as_its_head_says(
    count: int, chunk: int, nbytes: int, in_place: bool, device: torch.device
) -> None:
    pool = torch.full((200, nbytes), SENTINEL, dtype=torch.uint8, device=device)
    source = torch.randint(0, 256, (300, nbytes), dtype=torch.uint8, device=device)
    head = -(-(32 + 8 * chunk) // 64) * 64
    lane = torch.full((head + chunk * nbytes,), 0x5A, dtype=torch.uint8, device=device)
    index, slots = torch.randint(0, 300, (count,)), torch.randperm(200)[:count]
    lane[:24].view(torch.int64)[:] = torch.tensor([count, pool.data_ptr(), source.data_ptr()])
    numbers = lane[32:head].view(torch.int32)
    numbers[:count], numbers[chunk : chunk + count] = slots.to(device), index.to(device)
    if not in_place:
        lane[head : head + count * nbytes] = source[index.to(device)].flatten()
    kernels.land(lane, chunk, head, nbytes, in_place=in_place)
    expected = torch.full_like(pool, SENTINEL)
    expected[slots.to(device)] = source[index.to(device)]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("change", [{"head": 32}, {"head": 96}, {"chunk": 9}, {"nbytes": 65}], ids=str)
def test_a_lane_that_does_not_fit_is_refused(change: dict[str, int], device: torch.device) -> None:
    lane = torch.zeros(64 + 4 * 64, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="does not hold"):
        kernels.land(lane, **{"chunk": 4, "head": 64, "nbytes": 64, **change}, in_place=False)


def test_what_is_no_record_is_refused(device: torch.device) -> None:
    pool, records = torch.zeros(4, 63, dtype=torch.uint8), torch.zeros(1, 63, dtype=torch.uint8)
    with pytest.raises(ValueError, match="32-bit words"):
        kernels.pool_scatter(pool.to(device), torch.tensor([1]), records.to(device))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.pool_scatter(torch.zeros(64, 4, dtype=torch.uint8, device=device).T, torch.tensor([1]), records)


@pytest.mark.gpu
def test_gather_from_pinned_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory needs a CUDA device")
    rows = layer_on(torch.device("cpu"), (2, 37, 128, 64), (2, 4, 4)).rows
    pinned = type(rows)(rows.layout, rows.data.pin_memory())
    out = torch.zeros(3, rows.layout.nbytes, dtype=torch.uint8, device=device)
    kernels.gather_rows(pinned, 1, torch.tensor([5, 0, 36]), out)
    assert torch.equal(out.cpu(), rows.data[1][[5, 0, 36]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer", "none"])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 17, 640), (2, 17, 64), (2, 5, 130), (9, 4, 64)])
def test_a_layer_joined_with_its_neighbours_is_each_of_them(
    tokens: int, rows: int, columns: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(rows)  # the interpreter cuts bfloat16 off, by nearly as much as the limit
    vector = VectorLayout(columns, 4, 64 if columns % 64 == 0 else 26)
    weights = LinearWeights(
        vector,
        torch.randint(256, (rows, packed_bytes(columns, 4)), dtype=torch.uint8, device=device),
        *((torch.rand(rows, vector.groups, device=device) + high).half() for high in (0.1, 7)),
    )
    x, added = (3 * torch.randn(tokens, size, device=device).to(dtype) for size in (columns, rows))
    factors = 1 + 0.3 * torch.randn(columns, device=device).to(dtype)
    norm = Norm(factors, factors if kind == "layer" else None, "layer" if kind == "layer" else "rms"), 0.3
    bias = torch.randn(rows, device=device).to(dtype)
    given = (x, weights, 22)
    expected = kernels.linear(x if kind == "none" else norm[0](x, norm[1]), weights) + bias + added
    found = kernels.linear_joined(*given, None if kind == "none" else norm, bias, added)
    rounded = 1e-6 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype and relative_rms(found, expected) <= rounded
    assert relative_rms(kernels.linear_joined(*given, added=added), added + kernels.linear(x, weights)) <= rounded
    x[0, 3] = torch.nan
    found = kernels.linear_joined(x, weights, 22, norm, None, added)
    assert found[0].isnan().all() and found[1:].isfinite().all()


@pytest.mark.parametrize(
    ("numbers", "given"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")]
)
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("apart", "tokens", "rows", "columns"), [
    (False, 1, 17, 130), (False, 3, 35, 65), (False, 9, 4, 64), (True, 11, 7, 33), (True, 3, 35, 8), (False, 0, 3, 8)
])  # fmt: skip
def test_plain_weights_are_torchs(
    apart: bool, tokens: int, rows: int, columns: int, across: bool, numbers: str, given: str, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "MANY_ROWS", 32)
    shape = (tokens, rows, columns) if apart else (rows, columns)
    weight = torch.randn(shape, device=device).to(getattr(torch, numbers))
    weight = weight.mT.contiguous().mT if across else weight
    x = torch.randn(tokens, columns + 5, device=device).to(getattr(torch, given))[:, 2 : columns + 2]
    bias = None if apart else torch.randn(rows, device=device)
    expected = reference.plain(x.double(), weight, bias)
    found = kernels.plain(x, weight, bias)
    assert found.dtype == x.dtype and (
        not tokens or relative_rms(found, expected) <= (1e-2 if given != "float32" else 1e-6)
    )
    if tokens:
        x[0, -1] = torch.nan
        found = kernels.plain(x, weight, bias)
        assert found[0].isnan().all() and found[1:].isfinite().all()


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shares": {"norm_topk_prob": True, "dtype": torch.bfloat16},
    "biased": {"bias": True, "scale": 2.5},
    "sigmoid": {"kind": "sigmoid", "correction": True, "norm_topk_prob": True, "precise": True},
    "factors": {"factors": True, "scores": True, "norm_topk_prob": True},
    "groups": {"groups": 3, "top_groups": 2, "kind": "sigmoid", "correction": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 6, 40, 2), (3, 9, 130, 9), (1, 129, 65, 8), (9, 3, 8, 1), (0, 3, 8, 1)])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_choice_is_torchs(
    name: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    tokens, experts, hidden, among = sizes
    drawn = torch.Generator().manual_seed(experts)
    named: dict[str, Any] = {"norm_topk_prob": False, **ROUTERS[name]}
    if experts % named.get("groups", 1) or experts < 2 * named.get("groups", 1):
        pytest.skip("groups are alike, and of two experts at least")
    for part in ("bias", "correction", "factors"):
        if part in named:
            named[part] = torch.randn(experts, generator=drawn).to(device, dtype if part == "bias" else torch.float32)
    weight = torch.randn(experts, hidden, generator=drawn).to(device, dtype) * 3 / hidden**0.5
    scores = torch.full((tokens + 1, experts), torch.nan, device=device) if named.pop("scores", False) else None
    router = Router(weight, among, **named, scores=scores)
    x = torch.randn(tokens, hidden, generator=drawn).to(device, dtype)
    index, weights = kernels.route(x, router)
    assert index.dtype == torch.int64 and weights.dtype == router.dtype and index.shape == (tokens, among)
    seen = None if scores is None else scores.clone()
    wanted_index, wanted = router(x)
    # Where sums differ in the last place, neighbours may change places.
    alike: dict[str, Any] = {"norm_topk_prob": False, "groups": 1, "scores": None, "factors": None}
    whole = replace(router, top_k=experts, dtype=torch.float32, **alike)
    all_index, all_weights = whole(x)
    by_expert = torch.empty_like(all_weights).scatter_(1, all_index, all_weights)
    rtol, atol = (2e-2, 1e-3) if dtype == torch.bfloat16 else (2e-5, 1e-6)
    assert all(len(set(row)) == among for row in index.tolist())
    torch.testing.assert_close(by_expert.gather(1, index), by_expert.gather(1, wanted_index), rtol=rtol, atol=atol)
    rounding = max(rtol, 0.01 if router.dtype == torch.bfloat16 else 0.0)
    theirs = torch.full_like(all_weights, torch.nan).scatter_(1, wanted_index, wanted.float()).gather(1, index)
    both = theirs.isfinite()
    assert both.sum() >= tokens * (among - 1)
    torch.testing.assert_close(weights.float()[both], theirs[both], rtol=rounding, atol=atol)
    if scores is not None and seen is not None:
        torch.testing.assert_close(seen[:tokens], scores[:tokens], rtol=rtol, atol=atol)
        assert seen[tokens:].isnan().all()


def test_what_is_not_a_number_is_chosen_and_seen(device: torch.device) -> None:
    weight = torch.randn(5, 8, device=device)
    weight[3] = torch.nan
    router = Router(weight, 2, norm_topk_prob=False, kind="sigmoid")
    index, weights = kernels.route(torch.randn(1, 8, device=device), router)
    assert index[0, 0] == 3 and weights[0, 0].isnan() and not weights[0, 1].isnan()
    index, weights = kernels.route(torch.full((1, 8), torch.nan, device=device), replace(router, kind="softmax"))
    assert weights.isnan().all() and len(set(index[0].tolist())) == 2 and 0 <= int(index.min()) <= int(index.max()) < 5
