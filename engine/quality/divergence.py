"""How far one model's next-token distributions are from another's: plain formulas in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 64  # positions at a time: bounds the float64 copies to 64 vocabularies


@dataclass(frozen=True, slots=True)
class Scores:
    """Measurements at each of n positions, float64 (n,) except `same_top`, which is bool.

    Attributes:
        kl: KL divergence of the pack's distribution from the source's, nats.
        nll, source_nll: negative log-likelihood of the actual next token, nats.
        dp: its probability in the pack minus that in the source.
        same_top: whether both find the same token likeliest.
    """

    kl: Tensor
    nll: Tensor
    source_nll: Tensor
    dp: Tensor
    same_top: Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """The figures of one preset over `tokens` positions. KL in nats; `dp_rms` and `same_top` are shares, 0..1."""

    tokens: int
    perplexity: float
    source_perplexity: float
    kl_mean: float
    kl_99: float
    kl_max: float
    same_top: float
    dp_rms: float


def score(logits: Tensor, source: Tensor, following: Tensor) -> Scores:
    """Compare logits position by position.

    KL(source || pack) = sum over v of p_v (log p_v - log q_v), with p the source's and q the pack's probabilities.
    Both are normalised in float64 from raw logits, so that rounding enters KL only squared: float32 logits that
    differ by noise e give about e² / 2.

    Args:
        logits, source: (n, V) of the pack and of the source. following: (n,) int64, the actual next tokens.
    """
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(following), _BLOCK):
        part = slice(start, start + _BLOCK)
        log_q = logits[part].double().log_softmax(-1)
        log_p = source[part].double().log_softmax(-1)
        token = following[part, None]
        q_next, p_next = log_q.gather(1, token)[:, 0], log_p.gather(1, token)[:, 0]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0)  # rounding of the sum could make it negative
        same = logits[part].argmax(-1) == source[part].argmax(-1)
        parts.append((kl, -q_next, -p_next, q_next.exp() - p_next.exp(), same))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def summarize(scores: list[Scores]) -> Divergence:
    """The figures over all positions of all parts; the 99 % KL is interpolated between positions."""
    kl, nll, source_nll, dp, same = (
        torch.cat([getattr(part, name) for part in scores]) for name in ("kl", "nll", "source_nll", "dp", "same_top")
    )
    return Divergence(
        tokens=kl.numel(),
        perplexity=float(nll.mean().exp()),
        source_perplexity=float(source_nll.mean().exp()),
        kl_mean=float(kl.mean()),
        kl_99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        same_top=float(same.double().mean()),
        dp_rms=float(dp.pow(2).mean().sqrt()),
    )
