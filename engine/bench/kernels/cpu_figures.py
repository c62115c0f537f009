"""The figures of the CPU benchmark: each function makes one section's weights and the work to time.

Threads are torch's. `experts` are used as many at a time as a token uses, in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels import reference
from ....kernels.cpu import native
from ....kernels.weights import ExpertRows, LinearWeights, SignalWeights
from ...machine.random_weights import Shapes, filled, make_linear, make_rows, make_up, next_calls, random_active
from ...planning.rates import UNREACHED
from ..measure import Figure

_SHARES = (0.2, 0.4)
_SPARSITIES = (0.6, 0.8)
# The dtype of x and how many bits the kernels keep of it: float32 as in Exact, 16 bit, and as Balanced reads it.
_KINDS = {"float32 x": (torch.float32, 22), "bfloat16 x": (torch.bfloat16, 22), "x in 8 bits": (torch.float32, 8)}
_INT4_GROUPS = 128, 64, 32  # of torch's own 4-bit kernel, the usual one first


def _x(shapes: Shapes, dtype: torch.dtype, tokens: int = 1) -> Tensor:
    return torch.randn(tokens, shapes.hidden, generator=torch.Generator().manual_seed(1)).to(dtype)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _reading(nbytes: int) -> Figure:
    data = filled(nbytes)

    def work(_turn: int) -> int:
        native.read(data)
        return data.nbytes

    return Figure("read (floor)", work, inner=1)


def _up_work(x: Tensor, up: SignalWeights, among: int, x_bits: int = 22) -> Callable[[int], int]:
    nothing = torch.full((among,), UNREACHED)

    def work(turn: int) -> int:
        kernels.signal_gemv(x, up, next_calls(turn, up.q.shape[0], among), nothing, x_bits=x_bits)
        return among * up.bytes_per_expert()

    return work


def up(shapes: Shapes, experts: dict[int, int], floor_bytes: int) -> list[Figure]:
    """`signal_gemv` of a token's experts by width; `experts` says how many of each width. Floor: reading."""
    figures = [_reading(floor_bytes)]
    for bits, count in experts.items():
        made = make_up(shapes, bits, count)
        for kind, (dtype, x_bits) in _KINDS.items():
            figures.append(
                Figure(f"{bits} bit, {kind}", _up_work(_x(shapes, dtype), made, shapes.among, x_bits), "read (floor)")
            )
    return figures


def up_by_threads(shapes: Shapes, experts: int, threads: int) -> list[Figure]:
    """The same at 2 bit, on one thread and on all."""
    return _by_threads(_up_work(_x(shapes, torch.float32), make_up(shapes, 2, experts), shapes.among), threads)


def rows(shapes: Shapes, bits: int, experts: int, *, hugepages: bool) -> list[Figure]:
    """`sparse_swiglu` of a token's experts at each share of active neurons. Floor: reading the same records."""
    made = make_rows(shapes, bits, experts, hugepages=hugepages)
    flat = made.data.view(-1, made.layout.nbytes)
    figures: list[Figure] = []
    for share in _SHARES:
        chosen = _chosen(share, shapes, experts)
        places: list[Tensor] = []
        for turn, active in enumerate(chosen):
            first = torch.repeat_interleave(
                next_calls(turn, experts, shapes.among).experts * shapes.neurons, active.offsets.diff()
            )
            places.append(active.neurons + first)

        def gather(turn: int, places: list[Tensor] = places) -> int:
            index = places[turn % len(places)]
            native.read_rows(flat, index)
            return index.numel() * made.layout.nbytes

        name = f"gather {_percent(share)} (floor)"
        figures.append(Figure(name, gather))
        for kind, (dtype, x_bits) in _KINDS.items():
            work = _rows_work(_x(shapes, dtype), made, chosen, shapes.among, x_bits)
            figures.append(Figure(f"{_percent(share)} active, {kind}", work, name))
    return figures


def rows_by_threads(shapes: Shapes, experts: int, threads: int) -> list[Figure]:
    """The same with 4-bit rows, 40 % active, on one thread and on all."""
    chosen = _chosen(0.4, shapes, experts)
    work = _rows_work(_x(shapes, torch.float32), make_rows(shapes, 4, experts), chosen, shapes.among)
    return _by_threads(work, threads)


