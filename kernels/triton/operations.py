"""The sparse operations of `reference.py` on a GPU, and `moe_step`, which runs them without asking the host anything.

Weights are read in place: in device memory or in pinned host memory ("zero copy", over PCIe), also record by record
while a kernel runs. Nothing here copies them; pageable host memory is refused. Of x as many bits are read as on the
CPU, so that both find the same neurons active.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..codes import CHUNK
from ..layouts import SignalLayout
from ..rule import Rule
from ..step import ExpertLayer, Router
from ..types import Active, Calls, Limits, Work, digits_of
from ..weights import ExpertRows, SignalWeights
from . import launch
from .dense import FEW, plain
from .moving import copy_kernel, land_kernel
from .routing import choose_kernel
from .selection import begin_kernel, select_kernel
from .sparse import Into, List, fill, find, moved, swiglu
from .vectors import signal_vector


def select(index: Tensor, weights: Tensor, limits: Limits, rule: Rule) -> Work:
    """Apply a rule to a router's choice, index and weights (B, K); see `kernels.select`. Nobody waits.

    Raises:
        ValueError: a tensor that is not on the device.
    """
    device, (tokens, among), parts = index.device, index.shape, rule.parts
    launch.check_device(device)
    count = tokens * among * parts
    of, experts = torch.empty((2, count), dtype=torch.int64, device=device)
    own = torch.empty(count, dtype=weights.dtype, device=device)
    thresholds, products, late = torch.empty((3, count), device=device)
    if count:
        with launch.on(device):
            select_kernel[(tokens,)](
                *(index.contiguous(), weights.contiguous()),
                launch.least(device, rule) if limits.least is None else limits.least,
                *(limits.signal, _or(limits.product, limits.signal), _or(limits.late, limits.signal)),
                *(of, experts, own, thresholds, products, late),
                *(among, parts, rule.weighed, limits.product is not None, limits.late is not None),
                triton.next_power_of_2(among),
                num_warps=1,
            )
    return Work(
        Calls(of, experts, own),
        thresholds,
        None if limits.product is None else products,
        None if limits.late is None else late,
    )


def route(hidden: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """See `kernels.route`. By torch's operations for many tokens; so is the choice in groups and by SparseMixer.

    Raises:
        ValueError: tensors that are not on the device.
    """
    tokens, experts, device = len(hidden), len(router.weight), hidden.device
    if tokens > FEW:
        return router(hidden)
    logits = plain(hidden, router.weight, router.bias, torch.float32 if router.precise else None)
    if router.groups > 1 or router.kind == "sparsemixer":
        return router.chosen(logits)
    index = torch.empty(tokens, router.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, router.top_k, dtype=router.dtype, device=device)
    scored = router.scores is not None and tokens <= len(router.scores)
    if not tokens:
        return index, weights
    with launch.on(device):
        choose_kernel[(tokens,)](
            *(logits, _or(router.correction, logits), _or(router.factors, logits), _or(router.scores, logits)),
            *(index, weights, router.scale, experts, router.top_k, router.kind == "sigmoid"),
            *(router.correction is not None, router.norm_topk_prob, router.factors is not None, scored),
            *(triton.next_power_of_2(experts), triton.next_power_of_2(router.top_k)),
            num_warps=1,
        )
    return index, weights


def signal_gemv(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int = 22) -> Active:
    """v = s(signal_e · x) for every call, keeping the neurons with |v| >= thresholds[call]; ascending within a call.

    x is (B, H) of any float type; products are summed in float32. Waits for the device once, to learn how many neurons
    there are. A v that is not a number counts as active.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    active = _listed(x, signal, calls, thresholds, x_bits)
    offsets = torch.zeros(active.ends.numel() + 1, dtype=torch.int64)
    if active.most:
        offsets[1:] = active.ends.cpu()
    total = int(offsets[-1])
    return Active(offsets, active.found[:total].long(), active.values[:total])


def up_list(
    x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int = 22
) -> tuple[Tensor, Tensor, Tensor]:
    """`signal_gemv` without waiting: where each call's neurons end (P,), then buffers for all neurons (int32) and
    all values, valid up to the last end.

    A call whose threshold is infinite has no neurons, and its weights are not read.
    """
    active = _listed(x, signal, calls, thresholds, x_bits)
    return active.ends, active.found, active.values


