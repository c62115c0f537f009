"""`step.Ends` compiled from C++, and a token drawn from its logits (dense_step.cpp, decode.cpp)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..sampling import Filters
from ..step import Ends
from .native_library import check, isa, library_path
from .native_step import Matrix, address, matrix


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
        """As the library is told of it."""
        return cls(filters.temperature, filters.top_p, filters.min_p, filters.penalty, filters.top_k)


class NativeEnds:
    """`step.Ends` in float32.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or do not lie on the CPU in one piece.
    """

    def __init__(self, ends: Ends) -> None:
        self._function = _function("floe_head", c_int, POINTER(EndsStruct), c_void_p, c_int, c_int, c_void_p)
        self._weights = ends  # they must outlive the addresses
        self.vocabulary, self.hidden = ends.embedding.shape
        self.struct = EndsStruct(
            *(self.hidden, self.vocabulary, ends.eps),
            *(address(ends.embedding, ends.embedding.numel()), address(ends.norm, self.hidden), matrix(ends.head)),
        )
        if self.struct.head.rows != self.vocabulary or self.struct.head.n != self.hidden:
            raise ValueError("a head that does not fit the embedding")

    def logits(self, x: Tensor, x_bits: int = 22) -> Tensor:
        """As `step.Ends.logits`; x_bits as for the other operations.

        Raises:
            ValueError: x of another size, not float32 or not in one piece.
        """
        out = torch.empty(1, self.vocabulary)
        given = address(x, self.hidden)
        check(self._function(byref(self.struct), given, -(-x_bits // 8), torch.get_num_threads(), out.data_ptr()))
        return out


def draw(logits: Tensor, filters: Filters, uniform: float, seen: Tensor | None = None) -> int:
    """As `sampling.draw`, from float32 logits in one piece.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here. ValueError: as that.
    """
    function = _function("floe_draw", c_int64, POINTER(Sampling), c_void_p, c_int64, c_void_p, c_double)
    place = None if seen is None else address(seen, logits.numel(), torch.uint8)
    token = function(byref(Sampling.of(filters)), address(logits, logits.numel()), logits.numel(), place, uniform)
    check(token)
    return token


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    isa()  # the library is there, of this version, and runs the instruction set that was asked for
    function = ctypes.CDLL(str(library_path()))[name]
    function.restype, function.argtypes = result, list(arguments)
    return function
