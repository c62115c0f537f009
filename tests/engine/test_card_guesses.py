"""Guessed tokens of one text in one graph on a card: answers, counts and what is kept stay the same to the last bit.

The card is fake_card.py's. What the kernels of a card give several tokens is tested with them (kernels/triton).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder import draft_head, fused_pass, graphs
from floe_chat.engine.decoder.card.card_draft import CardDraft
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth
from floe_chat.engine.events import MOST_TOGETHER, Extras, Sampling
from floe_chat.engine.experts.moe_layer import Cancelled
from floe_chat.engine.generate import Answer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.sampling import Sampler
from floe_chat.models.packing.pack import EXACT, PackSpec
from torch import nn

from .. import families
from ..helpers import make_pack
from .driver import GREEDY, a_preset, open_model
from .fake_card import FakeCard
from .test_card_token import PRESETS, card, counted, form_of, on_gpu, open_on, use
from .test_drafts import PRESET, PROMPT, WARM, Given, answered, stored
from .test_head_guesses import Asking

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
    """The tokens drawn behind the prompt's last one by a pass with guesses, and how many of these were computed; -1
    where it goes through layer after layer.
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


def whole(layer: nn.Module) -> nn.Module:
    return layer


@pytest.mark.some(1)
@pytest.mark.parametrize("spec", [PackSpec(up=4), EXACT], ids=["codes", "16 bits"])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe", "deepseek_v3", "ernie4_5_moe"])
def test_a_head_guesses_as_on_the_cpu(
    family: str, spec: PackSpec, tmp_path: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, precise in (("PRESET", a_preset("", lossless=True)), ("X_BITS_COARSE", 22)):  # no guess by rounding
        monkeypatch.setattr(draft_head, name, precise)
    source = families.make(family, tmp_path / "source")
    families.add_head(source)
    make_pack(source, tmp_path / "pack", spec)
    ours = open_on(card, tmp_path / "pack")
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "possible", Mock(return_value=False))
        patch.setattr(fused_pass, "in_planes", whole)  # a head reads one of two planes alone
        theirs = open_model(tmp_path / "pack")
    texts, found = [KVCache(), KVCache()], list[list[list[float]]]()
    for loaded, kv in zip((ours, theirs), texts, strict=True):
        head, preset, ids = loaded.decoder.head, use(loaded, PRESETS["nothing"]), [*PROMPT, 4]
        assert head is not None and "with the model's own drafting head" in loaded.decoder.reason
        guesses: list[list[float]] = []
        for some in (PROMPT[:4], PROMPT[4:]):
            loaded.decoder.forward(some, kv)
            kv.computed(some, preset)
        for right in (0, 3, 1, 0, 2):  # so many guesses are computed
            tokens, likely = head.guess(ids[-1], kv, lambda so_far: len(so_far) < MOST_TOGETHER - 1)
            guesses.append([*tokens, *likely])
            drawn = loaded.decoder.several(ids[-1], kv, Sampler(GREEDY, ids), 1 + right, (), tokens[:right])
            assert drawn is not None
            kv.computed([ids[-1], *drawn[0][:-1]], preset)
            ids += drawn[0]
        guesses.append([*ids])
        found.append(guesses)
    for mine, other in zip(*found, strict=True):
        assert mine == pytest.approx(other, rel=1e-2)


def answered_by_head(loaded: LoadedModel, sampling: Sampling, depth: Depth | None) -> list[int]:
    loaded.telemetry.begin(1, len(PROMPT), 0.0)
    answer = Answer(
        *(loaded.decoder, KVCache(), PROMPT, sampling),
        max_new_tokens=24,
        stop_ids=(),
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
        depth=depth,
    )
    found = list[int]()
    while not answer.end:
        found += [one.token for one in answer.step() if one.token is not None]
    return found


def test_a_head_changes_no_answer(tmp_path: Path, card: FakeCard) -> None:
    source = families.make("qwen3_5_moe", tmp_path / "source")
    families.add_head(source)
    make_pack(source, tmp_path / "pack", PackSpec(up=4))
    loaded = open_on(card, tmp_path / "pack")
    for sampling in (GREEDY, WARM):
        wanted = answered_by_head(loaded, sampling, None)
        assert answered_by_head(loaded, sampling, Asking()) == wanted
        assert loaded.telemetry.answer.drafted > 20
    head = loaded.decoder.head
    assert isinstance(head, CardDraft) and not head.declined
    head._graphs.clear()  # pyright: ignore[reportPrivateUsage]
    card.refuses = torch.OutOfMemoryError("CUDA out of memory")
    assert answered_by_head(loaded, GREEDY, Asking()) == answered_by_head(loaded, GREEDY, None)
    assert not loaded.telemetry.answer.drafted and "out of memory" in head.declined
    (notice,) = loaded.control.notices
    assert "drafting head" in notice.title and head.declined in notice.cause


@pytest.mark.gpu
def test_guesses_on_a_gpu_change_no_answer() -> None:
    loaded = on_gpu()
    for preset in PRESETS.values():
        use(loaded, preset)
        for sampling in (GREEDY, WARM):
            wanted, chances, *_ = answered(loaded, sampling, None, Extras(likeliest=1))
            found, others, *_ = answered(loaded, sampling, Given(wanted, 1), Extras(likeliest=1))
            assert found == wanted and others == chances
        assert sorted(form_of(loaded).captured) == [*range(1, 1 + MOST_TOGETHER)]
