"""Reads attention through a latent vector from transformers' modules (DeepSeek-V2, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.step import Heads, Latent
from .blocks import in_order, projection


@dataclass(frozen=True, slots=True)
class LatentParts:
    """`kernels.step.Latent` by a layer's modules: asked and made are modules too."""

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
        norms = self.norm, self.eps
        return Latent(self.still, self.turned, self.value, *norms, projection(self.made), asked, self.asked_norm)


def read_latent(
    attention: Any, config: Any, kept: torch.dtype, order: Tensor | None
) -> tuple[Heads, nn.Module, LatentParts]:
    """The heads of a layer, its first projection, and the rest.

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
    rest = still, turned, config.v_head_dim, norm.weight, norm.variance_epsilon, attention.kv_b_proj, asked, asked_norm
    return heads, whole, LatentParts(*rest)


def _behind(heads: int, still: int, order: Tensor) -> Tensor:
    """Rows of heads whose dimensions behind the first `still` go into that order."""
    each = torch.cat([torch.arange(still, device=order.device), still + order])
    return (torch.arange(heads, device=order.device)[:, None] * len(each) + each).flatten()
