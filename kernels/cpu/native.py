"""The CPU kernels compiled from C++: the operations of `reference.py`, at close to memory speed.

The library (`floe.h` and its like) is built with the package where a C++ compiler is installed. Tensors are handed
over by address, so each operation checks its arguments first (`arguments.py`); the library checks indices. x may be
float32, bfloat16 or float16: it is computed in float32, so results are at least as exact as the reference's.

Environment: FLOE_CPU_ISA = avx512, avx2 or portable forces an instruction set (an error where the CPU lacks it);
FLOE_CPU_LIBRARY names another build of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import arguments, reference
from ..checks import BYTES, CPU, INDICES, described, indices, require
from ..rule import Rule
from ..types import Active, Calls, Limits, Work, digits_of
from ..weights import ExpertRows, LinearWeights, SignalWeights
from .binding import (
    ISAS,
    Isa,
    NativeUnavailableError,
    check,
    codes,
    isa,
    isa_is_forced,
    library,
    library_path,
    records,
    select_isa,
)
from .weights import linear_record, rows_record, rule_record, signal_record

__all__ = [
    "ISAS",
    "Isa",
    "NativeUnavailableError",
    "advise_hugepages",
    "expert_swiglu",
    "experts_swiglu",
    "gather_rows",
    "isa",
    "isa_is_forced",
    "library_path",
    "linear",
    "moe_step",
    "pool_scatter",
    "read",
    "read_rows",
    "select",
    "select_isa",
    "signal_gemv",
    "sparse_swiglu",
]


def select(index: Tensor, weights: Tensor, limits: Limits, rule: Rule) -> Work:
    """Apply a rule to a router's choice, index and weights (B, K); see `kernels.select`.

    Raises:
        ValueError: tensors that do not fit, or an expert out of range.
    """
    arguments.select(index, weights, limits, rule)
    if limits.least is not None:  # compiled code has them from the rule
        return reference.select(index, weights, limits, rule)
    numbers, shares = _whole(index), float32(weights)
    count = index.numel() * rule.parts
    tokens, experts = torch.empty((2, count), dtype=torch.int64).unbind()  # iterating takes twice as long
    own, thresholds, *others = torch.empty(
        (2 + (limits.product is not None) + (limits.late is not None), count)
    ).unbind()
    products = None if limits.product is None else others.pop(0)
    late = None if limits.late is None else others.pop(0)
    calls = records.calls(
        count=count, token=tokens, expert=experts, weight=own, threshold=thresholds, product=products, late=late
    )
    code = library().select(*_ruled(limits, rule), *index.shape, numbers, shares, calls)
    if code < 0:
        indices("expert", index.flatten(), limits.signal.numel() // rule.parts)
        check(code)
    return Work(Calls(tokens, experts, _as(own, weights.dtype)), thresholds, products, late)


def signal_gemv(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int = 22) -> Active:
    """v = s(signal_e · x) for every call, keeping the neurons with |v| >= thresholds[call]; ascending within a call.

    Raises:
        ValueError: tensors or indices that do not fit.
    """
    arguments.signal_gemv(x, signal, calls, thresholds, x_bits)
    loaded, x32 = library(), float32(x)
    given = _calls(calls, thresholds, None)
    offsets = torch.empty(given.count + 1, dtype=torch.int64)
    threads = torch.get_num_threads()
    total = loaded.signal_gemv(x32, x32.shape[0], signal_record(signal), given, digits_of(x, x_bits), threads, offsets)
    if total < 0:
        arguments.calls_in_range(x.shape[0], calls, signal.q.shape[0])
        check(total)
    # The library stores them per thread until tensors of the right size exist.
    neurons = torch.empty(total, dtype=torch.int32)
    values = torch.empty(total, dtype=torch.float32)
    check(loaded.signal_take(total, neurons, values))
    return Active(offsets, neurons.long(), _as(values, x.dtype))


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """y[token] += weight · sum_n o(other_n · x) v_n down_n over the active neurons n of every call.

    Args:
        down_thresholds: (P,) leaves out neurons with |o(other_n · x) v_n| below it, and does not read their down
            columns.

    Returns:
        y (B, H), and how many neurons of every call reached the second threshold (P,) int64.

    Raises:
        ValueError: tensors or indices that do not fit, or a neuron twice within one call.
    """
    arguments.sparse_swiglu(x, rows, calls, active, down_thresholds, x_bits)
    x32, given = float32(x), _calls(calls, None, down_thresholds)
    offsets, neurons, values = _whole(active.offsets), _whole(active.neurons), float32(active.values)
    if neurons.dtype != torch.int32:
        indices("neuron", neurons, rows.neurons)  # before they are cut to 32 bits
        neurons = neurons.int()
    if int(offsets[-1]) != neurons.numel():
        arguments.active_in_range(rows, active)
    found = records.active(offsets=offsets, neurons=neurons, values=values)
    y, kept = torch.empty(x32.shape), torch.empty(given.count, dtype=torch.int64)
    digits, threads = digits_of(x, x_bits), torch.get_num_threads()
    code = library().sparse_swiglu(x32, x32.shape[0], rows_record(rows), given, found, digits, threads, y, kept)
    if code < 0:
        arguments.calls_in_range(x.shape[0], calls, rows.experts)
        arguments.active_in_range(rows, active)
        check(code)
    return _as(y, x.dtype), kept


def moe_step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`signal_gemv`, then `sparse_swiglu` of what it found: y (B, H) and counts (P, 2) int64.

    counts: how many neurons of every call were active, and how many of those reached the second threshold.

    Raises:
        ValueError: tensors or indices that do not fit.
    """
    return _by_calls(library().moe_step, x, signal, rows, calls, thresholds, down_thresholds, x_bits)


