"""The CPU kernels compiled from C++: the operations of `reference.py`, close to what the memory can deliver.

The library (`floe.h`) is built with the package where a C++ compiler is at hand. Tensors are handed over by address;
the library checks sizes and indices itself before it touches them. x may be float32, bfloat16 or float16: it is
computed in float32, so results are at least as exact as the reference's.

Environment: FLOE_CPU_ISA = avx512, avx2 or portable forces an instruction set (an error where the CPU lacks it);
FLOE_CPU_LIBRARY names another build of the library.
"""

from __future__ import annotations

from ctypes import byref, c_int64, c_uint64

import torch
from torch import Tensor

from ..layouts import ExpertRows, LinearWeights, PoolRows, UpWeights
from ..types import Active, Calls
from .native_library import (
    ISAS,
    OK,
    Isa,
    NativeUnavailableError,
    check,
    isa,
    isa_is_forced,
    library,
    library_path,
    row_vectors,
    select_isa,
    vector,
)

__all__ = [
    "ISAS",
    "Isa",
    "NativeUnavailableError",
    "advise_hugepages",
    "expert_swiglu",
    "gather_rows",
    "isa",
    "isa_is_forced",
    "library_path",
    "linear",
    "moe_step",
    "pool_scatter",
    "read",
    "read_rows",
    "select_isa",
    "sparse_swiglu",
    "up_gemv",
]

_DIGITS = {22: 3, 15: 2, 8: 1}  # by `x_bits`


def up_gemv(x: Tensor, up: UpWeights, calls: Calls, thresholds: Tensor, x_bits: int = 22) -> Active:
    """v = up_e · x for every call, keeping the neurons with |v| >= thresholds[call]; ascending within a call.

    Raises:
        ValueError: sizes or indices that do not fit.
    """
    loaded = library()
    x32, tokens, experts = _float32(x), _int64(calls.tokens), _int64(calls.experts)
    limits, offsets = _float32(thresholds), torch.empty(calls.experts.numel() + 1, dtype=torch.int64)
    q, scale, zero = _bytes(up.q), up.scale.contiguous(), up.zero.contiguous()
    total = loaded.floe_up_gemv(
        *(x32.data_ptr(), x32.shape[0], vector(up.layout.vector, up.layout.float16)),
        *(q.data_ptr(), scale.data_ptr(), zero.data_ptr(), q.shape[0], q.shape[1]),
        *(experts.numel(), tokens.data_ptr(), experts.data_ptr(), limits.data_ptr()),
        *(_digits(x, x_bits), torch.get_num_threads(), offsets.data_ptr()),
    )
    check(total)
    # They wait in the library, in this thread, until there are tensors of the right size for them.
    neurons = torch.empty(total, dtype=torch.int64)
    values = torch.empty(total, dtype=torch.float32)
    check(loaded.floe_up_take(total, neurons.data_ptr(), values.data_ptr()))
    return Active(offsets, neurons, _as(values, x.dtype))


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """y[token] += weight · sum_n silu(gate_n · x) v_n down_n over the active neurons n of every call.

    Args:
        down_thresholds: (P,) leaves out neurons with |silu(gate_n · x) v_n| below it, and does not read their down
            columns.

    Returns:
        y (B, H), and how many neurons of every call reached the second threshold (P,) int64.

    Raises:
        ValueError: sizes or indices that do not fit, or a neuron twice within one call.
    """
    loaded = library()
    x32, tokens, experts, weights = (
        _float32(x),
        _int64(calls.tokens),
        _int64(calls.experts),
        _float32(calls.weights),
    )
    offsets, neurons, values = _int64(active.offsets), _int64(active.neurons), _float32(active.values)
    limits = None if down_thresholds is None else _float32(down_thresholds)
    data = _bytes(rows.data)
    slots = None if isinstance(rows, ExpertRows) else rows.slots.to(torch.int32).contiguous()
    shape = data.shape[:2] if slots is None else slots.shape
    if int(offsets[-1]) != neurons.numel() or neurons.numel() != values.numel():
        raise ValueError("offsets must end at the number of neurons, with one value each")
    gate, down = row_vectors(rows.layout)
    y, kept = torch.empty(x32.shape), torch.empty(experts.numel(), dtype=torch.int64)
    check(
        loaded.floe_sparse_swiglu(
            *(x32.data_ptr(), x32.shape[0], gate, down, data.data_ptr(), *shape, rows.layout.nbytes),
            *((None, 0) if slots is None else (slots.data_ptr(), data.shape[0])),
            *(experts.numel(), tokens.data_ptr(), experts.data_ptr(), weights.data_ptr()),
            *(offsets.data_ptr(), neurons.data_ptr(), values.data_ptr()),
            *(None if limits is None else limits.data_ptr(), _digits(x, x_bits), torch.get_num_threads()),
            *(y.data_ptr(), kept.data_ptr()),
        )
    )
    return _as(y, x.dtype), kept


