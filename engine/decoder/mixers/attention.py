"""Attention of several tokens by torch's operations, in bounded memory: all scores at once of a long prompt would be
gigabytes, and so would a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES = 64 << 20  # bytes of scores in float32, or of a mask, that are there at once
_MASK = 5  # bytes of a mask for each pair: as booleans, as numbers of 16 bits, and those padded


@dataclass(frozen=True, slots=True)
class Sight:
    """Which of the tokens first..end-1 each of start..stop-1 sees: those up to itself, of a window the last ones.

    first: no later than what the first of them sees.
    """

    first: int
    end: int
    start: int
    stop: int
    window: int | None

    @property
    def unmasked(self) -> bool:
        """Whether it is that of one token, which sees all, or plain causal."""
        tokens, seen = self.stop - self.start, self.end - self.first
        return self.stop == self.end and (tokens == 1 or (tokens == seen and not self._narrow))

    @property
    def _narrow(self) -> bool:
        return self.window is not None and self.window < self.end - self.first

    def part(self, at: int, count: int) -> Sight:
        """Of so many of the tokens, with what they see."""
        start = self.start + at
        first = self.first if self.window is None else max(self.first, start + 1 - self.window)
        return Sight(first, start + count, start, start + count, self.window)

    def mask(self, device: torch.device) -> Tensor:
        """(tokens, seen): what each sees."""
        here = torch.arange(self.start, self.stop, device=device)[:, None]
        there = torch.arange(self.first, self.end, device=device)
        seen = there <= here
        return seen if not self._narrow or self.window is None else seen & (there > here - self.window)


def attended(
    queries: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """queries (K, G, T, D), keys (K, 1, N, D) and values (K, 1, N, V) -> (K, G, T, V).

    By torch's fused attention, or by the formula in float32 where that would keep more than `SCORES`, or sinks (K, G)
    take a share. Query heads that share a key head need no copy of it.
    """
    heads, groups, tokens, _ = queries.shape
    seen = keys.shape[2]
    if sinks is not None or (4 * heads * groups * tokens * seen > SCORES and not _fused(queries, keys, values, sight)):
        return _by_formula(queries, keys, values, sight, scale, sinks)
    rows = tokens if sight.unmasked else max(1, SCORES // (_MASK * seen))
    keys, values = (part.expand(-1, groups, -1, -1) for part in (keys, values))
    parts: list[Tensor] = []
    for at, own, low, high in _parts(sight, tokens, rows):
        mask = None if own.unmasked else own.mask(queries.device)
        given = queries[:, :, at : at + rows], keys[:, :, low:high], values[:, :, low:high]
        causal = own.unmasked and own.stop - own.start > 1
        parts.append(F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=causal, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _parts(sight: Sight, tokens: int, rows: int) -> Iterator[tuple[int, Sight, int, int]]:
    """Some tokens at a time: the first, what they see, and where that is among what all see."""
    if rows >= tokens:
        yield 0, sight, 0, sight.end - sight.first
        return
    for at in range(0, tokens, rows):
        own = sight.part(at, min(rows, tokens - at))
        yield at, own, own.first - sight.first, own.end - sight.first


def _fused(queries: Tensor, keys: Tensor, values: Tensor, sight: Sight) -> bool:
    """Whether torch has an attention for these that keeps no scores."""
    choice = getattr(torch, "_fused_sdp_choice", None)  # as scaled_dot_product_attention asks; no public name
    if choice is None:
        return False
    groups, few = queries.shape[1], min(2, queries.shape[2])
    own = Sight(sight.first, sight.end, sight.end - few, sight.end, sight.window)
    mask = None if sight.unmasked else own.mask(queries.device)
    keys, values = (part.expand(-1, groups, -1, -1) for part in (keys, values))
    return bool(choice(queries[:, :, :few], keys, values, mask, 0.0, False))


def _by_formula(
    queries: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float, sinks: Tensor | None
) -> Tensor:
    heads, groups, tokens, _ = queries.shape
    each = 4 * groups * keys.shape[2]  # bytes of the scores of a token, in one head of keys
    some, rows = max(1, SCORES // (each * tokens)), min(tokens, max(1, SCORES // each))
    out = queries.new_empty(heads, groups, tokens, values.shape[3])
    for at, own, low, high in _parts(sight, tokens, rows):
        mask = own.mask(queries.device)
        for first in range(0, heads, some):
            of = slice(first, first + some)
            asked = queries[of, :, at : at + rows].float()
            scores = asked.flatten(1, 2) @ keys[of, 0, low:high].float().transpose(1, 2)
            scores = scores.view(*asked.shape[:3], -1).mul_(scale).masked_fill_(~mask, -torch.inf)
            if sinks is not None:
                own_sinks = sinks[of].float()[:, :, None, None].expand(-1, -1, scores.shape[2], -1)
                scores = torch.cat([scores, own_sinks], -1)
            shares = scores.softmax(-1)[..., : high - low]
            found = shares.flatten(1, 2) @ values[of, 0, low:high].float()
            out[of, :, at : at + rows] = found.view(*asked.shape[:3], -1)
    return out
