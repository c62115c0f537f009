"""What is known of published models before the first byte: sizes, licence, terms, and whether they can chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_BYTES = 5_000_000_000  # what published checkpoints are cut into, at the most


@dataclass(frozen=True, slots=True)
class Sizes:
    """An architecture (DESIGN section 1). `window`: tokens that prompt and answer may take together. `tied`: whether
    the head is the embedding."""

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
        """Weights of all routers and norms, which no pack rounds."""
        return self.layers * self.hidden * (self.experts + 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All weights; the head counts once where it is the embedding."""
        expert = 3 * self.hidden * self.intermediate
        heads = 1 if self.tied else 2
        return self.layers * (self.attention + self.experts * expert) + heads * self.embedding + self.small


@dataclass(frozen=True, slots=True)
class Entry:
    """A model and what is known of it without its weights.

    Attributes:
        name: on our command line. repo: on the hub; None for one that is known by its folder alone.
        folder: where it lies on this machine, None where it does not. packed: whether that is a pack already.
        licence: as its publisher states it, "" where unknown. gated: whether the publisher asks to accept terms first,
            as last known; the hub decides at run time. chat: how turns are written, in words; None for a base model,
            which knows no turns; "" where unknown.
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
        """Of the published weights: by the architecture, 16 bits each."""
        return 2 * self.sizes.parameters


APACHE, _TURNS = "Apache-2.0", "[INST] turns, written by the template of its own tokenizer"
_8X7B = Sizes(
    model_type="mixtral",
    layers=32,
    hidden=4096,
    intermediate=14336,
    experts=8,
    top_k=2,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32000,
    window=32768,
)
_8X22B = Sizes(
    model_type="mixtral",
    layers=56,
    hidden=6144,
    intermediate=16384,
    experts=8,
    top_k=2,
    heads=48,
    kv_heads=8,
    head_dim=128,
    vocab=32768,
    window=65536,
)


def _mistral(name: str, sizes: Sizes, repo: str, chat: str | None) -> Entry:
    return Entry(name, sizes, f"mistralai/{repo}", licence=APACHE, gated=True, chat=chat)


PUBLISHED = (
    _mistral("mixtral-8x7b-instruct", _8X7B, "Mixtral-8x7B-Instruct-v0.1", _TURNS),
    _mistral("mixtral-8x7b", _8X7B, "Mixtral-8x7B-v0.1", None),
    _mistral("mixtral-8x22b-instruct", _8X22B, "Mixtral-8x22B-Instruct-v0.1", _TURNS),
)