def _listed(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> List:
    device, count, neurons = x.device, calls.experts.numel(), signal.q.shape[1]
    spans = torch.empty(2, count, dtype=torch.int64, device=device)
    found = torch.empty(count * neurons, dtype=torch.int32, device=device)
    values = torch.empty(count * neurons, dtype=x.dtype, device=device)
    if not neurons:
        spans.zero_()
    active = List(spans[0], spans[1], found, values, neurons if count else 0)
    fill(active, x, signal, moved(calls, device), thresholds, x_bits)
    return active


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """y[token] += weight · sum_n o(other_n · x) v_n down_n over the active neurons n of every call, y (B, H).

    With `down_thresholds` (P,) neurons with |o(other_n · x) v_n| below the call's are left out and their down columns
    are not read. Repeats bit for bit.

    Returns:
        y, and how many neurons of every call reached the second threshold (P,) int64.

    Raises:
        ValueError: rows that the device of x cannot read.
    """
    offsets, found, values = (part.to(x.device) for part in (active.offsets, active.neurons, active.values))
    listed = List(offsets[:-1], offsets[1:], found.contiguous(), values.contiguous(), active.neurons.numel())
    into = Into(torch.empty_like(x), torch.zeros(calls.experts.numel(), dtype=torch.int64, device=x.device))
    swiglu(x, rows, moved(calls, x.device), listed, down_thresholds, x_bits, into)
    return into.y, into.reached


def moe_step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`signal_gemv` and `sparse_swiglu` in one go; the list of active neurons stays on the device and nothing waits.

    With calls and thresholds on the device already, and once it has run, this can be captured in a CUDA graph.

    Returns:
        y (B, H) and counts (P, 2) int64 on the device: how many neurons of each call were active, and how many of those
        reached the second threshold.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    counts = torch.zeros(calls.experts.numel(), 2, dtype=torch.int64, device=x.device)
    into = Into(torch.empty_like(x), counts[:, 1])
    _step(x, signal, rows, moved(calls, x.device), (thresholds, down_thresholds), x_bits, counts, into)
    return into.y, counts


def experts_step(
    x: Tensor, layer: ExpertLayer, index: Tensor, weights: Tensor, stream: Tensor | None, x_bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`select` and `moe_step` with one launch less, and the stream added; see `kernels.experts_step`. Each token's
    result is, to the last bit, what it is alone.
    """
    signal, limits, ready = layer.signal, layer.limits, None
    device, count = x.device, index.numel() * layer.rule.parts
    if limits.late is not None or not signal_vector(*_parts(signal)).chunked:
        counts = torch.zeros(count, 2, dtype=torch.int64, device=device)
        work = select(index, weights, limits, layer.rule)
    else:
        counts = torch.empty(count, 2, dtype=torch.int64, device=device)
        work, ready = _begun(x.contiguous(), layer, index, weights, x_bits, counts)
    into = Into(torch.empty_like(x if stream is None else stream), counts[:, 1], stream)
    given = work.calls, (work.thresholds, work.products), x_bits, counts, into, ready
    _step(x, signal, layer.rows, *given, each=count // max(1, len(x)))
    return into.y, counts, work.thresholds


def _begun(
    x: Tensor, layer: ExpertLayer, index: Tensor, weights: Tensor, x_bits: int, counts: Tensor
) -> tuple[Work, Tensor]:
    """The work that is selected, and x for the kernels that do it (`launch.spread`); counts begin at 0."""
    device, (tokens, among), rule, limits = x.device, index.shape, layer.rule, layer.limits
    launch.check_device(device)
    count, vector = tokens * among * rule.parts, signal_vector(*_parts(layer.signal)).reading(digits_of(x, x_bits))
    of, experts = torch.empty((2, count), dtype=torch.int64, device=device)
    own = torch.empty(count, dtype=weights.dtype, device=device)
    thresholds, products = torch.empty((2, count), device=device)
    spread = torch.empty(tokens, vector.x_words, dtype=torch.int32, device=device)
    if count:
        with launch.on(device):
            begin_kernel[(tokens, 1 + triton.cdiv(vector.n // CHUNK, launch.SPREAD_CHUNKS))](
                *(index.contiguous(), weights.contiguous()),
                launch.least(device, rule) if limits.least is None else limits.least,
                *(limits.signal, _or(limits.product, limits.signal), of, experts, own, thresholds, products),
                *(counts, x, spread),
                *(among, rule.parts, rule.weighed, limits.product is not None, triton.next_power_of_2(among)),
                *(vector.n, vector.digits, vector.x_words, launch.SPREAD_CHUNKS),
                num_warps=1,
            )
    return Work(Calls(of, experts, own), thresholds, None if limits.product is None else products), spread


def _step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: tuple[Tensor, Tensor | None],
    x_bits: int,
    counts: Tensor,
    into: Into,
    ready: Tensor | None = None,
    each: int | None = None,
) -> None:
    """counts (P, 2), of which `into` has the second, begin at 0. each: see `swiglu`."""
    marks, v, ready = find(x, signal, calls, thresholds[0], x_bits, ready)
    begins, ends = torch.empty(2, len(counts), dtype=torch.int64, device=x.device)
    active = List(begins, ends, marks, v, v.shape[1], counts=counts)
    swiglu(x, rows, calls, active, thresholds[1], x_bits, into, ready, each)


def _parts(signal: SignalWeights) -> tuple[SignalLayout, Tensor, Tensor, Tensor]:
    return signal.layout, signal.q, signal.scale, signal.zero


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in the order given, into out (N, layout.nbytes) uint8.

    Runs on the device of `out`; rows may be in pinned host memory, and `out` too if the rows are on the device.

    Raises:
        ValueError: rows or out that the device cannot reach.
    """
    device = out.device if out.device.type == "cuda" else rows.data.device
    launch.check_weights(device, "rows", rows.data)
    launch.check_weights(device, "out", out)
    _copy(device, rows.data, out, neurons, expert * rows.data.shape[1], gather=True)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) uint8 into pool[slots], pool (S, nbytes); records may be in pinned host memory.

    Raises:
        ValueError: records or a pool that the device cannot reach.
    """
    device = pool.device if pool.device.type == "cuda" else records.device
    launch.check_weights(device, "pool", pool)
    launch.check_weights(device, "records", records)
    _copy(device, records, pool, slots, 0, gather=False)


def land(lane: Tensor, chunk: int, head: int, nbytes: int, *, in_place: bool) -> None:
    """Put the rows of a link's lane into the slots that its head names, without waiting or knowing how many there are.

    Args:
        lane: uint8 on the device, `head` bytes (floe_lane in floe_offload.h), then up to `chunk` rows of `nbytes`.
        in_place: rows are elsewhere, at an address in the head, and the lane has none.

    Raises:
        ValueError: a lane that does not fit.
    """
    launch.check_device(lane.device)
    held = 0 if in_place else chunk * nbytes
    if lane.dtype != torch.uint8 or head % 64 or head < 32 + 8 * chunk or lane.numel() < head + held or nbytes % 64:
        raise ValueError(f"a lane of {lane.numel()} bytes does not hold {chunk} rows of {nbytes} bytes")
    block = launch.block_of(nbytes // 4, launch.COPY_WORDS)
    grid = (triton.cdiv(chunk, launch.COPY_ROWS), triton.cdiv(nbytes // 4, block))
    with launch.on(lane.device):
        land_kernel[grid](lane, chunk, head, nbytes, in_place, launch.COPY_ROWS, block)


def _copy(device: torch.device, source: Tensor, target: Tensor, index: Tensor, first: int, *, gather: bool) -> None:
    launch.check_device(device)
    nbytes = source.shape[-1]
    if nbytes % 4 or source.data_ptr() % 4 or target.data_ptr() % 4:
        raise ValueError(f"records of {nbytes} bytes are not whole 32-bit words: use the layouts' padded records")
    if not index.numel():
        return
    index = index.to(device)
    block = launch.block_of(nbytes // 4, launch.COPY_WORDS)
    grid = (triton.cdiv(index.numel(), launch.COPY_ROWS), triton.cdiv(nbytes // 4, block))
    with launch.on(device):
        copy_kernel[grid](source, target, index, index.numel(), first, nbytes, gather, launch.COPY_ROWS, block)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor that a kernel may be given where it reads none."""
    return other if tensor is None else tensor
