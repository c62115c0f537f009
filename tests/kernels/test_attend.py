"""Attention of one token whose position and entries are read from memory, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.step import KeptTokens

from ..helpers import relative_rms
from .attending import CASES, EPS, POSITIONS, Case, a_token, limit, read, truth

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_it_reads_and_writes_the_entries_of_its_layer(case: Case) -> None:
    for position in POSITIONS:
        token = a_token(case, position)
        expected, entry = truth(case, token)
        before = [each.clone() for each in token.entries]
        y = kernels.attend_one(token.qkv, token.rope, token.kept(), 1, case.heads(), EPS)
        assert y.dtype == case.dtype and relative_rms(y, expected) <= limit(case)
        assert relative_rms(read(case, token.entries[1][position]), entry) <= limit(case)
        before[1][position] = token.entries[1][position]
        for found, wanted in zip(token.entries, before, strict=True):
            assert torch.equal(found.nan_to_num(99), wanted.nan_to_num(99))


def test_what_does_not_fit_is_refused() -> None:
    case = CASES["all-of-odd"]
    token, heads = a_token(case, 3), case.heads()
    kept = token.kept()
    for wrong in (
        (token.qkv[:, 1:], token.rope, kept, 1, heads),
        (token.qkv.repeat(2, 1), token.rope, kept, 1, heads),
        (token.qkv, token.rope[:, :, 1:], kept, 1, heads),
        (token.qkv, token.rope[:3], kept, 1, heads),
        (token.qkv, token.rope, KeptTokens(kept.addresses.int(), kept.position), 1, heads),
        (token.qkv, token.rope, KeptTokens(kept.addresses, kept.position.repeat(2)), 1, heads),
        (token.qkv, token.rope, kept, 3, heads),
        (token.qkv, token.rope, kept, -1, heads),
        (token.qkv, token.rope, kept, 1, replace(heads, k_norm=None)),
        (token.qkv, token.rope, kept, 1, replace(heads, q_norm=heads.k_norm)),
        (token.qkv, token.rope, kept, 1, replace(heads, num_kv_heads=4)),
    ):
        with pytest.raises(ValueError):
            kernels.attend_one(*wrong, EPS)
