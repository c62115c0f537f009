"""`step.Ends` compiled from C++, and a token drawn from its logits (cpu/src/dense)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..checks import BYTES, described
from ..sampling import Filters, check_draw
from ..step import ModelEnds
from ..weights import Planes, Projection
from .binding import check, library, records
from .weights import digits, norm_record, optional, projection_record, required


def sampling_record(filters: Filters) -> Any:
    """`floe_sampling`.

    Raises:
        ValueError: a value outside its range.
    """
    filters.check()
    return records.sampling(
        temperature=filters.temperature,
        top_p=filters.top_p,
        min_p=filters.min_p,
        penalty=filters.penalty,
        top_k=filters.top_k,
    )


class NativeEnds:
    """`step.Ends` in float32.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or are not contiguous on the CPU.
    """

    def __init__(self, ends: ModelEnds) -> None:
        self._head = library().head
        if ends.embedding.ndim != 2 or not ends.embedding.numel():
            raise ValueError(f"embedding must be float32 of shape (V, H), not {described(ends.embedding)}")
        self.vocabulary, self.hidden = ends.embedding.shape
        if ends.cap is not None and not 0 < ends.cap < math.inf:
            raise ValueError(f"logits come near a number above 0, not {ends.cap}")
        weight, shape = ends.head.weight, (self.vocabulary, self.hidden)
        planes = weight if isinstance(weight, Planes) else None
        head = ends.head if planes is None else Projection(planes.high, ends.head.bias)
        rest = None if planes is None else projection_record("head.low", Projection(planes.low), *shape)
        self.record: Any = records.ends(
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            eps=ends.eps,
            scale=ends.scale,
            cap=ends.cap or 0.0,
            embedding=required("embedding", ends.embedding, shape),
            norm=norm_record("norm", ends.norm, self.hidden),
            head=projection_record("head", head, *shape),
            rest=rest,
            spread=planes and required("head.spread", planes.spread, (planes.low.vector.groups,)),
        )

    def logits(self, x: Tensor, x_bits: int = 22, reach: float = math.inf) -> Tensor:
        """(T, V): as `step.ModelEnds.logits` of each of T tokens, x (T, H), 4 at most; x_bits as for other operations.

        Args:
            reach: with a head in two planes, those logits are exact that are no further below the largest; others may
                be a little off, but are further below.

        Raises:
            ValueError: x of another shape, not float32, not contiguous or not on the CPU.
        """
        out = torch.empty(len(x), self.vocabulary)
        required("x", x, (len(x), self.hidden))
        check(self._head(self.record, len(x), x, reach, digits(x_bits), torch.get_num_threads(), out))
        return out


def draw(logits: Tensor, filters: Filters, uniform: float, seen: Tensor | None = None) -> int:
    """As `sampling.draw`, from contiguous float32 logits.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here. ValueError: as `sampling.draw`.
    """
    check_draw(logits, uniform, seen)
    count = logits.numel()
    required("logits", logits, (count,))
    optional("seen", seen, (count,), BYTES)
    token = library().draw(sampling_record(filters), logits, count, seen, uniform)
    check(token)
    return token
