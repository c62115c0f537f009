"""What changes a distribution before a draw does it as transformers does, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.kernels import sampling as warpers

VALUES: list[tuple[str, float]] = [
    ("RepetitionPenaltyLogitsProcessor", 1.3),
    ("RepetitionPenaltyLogitsProcessor", 0.7),
    ("TemperatureLogitsWarper", 0.3),
    ("TemperatureLogitsWarper", 2.5),
    ("TopKLogitsWarper", 1),
    ("TopKLogitsWarper", 7),
    ("TopKLogitsWarper", 1000),
    ("TopPLogitsWarper", 0.01),
    ("TopPLogitsWarper", 0.5),
    ("TopPLogitsWarper", 0.99),
    ("MinPLogitsWarper", 0.05),
    ("MinPLogitsWarper", 1.0),
]


def distributions() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    scores = [scale * torch.randn(1, 50, generator=drawn) for scale in (0.01, 1.0, 3.0, 40.0)]
    ties = torch.randint(-2, 3, (1, 50), generator=drawn).float()
    return [*scores, ties, torch.zeros(1, 50), scores[1].masked_fill(scores[1] < 0, -torch.inf)]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_each_is_transformers_own(name: str, value: float) -> None:
    import transformers

    own, theirs = getattr(warpers, name)(value), getattr(transformers, name)(value)
    ids: Any = torch.tensor([[3, 4, 3, 49, 0]])
    for scores in distributions():
        given: Any = scores.clone()
        found, wanted = own(ids, scores.clone()), theirs(ids, given)
        if name == "TopPLogitsWarper":  # of equal ones theirs keeps any
            found, wanted = found.sort().values, wanted.sort().values
        assert torch.equal(found, wanted)


def test_together_they_are_applied_in_order() -> None:
    import transformers

    own, theirs = warpers.LogitsProcessorList(), transformers.LogitsProcessorList()
    for name, value in VALUES[0:2] + VALUES[3:4] + VALUES[5:6] + VALUES[9:11]:
        own.append(getattr(warpers, name)(value))
        theirs.append(getattr(transformers, name)(value))
    ids: Any = torch.tensor([[3, 4, 3, 49, 0]])
    for scores in distributions():
        before: Any = scores.clone()
        assert torch.equal(own(ids, scores), theirs(ids, before))
        assert torch.equal(scores, before)  # logits are not changed in place
