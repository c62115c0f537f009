"""Attention through a latent vector, of which keys and values of all heads are made (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..entries import CODES, stored
from ..weights import Projection
from .grouped import Heads, KeptTokens, turned


@dataclass(frozen=True, slots=True)
class Latent:
    """Keys and values of all heads are made of one vector per token, R numbers.

    That alone is cached, and behind it a key that all heads share. The first projection gives queries, or their vector,
    and what is cached.

    Attributes:
        heads: that meet what is cached: one head of keys, R + `turned` wide, with the value inside.
        still, turned: how many numbers of a head's query and key rope leaves alone, and turns. value: those of its
            value. norm: (R,) weights of the vector's RMS norm, with its eps. made: to each head's key, without what is
            turned, and value. asked: to queries, where these are made of a vector too, behind a norm of that.
    """

    heads: Heads
    still: int
    turned: int
    value: int
    norm: Tensor
    eps: float
    made: Projection
    asked: Projection | None = None
    asked_norm: Tensor | None = None

    @property
    def attending(self) -> Heads:
        """How entries are stored and met."""
        return self.heads

    @property
    def state(self) -> int:
        """Numbers of a text's state: none."""
        return 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the layer's first projection, and columns of the one back."""
        count = self.heads.num_heads
        asked = count * (self.still + self.turned) if self.asked_norm is None else self.asked_norm.numel()
        return asked + self.heads.head_dim, count * self.value

    @property
    def rank(self) -> int:
        """R."""
        return self.norm.numel()

    def check(self) -> None:
        """Refuse heads that are not those of what is cached.

        Raises:
            ValueError: which of them do not fit.
        """
        heads = self.heads
        alone = heads.q_norm is None and heads.sinks is None and heads.clip is None and heads.num_kv_heads == 1
        if not alone or heads.cache_dtype == CODES or heads.inside != self.rank:
            raise ValueError(
                "heads do not fit a latent vector: one of keys with its value inside, as numbers, as projected"
            )
        if heads.head_dim != self.rank + self.turned or min(self.still, self.value) < 1:
            raise ValueError(f"a latent vector of {self.rank} and a key of {self.turned} are not {heads.head_dim}")
        if self.turned < 2 or self.turned % 2:
            raise ValueError(f"rope must turn an even number of values, not {self.turned}")
        if (self.asked is None) != (self.asked_norm is None):
            raise ValueError("queries must be made of a vector behind a norm, or of neither")


def attend_latent(qkv: Tensor, rope: Tensor, kv: Tensor, position: int, latent: Latent) -> Tensor:
    """`attend` through a latent vector: (1, heads * value). Keys and values are made of all that is cached."""
    asked, given = qkv.split([qkv.shape[1] - latent.heads.head_dim, latent.heads.head_dim], -1)
    if latent.asked is not None and latent.asked_norm is not None:
        asked = latent.asked(F.rms_norm(asked, latent.asked_norm.shape, latent.asked_norm, latent.eps))
    return _attend(asked, given, rope, kv, position, latent)


def latent_one(asked: Tensor, given: Tensor, rope: Tensor, kept: KeptTokens, layer: int, latent: Latent) -> Tensor:
    """`attend_latent` behind what makes queries, with position and address read from memory, on the CPU; see
    `kernels.latent_one`.
    """
    position = int(kept.position)
    kv = kept.there(layer, (position + 1, *latent.heads.entry), latent.heads.cache_dtype)
    return _attend(asked, given, rope, kv, position, latent)


def _attend(asked: Tensor, given: Tensor, rope: Tensor, kv: Tensor, position: int, latent: Latent) -> Tensor:
    heads = latent.heads
    vector, key = given.split([latent.rank, latent.turned], -1)
    still, moved = asked.view(heads.num_heads, -1).split([latent.still, latent.turned], -1)
    vector = F.rms_norm(vector, latent.norm.shape, latent.norm, latent.eps)
    kv[position] = stored(torch.cat([vector, turned(key, *rope)], -1), kv.dtype)
    seen = heads.values(kv[: position + 1], asked.dtype)[:, 0]
    made = latent.made(seen[:, : latent.rank]).unflatten(-1, (heads.num_heads, -1))
    keys, others = made.split([latent.still, latent.value], -1)
    scores = torch.einsum("hd,thd->ht", still, keys) + turned(moved, *rope) @ seen[:, latent.rank :].T
    return torch.einsum("ht,thd->hd", (scores * heads.scale).softmax(-1), others).reshape(1, -1)
