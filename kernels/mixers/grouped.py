"""Grouped-query attention: each head of keys and values serves as many heads of queries; all of them are stored."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..entries import entry_of, stored, values


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer attends.

    Attributes:
        num_heads: of queries. num_kv_heads: of keys, and of values; each serves num_heads / num_kv_heads of queries.
        head_dim: D, even. scale: of the products of queries and keys. clip: limit of all three.
        window: how many tokens a query sees, itself included. cache_dtype: in which form keys and values are stored,
            see entries.py.
        q_norm, k_norm: weights of RMS norms before rope, (D,) of each head, or (heads * D,) of all heads together.
        sinks: (heads,) scores of a token that has no value, which every query sees besides; None where there is none.
        inside: how many of a key's first numbers are its value; None where values are stored behind keys.
        gated: whether the first projection has a gate of each number of a head's output, behind the queries.
        keys_alone: whether it has no values: they are the keys as projected. v_normed: whether values are divided by
            their root mean square. queries_alone: whether it has neither: queries see what another layer has stored of
            the tokens before this one, and nothing is stored. rope_at: where its cosines and sines are among those of a
            position.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    clip: float | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    cache_dtype: torch.dtype = torch.float32
    sinks: Tensor | None = None
    inside: int | None = None
    gated: bool = False
    keys_alone: bool = False
    v_normed: bool = False
    queries_alone: bool = False
    rope_at: int = 0

    @property
    def attending(self) -> Heads:
        """How entries are stored and met."""
        return self

    @property
    def state(self) -> int:
        """Numbers of a text's state: none."""
        return 0

    @property
    def turned(self) -> int:
        """How many numbers of a head rope turns."""
        return self.head_dim

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the layer's first projection, and columns of the one back."""
        queries = self.num_heads * self.head_dim
        kept = 0 if self.queries_alone else (1 if self.keys_alone else 2) * self.num_kv_heads * self.head_dim
        return (2 if self.gated else 1) * queries + kept, queries

    @property
    def rows(self) -> int:
        """Rows of what a layer caches of a token: its keys, then its values if they are not inside."""
        return self.num_kv_heads * (1 if self.inside else 2)

    @property
    def entry(self) -> tuple[int, ...]:
        """The shape of what a layer caches of a token."""
        return entry_of(self.rows, self.head_dim, self.cache_dtype)

    def values(self, entries: Tensor, dtype: torch.dtype) -> Tensor:
        """Entries (N, *entry) -> their keys and values (N, rows, D)."""
        return values(entries, self.rows, self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Where what is kept of the tokens so far is, in the device's memory: no launch depends on their number.

    Attributes:
        addresses: (L,) int64, of each layer's entries (C, *entry), or of its states (ring, numbers) float32. position:
            (1,) int64, of the new token. aligned: bytes that divide every address, at most 16. ring: how many states
            a layer has: the one before a token is at its position modulo this.
    """

    addresses: Tensor
    position: Tensor
    aligned: int = 16
    ring: int = 2

    def there(self, layer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A layer's memory, on the CPU."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = (ctypes.c_uint8 * nbytes).from_address(int(self.addresses[layer]))
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def states(self, layer: int, numbers: int) -> tuple[Tensor, Tensor]:
        """A layer's states (numbers,) before and behind the token, on the CPU."""
        states, position = self.there(layer, (self.ring, numbers), torch.float32), int(self.position)
        return states[position % self.ring], states[(position + 1) % self.ring]


def attend(qkv: Tensor, rope: Tensor, kv: Tensor, position: int, heads: Heads, eps: float) -> Tensor:
    """Attention of one token: qkv (1, all heads * D), as projected -> (1, heads * D); see `step.dense_step`."""
    qkv = qkv.view(-1, heads.head_dim)
    gating = heads.num_heads if heads.gated else 0
    of_keys = 0 if heads.queries_alone else heads.num_kv_heads
    of_values = 0 if heads.keys_alone else of_keys
    queries, gates, keys, own = qkv.split([heads.num_heads, gating, of_keys, of_values])
    own = keys if heads.keys_alone else own
    if heads.v_normed:
        own = F.rms_norm(own, own.shape[-1:], eps=eps)
    if heads.q_norm is not None:
        queries = _norm(queries, heads.q_norm, eps)
    if heads.k_norm is not None:
        keys = _norm(keys, heads.k_norm, eps)
    if heads.clip is not None:
        queries, keys, own = (part.clamp(-heads.clip, heads.clip) for part in (queries, keys, own))
    queries, keys = (turned(part, rope[0], rope[1]) for part in (queries, keys))
    if not heads.queries_alone:
        kv[position] = stored(torch.cat([keys, own]), kv.dtype)
    first = 0 if heads.window is None else max(0, position + 1 - heads.window)
    seen = heads.values(kv[first : position if heads.queries_alone else position + 1], qkv.dtype)
    keys, others = seen.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1).chunk(2, 1)
    scores = torch.einsum("hd,thd->ht", queries, keys) * heads.scale
    if heads.sinks is not None:
        scores = torch.cat([scores, heads.sinks[:, None].to(scores.dtype)], -1)
    out = torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(others)], others)
    return (out * gates.sigmoid() if heads.gated else out).reshape(1, -1)


def turned(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """part (..., D) by rope, (..., D) each, the first half of the sines negated."""
    return torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin)


def attend_one(qkv: Tensor, rope: Tensor, kept: KeptTokens, layer: int, heads: Heads, eps: float) -> Tensor:
    """`attend` with position and address read from memory, on the CPU; see `kernels.attend_one`."""
    position = int(kept.position)
    kv = kept.there(layer, (position + 1, *heads.entry), heads.cache_dtype)
    turn = rope.flatten()[heads.rope_at :][: 2 * heads.head_dim].view(2, -1)
    return attend(qkv, turn, kv, position, heads, eps)


def _norm(part: Tensor, weight: Tensor, eps: float) -> Tensor:
    """part (heads, D), normalized over each head or all of them, as many as weight is for."""
    return F.rms_norm(part.reshape(-1, weight.numel()), weight.shape, weight, eps).view(part.shape)
