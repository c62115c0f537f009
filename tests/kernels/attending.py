"""Cases of the attention of one token, with entries where a device keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from floe_chat.kernels.entries import CODES, stored
from floe_chat.kernels.mixers.grouped import Heads, KeptTokens, attend
from torch import Tensor

NAN = float("nan")
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """normed: what queries and keys are normalized over. dtype: of the computation. stored: of keys and values.

    alone, v_normed, rope_at: as in `Heads`; rope then has some numbers more.
    """

    queries: int = 4
    keys: int = 2
    dim: int = 12
    normed: str = ""
    clip: float | None = None
    window: int | None = None
    dtype: torch.dtype = torch.float32
    stored: torch.dtype = torch.float32
    sinks: bool = False
    gated: bool = False
    alone: bool = False
    v_normed: bool = False
    rope_at: int = 0

    def heads(self) -> Heads:
        torch.manual_seed(self.dim)
        over = {"": None, "head": (1, 1), "all": (self.queries, self.keys)}[self.normed]
        q_norm, k_norm = ((1 + 0.3 * torch.randn(n * self.dim)).to(self.dtype) for n in over) if over else (None, None)
        given = self.queries, self.keys, self.dim, self.dim**-0.5, self.window, self.clip
        sinks = (torch.randn(self.queries) * 2).to(self.dtype) if self.sinks else None
        heads = Heads(*given, q_norm, k_norm, self.stored, sinks, gated=self.gated)
        return replace(heads, keys_alone=self.alone, v_normed=self.v_normed, rope_at=self.rope_at)


CASES = {
    "plain": Case(),
    "least": Case(1, 1, 2),
    "odd": Case(6, 3, 14, stored=torch.float16),
    "five-of-one": Case(5, 1, 66, normed="head"),
    "all-keys": Case(4, 4, 32, normed="all", clip=0.7),
    "all-of-odd": Case(6, 2, 10, normed="all"),
    "window": Case(window=9, clip=0.5),
    "window-of-one": Case(window=1),
    "window-of-splits": Case(8, 2, 16, window=100, stored=torch.float16),
    "mixtral": Case(8, 2, 128, dtype=torch.bfloat16, stored=torch.bfloat16),
    "olmoe": Case(3, 3, 128, normed="all", dtype=torch.bfloat16, stored=torch.bfloat16),
    "qwen": Case(8, 1, 64, normed="head", dtype=torch.float16, stored=torch.float16),
    "gated": Case(6, 3, 14, normed="head", gated=True),
    "gated-window": Case(8, 1, 16, window=9, gated=True, dtype=torch.bfloat16, stored=CODES),
    "sinks": Case(sinks=True),
    "sinks-window": Case(8, 2, 16, window=100, sinks=True, stored=torch.float16),
    "gpt-oss": Case(8, 1, 64, window=128, dtype=torch.bfloat16, stored=torch.bfloat16, sinks=True),
    "alone": Case(clip=0.8, alone=True),
    "gemma-window": Case(8, 4, 32, normed="head", window=100, stored=torch.float16, v_normed=True),
    "gemma": Case(6, 2, 66, normed="head", alone=True, v_normed=True, rope_at=20),
    "gemma-all": Case(6, 2, 10, normed="all", alone=True, v_normed=True, rope_at=1),
    "gemma-wide": Case(
        *(8, 1, 512, "head", None, None, torch.bfloat16, torch.bfloat16), alone=True, v_normed=True, rope_at=512
    ),
    "codes-gemma": Case(6, 3, 14, normed="head", stored=CODES, alone=True, v_normed=True, rope_at=8),
    "codes-sinks": Case(6, 3, 14, stored=CODES, sinks=True),
    "codes": Case(6, 3, 14, stored=CODES),
    "codes-least": Case(1, 1, 2, stored=CODES),
    "codes-five-of-one": Case(5, 1, 66, normed="head", stored=CODES),
    "codes-window": Case(8, 2, 16, window=100, clip=0.9, stored=CODES),
    "half": Case(6, 2, 10, normed="all", clip=0.7, window=100, dtype=torch.float16, stored=torch.float16),
    "half-alone": Case(1, 1, 2, dtype=torch.float16, stored=torch.float16, sinks=True),
    "half-many": Case(20, 1, 66, normed="head", dtype=torch.float16, stored=torch.float16, gated=True),
    "codes-half": Case(5, 1, 66, normed="head", dtype=torch.float16, stored=CODES),
    "codes-half-window": Case(8, 2, 16, window=100, dtype=torch.float16, stored=CODES, alone=True, v_normed=True),
    "codes-mixtral": Case(8, 2, 128, dtype=torch.bfloat16, stored=CODES),
}
# Of a key or value that another path rounds to the neighbour, and of results in 16 bits.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2, CODES: 5e-3}
POSITIONS = [0, 1, 8, 9, 67, 150]


def limit(case: Case) -> float:
    """How far from the formula a result may be, as relative RMS."""
    return max(LIMITS[case.dtype], LIMITS[case.stored])


@dataclass(frozen=True)
class Token:
    """A token's projections, rope, and what is stored of the tokens before it in each of three layers.

    Everything that nobody may read is NaN.
    """

    qkv: Tensor
    rope: Tensor
    entries: list[Tensor]
    position: int

    def on(self, device: torch.device) -> Token:
        return Token(
            self.qkv.to(device), self.rope.to(device), [each.to(device) for each in self.entries], self.position
        )

    def kept(self) -> KeptTokens:
        device = self.qkv.device
        addresses = torch.tensor([each.data_ptr() for each in self.entries], device=device)
        return KeptTokens(addresses, torch.tensor([self.position], device=device))


def a_token(case: Case, position: int) -> Token:
    generator = torch.Generator().manual_seed(position)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    angles = random(case.dim // 2).mul(3).repeat(2)
    turn = torch.cat([angles.cos(), angles.sin()])
    turn[case.dim : case.dim * 3 // 2].neg_()
    around = torch.full((case.rope_at,), NAN), torch.full((3,), NAN)
    rope = torch.cat([around[0], turn, around[1]]) if case.rope_at else turn.view(2, -1)
    entries = torch.full((3, position + 5, 2 * case.keys, case.dim), NAN)
    first = 0 if case.window is None else max(0, position + 1 - case.window)
    entries[1, first:position] = random(position - first, 2 * case.keys, case.dim)
    qkv = random(1, case.heads().sizes[0])
    return Token(qkv.to(case.dtype), rope.to(case.dtype), list(stored(entries, case.stored)), position)


def truth(case: Case, token: Token) -> tuple[Tensor, Tensor]:
    """The output and the token's entry in layer 1, in float64."""
    heads, entries = case.heads(), token.entries[1]
    # In float64 too a new token's key and value are stored as the nearest codes.
    entries = entries.clone() if case.stored == CODES else entries.double()
    norms: dict[str, Any] = {
        name: None if (w := getattr(heads, name)) is None else w.double() for name in ("q_norm", "k_norm", "sinks")
    }
    turn = token.rope.flatten()[case.rope_at :][: 2 * case.dim].view(2, -1)
    given = token.qkv.double(), turn.double(), entries, token.position
    return attend(*given, replace(heads, **norms), EPS), read(case, entries[token.position])


def read(case: Case, entry: Tensor) -> Tensor:
    """The keys and values (R, D) of an entry."""
    return case.heads().values(entry, torch.float64)
