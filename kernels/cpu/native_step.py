"""`step.dense_step` compiled from C++ (dense_step.cpp): a layer's weights are handed over once, then a call is a call.

At small sizes that call takes as long as two of the two dozen operations that torch would need.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..layouts import LinearWeights, packed_bytes
from ..step import DenseLayer, Projection, Stepped
from . import native

_ERRORS = {-1: "sizes that do not fit each other", -2: "a position beyond what the store has room for"}


class Matrix(Structure):
    """`floe_matrix`."""

    _fields_ = (
        *(("n", c_int64), ("group", c_int64), ("bits", c_int32), ("bfloat16", c_int32)),
        *(("rows", c_int64), ("q", c_void_p), ("scale", c_void_p), ("zero", c_void_p), ("bias", c_void_p)),
    )


class Layer(Structure):
    """`floe_dense_layer`."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "dim", "window", "experts", "top_k")),
        *((name, c_int32) for name in ("each_head", "shares", "half")),
        *((name, c_float) for name in ("eps", "scale", "clip")),
        *((name, c_void_p) for name in ("before", "after", "q_norm", "k_norm", "router")),
        *(("qkv", Matrix), ("out", Matrix)),
    )


class NativeStep:
    """`step.dense_step` for one layer, in float32.

    Attributes:
        kept: the form of keys and values, float32 or float16.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or do not lie on the CPU in one piece; keys and
            values of another form.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._function = _function()
        if layer.heads.kept not in (torch.float32, torch.float16):
            raise ValueError(f"keys and values in {layer.heads.kept}")
        self._weights = layer  # they must outlive the addresses
        heads, router, hidden = layer.heads, layer.router, layer.before.numel()
        each_head = heads.q_norm is not None and heads.q_norm.numel() == heads.dim
        normed = [heads.dim, heads.dim] if each_head else [heads.queries * heads.dim, heads.keys * heads.dim]
        experts = 0 if router is None else router.weight.shape[0]
        self._layer = Layer(
            *(hidden, heads.queries, heads.keys, heads.dim, heads.window or 0),
            *(experts, 0 if router is None else router.top_k),
            *(each_head, router is not None and router.shares, heads.kept == torch.float16),
            *(layer.eps, heads.scale, inf if heads.clip is None else heads.clip),
            *(address(layer.before, hidden), address(layer.after, hidden)),
            *(_optional(norm, size) for norm, size in zip((heads.q_norm, heads.k_norm), normed, strict=True)),
            _optional(None if router is None else router.weight, experts * hidden),
            *(matrix(layer.qkv), matrix(layer.out)),
        )
        self._pointer = byref(self._layer)
        self._hidden, self._top_k, self._rope = hidden, self._layer.top_k, 2 * heads.dim
        self._stored = 2 * heads.keys * heads.dim  # of a token
        self.kept = heads.kept
        if self._function(self._pointer, *[None] * 4, 0, 0, 2, 1, *[None] * 4) == -1:  # no position: nothing is touched
            raise ValueError(_ERRORS[-1])

    @property
    def layer(self) -> Layer:
        """For an operation on several."""
        return self._layer

    def __call__(
        self, x: Tensor, added: Tensor | None, rope: Tensor, kv: Tensor, position: int, x_bits: int = 22
    ) -> Stepped:
        """As `step.dense_step`; x_bits as for the other operations.

        Raises:
            ValueError: tensors of other sizes or forms or not in one piece, or a position that kv has no room for.
        """
        stream, hidden = torch.empty(1, self._hidden), torch.empty(1, self._hidden)
        routed: tuple[Tensor, ...] = ()
        places = (None, None)
        if self._top_k:
            routed = (torch.empty(1, self._top_k, dtype=torch.int64), torch.empty(1, self._top_k))
            places = (routed[0].data_ptr(), routed[1].data_ptr())
        code = self._function(
            *(self._pointer, address(x, self._hidden), _optional(added, self._hidden), address(rope, self._rope)),
            *(address(kv, kv.numel(), self.kept), kv.numel() // self._stored, position, -(-x_bits // 8)),
            *(torch.get_num_threads(), stream.data_ptr(), hidden.data_ptr(), *places),
        )
        if code:
            raise ValueError(_ERRORS[code]) if code in _ERRORS else MemoryError("the CPU kernels got no memory")
        return Stepped(stream, hidden, routed)


def _function() -> Any:
    native.isa()  # the library is there, of this version, and runs the instruction set that was asked for
    try:
        function = ctypes.CDLL(str(native.library_path())).floe_dense_step
    except AttributeError as error:
        raise native.NativeUnavailableError(f"the compiled CPU kernels are older than this: {error}") from error
    function.restype = c_int
    function.argtypes = [
        *(POINTER(Layer), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    ]
    return function


def matrix(projection: Projection) -> Matrix:
    """A projection as the library is told of it.

    Raises:
        ValueError: see `address`.
    """
    weight, bias = projection.weight, projection.bias
    if isinstance(weight, LinearWeights):
        vector, rows = weight.vector, weight.q.shape[0]
        parts = (
            address(weight.q, rows * packed_bytes(vector.n, vector.bits), torch.uint8),
            *(address(part, rows * vector.groups, torch.float16) for part in (weight.scale, weight.zero)),
        )
        return Matrix(vector.n, vector.group, vector.bits, 0, rows, *parts, _optional(bias, rows))
    rows, columns = weight.shape
    return Matrix(columns, columns, 32, 0, rows, address(weight, rows * columns), None, None, _optional(bias, rows))


def _optional(tensor: Tensor | None, count: int) -> int | None:
    return None if tensor is None else address(tensor, count)


def address(tensor: Tensor, count: int, dtype: torch.dtype = torch.float32) -> int:
    """Where the values lie.

    Raises:
        ValueError: not so many, of another type, or not on the CPU in one piece.
    """
    if tensor.dtype != dtype or tensor.numel() != count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{count} values of {dtype} in one piece on the CPU are wanted, not {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return tensor.data_ptr()
