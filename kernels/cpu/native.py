"""The CPU kernels compiled from C++: the operations of `reference.py`, close to what the memory can deliver.

The library (`floe.h`) is built with the package where a C++ compiler is at hand. Tensors are handed over by address;
the library checks sizes and indices itself before it touches them. x may be float32, bfloat16 or float16: it is
computed in float32, so results are at least as exact as the reference's.

Environment: FLOE_CPU_ISA = avx512, avx2 or portable forces an instruction set (an error where the CPU lacks it);
FLOE_CPU_LIBRARY names another build of the library.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..layouts import ExpertRows, LinearWeights, PoolRows, RowLayout, UpWeights, VectorLayout
from ..types import Active, Calls

ISAS = ("avx512", "avx2", "portable")
_VERSION = 3
_SUFFIXES = (".so", ".pyd", ".dll", ".dylib")
_OK, _UNSUPPORTED = 0, -5
_ERRORS = {
    -1: "sizes that no layout has",
    -2: "an index out of range, or offsets that do not rise",
    -3: "a neuron is listed twice in one call",
}


class NativeUnavailableError(RuntimeError):
    """The compiled kernels cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Isa:
    """The instruction set in use ("avx512", "avx2", "portable"), and why."""

    name: str
    reason: str


class _Vector(Structure):
    _fields_ = (("n", c_int64), ("group", c_int64), ("bits", c_int32), ("bfloat16", c_int32))


_SIGNATURES = {
    "floe_version": (c_int, ()),
    "floe_isa": (c_char_p, ()),
    "floe_isa_reason": (c_char_p, ()),
    "floe_select_isa": (c_int, (c_char_p,)),
    "floe_up_gemv": (
        c_int64,
        (
            *(c_void_p, c_int64, POINTER(_Vector), c_void_p, c_void_p, c_void_p, c_int64, c_int64),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p),
        ),
    ),
    "floe_up_take": (c_int, (c_int64, c_void_p, c_void_p)),
    "floe_sparse_swiglu": (
        c_int,
        (
            *(c_void_p, c_int64, POINTER(_Vector), POINTER(_Vector), c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_int64),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p),
            c_void_p,
        ),
    ),
    "floe_linear": (
        c_int,
        (
            *(c_void_p, c_int64, POINTER(_Vector), c_void_p, c_void_p, c_void_p, c_int64),
            *(c_int, c_int, c_void_p),
        ),
    ),
    "floe_expert_swiglu": (
        c_int64,
        (
            *(c_void_p, c_int64, POINTER(_Vector), c_void_p, c_void_p, c_void_p),
            *(POINTER(_Vector), POINTER(_Vector), c_void_p, c_int64, c_int64, c_float, c_float, c_int, c_int),
            *(c_void_p, POINTER(c_int64)),
        ),
    ),
    "floe_gather_rows": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, c_void_p)),
    "floe_pool_scatter": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, c_void_p)),
    "floe_advise_hugepages": (c_int, (c_void_p, c_int64)),
    "floe_read": (c_int, (c_void_p, c_int64, c_int, POINTER(c_uint64))),
    "floe_read_rows": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, POINTER(c_uint64))),
}


def library_path() -> Path:
    """Where the compiled library lies.

    Raises:
        NativeUnavailableError: it was not built.
    """
    if named := os.environ.get("FLOE_CPU_LIBRARY"):
        return Path(named)
    for path in sorted(Path(__file__).parent.glob("_floe*")):
        if path.suffix in _SUFFIXES:
            return path
    raise NativeUnavailableError("the CPU kernels were not compiled (no C++ compiler when the package was installed)")


@cache
def _library() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"the compiled CPU kernels do not load: {error}") from error
    if (version := library.floe_version()) != _VERSION:
        raise NativeUnavailableError(f"{path.name} has interface {version}, not {_VERSION}: install the package again")
    if wanted := os.environ.get("FLOE_CPU_ISA"):
        _select(library, wanted)
    return library


