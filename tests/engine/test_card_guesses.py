"""Guessed tokens of one text in one graph on a card: answers, counts and what is kept stay the same to the last bit.

The card is fake_card.py's. What the kernels of a card give several tokens is tested with them (kernels/triton).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import MOST_TOGETHER, Extras
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.sampling import Sampler
from floe_chat.models.packing.pack import PackSpec

from .. import families
from ..helpers import make_pack
from .driver import GREEDY
from .fake_card import FakeCard
from .test_card_token import PRESETS, card, counted, open_on, use
from .test_drafts import PRESET, PROMPT, WARM, Given, answered, stored

assert card  # a fixture
FAMILIES = ["mixtral", "qwen3_next", "lfm2_moe", "gpt_oss", "gemma4", "deepseek_v2", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def family_pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guesses")
    families.make(request.param, folder / "source")
    make_pack(folder / "source", folder / "pack", PackSpec(up=4))
    return folder / "pack"


def way_of(loaded: LoadedModel) -> Any:
    assert isinstance(loaded.decoder, FusedDecoder)
    return loaded.decoder.way


@pytest.mark.some(1)
def test_tokens_and_counts_are_the_same(family_pack: Path, card: FakeCard) -> None:
    loaded = open_on(card, family_pack)
    use(loaded, PRESET)
    assert way_of(loaded).most == MOST_TOGETHER and len(card.captures) == 1
    for sampling, extras in ((GREEDY, None), (WARM, Extras(presence_penalty=0.3, likeliest=2))):
        wanted, chances, kept, _ = answered(loaded, sampling, None, extras)
        alone, given = counted(loaded), Given(wanted, 1)
        waits, replays = card.waits, card.replays
        found, others, kv, _ = answered(loaded, sampling, given, extras)
        assert found == wanted and others == chances and counted(loaded) == alone
        assert card.waits - waits == card.replays - replays < len(wanted) - 20
        assert loaded.telemetry.answer.drafted > loaded.telemetry.answer.accepted > 20
        for ours, theirs in zip(stored(kv), stored(kept), strict=True):
            assert torch.equal(ours, theirs)
    assert len(card.captures) == 1 + MOST_TOGETHER  # another structure than the first, of each number of tokens


def guess(loaded: LoadedModel, kv: KVCache, guessed: list[int]) -> tuple[list[int], int]:
    """The tokens drawn behind the prompt's last one by a pass with guesses, and how many of these were computed; -1 where
    it goes through layer after layer.
    """
    kv.cut(len(PROMPT) - 1)
    if not kv.length:
        loaded.decoder.forward(PROMPT[:-1], kv)
        kv.computed(PROMPT[:-1], loaded.control.preset)
    drawn = loaded.decoder.several(PROMPT[-1], kv, Sampler(GREEDY, PROMPT), MOST_TOGETHER, (), guessed)
    return ([int(loaded.decoder.forward(PROMPT[-1:], kv).argmax())], -1) if drawn is None else (drawn[0], drawn[2])


def test_several_that_cannot_be_captured_go_one_by_one(tiny_pack: Path, card: FakeCard) -> None:
    loaded, kv = open_on(card, tiny_pack), KVCache()
    use(loaded, PRESETS["nothing"])
    first = guess(loaded, kv, [])[0]
    card.refuses = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        assert guess(loaded, kv, [*first, 9]) == (first, 0)
    (notice,) = loaded.control.notices
    assert "Guessed words" in notice.title and "3 tokens at once" in notice.cause and "memory" in notice.cause
    card.refuses = None
    assert guess(loaded, kv, [*first, 9]) == (first, 0)  # it is not tried for each token
    use(loaded, PRESETS["weighed"])
    first = guess(loaded, kv, [])[0]
    tokens, checked = guess(loaded, kv, [*first, 9])
    assert checked == 2 and tokens[:1] == first and len(tokens) > 1


def test_hooks_and_stops_are_seen(tiny_pack: Path, card: FakeCard) -> None:
    loaded, kv = open_on(card, tiny_pack), KVCache()
    use(loaded, PRESETS["nothing"])
    first, seen = guess(loaded, kv, [])[0], list[int]()
    loaded.control.cancelled.set()
    with pytest.raises(Cancelled):
        guess(loaded, kv, first)
    loaded.control.cancelled.clear()
    assert kv.length == len(PROMPT) - 1 and guess(loaded, kv, first)[1] == 1

    def note(*_given: object) -> None:
        seen.append(1)

    hook = loaded.model.model.layers[0].mlp.experts.register_forward_pre_hook(note)
    assert guess(loaded, kv, first) == (first, -1) and seen == [1]
    hook.remove()
    assert guess(loaded, kv, first)[1] == 1
