"""Guessed tokens: what comes again, how many it pays to compute, and that no answer is another one by them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import GrowingStore
from floe_chat.engine.drafts import Depth, Guess, Repeats
from floe_chat.engine.events import MOST_TOGETHER, Extras, Sampling
from floe_chat.engine.generate import Answer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.quality_presets import Preset
from floe_chat.engine.sampling import Sampler
from floe_chat.models.packing.pack import PackSpec

from .. import families
from ..helpers import make_pack
from .driver import GREEDY, a_preset, open_model

PRESET = a_preset("", 0.3, 0.8, drop=0.3, major=0.3)
WARM = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
PROMPT = [5, 9, 17, 3, 42, 5, 9, 17, 200, 7]


def longest(text: Sequence[int], places: int = 8) -> tuple[int, int] | None:
    """How many of the last tokens came before, and where what followed is: by looking everywhere."""
    found = [
        (next((n for n in range(32) if n >= at or text[at - 1 - n] != text[-1 - n]), 32), at)
        for at in range(1, len(text))
    ]
    return max([one for one in found if one[0] >= 3][-places:], default=None)


def test_what_comes_again_is_what_came_before() -> None:
    seen = 0
    for seed in range(60):
        drawn = random.Random(seed)
        text, repeats = [drawn.randrange(2 + seed % 5) for _ in range(drawn.randrange(90))], Repeats([])
        for at, token in enumerate(text):
            repeats.add([token])
            guess, best = repeats.guess(), longest(text[: at + 1])
            assert (guess is None) == (best is None)
            if guess is not None and best is not None:
                follows = [*text[best[1] : at + 1]]
                while len(follows) < MOST_TOGETHER - 1:  # where it repeats itself
                    follows.append(follows[len(follows) - (at + 1 - best[1])])
                assert guess.tokens == follows[: MOST_TOGETHER - 1]
                assert guess.kinds == [(best[0] >= 4) + (best[0] >= 8) + (best[0] >= 16)] * len(guess.tokens)
                seen += 1
    assert seen > 1000


def test_as_many_as_pay() -> None:
    depth, guess, other = Depth(), Guess([7, 8, 9], [3] * 3), Guess([7, 8, 9], [0] * 3)
    assert not depth.worth(guess, PRESET)  # a token's time is not known
    depth.took(PRESET, 0, 40, 40.0)
    assert depth.worth(guess, PRESET) == [7, 8, 9] and not depth.worth(guess, a_preset("", 0.0))
    depth.took(PRESET, 3, 1, 400.0)  # the first pass of four captured its graph
    for _ in range(4):
        depth.took(PRESET, 3, 1, 3.9)  # four together are hardly faster
    assert depth.worth(guess, PRESET) == [7, 8]  # three were not tried
    for _ in range(7):
        depth.took(PRESET, 2, 3, 3.3)
        depth.took(PRESET, 1, 2, 1.4)
    assert depth.worth(guess, PRESET) == [7]
    for _ in range(20):
        depth.compare(guess, [6])
    assert not depth.worth(guess, PRESET)
    for _ in range(20):
        depth.compare(other, [7, 8, 9, 10])
    assert depth.worth(other, PRESET) == [7] and not depth.worth(guess, PRESET)


def test_a_head_is_asked_where_that_pays() -> None:
    depth, sure, other = Depth(), depth_kind(0.99), Guess([7], [3])
    assert not depth.asks(PRESET, None)  # a token's time is not known
    depth.took(PRESET, 0, 40, 40.0)
    assert depth.asks(PRESET, None) and not depth.asks(PRESET, other) and not depth.asks(a_preset("", 0.0), None)
    assert depth.more(PRESET, []) and depth.more(PRESET, [0.99]) and not depth.more(PRESET, [0.2])
    for _ in range(40):
        depth.compare(Guess([7, 8, 9], [sure] * 3), [6])
    assert not depth.asks(PRESET, None) and not depth.more(PRESET, [0.99])
    depth.took(PRESET, 0, 220, 220.0)
    asked = [depth.asks(PRESET, None) for _ in range(40)]
    assert 1 < sum(asked) < 6 and not any(asked[6:])  # tried again
    for _ in range(40):
        depth.compare(Guess([7, 8, 9], [sure] * 3), [7, 8, 9, 1])
    assert depth.asks(PRESET, None)
    for _ in range(40):
        depth.asked(PRESET, 2, 4.0)  # a guess takes as long as two tokens
    assert not depth.asks(PRESET, None)


def depth_kind(likely: float) -> int:
    """The class of a head's guess that it finds so likely."""
    kinds = [Depth.of_head(one) for one in (0.0, 0.4, 0.6, 0.8, 0.9, likely)]
    assert kinds == sorted(set(kinds)) and min(kinds) > 3  # none is a class of what comes again
    return kinds[-1]


