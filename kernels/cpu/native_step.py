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

from ..checks import CPU, Shape, index
from ..layouts import LinearWeights
from ..step import DenseLayer, Heads, Projection, Stepped
from ..types import X_BITS
from . import native
from .native_library import address

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
        ValueError: weights that do not fit each other, are not float32, or are not contiguous on the CPU; keys and
            values of another form.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._function = _function()
        self._weights = layer  # they must outlive the addresses
        heads, router, hidden = layer.heads, layer.router, layer.before.numel()
        _check_heads(heads)
        queries, keys = heads.queries * heads.dim, heads.keys * heads.dim
        experts = 0 if router is None or not router.weight.ndim else router.weight.shape[0]
        if router is not None and not 1 <= router.top_k <= experts:
            raise ValueError(f"top_k must be from 1 to {experts}, not {router.top_k}")
        each_head = heads.q_norm is not None and heads.q_norm.numel() == heads.dim
        normed = (heads.dim, heads.dim) if each_head else (queries, keys)
        self._layer = Layer(
            *(hidden, heads.queries, heads.keys, heads.dim, heads.window or 0),
            *(experts, 0 if router is None else router.top_k),
            *(each_head, router is not None and router.shares, heads.kept == torch.float16),
            *(layer.eps, heads.scale, inf if heads.clip is None else heads.clip),
            *(address("before", layer.before, (hidden,)), address("after", layer.after, (hidden,))),
            *(_optional("q_norm", heads.q_norm, (normed[0],)), _optional("k_norm", heads.k_norm, (normed[1],))),
            _optional("router", None if router is None else router.weight, (experts, hidden)),
            matrix("qkv", layer.qkv, queries + 2 * keys, hidden),
            matrix("out", layer.out, hidden, queries),
        )
        self._pointer = byref(self._layer)
        self._hidden, self._top_k = hidden, self._layer.top_k
        self._rope, self._stored = (2, heads.dim), (2 * heads.keys, heads.dim)  # of a token
        self.kept = heads.kept
        if self._function(self._pointer, *[None] * 4, 0, 0, 2, 1, *[None] * 4) == -1:  # no position: nothing is touched
            raise ValueError(_ERRORS[-1])

    @property
    def layer(self) -> Layer:
        """For an operation on several."""
        return self._layer

    @property
    def stored(self) -> tuple[Shape, torch.dtype]:
        """Shape and type of a token's keys and values."""
        return self._stored, self.kept

    def __call__(
        self, x: Tensor, added: Tensor | None, rope: Tensor, kv: Tensor, position: int, x_bits: int = 22
    ) -> Stepped:
        """As `step.dense_step`; x_bits as for the other operations.

        Raises:
            ValueError: tensors of other sizes or forms or not in one piece, or a position that kv has no room for.
        """
        shape = kv.shape
        capacity = shape[0] if shape else 0
        index("position", position, capacity)
        stream, hidden = torch.empty(1, self._hidden), torch.empty(1, self._hidden)
        routed: tuple[Tensor, ...] = ()
        places = (None, None)
        if self._top_k:
            routed = (torch.empty(1, self._top_k, dtype=torch.int64), torch.empty(1, self._top_k))
            places = (routed[0].data_ptr(), routed[1].data_ptr())
        code = self._function(
            *(self._pointer, address("x", x, (1, self._hidden)), _optional("added", added, (1, self._hidden))),
            *(address("rope", rope, self._rope), address("kv", kv, (capacity, *self._stored), (self.kept,))),
            *(capacity, position, digits(x_bits), torch.get_num_threads()),
            *(stream.data_ptr(), hidden.data_ptr(), *places),
        )
        if code:
            raise ValueError(_ERRORS[code]) if code in _ERRORS else MemoryError("the CPU kernels got no memory")
        return Stepped(stream, hidden, routed)


def _check_heads(heads: Heads) -> None:
    """Refuse what no attention has; in Python, where no product is too large."""
    if heads.kept not in (torch.float32, torch.float16):
        raise ValueError(f"keys and values must be float32 or float16, not {heads.kept}")
    if heads.keys < 1 or heads.queries < 1 or heads.queries % heads.keys:
        raise ValueError(f"{heads.queries} heads of queries cannot share {heads.keys} heads of keys evenly")
    if heads.dim < 2 or heads.dim % 2:
        raise ValueError(f"a head must have an even number of values, not {heads.dim}")
    if heads.window is not None and not 1 <= heads.window < 1 << 63:
        raise ValueError(f"a window must be at least 1 token, not {heads.window}")
    if heads.clip is not None and not heads.clip > 0:
        raise ValueError(f"queries, keys and values are clipped to a number above 0, not {heads.clip}")
    if (heads.q_norm is None) != (heads.k_norm is None):
        raise ValueError("queries and keys must both have norms, or neither")


def digits(x_bits: int) -> int:
    """8-bit digits that so many bits of float32 x take.

    Raises:
        ValueError: a precision that does not exist.
    """
    if x_bits not in X_BITS:
        raise ValueError(f"x_bits must be one of {', '.join(map(str, X_BITS))}, not {x_bits}")
    return -(-x_bits // 8)


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


def matrix(name: str, projection: Projection, rows: int, columns: int) -> Matrix:
    """A projection of this size as the library sees it.

    Raises:
        ValueError: another size or type, not contiguous, or not on the CPU.
    """
    weight, bias = projection.weight, _optional(f"{name}.bias", projection.bias, (rows,))
    if isinstance(weight, LinearWeights):
        vector = weight.vector
        weight.check(CPU)
        if (weight.q.shape[0], vector.n) != (rows, columns):
            raise ValueError(f"{name} must be of shape {(rows, columns)}, not {(weight.q.shape[0], vector.n)}")
        parts = (part.data_ptr() for part in (weight.q, weight.scale, weight.zero))
        return Matrix(vector.n, vector.group, vector.bits, 0, rows, *parts, bias)
    return Matrix(columns, columns, 32, 0, rows, address(name, weight, (rows, columns)), None, None, bias)


def _optional(name: str, tensor: Tensor | None, shape: Shape) -> int | None:
    return None if tensor is None else address(name, tensor, shape)
