"""A token's way through all layers as one call of the compiled library (token_step.cpp), or several (decode.cpp).

The interpreter and its lock are not needed meanwhile: a layer costs what its kernels cost, and whatever else the
program does, such as drawing a screen, goes on beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import BYTES, CPU, Shape, index, require
from ..sampling import Filters
from ..step import ExpertLayer
from .native_ends import EndsStruct, NativeEnds, Sampling
from .native_library import RuleStruct, Vector, address, check, isa, library_path, row_vectors, rule_struct, vector
from .native_step import Layer, NativeStep, digits

_STOPPED = -6


class _Experts(Structure):
    _fields_ = (
        *((name, Vector) for name in ("up", "gate", "down")),
        *((name, c_void_p) for name in ("q", "scale", "zero", "rows")),
        *((name, c_int64) for name in ("experts", "neurons", "row_bytes")),
        *((name, c_void_p) for name in ("thresholds", "down_thresholds")),
        ("rule", RuleStruct),
    )


class _Model(Structure):
    _fields_ = (
        *(("layers", c_int64), ("dense", POINTER(POINTER(Layer))), ("experts", POINTER(_Experts))),
        ("ends", EndsStruct),
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


class Draw(NamedTuple):
    """How tokens are drawn.

    Attributes:
        uniforms: a number from [0, 1) for each token that may be drawn. seen: as `sampling.draw` takes it, kept up to
            date. last: tokens that end it.
    """

    filters: Filters
    uniforms: Sequence[float]
    seen: Tensor | None
    last: Sequence[int]


class Drawn(NamedTuple):
    """N tokens.

    Attributes:
        at: when each was drawn, in seconds since the call. chosen: (N, L, K), counts: (N, L, K, 2, 2) as in `Through`,
            of the tokens before them, whose keys and values are there now.
    """

    tokens: list[int]
    at: list[float]
    chosen: Tensor
    counts: Tensor


class NativeToken:
    """The layers of a model, handed over once for a preset.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: experts that are not as the kernels read them.
    """

    def __init__(self, dense: Sequence[NativeStep], experts: Sequence[ExpertLayer]) -> None:
        self._function, self._decode = _functions()
        if not dense or len(dense) != len(experts):
            raise ValueError(f"{len(dense)} dense layers, but experts of {len(experts)}")
        self._kept = dense, experts  # they must outlive the addresses
        self._dense = (POINTER(Layer) * len(dense))(*(ctypes.pointer(step.layer) for step in dense))
        self._experts = (_Experts * len(experts))(*map(_experts, experts))
        one = dense[0].layer
        self._hidden, self._top_k = one.hidden, one.top_k
        self._rope, self._stored, self._form = (2, one.dim), (2 * one.kv_heads, one.dim), dense[0].kept  # of a token
        if any(step.stored != dense[0].stored for step in dense):
            raise ValueError("layers store keys and values in different shapes or types")

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
        require("x", x, (torch.float32,), (1, self._hidden), whole=False)
        stream = x.clone(memory_format=torch.contiguous_format)
        chosen, weights, counts = self._room(layers)
        code = self._function(
            *(layers, self._dense, self._experts, stream.data_ptr()),
            *self._where(rope, self._rope, kv, position),
            *self._how(bits, stop),
            *(chosen.data_ptr(), weights.data_ptr(), counts.data_ptr()),
        )
        if code == _STOPPED:
            return None
        check(code)
        return Through(stream, chosen, weights, counts)

    def decode(
        self,
        ends: NativeEnds,
        token: int,
        rope: Tensor,
        kv: Sequence[Tensor],
        position: int,
        bits: tuple[int, int],
        stop: c_int32,
        how: Draw,
        seconds: float,
    ) -> Drawn | None:
        """As many tokens behind `token`, at `position`, as there are numbers to draw them by, but at least one.

        Fewer if `seconds` have passed before, if one of `how.last` was drawn or if `stop`, looked at in each layer, is
        not 0. None if that was before the first.

        Args:
            rope: (N, 2, D) from that position on. kv: as in the call of one token. bits: the head has the experts'.

        Raises:
            ValueError: as the call of one token; logits that nothing can be drawn from.
        """
        most, layers = len(how.uniforms), len(kv)
        if not most:
            raise ValueError("no number to draw a token by")
        if ends.hidden != self._hidden:
            raise ValueError(f"ends of {ends.hidden} values for layers of {self._hidden}")
        index("token", token, ends.vocabulary)
        if not all(0 <= uniform < 1 for uniform in how.uniforms):
            raise ValueError("tokens are drawn by numbers from 0 up to 1")
        chosen, weights, counts = self._room(most, layers)
        tokens, at = (c_int64 * most)(), (c_double * most)()
        found = self._decode(
            *(byref(_Model(layers, self._dense, self._experts, ends.struct)), byref(Sampling.of(how.filters))),
            *(*self._where(rope, (most, *self._rope), kv, position), *self._how(bits, stop)),
            *(token, most, seconds, (c_int64 * len(how.last))(*how.last), len(how.last)),
            None if how.seen is None else address("seen", how.seen, (ends.vocabulary,), BYTES),
            *((c_double * most)(*how.uniforms), tokens, at),
            *(chosen.data_ptr(), weights.data_ptr(), counts.data_ptr()),
        )
        if found == _STOPPED:
            return None
        check(found)
        return Drawn(tokens[:found], at[:found], chosen[:found], counts[:found])

    def _room(self, *sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        """What is filled for each layer: its experts, their weights, and counts."""
        shape = *sizes, self._top_k
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape), torch.empty(*shape, 2, 2, dtype=torch.int64)

    def _where(self, rope: Tensor, shape: Shape, kv: Sequence[Tensor], position: int) -> tuple[Any, ...]:
        if not 0 < len(kv) <= len(self._dense):
            raise ValueError(f"keys and values of {len(kv)} layers; there are {len(self._dense)}")
        capacity = kv[0].shape[0] if kv[0].ndim else 0
        index("position", position, capacity)
        stores = [address("kv", part, (capacity, *self._stored), (self._form,)) for part in kv]
        return address("rope", rope, shape), (c_void_p * len(kv))(*stores), capacity, position

    def _how(self, bits: tuple[int, int], stop: c_int32) -> tuple[Any, ...]:
        return *(digits(each) for each in bits), torch.get_num_threads(), byref(stop)


_WHERE = c_void_p, POINTER(c_void_p), c_int64, c_int64  # rope, kv, capacity, position
_HOW = c_int, c_int, c_int, POINTER(c_int32)


def _functions() -> tuple[Any, Any]:
    isa()  # the library is there, of this version, and runs the instruction set that was asked for
    library = ctypes.CDLL(str(library_path()))
    step, decode = library.floe_token_step, library.floe_decode
    step.restype, decode.restype = c_int, c_int64
    filled = c_void_p, c_void_p, c_void_p
    step.argtypes = [c_int64, POINTER(POINTER(Layer)), POINTER(_Experts), c_void_p, *_WHERE, *_HOW, *filled]
    decode.argtypes = [
        *(POINTER(_Model), POINTER(Sampling), *_WHERE, *_HOW, c_int64, c_int64, c_double, POINTER(c_int64), c_int64),
        *(c_void_p, POINTER(c_double), POINTER(c_int64), POINTER(c_double), *filled),
    ]
    return step, decode


def _experts(layer: ExpertLayer) -> _Experts:
    up, rows, limits = layer.up, layer.rows, layer.limits
    up.check(CPU)
    rows.check(CPU)
    if (*up.q.shape[:2], up.layout.vector.n) != (rows.experts, rows.neurons, rows.layout.gate.n):
        raise ValueError(f"up of {tuple(up.q.shape[:2])} experts and neurons, but rows of {tuple(rows.data.shape[:2])}")
    return _Experts(
        *(vector(up.layout.vector, up.layout.float16), *row_vectors(rows.layout)),
        *(part.data_ptr() for part in (up.q, up.scale, up.zero, rows.data)),
        *(*rows.data.shape, address("signal", limits.signal, (rows.experts,))),
        None if limits.product is None else address("product", limits.product, (rows.experts,)),
        rule_struct(layer.rule),
    )
