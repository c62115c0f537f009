"""A token's way through all layers as one call of the compiled library (token_step.cpp).

The interpreter and its lock are not needed meanwhile: a layer costs what its kernels cost, and whatever else the
program does, such as drawing a screen, goes on beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..step import ExpertLayer
from .native_library import Vector, check, isa, library_path, row_vectors, vector
from .native_step import Layer, NativeStep

_STOPPED = -6


class _Experts(Structure):
    _fields_ = (
        *((name, Vector) for name in ("up", "gate", "down")),
        *((name, c_void_p) for name in ("q", "scale", "zero", "rows")),
        *((name, c_int64) for name in ("experts", "neurons", "row_bytes")),
        *((name, c_void_p) for name in ("thresholds", "down_thresholds")),
        *(("drop", c_double), ("major", c_double), ("parts", c_int32), ("weighed", c_int32)),
    )


class Through(NamedTuple):
    """What came of a token.

    Attributes:
        stream: (1, H) the residual stream behind the last layer. chosen, weights: (L, K) of each layer's router.
        counts: (L, K, 2, 2) of each expert's halves, or of the whole in the first place, how many neurons were active
            and how many of those reached the second threshold; -1 for what was left out whole.
    """

    stream: Tensor
    chosen: Tensor
    weights: Tensor
    counts: Tensor


class NativeToken:
    """The layers of a model, handed over once for a preset.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: experts that are not as the kernels read them.
    """

    def __init__(self, dense: Sequence[NativeStep], experts: Sequence[ExpertLayer]) -> None:
        self._function = _function()
        self._kept = dense, experts  # they must outlive the addresses
        self._dense = (POINTER(Layer) * len(dense))(*(ctypes.pointer(step.layer) for step in dense))
        self._experts = (_Experts * len(experts))(*map(_experts, experts))
        one = dense[0].layer
        self._hidden, self._top_k, self._rope = one.hidden, one.top_k, 2 * one.dim
        self._stored = 2 * one.kv_heads * one.dim  # of a token

    def __call__(
        self, x: Tensor, rope: Tensor, kv: Sequence[Tensor], position: int, bits: tuple[int, int], stop: c_int32
    ) -> Through | None:
        """One token; None where `stop`, looked at in each layer, was not 0.

        Args:
            x: (1, H) float32 its embedding. rope, kv, position: as `step.dense_step` takes them; kv of each of the
                first L layers, which are all that it goes through.
            bits: how much of x's precision the dense part and the experts keep (`kernels.X_BITS`).

        Raises:
            ValueError: sizes that do not fit each other, or a position that kv has no room for.
        """
        layers = len(kv)
        stream = x.clone(memory_format=torch.contiguous_format)
        chosen = torch.empty(layers, self._top_k, dtype=torch.int64)
        weights = torch.empty(layers, self._top_k)
        counts = torch.empty(layers, self._top_k, 2, 2, dtype=torch.int64)
        if stream.shape != (1, self._hidden) or stream.dtype != torch.float32 or not 0 < layers <= len(self._dense):
            raise ValueError(f"x of shape {tuple(x.shape)} and {x.dtype}, and keys and values of {layers} layers")
        first = kv[0]
        if first[:1].numel() != self._stored or rope.numel() != self._rope:
            raise ValueError(f"keys and values of {tuple(first.shape)}, rope of {tuple(rope.shape)}")
        for part in (rope, *kv):
            if (
                part.dtype != torch.float32
                or not part.is_contiguous()
                or (part is not rope and part.shape != first.shape)
            ):
                raise ValueError("rope, keys and values are not float32 of one size in one piece each")
        code = self._function(
            *(layers, self._dense, self._experts, stream.data_ptr(), rope.data_ptr()),
            *((c_void_p * layers)(*(part.data_ptr() for part in kv)), len(first), position),
            *(*(-(-each // 8) for each in bits), torch.get_num_threads(), ctypes.byref(stop)),
            *(chosen.data_ptr(), weights.data_ptr(), counts.data_ptr()),
        )
        if code == _STOPPED:
            return None
        check(code)
        return Through(stream, chosen, weights, counts)


def _function() -> Any:
    isa()  # the library is there, of this version, and runs the instruction set that was asked for
    function = ctypes.CDLL(str(library_path())).floe_token_step
    function.restype = c_int
    function.argtypes = [
        *(c_int64, POINTER(POINTER(Layer)), POINTER(_Experts), c_void_p, c_void_p, POINTER(c_void_p)),
        *(c_int64, c_int64, c_int, c_int, c_int, POINTER(c_int32), c_void_p, c_void_p, c_void_p),
    ]
    return function


def _experts(layer: ExpertLayer) -> _Experts:
    up, rows, products = layer.up, layer.rows, layer.products
    limits = [layer.thresholds] if products is None else [layer.thresholds, products]
    whole = up.q, up.scale, up.zero, rows.data, *limits
    if any(not part.is_cpu or not part.is_contiguous() for part in whole):
        raise ValueError("experts do not lie on the CPU in one piece")
    each = all(limit.dtype == torch.float32 and limit.shape == rows.data.shape[:1] for limit in limits)
    if not each or up.q.shape[:2] != rows.data.shape[:2]:
        raise ValueError("experts whose parts do not fit each other")
    return _Experts(
        *(vector(up.layout.vector, up.layout.float16), *row_vectors(rows.layout)),
        *(part.data_ptr() for part in (up.q, up.scale, up.zero, rows.data)),
        *(*rows.data.shape[:2], rows.layout.nbytes),
        *(layer.thresholds.data_ptr(), None if products is None else products.data_ptr()),
        *(layer.drop, layer.major, layer.parts, layer.weighed),
    )
