"""Attention through a latent vector, of which keys and values of all heads are made (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..entries import stored
from ..weights import Projection
from .grouped import Heads, turned


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


def attend_latent(qkv: Tensor, rope: Tensor, kv: Tensor, position: int, latent: Latent) -> Tensor:
    """`attend` through a latent vector: (1, heads * value). Keys and values are made of all that is cached."""
    heads = latent.heads
    asked, vector, key = qkv.split([qkv.shape[1] - heads.head_dim, latent.rank, latent.turned], -1)
    if latent.asked is not None and latent.asked_norm is not None:
        asked = latent.asked(F.rms_norm(asked, latent.asked_norm.shape, latent.asked_norm, latent.eps))
    still, moved = asked.view(heads.num_heads, -1).split([latent.still, latent.turned], -1)
    vector = F.rms_norm(vector, latent.norm.shape, latent.norm, latent.eps)
    kv[position] = stored(torch.cat([vector, turned(key, *rope)], -1), kv.dtype)
    seen = heads.values(kv[: position + 1], qkv.dtype)[:, 0]
    made = latent.made(seen[:, : latent.rank]).unflatten(-1, (heads.num_heads, -1))
    keys, others = made.split([latent.still, latent.value], -1)
    scores = torch.einsum("hd,thd->ht", still, keys) + turned(moved, *rope) @ seen[:, latent.rank :].T
    return torch.einsum("ht,thd->hd", (scores * heads.scale).softmax(-1), others).reshape(1, -1)
