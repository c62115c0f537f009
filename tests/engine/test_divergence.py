"""Every figure of an evaluation against the formula written down plainly."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from floe_chat.engine.quality.divergence import score, summarize
from torch import Tensor


def by_hand(logits: Tensor, source: Tensor, following: list[int]) -> dict[str, float]:
    """Every figure with plain float64 loops and Python's own mathematics."""
    kl: list[float] = []
    nll: list[float] = []
    source_nll: list[float] = []
    dp: list[float] = []
    same = 0
    for ours, theirs, token in zip(logits.tolist(), source.tolist(), following, strict=True):
        q, p = ([math.exp(value - max(row)) for value in row] for row in (ours, theirs))
        q, p = [value / math.fsum(q) for value in q], [value / math.fsum(p) for value in p]
        kl.append(math.fsum(b * math.log(b / a) for a, b in zip(q, p, strict=True)))
        nll.append(-math.log(q[token]))
        source_nll.append(-math.log(p[token]))
        dp.append(q[token] - p[token])
        same += ours.index(max(ours)) == theirs.index(max(theirs))
    n = len(following)
    place = 0.99 * (n - 1)
    low, ordered = int(place), sorted(kl)
    return {
        "tokens": n,
        "perplexity": math.exp(math.fsum(nll) / n),
        "source_perplexity": math.exp(math.fsum(source_nll) / n),
        "kl_mean": math.fsum(kl) / n,
        "kl_99": ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]),
        "kl_max": ordered[-1],
        "same_top": same / n,
        "dp_rms": math.sqrt(math.fsum(value * value for value in dp) / n),
    }


@pytest.mark.parametrize("noise", [1e-4, 0.1, 3.0])
@pytest.mark.parametrize("n", [2, 63, 65, 200])
def test_every_figure_is_the_plain_formula(n: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(n)
    source = 4 * torch.randn(n, 37, generator=generator)
    logits = source + noise * torch.randn(n, 37, generator=generator)
    following = torch.randint(0, 37, (n,), generator=generator)
    half = n // 2  # in two parts, as windows come
    parts = [score(logits[part], source[part], following[part]) for part in (slice(half), slice(half, None))]
    assert asdict(summarize(parts)) == pytest.approx(by_hand(logits, source, following.tolist()), rel=1e-9, abs=1e-15)


def test_divergence_does_not_drown_in_float32_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    source = 5 * torch.randn(64, 5000, generator=generator)
    noise = 1e-5 * torch.randn(64, 5000, generator=generator)
    found = summarize([score(source + noise, source, torch.zeros(64, dtype=torch.long))])
    assert 0 < found.kl_mean < 1e-9
    same = summarize([score(source, source, torch.zeros(64, dtype=torch.long))])
    assert (same.kl_max, same.dp_rms, same.same_top) == (0, 0, 1)
