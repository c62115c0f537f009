"""The compiled CPU kernels' library: where it is, what its functions take, and the instruction set that it uses."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ..checks import Dtypes, Shape, require
from ..layouts import RowLayout, VectorLayout
from ..rule import Rule
from ..sampling import NotNumbersError

ISAS = ("avx512", "avx2", "portable")
_VERSION = 9
_SUFFIXES = (".so", ".pyd", ".dll", ".dylib")
OK = 0
_ERRORS = {
    -1: "sizes that no layout has",
    -2: "an index out of range, or offsets that do not rise",
    -3: "a neuron is listed twice in one call",
}
_NOT_NUMBERS = -7


class NativeUnavailableError(RuntimeError):
    """The compiled kernels cannot be used here; the text says why."""


@dataclass(frozen=True, slots=True)
class Isa:
    """The instruction set in use ("avx512", "avx2", "portable"), and why."""

    name: str
    reason: str


class Vector(Structure):
    """`floe_vector`."""

    _fields_ = (("n", c_int64), ("group", c_int64), ("bits", c_int32), ("bfloat16", c_int32))


class RuleStruct(Structure):
    """`floe_rule`."""

    _fields_ = (("drop", c_double), ("major", c_double), ("parts", c_int32), ("weighed", c_int32))


def rule_struct(rule: Rule) -> RuleStruct:
    """A rule as the library takes it."""
    return RuleStruct(rule.drop, rule.major, rule.parts, rule.weighed)


_SIGNATURES = {
    "floe_version": (c_int, ()),
    "floe_isa": (c_char_p, ()),
    "floe_isa_reason": (c_char_p, ()),
    "floe_select_isa": (c_int, (c_char_p,)),
    "floe_select": (
        c_int,
        (
            *(POINTER(RuleStruct), c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        ),
    ),
    "floe_up_gemv": (
        c_int64,
        (
            *(c_void_p, c_int64, POINTER(Vector), c_void_p, c_void_p, c_void_p, c_int64, c_int64),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p),
        ),
    ),
    "floe_up_take": (c_int, (c_int64, c_void_p, c_void_p)),
    "floe_sparse_swiglu": (
        c_int,
        (
            *(c_void_p, c_int64, POINTER(Vector), POINTER(Vector), c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_int64),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p),
            c_void_p,
        ),
    ),
    "floe_moe_step": (
        c_int,
        (
            *(c_void_p, c_int64, POINTER(Vector), c_void_p, c_void_p, c_void_p),
            *(POINTER(Vector), POINTER(Vector), c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p),
        ),
    ),
    "floe_linear": (
        c_int,
        (
            *(c_void_p, c_int64, POINTER(Vector), c_void_p, c_void_p, c_void_p, c_int64),
            *(c_int, c_int, c_void_p),
        ),
    ),
    "floe_expert_swiglu": (
        c_int64,
        (
            *(c_void_p, c_int64, POINTER(Vector), c_void_p, c_void_p, c_void_p),
            *(POINTER(Vector), POINTER(Vector), c_void_p, c_int64, c_int64, c_void_p, c_void_p),
            *(c_int, c_int, c_void_p, POINTER(c_int64)),
        ),
    ),
    "floe_gather_rows": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, c_void_p)),
    "floe_pool_scatter": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, c_void_p)),
    "floe_advise_hugepages": (c_int, (c_void_p, c_int64)),
    "floe_read": (c_int, (c_void_p, c_int64, c_int, POINTER(c_uint64))),
    "floe_read_rows": (c_int, (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int, POINTER(c_uint64))),
}


@cache
def vector(layout: VectorLayout, float16: torch.dtype) -> Vector:
    """A stored vector as the library is told of it."""
    return Vector(layout.n, layout.group, layout.bits, int(float16 == torch.bfloat16))


@cache
def row_vectors(layout: RowLayout) -> tuple[Vector, Vector]:
    """The gate and the down part of a record."""
    return vector(layout.gate, layout.float16), vector(layout.down, layout.float16)


def address(name: str, tensor: torch.Tensor, shape: Shape, dtypes: Dtypes = (torch.float32,)) -> int:
    """Where the values are.

    Raises:
        ValueError: another shape or type, not contiguous, or not on the CPU.
    """
    require(name, tensor, dtypes, shape)
    return tensor.data_ptr()


def check(code: int) -> None:
    """What an operation returned.

    Raises:
        ValueError: sizes or indices that do not fit. NotNumbersError: logits without a largest one. MemoryError: there
            was none left.
    """
    if code >= 0:
        return
    if code == _NOT_NUMBERS:
        raise NotNumbersError
    if code in _ERRORS:
        raise ValueError(_ERRORS[code])
    raise MemoryError("the CPU kernels got no memory")


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
def library() -> ctypes.CDLL:
    """The library, loaded and told which instruction set the environment asks for.

    Raises:
        NativeUnavailableError: it is missing, too old, or cannot run as asked.
    """
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, list(arguments)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"the compiled CPU kernels do not load: {error}") from error
    if (version := loaded.floe_version()) != _VERSION:
        raise NativeUnavailableError(f"{path.name} has interface {version}, not {_VERSION}: install the package again")
    if wanted := os.environ.get("FLOE_CPU_ISA"):
        _select(loaded, wanted)
    return loaded


def _select(loaded: ctypes.CDLL, name: str) -> None:
    if name not in ISAS:
        raise NativeUnavailableError(f"no such instruction set: {name!r}; valid are {', '.join(ISAS)}")
    if loaded.floe_select_isa(name.encode()) != OK:
        raise NativeUnavailableError(f"this CPU cannot run the {name} kernels")


def isa_is_forced() -> bool:
    """Whether FLOE_CPU_ISA asks for an instruction set by name, so that nothing else may run in its place."""
    return bool(os.environ.get("FLOE_CPU_ISA"))


def isa() -> Isa:
    """The instruction set in use.

    Raises:
        NativeUnavailableError: no library, or FLOE_CPU_ISA asks for what this CPU lacks.
    """
    loaded = library()
    return Isa(loaded.floe_isa().decode(), loaded.floe_isa_reason().decode())


def select_isa(name: str | None) -> Isa:
    """Use this instruction set from now on, for tests and benchmarks; None is the best one.

    Raises:
        NativeUnavailableError: it does not exist, or this CPU cannot run it.
    """
    loaded = library()
    if name is None:
        loaded.floe_select_isa(None)
    else:
        _select(loaded, name)
    return isa()
