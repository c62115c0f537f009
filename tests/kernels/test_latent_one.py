"""Attention of one token through a latent vector, position and entries read from memory, against its definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu import native
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.mixers.grouped import KeptTokens
from floe_chat.kernels.mixers.latent import Latent, attend_latent
from floe_chat.kernels.weights import LinearWeights, Projection
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import BACKENDS, Subject
from .test_dense_step import widened
from .test_latent import SIZES, Sizes, make_layer

NAN = float("nan")
WHERE = [name for name in BACKENDS if name not in native.ISAS]  # on a CPU there is one way
SPLITS = [1, 4] if "triton" in WHERE else [1]
POSITIONS = [0, 1, 31, 67, 150]
HALF, BRAIN = torch.float16, torch.bfloat16
# The definition rounds each step to 16 bits.
LIMITS = {torch.float32: 1e-5, HALF: 2e-3, BRAIN: 2e-2}
ROUNDED = {torch.float32: 1e-5, HALF: 5e-3, BRAIN: 4e-2}


@dataclass(frozen=True)
class Case:
    """dtype: of the computation."""

    sizes: Sizes
    dtype: torch.dtype = torch.float32

    def latent(self) -> Latent:
        mixer: Any = make_layer(replace(self.sizes, asked=0)).mixer
        weight = mixer.made.weight
        made = mixer.made if isinstance(weight, LinearWeights) else Projection(weight.to(self.dtype))
        return replace(mixer, norm=mixer.norm.to(self.dtype), made=made)

    def limit(self, backend: str) -> float:
        limits = LIMITS if backend == "triton" else ROUNDED
        return max(limits[self.dtype], limits[self.sizes.kept])


CASES = {name: Case(SIZES[name]) for name in ("small", "least", "odd", "8-bit", "3-bit-odd")} | {
    "plain-half": Case(Sizes(heads=5, rank=40, still=24, turned=8, value=16, kept=HALF), HALF),
    "plain-brain": Case(Sizes(heads=17, rank=33, still=24, turned=20, value=16, kept=BRAIN), BRAIN),
    "least-half": Case(Sizes(2, 1, 1, 1, 2, 1, kept=HALF), HALF),
    "3-bit-half": Case(Sizes(50, 5, 36, 14, 6, 10, bits=3, kept=HALF), HALF),
    "8-bit-brain": Case(Sizes(128, 5, 64, 16, 32, 9, bits=8, kept=BRAIN), BRAIN),
    "deepseek": Case(Sizes(192, 2, 512, 128, 64, 16, bits=4)),
    "glm": Case(Sizes(192, 20, 128, 48, 64, 24, bits=4, kept=HALF), HALF),
}


@dataclass(frozen=True)
class Token:
    """A token's queries, vector and key, rope, and what each of three layers stores: NaN where nobody may read."""

    asked: Tensor
    given: Tensor
    rope: Tensor
    entries: list[Tensor]
    position: int

    def on(self, device: torch.device) -> Token:
        asked, given, rope = (part.to(device) for part in (self.asked, self.given, self.rope))
        return Token(asked, given, rope, [each.to(device) for each in self.entries], self.position)

    def kept(self) -> KeptTokens:
        device = self.asked.device
        addresses = torch.tensor([each.data_ptr() for each in self.entries], device=device)
        return KeptTokens(addresses, torch.tensor([self.position], device=device), self.entries[0].element_size())

    def through(self, subject: Subject, latent: Latent) -> Tensor:
        """What it gives in layer 1."""
        return subject.kernels.latent_one(self.asked, self.given, self.rope, self.kept(), 1, subject.there(latent))