def _chosen(share: float, shapes: Shapes, experts: int) -> list[kernels.Active]:
    """The active neurons of the experts of each turn."""
    return [random_active(share, shapes.neurons, seed, shapes.among) for seed in range(experts // shapes.among)]


def _rows_work(
    x: Tensor, made: ExpertRows, chosen: list[kernels.Active], among: int, x_bits: int = 22
) -> Callable[[int], int]:
    # The up projection's results have the dtype of x.
    typed = [kernels.Active(a.offsets, a.neurons, a.values.to(x.dtype)) for a in chosen]

    def work(turn: int) -> int:
        active = typed[turn % len(typed)]
        kernels.sparse_swiglu(x, made, next_calls(turn, made.data.shape[0], among), active, x_bits=x_bits)
        return active.neurons.numel() * made.layout.nbytes

    return work


def _by_threads(work: Callable[[int], int], threads: int) -> list[Figure]:
    def alone(turn: int) -> int:
        torch.set_num_threads(1)
        try:
            return work(turn)
        finally:
            torch.set_num_threads(threads)

    return [Figure("1 thread", alone), Figure(f"{threads} threads", work, peer="1 thread")]


def step(shapes: Shapes, experts: int, *, compiled: bool) -> list[Figure]:
    """`moe_step`: a token's experts, 2-bit signal, 4-bit rows, thresholds cut at each sparsity. Peer: torch's int4."""
    up, rows, among = make_up(shapes, 2, experts), make_rows(shapes, 4, experts), shapes.among
    figures = [Figure("dense int4", _dense_int4(shapes, _x(shapes, torch.bfloat16), experts))]
    for sparsity, (kind, (dtype, x_bits)) in product(_SPARSITIES, _KINDS.items()):
        x = _x(shapes, dtype)

        @cache
        def limits(turn: int, x: Tensor = x, sparsity: float = sparsity) -> Tensor:
            found = kernels.signal_gemv(x, up, next_calls(turn, experts, among), torch.zeros(among))
            return found.values.view(among, -1).abs().float().quantile(sparsity, dim=1)

        # Found before timing starts; the slow reference gets only one turn.
        for turn in range(experts // among if compiled else 1):
            limits(turn)

        def work(turn: int, x: Tensor = x, limits: Callable[[int], Tensor] = limits, x_bits: int = x_bits) -> int:
            thresholds = limits(turn % (experts // among))
            _, counts = kernels.moe_step(x, up, rows, next_calls(turn, experts, among), thresholds, x_bits=x_bits)
            # Gate rows and down columns are counted one by one: each is half of a row.
            return among * up.bytes_per_expert() + int(counts.sum()) * rows.layout.nbytes // 2

        name = f"{_percent(sparsity)} sparse, {kind}"
        figures.append(Figure(name, work, peer="dense int4", once=not compiled))
    return figures


def _dense_int4(shapes: Shapes, x: Tensor, experts: int) -> Callable[[int], int]:
    """A token's dense experts through torch's own 4-bit kernel."""
    H, N = shapes.hidden, shapes.neurons
    group = next(size for size in _INT4_GROUPS if H % size == N % size == 0)
    matrices: list[tuple[Tensor, Tensor]] = []
    for i in range(3 * experts):
        n, k = (H, N) if i % 3 == 2 else (N, H)
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        matrices.append((packed, torch.rand(k // group, n, 2, dtype=torch.bfloat16) * 0.01))

    def multiply(v: Tensor, which: int) -> Tensor:
        packed, scales = matrices[which]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(v, packed, group, scales)

    def work(turn: int) -> int:
        for expert in next_calls(turn, experts, shapes.among).experts.tolist():
            gate, up = multiply(x, 3 * expert), multiply(x, 3 * expert + 1)
            multiply(F.silu(gate) * up, 3 * expert + 2)
        return shapes.among * 3 * (H * N // 2 + H * N // group * 4)

    return work


def linear(shapes: Shapes, widths: tuple[int, ...], matrices: int, floor_bytes: int, *, compiled: bool) -> list[Figure]:
    """`linear` by width, for one token, float32 x as attention has it. Floor: reading."""
    x = _x(shapes, torch.float32)
    figures = [_reading(floor_bytes)] if compiled else []
    for bits in widths:
        # The same number of bytes for each width, since caches count bytes.
        made = [make_linear(shapes, bits) for _ in range(matrices * 8 // bits)]
        floor = "read (floor)" if compiled else None
        for kind, x_bits in (("float32 x", 22), ("x in 8 bits", 8)):

            def work(turn: int, made: list[LinearWeights] = made, x_bits: int = x_bits) -> int:
                one = made[turn % len(made)]
                kernels.linear(x, one, x_bits=x_bits)
                return one.q.nbytes + one.scale.nbytes + one.zero.nbytes

            figures.append(Figure(f"{bits} bit, {kind}", work, floor, inner=len(made), once=not compiled))
    return figures


def prefill(shapes: Shapes, experts: int, *, compiled: bool) -> list[Figure]:
    """`expert_swiglu` of many tokens, without and with sparsity. Peer: the plain torch reference, run once."""
    x, up, rows = _x(shapes, torch.float32, shapes.tokens), make_up(shapes, 2, experts), make_rows(shapes, 4, experts)
    zero = torch.tensor([0])
    first = kernels.Calls(zero, zero, torch.ones(1))
    limit = float(kernels.signal_gemv(x, up, first, torch.zeros(1)).values.abs().quantile(_SPARSITIES[0]))

    def with_torch(_turn: int) -> int:
        reference.expert_swiglu(x, up, rows, 0, x.new_zeros(x.shape[:1]))
        return 0

    figures = [Figure("plain torch", with_torch, tokens=shapes.tokens, once=True)]
    if not compiled:
        return figures
    for sparsity, threshold, x_bits in ((0.0, 0.0, 22), (_SPARSITIES[0], limit, 22), (_SPARSITIES[0], limit, 8)):

        def work(turn: int, threshold: float = threshold, x_bits: int = x_bits) -> int:
            kernels.expert_swiglu(x, up, rows, turn % experts, x.new_full(x.shape[:1], threshold), x_bits=x_bits)
            return 0

        name = f"{_percent(sparsity)} sparse" + (", x in 8 bits" if x_bits == 8 else "")
        figures.append(Figure(name, work, peer="plain torch", tokens=shapes.tokens, inner=1))
    return figures