def moe_step(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`up_gemv`, then `sparse_swiglu` of what it found: y (B, H) and counts (P, 2) int64.

    counts: how many neurons of every call were active, and how many of those reached the second threshold.

    Raises:
        ValueError: sizes or indices that do not fit, or an active neuron that a pool does not hold.
    """
    x32, tokens, experts = _float32(x), _int64(calls.tokens), _int64(calls.experts)
    weights, limits = _float32(calls.weights), _float32(thresholds)
    down_limits = None if down_thresholds is None else _float32(down_thresholds)
    q, scale, zero, data = _bytes(up.q), up.scale.contiguous(), up.zero.contiguous(), _bytes(rows.data)
    slots = None if isinstance(rows, ExpertRows) else rows.slots.to(torch.int32).contiguous()
    shape = data.shape[:2] if slots is None else slots.shape
    gate, down = row_vectors(rows.layout)
    y, counts = torch.empty(x32.shape), torch.empty((experts.numel(), 2), dtype=torch.int64)
    check(
        library().floe_moe_step(
            *(x32.data_ptr(), x32.shape[0], vector(up.layout.vector, up.layout.float16)),
            *(q.data_ptr(), scale.data_ptr(), zero.data_ptr()),
            *(gate, down, data.data_ptr(), *shape, rows.layout.nbytes),
            *((None, 0) if slots is None else (slots.data_ptr(), data.shape[0])),
            *(experts.numel(), tokens.data_ptr(), experts.data_ptr(), weights.data_ptr(), limits.data_ptr()),
            *(None if down_limits is None else down_limits.data_ptr(), _digits(x, x_bits), torch.get_num_threads()),
            *(y.data_ptr(), counts.data_ptr()),
        )
    )
    return _as(y, x.dtype), counts


def expert_swiglu(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens: x (B, H), thresholds (B,) of each token -> y (B, H).

    Also, over all tokens, how many neurons were active and how many of those reached the second threshold.

    Raises:
        ValueError: sizes that do not fit.
    """
    x32, gate_down = _float32(x), row_vectors(rows.layout)
    q, data = _bytes(up.q[expert]), _bytes(rows.data[expert])
    scale, zero = up.scale[expert].contiguous(), up.zero[expert].contiguous()
    limits = _float32(thresholds)
    down_limits = None if down_thresholds is None else _float32(down_thresholds)
    y, kept = torch.empty(x32.shape), c_int64()
    active = library().floe_expert_swiglu(
        *(x32.data_ptr(), x32.shape[0], vector(up.layout.vector, up.layout.float16)),
        *(q.data_ptr(), scale.data_ptr(), zero.data_ptr()),
        *(*gate_down, data.data_ptr(), *data.shape, limits.data_ptr()),
        *(
            None if down_limits is None else down_limits.data_ptr(),
            _digits(x, x_bits),
            torch.get_num_threads(),
            y.data_ptr(),
            byref(kept),
        ),
    )
    check(active)
    return _as(y, x.dtype), active, kept.value


def linear(x: Tensor, weights: LinearWeights, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N).

    Raises:
        ValueError: sizes that do not fit.
    """
    x32, q = _float32(x), _bytes(weights.q)
    scale, zero = weights.scale.contiguous(), weights.zero.contiguous()
    y = torch.empty(x32.shape[0], q.shape[0])
    check(
        library().floe_linear(
            *(x32.data_ptr(), x32.shape[0], vector(weights.vector, torch.float16)),
            *(q.data_ptr(), scale.data_ptr(), zero.data_ptr(), q.shape[0]),
            *(_digits(x, x_bits), torch.get_num_threads(), y.data_ptr()),
        )
    )
    return _as(y, x.dtype)


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in the order given, into out (N, layout.nbytes) uint8.

    Raises:
        ValueError: an index out of range, or a buffer that is not contiguous.
    """
    data, index = rows.data[expert], _int64(neurons)
    source = _bytes(data)
    _writable(out)
    check(
        library().floe_gather_rows(
            *(source.data_ptr(), *source.shape, index.data_ptr(), index.numel()),
            *(torch.get_num_threads(), out.data_ptr()),
        )
    )


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) uint8 into pool[slots], pool (S, nbytes) uint8; the inverse of a gather.

    Raises:
        ValueError: a slot out of range, or a pool that is not contiguous.
    """
    index, source = _int64(slots), _bytes(records)
    _writable(pool)
    check(
        library().floe_pool_scatter(
            *(pool.data_ptr(), *pool.shape, index.data_ptr(), index.numel()),
            *(torch.get_num_threads(), source.data_ptr()),
        )
    )


def advise_hugepages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a large tensor before it is filled; False where the system has none to give."""
    return library().floe_advise_hugepages(tensor.data_ptr(), tensor.nbytes) == OK


def read(tensor: Tensor) -> int:
    """Read a contiguous tensor as fast as plain loads go, for a benchmark's floor; returns a checksum."""
    checksum = c_uint64()
    check(library().floe_read(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads(), byref(checksum)))
    return checksum.value


def read_rows(rows: Tensor, index: Tensor) -> int:
    """Read the rows `index` of (N, nbytes) uint8 likewise."""
    checksum = c_uint64()
    check(
        library().floe_read_rows(
            *(rows.data_ptr(), *rows.shape, index.data_ptr(), index.numel()),
            *(torch.get_num_threads(), byref(checksum)),
        )
    )
    return checksum.value


def _digits(x: Tensor, x_bits: int) -> int:
    """8-bit digits that x is cut into, two at most of 16-bit floats, which have fewer than 15 bits."""
    digits = _DIGITS[x_bits]
    return digits if x.dtype in (torch.float32, torch.float64) else min(digits, 2)


def _float32(tensor: Tensor) -> Tensor:
    return _as(tensor, torch.float32).contiguous()


def _int64(tensor: Tensor) -> Tensor:
    return _as(tensor, torch.int64).contiguous()


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # to() takes microseconds to do nothing


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError("weights must be contiguous uint8")
    return tensor


def _writable(tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise ValueError("the destination must be contiguous uint8")