def a_token(case: Case, position: int) -> Token:
    s = case.sizes
    torch.manual_seed(position)
    angles = torch.rand(s.turned // 2).mul(6).repeat(2)
    rope = torch.stack([angles.cos(), angles.sin()])
    rope[1, : s.turned // 2].neg_()
    entries = torch.full((3, position + 5, 1, s.dim), NAN)
    entries[1, :position] = torch.randn(position, 1, s.dim)
    asked, given = torch.randn(1, s.heads * (s.still + s.turned)), torch.randn(1, s.dim)
    asked, given, rope = (part.to(case.dtype) for part in (asked, given, rope))
    return Token(asked, given, rope, list(entries.to(s.kept)), position)


def truth(case: Case, token: Token, latent: Latent) -> tuple[Tensor, Tensor]:
    """The output and the token's entry in layer 1, in float64."""
    wide: Any = widened(replace(make_layer(case.sizes), mixer=latent)).mixer
    entries = token.entries[1].double()
    qkv = torch.cat([token.asked, token.given], 1).double()
    return attend_latent(qkv, token.rope.double(), entries, token.position, wide), entries[token.position]


def cut(monkeypatch: pytest.MonkeyPatch, on_backend: Subject, splits: int) -> None:
    """On a GPU, cut positions into so many splits, whatever the device."""
    if on_backend.name != "triton":
        return
    from floe_chat.kernels.triton import attend

    def fixed(_device: torch.device, _beside: int) -> int:
        return splits

    monkeypatch.setattr(attend, "splits_of", fixed)


@covering({"on_backend": WHERE, "case": list(CASES)}, {"position": POSITIONS, "splits": SPLITS})
def test_it_is_the_definition_and_writes_its_entry_alone(
    case: str, position: int, splits: int, on_backend: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, on_backend, splits)
    subject, latent = CASES[case], CASES[case].latent()
    for at in (position,) if on_backend.name == "triton" else POSITIONS:
        token = a_token(subject, at)
        expected, entry = truth(subject, token, latent)
        before = [each.clone() for each in token.entries]
        there = token.on(on_backend.device)
        y = there.through(on_backend, latent).cpu()
        found = [each.cpu() for each in there.entries]
        assert y.dtype == subject.dtype and y.shape == expected.shape
        assert relative_rms(y, expected) <= subject.limit(on_backend.name)
        assert relative_rms(found[1][at], entry) <= subject.limit(on_backend.name)
        before[1][at] = found[1][at]
        for one, wanted in zip(found, before, strict=True):
            assert torch.equal(one.nan_to_num(99), wanted.nan_to_num(99)), "more was written than this token's place"


@covering({"on_backend": WHERE, "case": ["small", "plain-half"]})
def test_what_is_not_a_number_is_seen(case: str, on_backend: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, on_backend, 4)
    subject, latent = CASES[case], CASES[case].latent()
    for where, column in (("entries", 3), ("entries", -1), ("asked", -1), ("given", 0), ("given", -1)):
        token = a_token(subject, 40).on(on_backend.device)
        wrong = token.entries[1][33, 0] if where == "entries" else getattr(token, where)[0]
        wrong[column] = NAN
        y = token.through(on_backend, latent).view(subject.sizes.heads, -1)
        hit = subject.sizes.heads - 1 if where == "asked" else 0  # a query is one head's, an entry is all heads'
        assert y[hit:].isnan().all() and y[:hit].isfinite().all(), where


def test_what_does_not_fit_is_refused() -> None:
    case = CASES["small"]
    token, latent = a_token(case, 3), case.latent()
    kept = token.kept()
    given = token.asked, token.given, token.rope, kept, 1
    biased = replace(latent.made, bias=torch.zeros(96))
    coded = CASES["8-bit"].latent().made
    for wrong in (
        (token.asked[:, 1:], *given[1:], latent),
        (token.asked, token.given[:, 1:], *given[2:], latent),
        (token.asked, token.given.repeat(2, 1), *given[2:], latent),
        (token.asked, token.given, token.rope[:1], kept, 1, latent),
        (*given[:3], KeptTokens(kept.addresses.int(), kept.position), 1, latent),
        (*given[:4], 3, latent),
        (*given, replace(latent, still=11)),
        (*given, replace(latent, turned=5)),
        (*given, replace(latent, value=0)),
        (*given, replace(latent, norm=torch.ones(19))),
        (*given, replace(latent, made=biased)),
        (*given, replace(latent, made=coded)),
        (*given, replace(latent, heads=replace(latent.heads, cache_dtype=CODES))),
        (*given, replace(latent, heads=replace(latent.heads, num_kv_heads=2))),
        (*given, replace(latent, heads=replace(latent.heads, inside=None))),
    ):
        with pytest.raises(ValueError):
            kernels.latent_one(*wrong)