def experts_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`moe_step` expert by expert: faster where many tokens share an expert.

    Raises:
        ValueError: tensors or indices that do not fit.
    """
    return _by_calls(library().experts_swiglu, x, signal, rows, calls, thresholds, down_thresholds, x_bits)


def _by_calls(
    operation: Callable[..., int],
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None,
    x_bits: int,
) -> tuple[Tensor, Tensor]:
    arguments.moe_step(x, signal, rows, calls, thresholds, down_thresholds, x_bits)
    x32, given = float32(x), _calls(calls, thresholds, down_thresholds)
    y, counts = torch.empty(x32.shape), torch.empty((given.count, 2), dtype=torch.int64)
    digits, threads = digits_of(x, x_bits), torch.get_num_threads()
    weights = signal_record(signal), rows_record(rows)
    code = operation(x32, x32.shape[0], *weights, given, digits, threads, y, counts)
    if code < 0:
        arguments.calls_in_range(x.shape[0], calls, signal.q.shape[0])
        check(code)
    return _as(y, x.dtype), counts


def expert_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens: x (B, H), thresholds (B,) of each token -> y (B, H).

    Also, over all tokens, how many neurons were active and how many of those reached the second threshold.

    Raises:
        ValueError: tensors that do not fit, or no such expert.
    """
    arguments.expert_swiglu(x, signal, rows, expert, thresholds, down_thresholds, x_bits)
    x32, limits = float32(x), float32(thresholds)
    down_limits = None if down_thresholds is None else float32(down_thresholds)
    y, counts = torch.empty(x32.shape), torch.empty(2, dtype=torch.int64)
    weights, digits, threads = (signal_record(signal), rows_record(rows)), digits_of(x, x_bits), torch.get_num_threads()
    check(library().expert_swiglu(x32, x32.shape[0], *weights, expert, limits, down_limits, digits, threads, y, counts))
    active, kept = counts.tolist()
    return _as(y, x.dtype), active, kept


