"""`step.dense_step` compiled from C++ (dense_step.cpp): a layer's weights are passed once, not in every call.

At small sizes that call takes as long as two of the two dozen operations that torch would need.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from ..checks import Shape, index, require
from ..entries import CODES
from ..step import DenseLayer, Heads, Stepped
from .binding import check, codes, library, records
from .weights import FLOAT32, digits, optional, projection_record, required

_STORED = {torch.float32: codes.KEPT_FLOAT, torch.float16: codes.KEPT_HALF, CODES: codes.KEPT_CODES}


class NativeStep:
    """`step.dense_step` for one layer, in float32.

    Attributes:
        kept: the form of keys and values, one of `_STORED`. layer: its record, for an operation on several.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or are not contiguous on the CPU; keys and
            values of another form.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._step = library().dense_step
        heads, router, hidden = layer.heads, layer.router, layer.input_layernorm.numel()
        _check_heads(heads)
        queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        experts = 0 if router is None or not router.weight.ndim else router.weight.shape[0]
        if router is not None and not 1 <= router.top_k <= experts:
            raise ValueError(f"top_k must be from 1 to {experts}, not {router.top_k}")
        each_head = heads.q_norm is not None and heads.q_norm.numel() == heads.head_dim
        normed = (heads.head_dim, heads.head_dim) if each_head else (queries, keys)
        self.layer: Any = records.dense_layer(
            hidden=hidden,
            heads=heads.num_heads,
            kv_heads=heads.num_kv_heads,
            dim=heads.head_dim,
            window=heads.window or 0,
            experts=experts,
            top_k=0 if router is None else router.top_k,
            each_head=each_head,
            shares=router is not None and router.norm_topk_prob,
            stored=_STORED[heads.cache_dtype],
            eps=layer.eps,
            scale=heads.scale,
            clip=inf if heads.clip is None else heads.clip,
            before=required("input_layernorm", layer.input_layernorm, (hidden,)),
            after=required("post_attention_layernorm", layer.post_attention_layernorm, (hidden,)),
            q_norm=optional("q_norm", heads.q_norm, (normed[0],)),
            k_norm=optional("k_norm", heads.k_norm, (normed[1],)),
            router=optional("router", None if router is None else router.weight, (experts, hidden)),
            qkv=projection_record("qkv", layer.qkv, queries + 2 * keys, hidden),
            out=projection_record("out", layer.out, hidden, queries),
        )
        check(library().dense_check(self.layer))
        self._hidden, self._top_k = hidden, self.layer.top_k
        self._rope, self._stored = (2, heads.head_dim), heads.entry  # of a token
        self.kept = heads.cache_dtype
        self._scores = None if router is None else router.scores
        if self._scores is not None:
            require("scores", self._scores, FLOAT32, (len(self._scores), experts))

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
        capacity = kv.shape[0] if kv.shape else 0
        index("position", position, capacity)
        stream, hidden = torch.empty(1, self._hidden), torch.empty(1, self._hidden)
        routed: tuple[Tensor, ...] = ()
        chosen, weights = None, None
        if self._top_k:
            routed = chosen, weights = torch.empty(1, self._top_k, dtype=torch.int64), torch.empty(1, self._top_k)
        require("x", x, FLOAT32, (1, self._hidden))
        if added is not None:
            require("added", added, FLOAT32, (1, self._hidden))
        require("rope", rope, FLOAT32, self._rope)
        require("kv", kv, (self.kept,), (capacity, *self._stored))
        place = records.place(rope=rope, capacity=capacity, position=position)
        filled = records.routed(stream=stream, hidden=hidden, index=chosen, weights=weights, scores=self._scores)
        check(self._step(self.layer, x, added, kv, place, digits(x_bits), torch.get_num_threads(), filled))
        return Stepped(stream, hidden, routed)


def _check_heads(heads: Heads) -> None:
    """Refuse impossible heads; in Python, where no product overflows."""
    if heads.cache_dtype not in _STORED:
        raise ValueError(f"keys and values must be {' or '.join(map(str, _STORED))}, not {heads.cache_dtype}")
    if heads.num_kv_heads < 1 or heads.num_heads < 1 or heads.num_heads % heads.num_kv_heads:
        raise ValueError(f"{heads.num_heads} heads of queries cannot share {heads.num_kv_heads} heads of keys evenly")
    if heads.head_dim < 2 or heads.head_dim % 2:
        raise ValueError(f"a head must have an even number of values, not {heads.head_dim}")
    if heads.window is not None and not 1 <= heads.window < 1 << 63:
        raise ValueError(f"a window must be at least 1 token, not {heads.window}")
    if heads.clip is not None and not heads.clip > 0:
        raise ValueError(f"queries, keys and values are clipped to a number above 0, not {heads.clip}")
    if (heads.q_norm is None) != (heads.k_norm is None):
        raise ValueError("queries and keys must both have norms, or neither")
