"""select on a GPU, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import reference
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Limits

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


@pytest.mark.parametrize("name", ["2T-drop", "1T-drop", "all"])
def test_what_is_left_out_may_be_in_memory(name: str, device: torch.device) -> None:
    rule, (index, weights) = RULES[name], routed(5, 3, torch.float32)
    limits = limits_of(rule, product=False, late=False)
    wanted = reference.select(index, weights, limits, rule)
    least = torch.tensor(rule.least(), dtype=torch.float64, device=device)
    other = replace(rule, drop=0.1, major=0.1 if rule.parts == 1 else 0.2)
    there = Limits(limits.signal.to(device), least=least)
    found = kernels.select(index.to(device), weights.to(device), there, other)
    torch.testing.assert_close(found.thresholds.cpu(), wanted.thresholds, rtol=1e-6, atol=0, equal_nan=True)
