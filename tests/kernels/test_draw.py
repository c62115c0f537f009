"""Drawing: the compiled one takes the token that the plain one takes, whatever the filters, ties and odd numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from floe_chat.kernels import sampling
from floe_chat.kernels.cpu.native_ends import draw
from floe_chat.kernels.sampling import Filters, NotNumbersError
from torch import Tensor

from ..covering import covering_rows

INF, NAN, LARGEST = math.inf, math.nan, 1 - 2**-53
FILTERS = [
    *(
        Filters(temperature, k, p, m, penalty)
        for k, p, m, temperature, penalty in covering_rows(
            {"top_k": (0, 1, 7), "top_p": (1.0, 0.6), "min_p": (0.0, 0.1)},
            {"temperature": (0.3, 1.7), "penalty": (1.0, 1.3)},
        )
    ),
    *(
        Filters(0.0),
        Filters(0.0, 3, 0.5, 0.9, 0.5),
        Filters(1.0, 10**9),
        Filters(1.0, 0, 1e-9),
        Filters(1.0, 0, 1.0, 1.0),
    ),
]


def logits_of(count: int, seed: int) -> Iterator[Tensor]:
    drawn = torch.Generator().manual_seed(1000 * count + seed)
    flat, wide = (scale * torch.randn(count, generator=drawn) for scale in (0.1, 6.0))
    yield from (flat, wide, torch.randint(-2, 3, (count,), generator=drawn).float(), torch.zeros(count))
    some = wide.clone()
    some[torch.rand(count, generator=drawn) < 0.5] = -INF
    some[seed % count] = 1.0
    yield some


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 50, 1001])
def test_both_draw_the_same(filters: Filters, count: int) -> None:
    drawn = torch.Generator().manual_seed(count)
    taken = set[int]()
    for logits in logits_of(count, FILTERS.index(filters)):
        seen = torch.randint(2, (count,), generator=drawn, dtype=torch.uint8)
        for uniform in [0.0, LARGEST, *torch.rand(3, dtype=torch.float64, generator=drawn).tolist()]:
            for there in (None, seen):
                token, plain = (take(logits, filters, uniform, there) for take in (draw, sampling.draw))
                assert logits[token] > -INF < logits[plain]
                assert token == plain or uniform == LARGEST  # where rounding may choose
                taken.add(token)
    assert len(taken) > 1 or count == 1


def test_numbers_pick_tokens_by_their_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.0, 0.25]).log()
    for take in (draw, sampling.draw):
        taken = [take(logits, Filters(1.0), uniform) for uniform in (0.0, 0.49, 0.51, 0.74, 0.76, 0.99)]
        assert taken == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("logits", [[1.0, NAN, 2.0], [1.0, INF, 2.0], [-INF, -INF, -INF], [NAN, NAN, NAN]], ids=str)
@pytest.mark.parametrize("filters", [Filters(0.0), Filters(0.0, penalty=1.3), Filters(1.0), Filters(0.5, 2, 0.9, 0.1)])
def test_logits_that_are_not_numbers_are_refused_at_any_temperature(filters: Filters, logits: list[float]) -> None:
    for take in (draw, sampling.draw):
        with pytest.raises(NotNumbersError, match="not numbers"):
            take(torch.tensor(logits), filters, 0.5, torch.ones(3, dtype=torch.uint8))


@pytest.mark.parametrize(
    "filters",
    [
        *(Filters(wrong) for wrong in (-1.0, NAN, INF)),
        *(Filters(1.0, top_k=wrong) for wrong in (-1, 1 << 63, (1 << 64) + 1)),
        *(Filters(1.0, top_p=wrong) for wrong in (0.0, 1.5, NAN)),
        *(Filters(1.0, min_p=wrong) for wrong in (-0.5, 1.5, NAN)),
        *(Filters(1.0, penalty=wrong) for wrong in (0.0, -1.0, NAN, INF)),
    ],
    ids=str,
)
def test_filters_outside_their_ranges_are_refused(filters: Filters) -> None:
    for take in (draw, sampling.draw):
        with pytest.raises(ValueError, match="must be"):
            take(torch.zeros(3), filters, 0.5)


@pytest.mark.parametrize("uniform", [-0.1, 1.0, NAN], ids=str)
def test_numbers_outside_0_to_1_are_refused(uniform: float) -> None:
    for take in (draw, sampling.draw):
        with pytest.raises(ValueError, match="a number from 0 up to 1"):
            take(torch.zeros(3), Filters(1.0), uniform)


def test_what_does_not_fit_is_refused() -> None:
    for logits, seen in (
        (torch.zeros(5, dtype=torch.float64), None),
        (torch.zeros(5, 2)[:, 0], None),
        (torch.zeros(5), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(5), torch.zeros(5)),
        (torch.zeros(0), None),
    ):
        with pytest.raises(ValueError):
            draw(logits, Filters(1.0), 0.5, seen)
