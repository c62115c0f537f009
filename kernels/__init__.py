"""The numerical operations, one function each: arguments are checked here, the device's backend computes.

`reference.py` defines what each computes. Bad shapes, dtypes and indices raise before any memory is touched.
Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons per expert, N active neurons.

`x_bits` says how much of x's precision must be kept where weights are codes: 22 bits (float32's), or what
`reference.rounded` leaves, 15 (relative errors of about 5e-5) or 8 (of 0.6 to 0.9 %, still far below those of low-bit
weights). The CPU's kernels are the faster the fewer it is; implementations may keep more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import Backend, choose
from .layouts import ExpertRows, LinearWeights, PoolRows, UpWeights, packed_bytes
from .types import X_BITS, Active, Calls

_FEW = 32

__all__ = [
    "X_BITS",
    "Active",
    "Backend",
    "Calls",
    "choose",
    "expert_swiglu",
    "gather_rows",
    "linear",
    "moe_step",
    "pool_scatter",
    "sparse_swiglu",
    "up_gemv",
]


def up_gemv(x: Tensor, up: UpWeights, calls: Calls, thresholds: Tensor, *, x_bits: int = 22) -> Active:
    """The active neurons of every call: v = up_e · x, kept where |v| >= threshold (FloE Algorithm 1, lines 2-3).

    Args:
        x: (B, H) floating point. up: the layer's up projections. thresholds: (P,) one per call, 0 keeps all. A v that
            is not a number is kept, so that it reaches the result.

    Raises:
        ValueError: shapes that do not fit, or a token or expert out of range.
    """
    _check_x(x, up.layout.vector.n, x_bits)
    _check_up(up)
    _check_calls(x, calls, up.q.shape[0])
    if thresholds.shape != calls.experts.shape:
        raise ValueError(f"{calls.experts.numel()} calls but thresholds of shape {tuple(thresholds.shape)}")
    return choose(x.device.type).up_gemv(x, up, calls, thresholds, x_bits)


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """The MoE output from the active neurons alone: y[token] += weight · sum_n silu(gate_n · x) v_n down_n.

    Args:
        x: (B, H). rows: the layer's neuron records, as packed or in a pool. active: what `up_gemv` found for the same
            calls. down_thresholds: (P,) leaves out neurons with |silu(gate_n · x) v_n| below the call's; their down
            halves are not read.

    Returns:
        y (B, H) of x's dtype, zero for tokens without a call; and (P,) int64 how many neurons of each call reached the
        second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, an index out of range, a neuron twice within one call, or one that the
            pool does not hold.
    """
    _check_x(x, rows.layout.gate.n, x_bits)
    experts, neurons = _check_rows(rows)
    _check_calls(x, calls, experts)
    _check_active(calls, active, neurons)
    if active.values.dtype != x.dtype:
        raise ValueError(f"values of {active.values.dtype} for x of {x.dtype}")
    if down_thresholds is not None and down_thresholds.shape != calls.experts.shape:
        raise ValueError(f"{calls.experts.numel()} calls but thresholds of shape {tuple(down_thresholds.shape)}")
    backend = choose(x.device.type)
    if not backend.checks_active:
        _check_active_content(rows, calls, active, neurons)
    return backend.sparse_swiglu(x, rows, calls, active, down_thresholds, x_bits)


def moe_step(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`up_gemv`, then `sparse_swiglu` of the neurons it found: one layer's experts for a few tokens.

    On a GPU the list of active neurons stays there and the host waits for nothing; so tokens and experts that lie on
    the GPU, which come from the model's own router, are not looked at before the kernels use them.

    Args:
        x: (B, H). thresholds, down_thresholds: (P,) as in those operations.

    Returns:
        y (B, H) of x's dtype, and counts (P, 2) int64 on the device of x: how many neurons of each call were active,
        and for how many of those |silu(gate_n · x) v_n| reached the second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) an index out of range.
    """
    _check_x(x, up.layout.vector.n, x_bits)
    _check_x(x, rows.layout.gate.n, x_bits)
    _check_up(up)
    if _check_rows(rows) != tuple(up.q.shape[:2]):
        raise ValueError(f"up of {tuple(up.q.shape[:2])} and rows of {_check_rows(rows)} experts and neurons")
    if calls.experts.device.type == "cpu":
        _check_calls(x, calls, up.q.shape[0])
    for name, limits in (("thresholds", thresholds), ("down_thresholds", down_thresholds)):
        if limits is not None and limits.shape != calls.experts.shape:
            raise ValueError(f"{calls.experts.numel()} calls but {name} of shape {tuple(limits.shape)}")
    return choose(x.device.type).moe_step(x, up, rows, calls, thresholds, down_thresholds, x_bits)