@pytest.fixture(scope="module", params=["mixtral", "qwen3_next", "lfm2_moe", "gpt_oss", "gemma4", "deepseek_v2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Of each kind of mixer."""
    folder = tmp_path_factory.mktemp("drafts")
    families.make(request.param, folder / "source")
    make_pack(folder / "source", folder / "pack", PackSpec(up=4))
    return open_model(folder / "pack")


class Given(Depth):
    """Guesses are right up to a place each, whatever an answer has."""

    def __init__(self, answer: Sequence[int], seed: int) -> None:
        super().__init__()
        self._answer, self._random, self.at = answer, random.Random(seed), 0
        self.alone_s = 0.0  # what all tokens take one by one

    def took(self, preset: Preset, guessed: int, drawn: int, seconds: float) -> None:
        self.alone_s += self.alone(preset, drawn) or 0.0 if guessed else seconds
        super().took(preset, guessed, drawn, seconds)

    def worth(self, guess: Guess, preset: object) -> list[int]:
        right = self._answer[self.at : self.at + self._random.randrange(MOST_TOGETHER)]
        return [*right, *[1] * self._random.randrange(not right, 3)][: MOST_TOGETHER - 1]


def answered(
    loaded: LoadedModel, sampling: Sampling, given: Given | None, extras: Extras | None = None, stop: Sequence[int] = ()
) -> tuple[list[int], list[object], KVCache, str]:
    kv, tokens, chances = KVCache(), list[int](), list[object]()
    loaded.telemetry.begin(1, len(PROMPT), 0.0)
    answer = Answer(
        *(loaded.decoder, kv, PROMPT, sampling),
        max_new_tokens=90,
        stop_ids=stop,
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
        extras=extras,
        depth=given,
    )
    if given is not None:
        repeats = answer._repeats  # pyright: ignore[reportPrivateUsage]
        assert repeats is not None
        repeats.guess = lambda: Guess([], [])
    while not answer.end:
        for one in answer.step():
            if one.token is not None:
                tokens.append(one.token)
                chances.append(one.chance)
        if given is not None:
            given.at = len(tokens)
    return tokens, chances, kv, answer.end


def test_tokens_are_the_same(loaded: LoadedModel) -> None:
    loaded.control.preset = PRESET
    for sampling, extras in ((GREEDY, None), (WARM, None), (WARM, Extras(presence_penalty=0.3, likeliest=2))):
        wanted, chances, kept, _ = answered(loaded, sampling, None, extras)
        stop = wanted[70]
        for seed in range(2):
            given = Given(wanted, seed)
            found, others, kv, end = answered(loaded, sampling, given, extras)
            assert found == wanted and others == chances and end == "length"
            stats = loaded.telemetry.answer
            assert stats.drafted > stats.accepted > 20
            assert kv.tokens == kept.tokens
            for ours, theirs in zip(stored(kv), stored(kept), strict=True):
                assert torch.equal(ours, theirs)
            found, _, _, end = answered(loaded, sampling, Given(wanted, seed), extras, [stop])
            assert found == wanted[: wanted.index(stop)] and end == "stop"


def test_what_guesses_gained_is_measured(loaded: LoadedModel) -> None:
    loaded.control.preset = PRESET
    wanted, *_ = answered(loaded, GREEDY, None)
    for known in (False, True):
        given = Given(wanted, 1)
        if known:
            given.took(PRESET, 0, 16, 0.0016)
            given.alone_s = 0.0
        answered(loaded, GREEDY, given)
        gained = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=0).draft_speedup
        assert gained == (pytest.approx(given.alone_s / loaded.telemetry.answer.decode_s) if known else None)


class Distribution:
    """What is drawn of the first two tokens after `PROMPT`, by logits of one pass each, computed in float64.

    Attributes:
        guess: the likeliest pair, or the least likely of frequent ones that begin with another token.
    """

    def __init__(self, loaded: LoadedModel, sampling: Sampling, answers: int, *, likely: bool) -> None:
        self.answers, filters = answers, Sampler(sampling, PROMPT).filters
        kv = KVCache()

        def shares(ids: list[int]) -> list[float]:
            kv.cut(0)
            logits = loaded.decoder.forward(ids, kv).double()
            return filters.warpers()(torch.tensor([ids]), logits).softmax(-1)[0].tolist()

        self.shares = {
            (first, second): part * share
            for first, part in enumerate(shares(PROMPT))
            if part * answers >= 5  # rarer ones are counted as one
            for second, share in enumerate(shares([*PROMPT, first]))
            if part * share * answers >= 5
        }
        best, chance = max(self.shares, key=self.shares.__getitem__), self.shares.__getitem__
        self.guess = best if likely else min((pair for pair in self.shares if pair[0] != best[0]), key=chance)

    def fits(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether Pearson's chi-square is within five standard deviations of what the distribution itself gives."""
        counts, shares = Counter(pairs), self.shares
        cells = [(counts[pair], self.answers * share) for pair, share in shares.items()]
        others = self.answers * (1 - sum(shares.values()))
        if others >= 5:
            cells.append((self.answers - sum(counts[pair] for pair in shares), others))
        freedom = len(cells) - 1
        return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells) < freedom + 5 * (2 * freedom) ** 0.5


def check_distribution(loaded: LoadedModel, sampling: Sampling, answers: int, *, likely: bool) -> None:
    loaded.control.preset = PRESET
    wanted, kv = Distribution(loaded, sampling, answers, likely=likely), KVCache()
    pairs, right = list[tuple[int, int]](), 0
    loaded.decoder.forward(PROMPT[:-1], kv)
    kv.computed(PROMPT[:-1], PRESET)
    for seed in range(answers):
        sampler, tokens = Sampler(replace(sampling, seed=seed), PROMPT), [PROMPT[-1]]
        while len(tokens) < 3:
            guessed = wanted.guess[len(tokens) - 1 :]
            found = loaded.decoder.several(tokens[-1], kv, sampler, MOST_TOGETHER, (), guessed)
            assert found is not None and found[2] == len(guessed)
            kv.computed([tokens[-1], *found[0][:-1]], PRESET)
            tokens += found[0]
        kv.cut(len(PROMPT) - 1)
        pairs.append((tokens[1], tokens[2]))
        right += tokens[1] == wanted.guess[0]
    assert wanted.fits(pairs) and (right > answers / 4 if likely else 0 < right < answers / 4)
    # Where guesses count by a coin, or are drawn again by their own chance, it does not fit.
    by_chance = random.Random(1)
    for chance in (0.5, wanted.shares[wanted.guess]) if likely else (0.5,):
        assert not wanted.fits([wanted.guess if by_chance.random() < chance else pair for pair in pairs])


@pytest.fixture(scope="module")
def small(tiny_pack: Path) -> LoadedModel:
    return open_model(tiny_pack)


COLD = Sampling(temperature=0.5, min_p=0.0)
FILTERS = {
    "temperature": COLD,
    "top-p": replace(COLD, top_p=0.8),
    "min-p": replace(COLD, min_p=0.1),
    "top-k": replace(COLD, top_k=5),
    "penalty": replace(COLD, repetition_penalty=0.4),
}
each_filter = pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)


@pytest.mark.some(2)
@pytest.mark.parametrize("likely", [True, False], ids=["right", "wrong"])
@each_filter
def test_guesses_change_no_distribution(small: LoadedModel, sampling: Sampling, likely: bool) -> None:
    check_distribution(small, sampling, 600, likely=likely)


@pytest.mark.thorough
@pytest.mark.parametrize("likely", [True, False], ids=["right", "wrong"])
@each_filter
def test_guesses_change_no_distribution_of_many(small: LoadedModel, sampling: Sampling, likely: bool) -> None:
    """10^5 tokens."""
    check_distribution(small, sampling, 5000, likely=likely)


def stored(kv: KVCache) -> list[torch.Tensor]:
    """Keys and values, and the states behind the text."""
    store, length = kv.store, kv.length
    assert isinstance(store, GrowingStore)
    store.crop(length)
    held = store.copied(1 << 40)
    assert held is not None
    return [*held.entries, *(held.copies[-1].states if held.copies else ())]
