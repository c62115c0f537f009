"""What a rule leaves of a router's choice: which calls, and what a neuron must reach in each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels import reference
from floe_chat.kernels.rule import MOST_EASE, NEVER, Rule
from floe_chat.kernels.types import Limits, Work
from torch import Tensor

from ..covering import covering
from .oracle import BACKENDS, Subject

EXPERTS = 5
RULES = {
    "nothing": Rule(),
    "1T-drop": Rule(drop=0.6, major=0.6),
    "halves": Rule(major=0.9),
    "2T-drop": Rule(drop=0.4, major=0.9),
    "weighed": Rule(weighed=True),
    "all": Rule(drop=0.4, major=0.9, weighed=True),
}
WHERE = ["native"] * (BACKENDS != ["triton"]) + ["triton"] * ("triton" in BACKENDS)


def limits_of(rule: Rule, *, product: bool = True, late: bool = True) -> Limits:
    drawn = torch.Generator().manual_seed(1)
    signal, first, second = (torch.rand(EXPERTS * rule.parts, generator=drawn) + 0.1 for _ in range(3))
    signal[2 * rule.parts : 3 * rule.parts] = NEVER
    return Limits(signal, first if product else None, second if late else None)


def routed(tokens: int, among: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(10 * tokens + among)
    index = torch.stack([torch.randperm(EXPERTS, generator=drawn)[:among] for _ in range(tokens)])
    weights = torch.rand(tokens, among, generator=drawn).softmax(-1) ** 3
    if tokens > 2:
        weights[1], weights[2, 0] = 0.0, math.nan
    return index, weights.to(dtype)


def parts_of(weights: list[list[float]], drop: float, major: float) -> list[list[int]]:
    """How many halves of each expert are computed."""
    rule = Rule(drop=drop, major=major)
    index = torch.arange(len(weights[0])).expand(len(weights), -1)
    ones = Limits(torch.ones(len(weights[0]) * rule.parts))
    work = kernels.select(index, torch.tensor(weights), ones, rule)
    computed = work.thresholds.view(*index.shape, rule.parts).isfinite().sum(-1) * (2 // rule.parts)
    return computed.tolist()


@pytest.mark.parametrize(
    ("drop", "major", "expected"),
    [
        (0.0, 0.0, [[2, 2], [2, 2]]),
        (0.6, 0.6, [[2, 0], [2, 2]]),  # 1T-drop
        (0.0, 0.6, [[2, 1], [2, 2]]),
        (0.2, 0.9, [[2, 1], [2, 1]]),
        (0.6, 0.9, [[2, 0], [2, 1]]),  # 2T-drop
        (0.6, 0.2, [[2, 0], [2, 2]]),  # a lower one for halves changes nothing
        (2.0, 2.0, [[0, 0], [0, 0]]),
    ],
)
def test_weights_decide_how_much_of_an_expert_is_computed(drop: float, major: float, expected: list[list[int]]) -> None:
    assert parts_of([[0.8, 0.2], [0.6, 0.4]], drop, major) == expected
    assert parts_of([[0.24, 0.06], [0.18, 0.12]], drop, major) == expected, "weights are relative"


def test_a_weight_that_is_not_a_number_is_not_hidden() -> None:
    assert parts_of([[math.nan, 0.5]], 0.3, 0.4) == [[2, 2]]


def test_the_less_a_call_counts_the_higher_its_thresholds() -> None:
    index, weights = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0.8, 0.2, 0.0, 1e-9]])
    work = kernels.select(index, weights, Limits(torch.full((4,), 2.0)), Rule(weighed=True))
    assert work.thresholds.tolist() == pytest.approx([0.625, 2.5, 2 * MOST_EASE, 2 * MOST_EASE])


@pytest.mark.parametrize("weighed", [False, True])
def test_an_expert_that_no_rule_leaves_out_is_computed_whole(weighed: bool) -> None:
    index, weights = torch.tensor([[0, 1]]), torch.tensor([[0.99, 0.01]])
    limits = Limits(torch.tensor([0.5, 0.5, NEVER, NEVER]))
    work = kernels.select(index, weights, limits, Rule(drop=0.5, major=0.9, weighed=weighed))
    assert work.thresholds.isfinite().all() and (work.thresholds[2:] < 0).all(), "every magnitude reaches these"
    work = kernels.select(index.flip(1), weights, limits, Rule(drop=0.5, major=0.9, weighed=weighed))
    assert work.thresholds.isinf().tolist() == [False, False, True, True]


@covering(
    {"on_backend": WHERE, "name": list(RULES), "counts": [(0, 2), (1, 1), (1, 2), (3, 5), (70, 3)]},
    {"dtype": [torch.float32, torch.bfloat16], "others": [True, False]},
)
def test_fast_ones_are_the_definition(
    on_backend: Subject, name: str, dtype: torch.dtype, counts: tuple[int, int], others: bool
) -> None:
    rule, (tokens, among) = RULES[name], counts
    index, weights = routed(tokens, among, dtype) if tokens else (torch.empty(0, among).long(), torch.empty(0, among))
    limits = limits_of(rule, product=others, late=others)
    found, wanted = on_backend("select", index, weights, limits, rule), reference.select(index, weights, limits, rule)
    assert torch.equal(found.calls.tokens, wanted.calls.tokens)
    assert torch.equal(found.calls.experts, wanted.calls.experts)
    assert found.thresholds.shape == (tokens * among * rule.parts,)
    for mine, theirs in zip(values(found), values(wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0, equal_nan=True)
    assert (found.products is None) == (found.late is None) == (not others)


def values(work: Work) -> list[Tensor]:
    found = [work.calls.weights, work.thresholds, work.products, work.late]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize(
    ("index", "weights", "limits"),
    [
        (torch.zeros(2).long(), torch.zeros(2), limits_of(Rule())),
        (torch.zeros(1, 2).int(), torch.zeros(1, 2), limits_of(Rule())),
        (torch.zeros(1, 2).long(), torch.zeros(1, 3), limits_of(Rule())),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2).long(), limits_of(Rule())),
        (torch.full((1, 2), EXPERTS), torch.zeros(1, 2), limits_of(Rule())),
        (torch.full((1, 2), -1), torch.zeros(1, 2), limits_of(Rule())),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2), Limits(torch.zeros(EXPERTS).double())),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2), Limits(torch.zeros(EXPERTS), torch.zeros(EXPERTS + 1))),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2), Limits(torch.zeros(EXPERTS), None, torch.zeros(1, EXPERTS))),
    ],
)
def test_what_does_not_fit_is_refused(index: Tensor, weights: Tensor, limits: Limits) -> None:
    with pytest.raises(ValueError):
        kernels.select(index, weights, limits, Rule())


def test_limits_of_half_an_expert_are_refused() -> None:
    with pytest.raises(ValueError, match="parts"):
        kernels.select(torch.zeros(1, 1).long(), torch.ones(1, 1), Limits(torch.ones(5)), Rule(major=0.5))


@covering({"on_backend": WHERE, "name": ["1T-drop", "2T-drop", "all"]})
def test_what_is_left_out_may_be_in_memory(on_backend: Subject, name: str) -> None:
    """As for a captured call, which was made with another rule's numbers."""
    rule, (index, weights) = RULES[name], routed(5, 3)
    limits = limits_of(rule)
    least = torch.tensor(rule.least(), dtype=torch.float64)
    other = replace(rule, drop=0.1, major=0.1 if rule.parts == 1 else 0.2)
    found = on_backend("select", index, weights, replace(limits, least=least), other)
    wanted = reference.select(index, weights, limits, rule)
    for mine, theirs in zip(values(found), values(wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0, equal_nan=True)
    assert not torch.equal(found.thresholds, reference.select(index, weights, limits, other).thresholds)
    with pytest.raises(ValueError, match="least"):
        kernels.select(index, weights, replace(limits, least=least.float()), rule)