def linear(x: Tensor, weights: LinearWeights, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N).

    Raises:
        ValueError: tensors that do not fit.
    """
    arguments.linear(x, weights, x_bits)
    x32 = float32(x)
    y = torch.empty(x32.shape[0], weights.q.shape[0])
    digits, threads = digits_of(x, x_bits), torch.get_num_threads()
    check(library().linear(x32, x32.shape[0], linear_record(weights), digits, threads, y))
    return _as(y, x.dtype)


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in the order given, into out (N, layout.nbytes) uint8.

    Raises:
        ValueError: an index out of range, or a buffer that does not fit.
    """
    arguments.gather_rows(rows, expert, neurons, out, CPU)
    source, index = rows.data[expert], _whole(neurons)
    code = library().gather_rows(source, *source.shape, index, index.numel(), torch.get_num_threads(), out)
    if code < 0:
        indices("neuron", neurons, rows.neurons)
        check(code)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) uint8 into pool[slots], pool (S, nbytes) uint8; the inverse of a gather.

    Raises:
        ValueError: a slot out of range or named twice, or records that do not fit the pool.
    """
    arguments.pool_scatter(pool, slots, records, CPU)
    index = _whole(slots)
    code = library().pool_scatter(pool, *pool.shape, index, index.numel(), torch.get_num_threads(), records)
    if code < 0:
        arguments.slots_in_range(slots, pool.shape[0])
        check(code)


def advise_hugepages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a large tensor before it is filled; False where the system has none to give.

    Raises:
        ValueError: it is not contiguous, or not on the CPU.
    """
    require("tensor", tensor, (tensor.dtype,), tuple(tensor.shape))
    return library().advise_hugepages(tensor, tensor.nbytes) == codes.OK


def read(tensor: Tensor) -> int:
    """Read a tensor as fast as plain loads go, for a benchmark's floor; returns a checksum.

    Raises:
        ValueError: it is not contiguous, or not on the CPU.
    """
    require("tensor", tensor, (tensor.dtype,), tuple(tensor.shape))
    checksum = np.zeros(1, np.uint64)
    check(library().read(tensor, tensor.nbytes, torch.get_num_threads(), checksum))
    return int(checksum[0])


def read_rows(rows: Tensor, index: Tensor) -> int:
    """Read the rows `index` of (N, nbytes) uint8 likewise.

    Raises:
        ValueError: tensors that do not fit, or an index out of range.
    """
    if rows.ndim != 2:
        raise ValueError(f"rows must be uint8 of shape (N, nbytes), not {described(rows)}")
    require("rows", rows, BYTES, tuple(rows.shape))
    require("index", index, INDICES, (index.numel(),))
    checksum = np.zeros(1, np.uint64)
    check(library().read_rows(rows, *rows.shape, index, index.numel(), torch.get_num_threads(), checksum))
    return int(checksum[0])


def _ruled(limits: Limits, rule: Rule) -> tuple[Any, Any]:
    """`floe_rule` and `floe_limits`, kept with the limits; checked already."""
    if (native := limits.native) is None or native[0] is not rule:
        signal, product, late = limits.signal, limits.product, limits.late
        made = records.limits(experts=signal.numel(), signal=signal, product=product, late=late)
        native = rule, rule_record(rule), made
        object.__setattr__(limits, "native", native)
    return native[1:]


def _calls(calls: Calls, thresholds: Tensor | None, products: Tensor | None) -> Any:
    """`floe_calls`; checked already."""
    return records.calls(
        count=calls.experts.numel(),
        token=_whole(calls.tokens),
        expert=_whole(calls.experts),
        weight=float32(calls.weights),
        threshold=None if thresholds is None else float32(thresholds),
        product=None if products is None else float32(products),
        late=None,
    )


def float32(tensor: Tensor) -> Tensor:
    """Checked already, but for its device: where x lies, so do the others."""
    if not tensor.is_cpu:
        raise ValueError(f"the compiled kernels take tensors on {CPU}, not on {tensor.device}")
    return (tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)).contiguous()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)  # to() takes microseconds to do nothing