def expert_swiglu(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens, as prefill needs it: the same result as `up_gemv` and `sparse_swiglu`.

    Args:
        x: (B, H). expert: its index in 0..E-1. thresholds: (B,) neurons with |up_n · x| below the token's are left
            out. down_thresholds: (B,) likewise those with |silu(gate_n · x) v_n| below it.

    Returns:
        y (B, H), not yet weighted by the router; over all tokens, how many neurons were active, and how many of those
        reached the second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, or no such expert.
    """
    _check_x(x, up.layout.vector.n, x_bits)
    _check_x(x, rows.layout.gate.n, x_bits)
    _check_up(up)
    _check_rows(rows)
    if up.q.shape[:2] != rows.data.shape[:2]:
        raise ValueError(f"up of {tuple(up.q.shape[:2])} and rows of {tuple(rows.data.shape[:2])} experts and neurons")
    _check_range("expert", torch.tensor([expert]), rows.data.shape[0])
    for name, limits in (("thresholds", thresholds), ("down_thresholds", down_thresholds)):
        if limits is not None and limits.shape != x.shape[:1]:
            raise ValueError(f"{x.shape[0]} tokens but {name} of shape {tuple(limits.shape)}")
    return choose(x.device.type).expert_swiglu(x, up, rows, expert, thresholds, down_thresholds, x_bits)


def linear(x: Tensor, weights: LinearWeights, *, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ from low-bit weights, for any number of tokens.

    Args:
        x: (B, K) floating point. weights: of N rows.

    Returns:
        y (B, N) of x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    vector = weights.vector
    _check_x(x, vector.n, x_bits)
    if weights.q.ndim != 2 or weights.q.shape[1] != packed_bytes(vector.n, vector.bits):
        raise ValueError(f"weights.q must be (N, {packed_bytes(vector.n, vector.bits)}), not {tuple(weights.q.shape)}")
    if not weights.scale.shape == weights.zero.shape == (weights.q.shape[0], vector.groups):
        raise ValueError(f"weights.scale and weights.zero must be {(weights.q.shape[0], vector.groups)}")
    return choose(x.device.type).linear(x, weights, x_bits)


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in that order, into out (N, layout.nbytes) uint8.

    Raises:
        ValueError: an index out of range, or a buffer that does not fit.
    """
    _check_range("expert", torch.tensor([expert]), rows.data.shape[0])
    _check_range("neuron", neurons, rows.data.shape[1])
    if out.dtype != torch.uint8 or out.shape != (neurons.numel(), rows.layout.nbytes):
        raise ValueError(
            f"out must be uint8 of {(neurons.numel(), rows.layout.nbytes)}, not {out.dtype} of {tuple(out.shape)}"
        )
    # Pinned rows are read by the device that wants them.
    device = out.device if out.device.type != "cpu" else rows.data.device
    choose(device.type).gather_rows(rows, expert, neurons, out)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) into pool[slots], pool (S, nbytes), both uint8.

    Raises:
        ValueError: a slot out of range or given twice, or records that do not fit the pool.
    """
    if pool.dtype != torch.uint8 or records.dtype != torch.uint8 or pool.ndim != 2:
        raise ValueError("pool and records must be 2-D uint8")
    if records.shape != (slots.numel(), pool.shape[1]):
        raise ValueError(f"records of {tuple(records.shape)} for {slots.numel()} slots of {pool.shape[1]} bytes")
    _check_range("slot", slots, pool.shape[0])
    if slots.unique().numel() != slots.numel():
        raise ValueError("a slot is written twice")
    choose(pool.device.type).pool_scatter(pool, slots, records)


def _check_x(x: Tensor, hidden: int, x_bits: int) -> None:
    if x_bits not in X_BITS:
        raise ValueError(f"no such precision of x: {x_bits} bit; valid are {', '.join(map(str, X_BITS))}")
    if x.ndim != 2 or x.shape[1] != hidden or not x.is_floating_point():
        raise ValueError(f"x must be (B, {hidden}) floating point, not {tuple(x.shape)} {x.dtype}")


def _check_up(up: UpWeights) -> None:
    vector = up.layout.vector
    if up.q.ndim != 3 or up.q.shape[2] != up.layout.row_bytes:
        raise ValueError(f"up.q must be (E, F, {up.layout.row_bytes}), not {tuple(up.q.shape)}")
    if not up.scale.shape == up.zero.shape == (*up.q.shape[:2], vector.groups):
        raise ValueError(f"up.scale and up.zero must be {(*up.q.shape[:2], vector.groups)}")


def _check_rows(rows: ExpertRows | PoolRows) -> tuple[int, int]:
    """Experts and neurons in an expert."""
    pooled = isinstance(rows, PoolRows)
    shape = rows.slots.shape if pooled else rows.data.shape[:-1]
    if len(shape) != 2 or rows.data.shape[-1] != rows.layout.nbytes or rows.layout.gate.n != rows.layout.down.n:
        wanted = f"{'(S' if pooled else '(E, F'}, {rows.layout.nbytes})"
        raise ValueError(f"rows must be {wanted}, not {tuple(rows.data.shape)}")
    if pooled and (rows.data.ndim != 2 or rows.slots.dtype != torch.int32):
        raise ValueError(
            f"a pool needs (S, nbytes) rows and int32 slots, not {rows.data.ndim}-D and {rows.slots.dtype}"
        )
    return shape[0], shape[1]


def _check_range(what: str, index: Tensor, end: int) -> None:
    if index.dtype != torch.int64 or index.ndim != 1:
        raise ValueError(f"{what} indices must be 1-D int64, not {index.ndim}-D {index.dtype}")
    # Few of them are looked at quicker in Python than by two operations on tensors.
    ends = index.tolist() if index.numel() <= _FEW else [int(index.min()), int(index.max())]
    if ends and (min(ends) < 0 or max(ends) >= end):
        raise ValueError(f"{what} index out of range 0..{end - 1}")


def _check_calls(x: Tensor, calls: Calls, experts: int) -> None:
    if not calls.tokens.shape == calls.experts.shape == calls.weights.shape:
        raise ValueError("calls need as many tokens as experts and weights")
    _check_range("token", calls.tokens, x.shape[0])
    _check_range("expert", calls.experts, experts)


def _check_active(calls: Calls, active: Active, neurons: int) -> None:
    if active.neurons.dtype != torch.int64 or active.neurons.ndim != 1:
        raise ValueError(f"neuron indices must be 1-D int64, not {active.neurons.ndim}-D {active.neurons.dtype}")
    if active.offsets.dtype != torch.int64 or active.offsets.ndim != 1:
        raise ValueError("offsets must be 1-D int64")
    offsets = active.offsets.tolist()
    if (
        len(offsets) != calls.experts.numel() + 1
        or offsets[0] != 0
        or offsets[-1] != active.neurons.numel()
        or sorted(offsets) != offsets
        or active.values.shape != active.neurons.shape
    ):
        raise ValueError("offsets must rise from 0 to the number of neurons, one interval per call")


def _check_active_content(rows: ExpertRows | PoolRows, calls: Calls, active: Active, neurons: int) -> None:
    """What only a look at every neuron tells: all in range, none twice in a call, each in the pool."""
    _check_range("neuron", active.neurons, neurons)
    owner = torch.repeat_interleave(active.offsets.diff().to(active.neurons.device))
    if (owner * neurons + active.neurons).unique().numel() != active.neurons.numel():
        raise ValueError("a neuron is listed twice in one call")
    if isinstance(rows, PoolRows):
        slots = rows.slots[calls.experts.to(owner.device)[owner], active.neurons]
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= rows.data.shape[0]):
            raise ValueError("a neuron is not in the pool, or its slot is out of range")
