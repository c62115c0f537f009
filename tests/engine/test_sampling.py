"""Drawing the next token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from floe_chat.engine.events import Extras, Sampling
from floe_chat.engine.ranges import check
from floe_chat.engine.sampling import Sampler
from floe_chat.models.errors import UsageError

VOCABULARY = 50
IDS = [3, 4, 5]
PLAIN = Sampling(temperature=1.0, min_p=0.0, seed=1)


def some_logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))


FLAT = 0.1 * some_logits()


def draws(sampling: Sampling, count: int, logits: torch.Tensor | None = None) -> list[int]:
    sampler = Sampler(sampling, IDS)
    return [sampler.draw(some_logits() if logits is None else logits) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    for seed in range(20):
        logits = some_logits(seed)
        assert draws(Sampling(temperature=0, seed=seed), 1, logits) == [int(logits.argmax())]


def test_no_seed_is_a_fresh_one() -> None:
    assert len({tuple(draws(replace(PLAIN, seed=None), 20, FLAT)) for _ in range(5)}) == 5


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    expected = logits[0].softmax(-1)
    counts = Counter(draws(PLAIN, 4000, logits))
    for token in range(4):
        # Five standard deviations of a share among 4,000 draws.
        room = 5 * float((expected[token] * (1 - expected[token]) / 4000).sqrt())
        assert abs(counts[token] / 4000 - float(expected[token])) <= room


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        pytest.param({"top_k": 2}, {0, 1}, id="top-k"),
        pytest.param({"top_p": 0.6}, {0}, id="top-p"),
        pytest.param({"top_p": 0.8}, {0, 1}, id="top-p-two"),
        pytest.param({"min_p": 0.3}, {0, 1}, id="min-p"),
        pytest.param({"temperature": 0.05}, {0}, id="cold"),
    ],
)
def test_filters_leave_the_likely_ones(filters: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])  # 64, 24, 9 and 3 %
    assert set(draws(replace(PLAIN, **filters), 300, logits)) == allowed


def test_a_repetition_penalty_makes_what_was_said_unlikely() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3:6] = 4.0  # all of IDS
    logits[0, 7] = 3.0
    assert set(draws(Sampling(temperature=0), 1, logits)) == {3}
    assert set(draws(Sampling(temperature=0, repetition_penalty=2.0), 1, logits)) == {7}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-40, 5e-324, 5.0])
def test_every_allowed_temperature_draws(temperature: float) -> None:
    token = draws(replace(PLAIN, temperature=temperature), 1)[0]
    assert 0 <= token < VOCABULARY
    if temperature <= 1e-3:
        assert token == int(some_logits().argmax())


BAD: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": 5.1},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_k": -1},
    {"top_k": 1 << 31},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_p": float("nan")},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 1e-4},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": 11.0},
    {"seed": -1},
    {"seed": 1 << 63},
]


@pytest.mark.parametrize("values", BAD, ids=str)
def test_values_out_of_range_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        check(Sampling(**values))
    assert next(iter(values)) in caught.value.title and caught.value.hint
    with pytest.raises(UsageError):
        Sampler(Sampling(**values), IDS)


def test_extras_that_change_nothing_draw_the_same() -> None:
    """One at a time, but by the same numbers."""
    plain, alone = Sampler(PLAIN, IDS), Sampler(PLAIN, IDS, Extras(likeliest=0))
    assert alone.alone and not plain.alone
    assert [plain.draw(FLAT) for _ in range(80)] == [alone.draw(FLAT) for _ in range(80)]


def test_penalties_and_biases_as_they_are_defined() -> None:
    """By the logits that they leave, whose largest is drawn."""
    extras = Extras(presence_penalty=0.7, frequency_penalty=0.3, bias=((7, 1.5), (9, -2.0)))
    sampler, counts = Sampler(replace(PLAIN, temperature=0), IDS, extras), Counter[int]()
    for seed in range(60):
        logits = 0.5 * some_logits(seed)
        expected = [
            float(logit) - 0.7 * (counts[token] > 0) - 0.3 * counts[token] + dict(extras.bias).get(token, 0.0)
            for token, logit in enumerate(logits[0])
        ]
        token = sampler.draw(logits)
        assert token == max(range(VOCABULARY), key=expected.__getitem__)
        counts[token] += 1
    assert max(counts.values()) > 1  # the prompt's tokens do not count, and those of the answer do


def test_chances_are_the_models() -> None:
    """Whatever changes the drawing."""
    extras = Extras(presence_penalty=2.0, bias=((4, 100.0),), likeliest=3)
    sampler = Sampler(replace(PLAIN, temperature=2.0, top_k=5, repetition_penalty=1.5), IDS, extras)
    for seed in range(20):
        logits = some_logits(seed)
        token, true = sampler.draw(logits), logits[0].double().log_softmax(0)
        (chance,) = sampler.chances
        sampler.chances.clear()
        assert token == 4
        assert chance.logprob == pytest.approx(float(true[4]), abs=1e-5)
        assert [number for number, _ in chance.likeliest] == true.argsort(descending=True)[:3].tolist()
        likeliest = [own for _, own in chance.likeliest]
        assert likeliest == pytest.approx(true.sort().values[-3:].flip(0).tolist(), abs=1e-5)
