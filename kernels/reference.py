"""The definition of every operation, in plain torch. Fast paths are compared with these; they run everywhere.

Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons of an expert, N active neurons over all calls.
`exact` lets other implementations keep less of x's precision (kernels/__init__.py); here everything is exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layouts import ExpertRows, LinearWeights, PoolRows, UpWeights
from .types import Active, Calls


def up_gemv(x: Tensor, up: UpWeights, calls: Calls, thresholds: Tensor, exact: bool = True) -> Active:
    """v = up_e · x for every call, keeping the neurons with |v| >= thresholds[call] (FloE Algorithm 1, lines 2-3).

    A v that is not a number is kept, so that it reaches the result and is noticed.
    """
    offsets = [0]
    neurons: list[Tensor] = []
    values: list[Tensor] = []
    for token, expert, threshold in zip(
        calls.tokens.tolist(), calls.experts.tolist(), thresholds.tolist(), strict=True
    ):
        v = F.linear(x[token], up.dense(expert, x.dtype))
        kept = (~(v.abs() < threshold)).nonzero().squeeze(1)
        neurons.append(kept)
        values.append(v[kept])
        offsets.append(offsets[-1] + kept.numel())
    return Active(
        torch.tensor(offsets),
        torch.cat(neurons) if neurons else torch.empty(0, dtype=torch.long, device=x.device),
        torch.cat(values) if values else x.new_empty(0),
    )


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    exact: bool = True,
) -> Tensor:
    """y[token] += weight · sum_n silu(gate_n · x) v_n down_n over the active neurons n of every call.

    With down_thresholds (P,), neurons with |silu(gate_n · x) v_n| below the call's are left out.
    """
    y = torch.zeros_like(x)
    offsets = active.offsets.tolist()
    for call, (token, expert) in enumerate(zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)):
        chosen = slice(offsets[call], offsets[call + 1])
        neurons = active.neurons[chosen]
        if isinstance(rows, PoolRows):
            records = rows.data.index_select(0, rows.slots[expert][neurons])
        else:
            records = rows.data[expert].index_select(0, neurons)
        gate, down = rows.layout.read(records, x.dtype)
        h = F.silu(F.linear(x[token], gate)) * active.values[chosen]
        if down_thresholds is not None:
            h = h.masked_fill(h.abs() < down_thresholds[call], 0)
        y[token] += calls.weights[call].to(x.dtype) * (h @ down)
    return y


def moe_step(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """`up_gemv`, then `sparse_swiglu` of what it found: y (B, H), and the active neurons of every call (P,) int64."""
    active = up_gemv(x, up, calls, thresholds, exact)
    return sparse_swiglu(x, rows, calls, active, down_thresholds, exact), active.offsets.diff()


def expert_swiglu(
    x: Tensor, up: UpWeights, rows: ExpertRows, expert: int, threshold: float, exact: bool = True
) -> tuple[Tensor, int]:
    """One expert over many tokens (prefill): x (B, H) -> y (B, H) and the number of active neurons over all tokens.

    Dequantizes the whole expert once and lets the library multiply; inactive neurons are masked per token, so the
    result is what `up_gemv` and `sparse_swiglu` give token by token.
    """
    v = F.linear(x, up.dense(expert, x.dtype))
    gate, down = rows.layout.read(rows.data[expert], x.dtype)
    kept = ~(v.abs() < threshold)
    return (F.silu(F.linear(x, gate)) * v * kept) @ down, int(kept.sum())


def linear(x: Tensor, weights: LinearWeights, exact: bool = True) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N)."""
    return F.linear(x, weights.dense(x.dtype))


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in the order given, into out (N, layout.nbytes) uint8."""
    torch.index_select(rows.data[expert], 0, neurons, out=out)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) uint8 into pool[slots], pool (S, nbytes) uint8; the inverse of a gather."""
    pool.index_copy_(0, slots, records)