def _select(library: ctypes.CDLL, name: str) -> None:
    if name not in ISAS:
        raise NativeUnavailableError(f"no such instruction set: {name!r}; valid are {', '.join(ISAS)}")
    if library.floe_select_isa(name.encode()) != _OK:
        raise NativeUnavailableError(f"this CPU cannot run the {name} kernels")


def isa_is_forced() -> bool:
    """Whether FLOE_CPU_ISA asks for an instruction set by name, so that nothing else may run in its place."""
    return bool(os.environ.get("FLOE_CPU_ISA"))


def isa() -> Isa:
    """The instruction set in use.

    Raises:
        NativeUnavailableError: no library, or FLOE_CPU_ISA asks for what this CPU lacks.
    """
    library = _library()
    return Isa(library.floe_isa().decode(), library.floe_isa_reason().decode())


def select_isa(name: str | None) -> Isa:
    """Use this instruction set from now on, for tests and benchmarks; None is the best one.

    Raises:
        NativeUnavailableError: it does not exist, or this CPU cannot run it.
    """
    library = _library()
    if name is None:
        library.floe_select_isa(None)
    else:
        _select(library, name)
    return isa()


def up_gemv(x: Tensor, up: UpWeights, calls: Calls, thresholds: Tensor, exact: bool = True) -> Active:
    """v = up_e · x for every call, keeping the neurons with |v| >= thresholds[call]; ascending within a call.

    Raises:
        ValueError: sizes or indices that do not fit.
    """
    library = _library()
    x32, tokens, experts = _float32(x), _int64(calls.tokens), _int64(calls.experts)
    limits, offsets = _float32(thresholds), torch.empty(calls.experts.numel() + 1, dtype=torch.int64)
    q, scale, zero = _bytes(up.q), up.scale.contiguous(), up.zero.contiguous()
    total = library.floe_up_gemv(
        *(x32.data_ptr(), x32.shape[0], _vector(up.layout.vector, up.layout.float16)),
        *(q.data_ptr(), scale.data_ptr(), zero.data_ptr(), q.shape[0], q.shape[1]),
        *(experts.numel(), tokens.data_ptr(), experts.data_ptr(), limits.data_ptr()),
        *(_digits(x, exact), torch.get_num_threads(), offsets.data_ptr()),
    )
    _check(total)
    # They wait in the library, in this thread, until there are tensors of the right size for them.
    neurons = torch.empty(total, dtype=torch.int64)
    values = torch.empty(total, dtype=torch.float32)
    _check(library.floe_up_take(total, neurons.data_ptr(), values.data_ptr()))
    return Active(offsets, neurons, _as(values, x.dtype))


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows | PoolRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    exact: bool = True,
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
    library = _library()
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
    gate, down = _row_vectors(rows.layout)
    y, kept = torch.empty(x32.shape), torch.empty(experts.numel(), dtype=torch.int64)
    _check(
        library.floe_sparse_swiglu(
            *(x32.data_ptr(), x32.shape[0], gate, down, data.data_ptr(), *shape, rows.layout.nbytes),
            *((None, 0) if slots is None else (slots.data_ptr(), data.shape[0])),
            *(experts.numel(), tokens.data_ptr(), experts.data_ptr(), weights.data_ptr()),
            *(offsets.data_ptr(), neurons.data_ptr(), values.data_ptr()),
            *(None if limits is None else limits.data_ptr(), _digits(x, exact), torch.get_num_threads()),
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
    exact: bool = True,
) -> tuple[Tensor, Tensor]:
    """`up_gemv`, then `sparse_swiglu` of what it found: y (B, H) and counts (P, 2) int64.

    counts: how many neurons of every call were active, and how many of those reached the second threshold.

    Raises:
        ValueError: sizes or indices that do not fit, or an active neuron that a pool does not hold.
    """
    active = up_gemv(x, up, calls, thresholds, exact)
    y, kept = sparse_swiglu(x, rows, calls, active, down_thresholds, exact)
    return y, torch.stack([active.offsets.diff(), kept], dim=1)


def expert_swiglu(
    x: Tensor,
    up: UpWeights,
    rows: ExpertRows,
    expert: int,
    threshold: float,
    down_threshold: float = 0.0,
    exact: bool = True,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens: x (B, H) -> y (B, H).

    Also, over all tokens, how many neurons were active and how many of those reached the second threshold.

    Raises:
        ValueError: sizes that do not fit.
    """
    x32, gate_down = _float32(x), _row_vectors(rows.layout)
    q, data = _bytes(up.q[expert]), _bytes(rows.data[expert])
    scale, zero = up.scale[expert].contiguous(), up.zero[expert].contiguous()
    y, kept = torch.empty(x32.shape), c_int64()
    active = _library().floe_expert_swiglu(
        *(x32.data_ptr(), x32.shape[0], _vector(up.layout.vector, up.layout.float16)),
        *(q.data_ptr(), scale.data_ptr(), zero.data_ptr()),
        *(*gate_down, data.data_ptr(), *data.shape, threshold, down_threshold),
        *(_digits(x, exact), torch.get_num_threads(), y.data_ptr(), byref(kept)),
    )
    _check(active)
    return _as(y, x.dtype), active, kept.value


def linear(x: Tensor, weights: LinearWeights, exact: bool = True) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N).

    Raises:
        ValueError: sizes that do not fit.
    """
    x32, q = _float32(x), _bytes(weights.q)
    scale, zero = weights.scale.contiguous(), weights.zero.contiguous()
    y = torch.empty(x32.shape[0], q.shape[0])
    _check(
        _library().floe_linear(
            *(x32.data_ptr(), x32.shape[0], _vector(weights.vector, torch.float16)),
            *(q.data_ptr(), scale.data_ptr(), zero.data_ptr(), q.shape[0]),
            *(_digits(x, exact), torch.get_num_threads(), y.data_ptr()),
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
    _check(
        _library().floe_gather_rows(
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
    _check(
        _library().floe_pool_scatter(
            *(pool.data_ptr(), *pool.shape, index.data_ptr(), index.numel()),
            *(torch.get_num_threads(), source.data_ptr()),
        )
    )


def advise_hugepages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a large tensor before it is filled; False where the system has none to give."""
    return _library().floe_advise_hugepages(tensor.data_ptr(), tensor.nbytes) == _OK


def read(tensor: Tensor) -> int:
    """Read a contiguous tensor as fast as plain loads go, for a benchmark's floor; returns a checksum."""
    checksum = c_uint64()
    _check(_library().floe_read(tensor.data_ptr(), tensor.nbytes, torch.get_num_threads(), byref(checksum)))
    return checksum.value


def read_rows(rows: Tensor, index: Tensor) -> int:
    """Read the rows `index` of (N, nbytes) uint8 likewise."""
    checksum = c_uint64()
    _check(
        _library().floe_read_rows(
            *(rows.data_ptr(), *rows.shape, index.data_ptr(), index.numel()),
            *(torch.get_num_threads(), byref(checksum)),
        )
    )
    return checksum.value


@cache
def _vector(layout: VectorLayout, float16: torch.dtype) -> _Vector:
    return _Vector(layout.n, layout.group, layout.bits, int(float16 == torch.bfloat16))


@cache
def _row_vectors(layout: RowLayout) -> tuple[_Vector, _Vector]:
    return _vector(layout.gate, layout.float16), _vector(layout.down, layout.float16)


def _digits(x: Tensor, exact: bool) -> int:
    """8-bit digits that x is cut into: three hold about 22 bits, two hold 15, more than 16-bit floats have."""
    return 3 if exact and x.dtype in (torch.float32, torch.float64) else 2


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


def _check(code: int) -> None:
    if code >= 0:
        return
    if code in _ERRORS:
        raise ValueError(_ERRORS[code])
    raise MemoryError("the CPU kernels got no memory")
