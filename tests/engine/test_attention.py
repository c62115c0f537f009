"""Attention of several tokens in bounded memory: what it computes, and how much is there at once."""

from __future__ import annotations

import math

import pytest
import torch
from floe_chat.engine.decoder.mixers import attention
from floe_chat.engine.decoder.mixers.attention import Sight, attended
from torch import Tensor

from ..allocated import Allocated
from ..helpers import relative_rms

HEADS, GROUPS, SIZE, VALUES = 3, 2, 8, 5

SIGHTS = [
    Sight(0, 13, 0, 13, None),  # a prompt
    Sight(0, 13, 0, 13, 4),
    Sight(0, 29, 11, 29, None),  # behind a text
    Sight(6, 29, 11, 29, 6),
    Sight(0, 29, 28, 29, None),  # a token
    Sight(0, 29, 9, 20, None),  # a part of a pass
    Sight(4, 29, 17, 29, 14),
]


def by_float64(
    queries: Tensor, keys: Tensor, values: Tensor, sight: Sight, scale: float, sinks: Tensor | None
) -> Tensor:
    """One query at a time."""
    out = torch.empty(HEADS, GROUPS, sight.stop - sight.start, VALUES, dtype=torch.float64)
    for head in range(HEADS):
        for group in range(GROUPS):
            for at in range(out.shape[2]):
                here = sight.start + at
                first = 0 if sight.window is None else max(0, here + 1 - sight.window)
                some = slice(max(first, sight.first) - sight.first, here + 1 - sight.first)
                scores = keys[head, 0, some].double() @ queries[head, group, at].double() * scale
                own = [] if sinks is None else [sinks[head, group].double().view(1)]
                shares = torch.cat([scores, *own]).softmax(0)[: len(scores)]
                out[head, group, at] = shares @ values[head, 0, some].double()
    return out


def made(sight: Sight, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    seen, tokens = sight.end - sight.first, sight.stop - sight.start
    return (
        torch.randn(HEADS, GROUPS, tokens, SIZE, generator=random),
        torch.randn(HEADS, 1, seen, SIZE, generator=random),
        torch.randn(HEADS, 1, seen, VALUES, generator=random),
    )


@pytest.mark.parametrize("limit", [64 << 20, 2000, 100, 1])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
def test_it_is_the_formulas(limit: int, fused: bool, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", limit)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: int(fused))  # pyright: ignore[reportUnknownLambdaType]
    for seed, sight in enumerate(SIGHTS):
        given = made(sight, seed)
        own = torch.randn(HEADS, GROUPS, generator=torch.Generator().manual_seed(seed)) if sinks else None
        want = by_float64(*given, sight, 0.3, own)
        assert relative_rms(attended(*given, sight, 0.3, own), want) < 1e-6, sight


@pytest.mark.parametrize("fused", [True, False])
def test_no_more_scores_are_there_at_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards before compute capability 8.0 have no fused attention for bfloat16: 1.1 GB of scores, and of shares again,
    ended a long prompt.
    """
    sight, limit = Sight(0, 700, 300, 700, None), 200_000
    queries, keys, values = made(sight, 1)
    whole = HEADS * GROUPS * 400 * 700 * 4
    assert max(part.nbytes for part in (queries, keys, values)) * GROUPS < limit < whole
    monkeypatch.setattr(attention, "SCORES", limit)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: int(fused))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", shape_alone)
    with Allocated() as made_now:
        attended(queries, keys, values, sight, 1.0)
    assert limit // 4 < made_now.largest <= limit * (1 if fused else 2)  # the shares are made next to the scores


def shape_alone(queries: Tensor, _keys: Tensor, values: Tensor, **_: object) -> Tensor:
    """What a fused attention allocates."""
    return queries.new_zeros(*queries.shape[:3], values.shape[3])


def test_a_part_sees_what_its_tokens_see() -> None:
    for sight in SIGHTS:
        whole, tokens = sight.mask(torch.device("cpu")), sight.stop - sight.start
        for at, count in ((0, 1), (tokens // 2, math.ceil(tokens / 2)), (tokens - 1, 1)):
            part = sight.part(at, count)
            wanted = whole[at : at + count]
            low, high = part.first - sight.first, part.end - sight.first
            assert torch.equal(part.mask(torch.device("cpu")), wanted[:, low:high])
            assert not wanted[:, :low].any() and not wanted[:, high:].any()
