"""A model's description without its weights: sizes, licence, terms, and whether it can chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_BYTES = 5_000_000_000  # the largest shard of published checkpoints


@dataclass(frozen=True, slots=True)
class Sizes:
    """An architecture.

    Attributes:
        window: most tokens of prompt and answer together. tied: whether the head is the embedding. normalized_heads:
            whether queries and keys have norms.
    """

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    tied: bool = False
    normalized_heads: bool = False

    @property
    def attention(self) -> int:
        """Weights of one layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def embedding(self) -> int:
        """Weights of the embedding; the head has as many."""
        return self.vocab * self.hidden

    @property
    def small(self) -> int:
        """Weights of all routers and norms, which every pack stores at 16 bits."""
        normed = self.head_dim * (self.heads + self.kv_heads) if self.normalized_heads else 0
        return self.layers * (self.hidden * (self.experts + 2) + normed) + self.hidden

    @property
    def parameters(self) -> int:
        """All weights; a tied head counts once."""
        expert = 3 * self.hidden * self.intermediate
        heads = 1 if self.tied else 2
        return self.layers * (self.attention + self.experts * expert) + heads * self.embedding + self.small


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model's description without its weights.

    Attributes:
        name: on our command line. repo: on the hub; None for a model that is known by its folder alone.
        folder: where it is stored on this machine, or None. packed: whether that folder is a pack already.
        licence: as its publisher states it, "" if unknown. gated: whether the publisher requires its terms to be
            accepted first, as last known; the hub decides at run time. chat: how turns are written, in words; None for
            a base model, which has no chat template; "" if unknown.
    """

    name: str
    sizes: Sizes
    repo: str | None = None
    folder: Path | None = None
    packed: bool = False
    licence: str = ""
    gated: bool | None = None
    chat: str | None = ""

    @property
    def checkpoint_bytes(self) -> int:
        """The size of the published weights, computed from the architecture: 16 bits each."""
        return 2 * self.sizes.parameters
