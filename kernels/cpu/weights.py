"""Weights as the compiled kernels read them: a record of each, made once and kept with the tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..activation import FUNCTIONS
from ..checks import CPU, Dtypes, Shape, require
from ..layouts import VectorLayout
from ..rule import Rule
from ..types import X_BITS
from ..weights import ExpertRows, LinearWeights, Norm, Projection, SignalWeights
from .binding import records

FLOAT32 = (torch.float32,)


@cache
def vector(layout: VectorLayout, float16: torch.dtype) -> Any:
    """`floe_vector`."""
    bfloat16 = int(float16 == torch.bfloat16)
    given = {"n": layout.n, "group": layout.group, "bits": layout.bits, "scale_bytes": layout.scale_bytes}
    return records.vector(**given, bfloat16=bfloat16)


def signal_record(signal: SignalWeights) -> Any:
    """`floe_signal`; the tensors are checked already."""
    if signal.native is None:
        experts, neurons = signal.q.shape[:2]
        row = vector(signal.layout.vector, signal.layout.float16)
        made = records.signal(
            row=row,
            function=FUNCTIONS.index(signal.layout.function),
            q=signal.q,
            scale=signal.scale,
            zero=signal.zero,
            bias=signal.bias,
            experts=experts,
            neurons=neurons,
        )
        object.__setattr__(signal, "native", made)
    return signal.native


def rows_record(rows: ExpertRows) -> Any:
    """`floe_rows`; the tensors are checked already."""
    if rows.native is None:
        layout = rows.layout
        made = records.rows(
            other=vector(layout.other, layout.float16),
            down=vector(layout.down, layout.float16),
            function=FUNCTIONS.index(layout.function),
            biased=layout.biased,
            data=rows.data,
            experts=rows.experts,
            neurons=rows.neurons,
            row_bytes=layout.nbytes,
        )
        object.__setattr__(rows, "native", made)
    return rows.native


def linear_record(weights: LinearWeights, bias: Tensor | None = None) -> Any:
    """`floe_matrix` of codes; the tensors are checked already. Kept where there is no bias."""
    if bias is None and weights.native is not None:
        return weights.native
    q, row = weights.q, vector(weights.vector, torch.float16)
    made = records.matrix(row=row, rows=q.shape[0], q=q, scale=weights.scale, zero=weights.zero, bias=bias)
    if bias is None:
        object.__setattr__(weights, "native", made)
    return made


def projection_record(name: str, projection: Projection, rows: int, columns: int) -> Any:
    """`floe_matrix` of this size.

    Raises:
        ValueError: another size or type, not contiguous, or not on the CPU.
    """
    weight, bias = projection.weight, optional(f"{name}.bias", projection.bias, (rows,))
    if isinstance(weight, LinearWeights):
        weight.check(CPU)
        if (weight.q.shape[0], weight.vector.n) != (rows, columns):
            raise ValueError(f"{name} must be of shape {(rows, columns)}, not {(weight.q.shape[0], weight.vector.n)}")
        return linear_record(weight, bias)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name} must be one matrix, not two planes")
    row = records.vector(n=columns, group=columns, bits=32, bfloat16=0, scale_bytes=2)
    given = required(name, weight, (rows, columns))
    return records.matrix(row=row, rows=rows, q=given, scale=None, zero=None, bias=bias)


def norm_record(name: str, norm: Norm, width: int) -> Any:
    """`floe_norm` of this width.

    Raises:
        ValueError: another size or type, not contiguous, or not on the CPU.
    """
    weight, bias = required(name, norm.weight, (width,)), optional(f"{name}.bias", norm.bias, (width,))
    return records.norm(centred=norm.kind == "layer", weight=weight, bias=bias)


def rule_record(rule: Rule) -> Any:
    """`floe_rule`."""
    return records.rule(drop=rule.drop, major=rule.major, parts=rule.parts, weighed=rule.weighed)


def required(name: str, tensor: Tensor, shape: Shape, dtypes: Dtypes = FLOAT32) -> Tensor:
    """The tensor.

    Raises:
        ValueError: another shape or type, not contiguous, or not on the CPU.
    """
    require(name, tensor, dtypes, shape)
    return tensor


def optional(name: str, tensor: Tensor | None, shape: Shape, dtypes: Dtypes = FLOAT32) -> Tensor | None:
    """As `required`, or None."""
    return None if tensor is None else required(name, tensor, shape, dtypes)


def digits(x_bits: int) -> int:
    """8-bit digits that so many bits of float32 x take.

    Raises:
        ValueError: a precision that does not exist.
    """
    if x_bits not in X_BITS:
        raise ValueError(f"x_bits must be one of {', '.join(map(str, X_BITS))}, not {x_bits}")
    return -(-x_bits // 8)
