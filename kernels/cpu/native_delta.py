"""`mixers.delta.delta_rule` of many tokens, compiled from C++ (delta_prompt.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from ..checks import require
from ..mixers.delta import CHUNK, Delta
from .binding import NativeUnavailableError, addresses_of, check, library
from .native_step import delta_record
from .weights import FLOAT32, required


def computes(x: Tensor) -> bool:
    """Whether the compiled kernels compute with such numbers here."""
    if not x.is_cpu or x.dtype != torch.float32:
        return False
    try:
        library()
    except NativeUnavailableError:
        return False
    return True


def delta_rule(
    qkv: Tensor,
    gates: Tensor,
    before: Tensor,
    delta: Delta,
    after: Tensor,
    along: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:
    """As `mixers.delta.delta_rule`, in float32.

    Args:
        along: where the states behind the first tokens go, by their number: multiples of `CHUNK`.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: tensors of another size or form.
    """
    tokens, (projected, queries) = len(qkv), delta.sizes
    require("qkv", qkv, FLOAT32, (tokens, projected), whole=False)
    require("gates", gates, FLOAT32, (tokens, 2 * delta.heads), whole=False)
    if qkv.stride(1) != 1 or gates.stride(1) != 1:
        raise ValueError("each token's numbers must lie next to each other")
    kept = [along.get(end) for end in range(CHUNK, tokens, CHUNK)]
    if len(along) != sum(one is not None for one in kept):
        raise ValueError(f"states are behind multiples of {CHUNK} of {tokens} tokens, not {list(along)}")
    for one in (before, after, *(along.values())):
        required("state", one, (delta.state,))
    out = torch.empty(tokens, queries)
    sizes = delta.heads, delta.shared, delta.value_dim, delta.key_dim**-0.5, tokens
    given = qkv, qkv.stride(0), gates, gates.stride(0), before, addresses_of(kept) if kept else None
    weight, threads = delta.gates.weight, torch.get_num_threads()
    record = delta_record(delta, weight.shape[-1] if isinstance(weight, Tensor) else 0)
    check(library().delta_rule(record, *sizes, *given, threads, after, out))
    return out
