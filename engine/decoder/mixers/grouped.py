"""Grouped-query attention. It owns the layout of its cache: a store (kv_stores.py) holds entries of the shape that it
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.entries import CODES, stored
from ....kernels.mixers.grouped import Heads
from ....models.families import Family
from ....models.families.family import GroupedQuery
from ..blocks import in_order, norm_weight
from ..kv_stores import GrowingStore
from .attention import Sight, attended


class Part(Protocol):
    """A part of a pass's tokens: other processes compute the others.

    Attributes:
        tokens: of the pass. mine: those of this process, at least two.
    """

    tokens: int
    mine: slice

    def everything(self, entries: Tensor) -> Tensor:
        """What all processes give, (tokens, ...), for this one's part of it."""
        ...

    def last(self, state: Tensor) -> Tensor:
        """The last token's (1, H), whoever has it, for that of this part."""
        ...


@dataclass(frozen=True, slots=True)
class _View:
    """What a pass's queries see in each layer: entries, their keys and values, and which of them each query sees.

    Attributes:
        entries: (N, *entry) of each layer. both: its keys and values (kv_heads, 1, N, D), or None where they have to be
            read first: from codes, or from RAM.
    """

    entries: list[Tensor]
    both: list[tuple[Tensor, Tensor] | None]
    sight: Sight


class GroupedAttention:
    """Grouped-query attention in all layers of one pass. An entry of the store is a token's keys, then its values.

    Args:
        mixers: of all layers. eps: of the norms of heads. rope: (T, 2, D) of the tokens' positions, from `start` on;
            with a `part` of these only.
    """

    def __init__(
        self,
        mixers: Sequence[object],
        eps: float,
        store: GrowingStore,
        rope: Tensor,
        start: int,
        part: Part | None = None,
    ) -> None:
        self._eps, self.tokens, self._part = eps, len(rope), part
        end = start + (len(rope) if part is None else part.tokens)
        self._places = store.places(end)
        attending = [(index, mixer) for index, mixer in enumerate(mixers) if isinstance(mixer, Heads)]
        self._of = {index: (number, heads) for number, (index, heads) in enumerate(attending)}
        # Queries and keys are rotated, values stay as they are: tables for all heads at once, (T, heads, D).
        kinds = {_turning(heads): heads for _, heads in attending}
        self._turns = {kind: _tables(heads, rope.flatten(1)) for kind, heads in kinds.items()}
        self._views: dict[int | None, _View] = {}
        for window in {each.window for _, each in attending}:
            first = 0 if window is None else max(0, start + 1 - window)
            groups = store.seen(first, end)
            entries = [layer for group in groups for layer in group.unbind(0)]
            both = [each for group in groups for each in _ready(group, rope.device)]
            mine = range(start, end) if part is None else range(start, end)[part.mine]
            self._views[window] = _View(entries, both, Sight(first, end, mine.start, mine.stop, window))

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """What heads see, (T, heads * D), by layer `index`'s first projection (T, ...); sets the keys and values of the
        pass's tokens.
        """
        number, heads = self._of[index]
        wide, gates = heads.num_heads * heads.head_dim, None
        if heads.gated:
            gates = projected[:, wide : 2 * wide]
            projected = torch.cat([projected[:, :wide], projected[:, 2 * wide :]], 1)
        if heads.keys_alone:
            projected = torch.cat([projected, projected[:, wide:]], 1)
        qkv = projected.view(self.tokens, -1, heads.head_dim)
        self._prepare(qkv, heads)
        cos, sin = self._turns[_turning(heads)]
        qkv = torch.addcmul(qkv * cos, qkv.roll(heads.head_dim // 2, 2), sin)
        queries, both = qkv.split_with_sizes((heads.num_heads, 2 * heads.num_kv_heads), 1)
        place = self._places[number]
        entries = stored(both, place.dtype)
        place.copy_(entries if self._part is None else self._part.everything(entries))
        view = self._views[heads.window]
        attend = self._attend_one if self.tokens == 1 and heads.sinks is None else self._attend_any
        ready = view.both[number]
        if ready is None:
            (ready,) = _split(heads.values(view.entries[number].to(qkv.device), qkv.dtype)[None])
        keys, values = ready[0].to(qkv.dtype), ready[1].to(qkv.dtype)
        out = attend(heads, queries, keys, values, view.sight)
        return out if gates is None else out * gates.sigmoid()

    def _prepare(self, qkv: Tensor, heads: Heads) -> None:
        """The steps of some families before rope: norms of queries and keys, clipping; in place, (T, all heads, D)."""
        if heads.q_norm is not None and heads.k_norm is not None:
            parts = qkv.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), 1)
            for part, weight in zip(parts, (heads.q_norm, heads.k_norm), strict=False):
                normed = F.rms_norm(part.reshape(self.tokens, -1, len(weight)), weight.shape, weight, self._eps)
                part.copy_(normed.view(part.shape))
        if heads.v_normed:
            values = qkv[:, heads.num_heads + heads.num_kv_heads :]
            values.copy_(F.rms_norm(values, values.shape[2:], eps=self._eps))
        if heads.clip is not None:
            qkv.clamp_(-heads.clip, heads.clip)

    # Key heads are in the batch dimension, so that query heads which share one need no copy of it.

    def _attend_one(self, heads: Heads, queries: Tensor, keys: Tensor, values: Tensor, _sight: Sight) -> Tensor:
        """queries (1, heads, D), keys and values (kv_heads, 1, N, D) -> (1, heads * D)."""
        grouped = queries.view(
            heads.num_kv_heads, 1, -1, heads.head_dim
        )  # as if they were positions: all see all tokens
        return F.scaled_dot_product_attention(grouped, keys, values, scale=heads.scale).reshape(1, -1)

    def _attend_any(self, heads: Heads, queries: Tensor, keys: Tensor, values: Tensor, sight: Sight) -> Tensor:
        """queries (T, heads, D) -> (T, heads * D)."""
        shared = heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
        grouped = queries.unflatten(1, shared).permute(1, 2, 0, 3)
        sinks = None if heads.sinks is None else heads.sinks.view(shared)
        out = attended(grouped, keys, values, sight, heads.scale, sinks)
        return out.permute(2, 0, 1, 3).reshape(self.tokens, -1)


