"""select on a GPU, against its definition."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import reference
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.rule import Rule

from ..test_select import RULES, limits_of, routed, values


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "among"), [(1, 1), (1, 2), (5, 3), (70, 5)])
@pytest.mark.parametrize("others", [True, False])
def test_select_is_its_definition(
    rule: Rule, dtype: torch.dtype, tokens: int, among: int, others: bool, device: torch.device
) -> None:
    index, weights = routed(tokens, among, dtype)
    limits = limits_of(rule, product=others, late=others)
    wanted = reference.select(index, weights, limits, rule)
    there = [None if table is None else table.to(device) for table in (limits.signal, limits.product, limits.late)]
    assert there[0] is not None
    found = kernels.select(index.to(device), weights.to(device), type(limits)(there[0], *there[1:]), rule)
    assert torch.equal(found.calls.tokens.cpu(), wanted.calls.tokens)
    assert torch.equal(found.calls.experts.cpu(), wanted.calls.experts)
    for mine, theirs in zip(values(found), values(wanted), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-6, atol=0, equal_nan=True)
    assert (found.products is None) == (found.late is None) == (not others)


def test_no_tokens_are_no_calls(device: torch.device) -> None:
    index, weights = torch.empty(0, 2, dtype=torch.int64, device=device), torch.empty(0, 2, device=device)
    limits = limits_of(Rule())
    found = kernels.select(index, weights, type(limits)(limits.signal.to(device)), Rule())
    assert found.thresholds.numel() == found.calls.experts.numel() == 0
