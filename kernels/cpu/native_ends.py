"""`step.Ends` compiled from C++, and a token drawn from its logits (dense_step.cpp, decode.cpp)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..checks import BYTES, described
from ..sampling import Filters, check_draw
from ..step import Ends
from .native_library import address, check, isa, library_path
from .native_step import Matrix, digits, matrix


class EndsStruct(Structure):
    """`floe_ends`."""

    _fields_ = (
        *(("hidden", c_int64), ("vocabulary", c_int64), ("eps", c_float)),
        *(("embedding", c_void_p), ("norm", c_void_p), ("head", Matrix)),
    )


class Sampling(Structure):
    """`floe_sampling`."""

    _fields_ = (*((name, c_double) for name in ("temperature", "top_p", "min_p", "penalty")), ("top_k", c_int64))

    @classmethod
    def of(cls, filters: Filters) -> Sampling:
        """As the library reads them.

        Raises:
            ValueError: a value outside its range.
        """
        filters.check()
        return cls(filters.temperature, filters.top_p, filters.min_p, filters.penalty, filters.top_k)


class NativeEnds:
    """`step.Ends` in float32.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or are not contiguous on the CPU.
    """

    def __init__(self, ends: Ends) -> None:
        self._function = _function("floe_head", c_int, POINTER(EndsStruct), c_void_p, c_int, c_int, c_void_p)
        self._weights = ends  # they must outlive the addresses
        if ends.embedding.ndim != 2 or not ends.embedding.numel():
            raise ValueError(f"embedding must be float32 of shape (V, H), not {described(ends.embedding)}")
        self.vocabulary, self.hidden = ends.embedding.shape
        self.struct = EndsStruct(
            *(self.hidden, self.vocabulary, ends.eps),
            address("embedding", ends.embedding, (self.vocabulary, self.hidden)),
            address("norm", ends.norm, (self.hidden,)),
            matrix("head", ends.head, self.vocabulary, self.hidden),
        )

    def logits(self, x: Tensor, x_bits: int = 22) -> Tensor:
        """As `step.Ends.logits`; x_bits as for the other operations.

        Raises:
            ValueError: x of another shape, not float32, not contiguous or not on the CPU.
        """
        out = torch.empty(1, self.vocabulary)
        given = address("x", x, (1, self.hidden))
        check(self._function(byref(self.struct), given, digits(x_bits), torch.get_num_threads(), out.data_ptr()))
        return out


def draw(logits: Tensor, filters: Filters, uniform: float, seen: Tensor | None = None) -> int:
    """As `sampling.draw`, from contiguous float32 logits.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here. ValueError: as `sampling.draw`.
    """
    check_draw(logits, uniform, seen)
    function = _function("floe_draw", c_int64, POINTER(Sampling), c_void_p, c_int64, c_void_p, c_double)
    count = logits.numel()
    place = None if seen is None else address("seen", seen, (count,), BYTES)
    token = function(byref(Sampling.of(filters)), address("logits", logits, (count,)), count, place, uniform)
    check(token)
    return token


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    isa()  # the library is there, of this version, and runs the instruction set that was asked for
    function = ctypes.CDLL(str(library_path()))[name]
    function.restype, function.argtypes = result, list(arguments)
    return function
