"""Layers that keep a state: many tokens at once are what they are one by one, and a text can be gone back in."""

from __future__ import annotations

import pytest
import torch
from floe_chat.engine.decoder.kv_stores import Layout
from floe_chat.engine.decoder.mixers.delta import chunked_rule
from floe_chat.engine.decoder.state_store import EVERY, StatefulStore
from floe_chat.kernels.mixers.delta import Delta, delta_rule
from floe_chat.kernels.weights import Projection

from ..helpers import relative_rms


@pytest.mark.parametrize(
    ("heads", "shared", "key", "value", "taps"), [(4, 2, 6, 10, 4), (1, 1, 1, 2, 2), (9, 3, 7, 19, 3)]
)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_are_the_rule(heads: int, shared: int, key: int, value: int, taps: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    channels = 2 * shared * key + heads * value
    parts = torch.randn(taps, channels) / taps, torch.rand(heads) * 4, torch.randn(heads), torch.rand(value)
    delta = Delta(heads, shared, key, value, *parts, 1e-6, Projection(torch.empty(0)))
    before = torch.randn(delta.state, dtype=torch.float64)
    qkv = torch.randn(tokens, channels + heads * value, dtype=torch.float64)
    gates, ours, theirs = torch.randn(tokens, 2 * heads, dtype=torch.float64), before.clone(), before.clone()
    found = chunked_rule(qkv, gates, before, delta, ours)
    assert relative_rms(found, delta_rule(qkv, gates, before, delta, theirs)) < 1e-6  # parameters have 32 bits
    assert relative_rms(ours, theirs) < 1e-6


def store(most: int | None = None) -> StatefulStore:
    made = StatefulStore(Layout(3, (1, 2), 10_000, torch.float32, torch.device("cpu")), [5, 0, 7])
    made._most = most or made._most  # pyright: ignore[reportPrivateUsage]
    return made


def read(own: StatefulStore, tokens: int) -> None:
    """Of each layer the state says how many tokens are there."""
    end = own.length + tokens
    own.reserve(end)
    for layer, size in ((0, 5), (2, 7)):
        assert (own.state(layer) == own.length).all()
        own.next_state(layer, torch.full((size,), float(end)))
    own.length = end


def test_a_text_is_gone_back_in_to_the_copy_before() -> None:
    own = store()
    for tokens in (10, 70, 1, 1):
        read(own, tokens)
    assert (own.keeps(82), own.keeps(81), own.keeps(79), own.keeps(9)) == (82, 80, 10, 0)
    own.crop(80)
    assert own.length == 80 and (own.state(0) == 80).all() and (own.state(2) == 80).all()
    own.crop(79)
    assert own.length == 10 and (own.state(2) == 10).all()
    own.crop(3)
    assert own.length == 0 and not own.state(0).any()
    read(own, 4)
    assert (own.state(0) == 4).all() and [len(layer) for layer in own.layers()] == [2, 256, 2]


def test_single_tokens_are_not_copied_one_by_one() -> None:
    own = store()
    for _ in range(EVERY + 1):
        read(own, 1)
    assert [length for length in range(1, own.length) if own.keeps(length) == length] == [EVERY]


def test_a_pass_that_broke_off_has_changed_nothing() -> None:
    own = store()
    read(own, 7)
    own.next_state(0, torch.full((5,), 99.0))
    own.crop(7)
    read(own, 1)
    assert (own.state(0) == 8).all()


def test_copies_are_fewer_the_longer_ago() -> None:
    own = store(most=8)
    for _ in range(60):
        read(own, EVERY)
    ends = [length for length in range(1, own.length + 1) if own.keeps(length) == length]
    assert len(ends) == 8 and ends[-2:] == [own.length - EVERY, own.length]
    gaps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert gaps[1:] == sorted(gaps[1:], reverse=True), "no part of what is near was given up for what is far"
