"""Attention of one token on a GPU, against the formula, in any number of splits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import entries
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.step import Heads
from floe_chat.kernels.triton import attend

from ..attending import CASES, EPS, POSITIONS, Case, a_token, limit, read, truth
from .layers import relative_rms


def heads_on(device: torch.device, case: Case) -> Heads:
    heads = case.heads()
    norms = {name: None if (w := getattr(heads, name)) is None else w.to(device) for name in ("q_norm", "k_norm")}
    return replace(heads, **norms)


def cut(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Cut positions into so many splits, whatever the device."""

    def fixed(_device: torch.device, _heads: Heads) -> int:
        return splits

    monkeypatch.setattr(attend, "splits_of", fixed)


def compare(case: Case, position: int, device: torch.device) -> torch.Tensor:
    """One token, which must be the formula and write its entry alone; returns the result."""
    token = a_token(case, position)
    expected, entry = truth(case, token)
    before = [each.clone() for each in token.entries]
    there = token.on(device)
    y = kernels.attend_one(there.qkv, there.rope, there.kept(), 1, heads_on(device, case), EPS)
    assert y.dtype == case.dtype and y.shape == expected.shape
    assert relative_rms(y, expected) <= limit(case)
    assert relative_rms(read(case, there.entries[1][position].cpu()), entry) <= limit(case)
    before[1][position] = there.entries[1][position].cpu()
    for found, wanted in zip(there.entries, before, strict=True):
        assert torch.equal(found.cpu().nan_to_num(99), wanted.nan_to_num(99)), (
            "more was written than this token's place"
        )
    return y


# Cases are in one test each: of the many of one test the interpreter runs a part.
@pytest.mark.parametrize("position", [POSITIONS[-1], *POSITIONS[:-1]])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_the_formula(
    case: Case, splits: int, position: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, splits)
    compare(case, position, device)


@pytest.mark.parametrize("splits", [2, 64])
@pytest.mark.parametrize("case", ["window", "odd", "all-keys", "five-of-one", "mixtral", "codes"])
def test_a_tile_may_be_a_single_token(
    case: str, splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, splits)
    monkeypatch.setattr(attend, "TILE", 1)
    compare(CASES[case], 9, device)


def test_the_number_of_splits_changes_rounding_only(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    for splits in (1, 2, 16):
        cut(monkeypatch, splits)
        found.append(compare(CASES["all-of-odd"], 67, device))
    assert relative_rms(found[1], found[0].cpu()) <= 1e-6 and relative_rms(found[2], found[0].cpu()) <= 1e-6


@pytest.mark.parametrize("stored", [torch.float32, CODES])
def test_what_is_not_a_number_is_seen(
    stored: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, 4)
    case = Case(stored=stored)
    token = a_token(case, 40).on(device)
    key = case.heads().values(token.entries[1][33], torch.float32)
    key[0, 3] = float("nan")  # of the first head: its two heads of queries see it
    token.entries[1][33] = entries.stored(key, stored)
    y = kernels.attend_one(token.qkv, token.rope, token.kept(), 1, heads_on(device, case), EPS).view(4, 12)
    assert y[:2].isnan().all() and y[2:].isfinite().all()
    for wrong in (float("nan"), float("inf"), -float("inf")):  # the new token's own
        token.qkv[0, 4 * 12 + 5] = wrong
        y = kernels.attend_one(token.qkv, token.rope, token.kept(), 1, heads_on(device, case), EPS).view(4, 12)
        assert y[:2].isnan().all(), wrong
