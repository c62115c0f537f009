"""Attention through a latent vector (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.entries import stored
from ....kernels.mixers.grouped import Heads, turned
from ....kernels.mixers.latent import Latent
from ....kernels.weights import Norm
from ..blocks import in_order, projection
from ..kv_stores import GrowingStore
from ..quantized_linear import through
from .attention import Sight, attended


@dataclass(frozen=True, slots=True)
class LatentParts:
    """`kernels.mixers.latent.Latent` by a layer's modules: asked and made are modules too."""

    heads: Heads
    still: int
    turned: int
    value: int
    norm: Tensor
    eps: float
    made: nn.Module
    asked: nn.Module | None
    asked_norm: Tensor | None

    def record(self) -> Latent:
        """As one operation takes it.

        Raises:
            Unsupported: projections of an unknown kind.
        """
        asked = None if self.asked is None else projection(self.asked)
        sizes = self.heads, self.still, self.turned, self.value
        return Latent(*sizes, self.norm, self.eps, projection(self.made), asked, self.asked_norm)

    def asking(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (T, heads * (still + turned)), and vectors and keys (T, R + turned), by the first projection's."""
        width = self.heads.head_dim
        asked, given = projected.split([projected.shape[1] - width, width], 1)
        if self.asked is not None and self.asked_norm is not None:
            asked = through(self.asked, asked, norm=(Norm(self.asked_norm), self.eps))
        return asked, given

    @property
    def attending(self) -> Heads:
        """See `Latent`."""
        return self.heads

    @property
    def state(self) -> int:
        """See `Latent`."""
        return 0


def read_latent(attention: Any, config: Any, kept: torch.dtype, order: Tensor | None) -> tuple[nn.Module, LatentParts]:
    """The first projection of a layer, and its mixer.

    Args:
        kept: dtype of what is stored. order: of the dimensions that rope turns, see `layers.Rope`.

    Raises:
        Unsupported: projections that cannot be joined.
    """
    rank, still, turned = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    heads = Heads(
        num_heads=config.num_attention_heads,
        num_kv_heads=1,
        head_dim=rank + turned,
        scale=attention.scaling,
        cache_dtype=kept,
        inside=rank,
    )
    queries = None if order is None else _behind(heads.num_heads, still, order)
    stored = None if order is None else _behind(1, rank, order)
    first, asked, asked_norm = "q_proj", None, None
    if config.q_lora_rank is not None:
        first, asked = "q_a_proj", in_order(attention, ("q_b_proj",), queries, "query")
        asked_norm = attention.q_a_layernorm.weight
        queries = None if order is None else torch.arange(config.q_lora_rank, device=order.device)
    rows = None if queries is None or stored is None else torch.cat([queries, len(queries) + stored])
    whole = in_order(attention, (first, "kv_a_proj_with_mqa"), rows, "query and latent")
    norm = attention.kv_a_layernorm
    rest = (
        heads,
        still,
        turned,
        config.v_head_dim,
        norm.weight,
        norm.variance_epsilon,
        attention.kv_b_proj,
        asked,
        asked_norm,
    )
    return whole, LatentParts(*rest)


def _behind(heads: int, still: int, order: Tensor) -> Tensor:
    """Rows of heads whose dimensions behind the first `still` go into that order."""
    each = torch.cat([torch.arange(still, device=order.device), still + order])
    return (torch.arange(heads, device=order.device)[:, None] * len(each) + each).flatten()


class LatentAttention:
    """Attention through a latent vector in all layers of one pass: keys and values are made of all that is stored.

    Args: as for `GroupedAttention`; rope is of what is turned.
    """

    def __init__(self, mixers: Sequence[object], _eps: float, store: GrowingStore, rope: Tensor, start: int) -> None:
        self._of, self.tokens, end = mixers, len(rope), start + len(rope)
        self._places = store.places(end)
        self._entries = [layer for group in store.seen(0, end) for layer in group.unbind(0)]
        self._cos, self._sin = rope[:, 0], rope[:, 1]
        self._sight = Sight(0, end, start, end, None)

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """As `GroupedAttention`."""
        latent = self._of[index]
        assert isinstance(latent, LatentParts)
        heads = latent.heads
        asked, given = latent.asking(projected)
        vector, key = given.split([latent.norm.numel(), latent.turned], 1)
        entry = torch.cat(
            [F.rms_norm(vector, latent.norm.shape, latent.norm, latent.eps), turned(key, self._cos, self._sin)], 1
        )
        place = self._places[index]
        place.copy_(stored(entry[:, None], place.dtype))
        still, moved = asked.view(self.tokens, heads.num_heads, -1).split([latent.still, latent.turned], 2)
        moved = turned(moved, self._cos[:, None], self._sin[:, None])
        seen = heads.values(self._entries[index].to(projected.device), projected.dtype)[:, 0]
        vectors, shared = seen.split([latent.norm.numel(), latent.turned], 1)
        made = latent.made(vectors).view(len(seen), heads.num_heads, -1)
        keys, values = made.split([latent.still, latent.value], 2)
        keys = torch.cat([keys, shared[:, None].expand(-1, heads.num_heads, -1)], 2)
        asking = torch.cat([still, moved], 2).transpose(0, 1)[:, None]
        keys, values = (part.transpose(0, 1)[:, None] for part in (keys, values))
        out = attended(asking, keys, values, self._sight, heads.scale)
        return out[:, 0].transpose(0, 1).reshape(self.tokens, -1)
