"""Substitution of experts, by hand-made scores."""

from __future__ import annotations

import pytest
import torch
from floe_chat.engine.experts.substitution import Residency, substitute, substitute_all, substitute_there


def resident(*experts: int, capacity: int = 8) -> Residency:
    kept = Residency(capacity)
    for expert in experts:
        kept.use(expert)
    return kept


def test_what_was_used_last_is_resident() -> None:
    kept = resident(1, 2, capacity=2)
    assert kept.use(1) and not kept.use(3)
    assert 1 in kept and 3 in kept and 2 not in kept


SCORES = [0.4, 0.22, 0.2, 0.15, 0.03]  # 0 and 1 are chosen; the best of the rest has 0.2


@pytest.mark.parametrize(
    ("there", "alpha", "expected"),
    [
        ((2, 3), 0.05, [0, 1]),  # 1 is above 1.05 * 0.2: too good to be replaced
        ((2, 3), 0.2, [0, 2]),
        ((3,), 0.2, [0, 1]),  # 3 is below 0.8 * 0.2: too bad to stand in
        ((3,), 0.3, [0, 3]),
        ((1, 2), 0.5, [0, 1]),  # 1 is there itself
        ((), 0.9, [0, 1]),  # nobody can stand in
        ((2, 3), 1.5, [2, 3]),  # both absent, both replaced
        ((2,), 1.5, [0, 2]),  # one stand-in: the lower one gives way
    ],
)
def test_a_resident_expert_stands_in_for_an_absent_one(
    there: tuple[int, ...], alpha: float, expected: list[int]
) -> None:
    assert substitute(SCORES, [0, 1], resident(*there), alpha) == expected


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("normalized", [True, False])
def test_stand_ins_get_the_weights_that_the_family_would_give_them(normalized: bool, dtype: torch.dtype) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.2, 0.3]])
    index = torch.tensor([[0, 1], [0, 2]])
    weights = probabilities.gather(1, index)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    taken, new = substitute_all(
        probabilities, index, weights.to(dtype), resident(0, 1, capacity=2), 0.9, normalized=normalized
    )
    assert taken.tolist() == [[0, 1], [0, 1]], "the second token takes what the first one left there"
    expected = torch.tensor([[0.5, 0.3], [0.5, 0.2]])
    if normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(new, expected.to(dtype))


class Fixed:
    """What is resident does not change."""

    def __init__(self, experts: list[bool]) -> None:
        self._experts = experts

    def __contains__(self, expert: int) -> bool:
        return self._experts[expert]

    def use(self, expert: int) -> bool:
        return expert in self


@DTYPES
@pytest.mark.parametrize("among", [1, 2, 4, 6])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 1.0])
def test_on_the_device_the_same_experts_stand_in(
    among: int, normalized: bool, alpha: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(among)
    changed = 0
    for _ in range(60):
        probabilities = torch.randn(3, 6, generator=generator).mul(2).softmax(-1)
        resident = torch.rand(6, generator=generator) < 0.5
        weights, index = probabilities.topk(among)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(dtype)
        want = substitute_all(probabilities, index, weights, Fixed(resident.tolist()), alpha, normalized=normalized)
        found = substitute_there(probabilities, index, weights, resident, alpha, normalized=normalized)
        assert found[0].tolist() == want[0].tolist()
        torch.testing.assert_close(found[1], want[1])
        for row in range(3):
            own = probabilities[row, found[0][row]]
            if found[0][row].tolist() == index[row].tolist():
                assert torch.equal(found[1][row], weights[row])  # the router's own, to the last bit
            elif normalized:
                torch.testing.assert_close(found[1][row].float().sum(), weights[row].float().sum(), rtol=0.01, atol=0)
            else:
                assert torch.equal(found[1][row], own.to(dtype))
        changed += found[0].tolist() != index.tolist()
    assert (changed > 0) == (alpha > 0 and among < 6)
