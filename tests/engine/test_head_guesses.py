"""A model's drafting head: what it guesses is what its definition gives, whatever way the text came to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.draft_assistant import DraftAssistant
from floe_chat.engine.decoder.draft_head import DraftHead
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.drafts import Depth, Guess
from floe_chat.engine.events import MOST_TOGETHER, Extras, Sampling
from floe_chat.engine.generate import Answer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.sampling import Sampler
from floe_chat.models.checking.repair import add_draft
from floe_chat.models.packing.assistant_part import AssistantSource
from floe_chat.models.packing.pack import EXACT

from .. import families
from ..helpers import make_pack, reference_model
from .driver import GREEDY, open_model

WARM = Sampling(temperature=0.8, top_k=40, min_p=0.01, repetition_penalty=1.1, seed=5)
PROMPT = [5, 9, 17, 3, 42, 5, 9, 17, 200, 7, 11, 60, 61, 3, 42]


def silent(_step: str, _share: float, _left: float | None) -> None:
    """Progress that nobody looks at."""


@dataclass
class Case:
    """A model with a head, and the library's models of both."""

    loaded: LoadedModel
    whole: Any
    theirs: families.Head | families.Assistant

    @property
    def head(self) -> DraftHead | DraftAssistant:
        assert isinstance(self.loaded.decoder.head, DraftHead | DraftAssistant)
        return self.loaded.decoder.head

    def defined(self, text: Sequence[int], count: int, seen: int = 100) -> list[int]:
        """The first guesses behind a text, by the definition."""
        return self.theirs.guesses(self.whole, text, count, seen)


@pytest.fixture(scope="module", params=["qwen3_5_moe", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "gemma4"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("head")
    source = families.make(request.param, folder / "source")
    if request.param in families.HEADS:
        theirs = families.add_head(source)
    else:
        theirs = families.add_assistant(source, folder / "assistant")
    family = make_pack(source, folder / "pack", EXACT).family
    if isinstance(theirs, families.Assistant):
        add_draft(AssistantSource(folder / "assistant", family), folder / "pack", silent)
    loaded = open_model(folder / "pack", "Exact")
    assert f"with the model's {family.drafter}" in loaded.decoder.reason
    return Case(loaded, reference_model(source), theirs)


def guessed(case: Case, token: int, kv: KVCache, count: int = MOST_TOGETHER - 1) -> list[int]:
    tokens, likely = case.head.guess(token, kv, lambda so_far: len(so_far) < count)
    assert len(tokens) == len(likely) and all(0 < one <= 1 for one in likely)
    return tokens


def read(case: Case, ids: Sequence[int], kv: KVCache, *sizes: int) -> int:
    """The prompt's tokens that are not there yet, in parts of these sizes and a last one -> the token behind them."""
    logits = None
    for size in (*sizes, len(ids)):
        some = list(ids)[kv.length :][:size]
        logits = case.loaded.decoder.forward(some, kv)
        kv.computed(some, case.loaded.control.preset)
    assert logits is not None
    return int(logits.argmax())


def follow(case: Case, token: int, kv: KVCache, guess: Sequence[int], extras: Extras | None = None) -> int:
    """A pass with these guesses -> the last token that was drawn."""
    sampler = Sampler(GREEDY, PROMPT, extras)
    drawn = case.loaded.decoder.several(token, kv, sampler, MOST_TOGETHER, (), guess)
    if drawn is None:
        return read(case, [*kv.tokens, token], kv)
    kv.computed([token, *drawn[0][:-1]], case.loaded.control.preset)
    return drawn[0][-1]


@torch.inference_mode()
def test_guesses_are_those_of_the_definition(case: Case) -> None:
    """Behind prompts in one part and in some, right and wrong guesses, passes without any, and each way to draw."""
    for sizes in ((), (1, 2, 7)):
        kv = KVCache()
        token = read(case, PROMPT, kv, *sizes)
        for turn, count in enumerate((3, 1, 2, 3, 3, 0, 0, 3, 3)):
            guess = guessed(case, token, kv, count) if count else []
            assert guess == case.defined([*kv.tokens, token], count)
            wrong = [*guess[:1], *((one + 1) % 259 for one in guess[1:])]
            extras = Extras(likeliest=1) if turn % 3 == 2 else None
            token = follow(case, token, kv, wrong if turn % 2 else guess, extras)


@torch.inference_mode()
def test_a_text_goes_on_and_back(case: Case) -> None:
    preset, kv, other = case.loaded.control.preset, KVCache(), KVCache()
    token = read(case, PROMPT, kv)
    for _ in range(3):
        token = follow(case, token, kv, guessed(case, token, kv))
    longer = [*kv.tokens, token, 8, 9, 10, 11, 12, 13]
    kept = kv.keep(longer, preset)  # the next prompt: layers with a state may have to begin again
    token = read(case, longer, kv)
    if kept:
        assert guessed(case, token, kv) == case.defined([*longer, token], 3)
    short = [*longer[:-4], 50, 51, 52, 53, 54, 55]  # another one from its middle on: all but one token's entry
    kv.keep(short, preset)
    token = read(case, short, kv)
    assert len(guessed(case, token, kv)) == 3
    read(case, short[::-1], other)  # of a text that it does not follow any more, it guesses nothing
    assert not guessed(case, token, kv)
    token = follow(case, token, kv, [])
    assert len(guessed(case, token, kv)) == 3


@torch.inference_mode()
def test_long_prompts_and_the_first_part_of_a_vocabulary(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, kv = [*PROMPT] * 3, KVCache()
    monkeypatch.setattr("floe_chat.engine.decoder.draft_head._MOST", 13)
    token = read(case, ids, kv, 16, 16)
    text = [*ids, token]
    assert guessed(case, token, kv) == case.defined(text, 3, seen=13)
    kv = KVCache()
    token = read(case, [one % 64 for one in ids], kv)
    assert all(one < 259 // 4 for one in guessed(case, token, kv))
    kv = KVCache()
    token = read(case, [one % 32 for one in ids], kv)
    assert all(one < 259 // 8 for one in guessed(case, token, kv))


class Asking(Depth):
    """Asks the head before every pass, and computes all that it guesses."""

    def asks(self, preset: object, other: object) -> bool:
        return True

    def more(self, preset: object, likely: object) -> bool:
        return True

    def worth(self, guess: Guess, preset: object) -> list[int]:
        return guess.tokens


def test_answers_stay_the_same(case: Case) -> None:
    loaded = case.loaded

    def answered(sampling: Sampling, depth: Depth | None, extras: Extras | None) -> list[int]:
        loaded.telemetry.begin(1, len(PROMPT), 0.0)
        answer = Answer(
            *(loaded.decoder, KVCache(), PROMPT, sampling),
            max_new_tokens=40,
            stop_ids=(),
            window=loaded.window,
            control=loaded.control,
            telemetry=loaded.telemetry,
            extras=extras,
            depth=depth,
        )
        found = list[int]()
        while not answer.end:
            found += [one.token for one in answer.step() if one.token is not None]
        return found

    for sampling, extras in ((GREEDY, None), (WARM, None), (WARM, Extras(presence_penalty=0.3))):
        wanted = answered(sampling, None, extras)
        assert answered(sampling, Asking(), extras) == wanted
        counts = loaded.telemetry.answer
        assert counts.drafted > 60 > counts.accepted
        assert answered(sampling, Depth(), extras) == wanted