def _turning(heads: Heads) -> tuple[int, ...]:
    """By what rope's tables for all heads differ between layers."""
    return heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rope_at


def _tables(heads: Heads, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, heads, D) for the heads of queries, keys and values, of rope (T, numbers)."""
    own = rope[:, heads.rope_at : heads.rope_at + 2 * heads.head_dim].unflatten(1, (2, -1))
    cos, sin = own[:, :1], own[:, 1:]
    turned, still = heads.num_heads + heads.num_kv_heads, (len(rope), heads.num_kv_heads, heads.head_dim)
    cos = torch.cat([cos.expand(-1, turned, -1), cos.new_ones(still)], 1)
    return cos, torch.cat([sin.expand(-1, turned, -1), sin.new_zeros(still)], 1)


def _ready(group: Tensor, device: torch.device) -> Sequence[tuple[Tensor, Tensor] | None]:
    """Keys and values of each layer of a group (layers, N, *entry), if its entries are numbers on the device."""
    return _split(group) if group.device == device and group.dtype != CODES else [None] * len(group)


def _split(group: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each layer of (layers, N, 2 * heads, D), keys and values (heads, 1, N, D): views."""
    both = group.transpose(1, 2).unsqueeze(3).transpose(2, 3)
    return list(zip(*(part.unbind(0) for part in both.chunk(2, 1)), strict=True))


def read_grouped(
    attention: Any, index: int, family: Family, config: Any, kept: torch.dtype, order: Tensor | None, rope_at: int
) -> tuple[nn.Module, Heads]:
    """The first projection of layer `index`, and its mixer.

    Args:
        kept: dtype of what is stored. order: of the dimensions of heads, see `layers.Rope`. rope_at: see `Heads`.

    Raises:
        Unsupported: projections that cannot be joined.
    """
    heads = replace(_read_heads(attention, index, family, config, order), cache_dtype=kept, rope_at=rope_at)
    assert isinstance(family.attention, GroupedQuery)
    return _projections(attention, heads, order, family.attention.gate), heads


def _read_heads(attention: Any, index: int, family: Family, config: Any, order: Tensor | None) -> Heads:
    kind = family.attention
    assert isinstance(kind, GroupedQuery)
    norms = [getattr(attention, name) for name in kind.norms] if kind.normalized(config) else []
    count, groups = config.num_attention_heads, getattr(attention, "num_key_value_groups", None)
    return Heads(
        num_heads=count,
        num_kv_heads=count // groups if groups else config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=kind.window(config, index),
        clip=getattr(config, "clip_qkv", None),
        q_norm=_turned(norm_weight(family, norms[0]), order) if norms else None,
        k_norm=_turned(norm_weight(family, norms[1]), order) if norms else None,
        sinks=attention.sinks if kind.sinks else None,
        gated=kind.gated or bool(kind.gate),
        keys_alone=attention.v_proj is None,
        v_normed=hasattr(attention, "v_norm"),
    )


def _projections(attention: Any, heads: Heads, order: Tensor | None, gate: str) -> nn.Module:
    """Those of queries, keys and values as one, the dimensions of heads in that order; with that of gates, if any."""
    rows = None if order is None and (gate or not heads.gated) else _all_heads(heads, order, apart=bool(gate))
    names = ("q_proj", *([gate] if gate else []), "k_proj", *([] if heads.keys_alone else ["v_proj"]))
    return in_order(attention, names, rows, "query, key and value")


def _turned(weight: Tensor, order: Tensor | None) -> Tensor:
    """A norm's weights, of each head or of all together, for heads in that order."""
    return weight if order is None else weight.view(-1, order.numel())[:, order].flatten()


def _all_heads(heads: Heads, order: Tensor | None, *, apart: bool) -> Tensor:
    """The rows of the joined projections with the dimensions of each head of queries and keys in that order, and the
    queries' gates, if there are any, behind all queries; `apart`: where they are already.
    """
    width = heads.head_dim
    order = torch.arange(width) if order is None else order
    each = torch.arange(heads.num_heads, device=order.device)[:, None] * (2 if heads.gated and not apart else 1) * width
    queries = [(each + order).flatten()]
    if heads.gated:
        behind = each + (each.numel() if apart else 1) * width
        queries.append((behind + torch.arange(width, device=order.device)).flatten())
    first = sum(map(len, queries)) + torch.arange(heads.num_kv_heads, device=order.device)[:, None] * width
    keys = (first + order).flatten()
    values = torch.arange(len(keys), device=order.device) + sum(map(len, queries)) + len(keys)
    return torch.cat([*queries, keys, *([] if heads.keys_alone else [values])])
