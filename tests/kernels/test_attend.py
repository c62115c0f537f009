"""Attention of one token whose position and entries are read from memory, against the formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import entries
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu import native
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.mixers.grouped import KeptTokens

from ..covering import covering
from ..helpers import relative_rms
from .attending import CASES, EPS, POSITIONS, Case, a_token, limit, read, truth
from .oracle import BACKENDS, Subject

WHERE = [name for name in BACKENDS if name not in native.ISAS]  # on a CPU there is one way
SPLITS = [1, 4] if "triton" in WHERE else [1]


def cut(monkeypatch: pytest.MonkeyPatch, on_backend: Subject, splits: int, tile: int | None = None) -> None:
    """On a GPU, cut positions into so many splits and tiles of so many tokens, whatever the device."""
    if on_backend.name != "triton":
        return
    from floe_chat.kernels.triton import attend

    def fixed(_device: torch.device, _beside: int) -> int:
        return splits

    monkeypatch.setattr(attend, "splits_of", fixed)
    monkeypatch.setattr(attend, "TILE", tile or attend.TILE)


def compare(case: Case, position: int, on_backend: Subject) -> torch.Tensor:
    """One token, which must be the formula and write its entry alone; returns the result."""
    token = a_token(case, position)
    expected, entry = truth(case, token)
    before = [each.clone() for each in token.entries]
    there, heads = token.on(on_backend.device), on_backend.there(case.heads())
    y = on_backend.kernels.attend_one(there.qkv, there.rope, there.kept(), 1, heads, EPS).cpu()
    found = [each.cpu() for each in there.entries]
    assert y.dtype == case.dtype and y.shape == expected.shape
    assert relative_rms(y, expected) <= limit(case)
    assert relative_rms(read(case, found[1][position]), entry) <= limit(case)
    before[1][position] = found[1][position]
    for one, wanted in zip(found, before, strict=True):
        assert torch.equal(one.nan_to_num(99), wanted.nan_to_num(99)), "more was written than this token's place"
    return y


@covering({"on_backend": WHERE, "case": list(CASES)}, {"position": POSITIONS, "splits": SPLITS})
def test_it_reads_and_writes_the_entries_of_its_layer(
    case: str, position: int, splits: int, on_backend: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, on_backend, splits)
    for at in (position,) if on_backend.name == "triton" else sorted({position, 8, 150}):
        compare(CASES[case], at, on_backend)


@pytest.mark.skipif("triton" not in WHERE, reason="a CPU makes no splits")
@covering(
    {"on_backend": ["triton"], "case": ["window", "odd", "five-of-one", "codes", "half", "codes-half"]},
    {"splits": [2, 16]},
)
def test_a_tile_may_be_a_single_token_and_splits_change_rounding_only(
    case: str, splits: int, on_backend: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, on_backend, 1)
    whole = compare(CASES[case], 9, on_backend)
    cut(monkeypatch, on_backend, splits, 1)
    rounding = 1e-6 if CASES[case].dtype == torch.float32 else limit(CASES[case])
    assert relative_rms(compare(CASES[case], 9, on_backend), whole) <= rounding


@covering({"on_backend": WHERE, "stored": [torch.float32, CODES]})
def test_what_is_not_a_number_is_seen(
    stored: torch.dtype, on_backend: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, on_backend, 4)
    case = Case(stored=stored)
    token, heads = a_token(case, 40).on(on_backend.device), on_backend.there(case.heads())
    attend_one = on_backend.kernels.attend_one
    key = case.heads().values(token.entries[1][33], torch.float32)
    key[0, 3] = float("nan")  # of the first head: its two heads of queries see it
    token.entries[1][33] = entries.stored(key, stored)
    y = attend_one(token.qkv, token.rope, token.kept(), 1, heads, EPS).view(4, 12)
    assert y[:2].isnan().all() and y[2:].isfinite().all()
    for wrong in (float("nan"), float("inf"), -float("inf")):  # the new token's own
        token.qkv[0, 4 * 12 + 5] = wrong
        y = attend_one(token.qkv, token.rope, token.kept(), 1, heads, EPS).view(4, 12)
        assert y[:2].isnan().all(), wrong


def test_what_does_not_fit_is_refused() -> None:
    case = CASES["all-of-odd"]
    token, heads = a_token(case, 3), case.heads()
    kept = token.kept()
    for wrong in (
        (token.qkv[:, 1:], token.rope, kept, 1, heads),
        (token.qkv.repeat(2, 1), token.rope, kept, 1, heads),
        (token.qkv, token.rope[:, 1:], kept, 1, heads),
        (token.qkv, token.rope[:1], kept, 1, heads),
        (token.qkv, token.rope, KeptTokens(kept.addresses.int(), kept.position), 1, heads),
        (token.qkv, token.rope, KeptTokens(kept.addresses, kept.position.repeat(2)), 1, heads),
        (token.qkv, token.rope, kept, 3, heads),
        (token.qkv, token.rope, kept, -1, heads),
        (token.qkv, token.rope, kept, 1, replace(heads, k_norm=None)),
        (token.qkv, token.rope, kept, 1, replace(heads, q_norm=heads.k_norm)),
        (token.qkv, token.rope, kept, 1, replace(heads, num_kv_heads=4)),
        (token.qkv, token.rope, kept, 1, replace(heads, keys_alone=True)),
        (token.qkv, token.rope, kept, 1, replace(heads, rope_at=1)),
        (token.qkv, token.rope.flatten(), kept, 1, replace(heads, rope_at=-1)),
        (token.qkv, token.rope.flatten()[:-1], kept, 1, heads),
        (token.qkv, token.rope[None], kept, 1, heads),
    ):
        with pytest.raises(ValueError):
            kernels.attend_one(*wrong, EPS)
