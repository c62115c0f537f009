"""Published models that floe-chat can set up: sizes, licence, terms, and whether they can chat."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHARD_BYTES = 5_000_000_000  # the largest shard of published checkpoints


@dataclass(frozen=True, slots=True)
class Sizes:
    """An architecture. `window`: most tokens of prompt and answer together. `tied`: the head is the embedding."""

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
        """Weights of all routers and norms, which every pack stores at 16 bits."""
        normed = self.head_dim * (self.heads + self.kv_heads) if self.model_type == "olmoe" else 0  # queries and keys
        return self.layers * (self.hidden * (self.experts + 2) + normed) + self.hidden

    @property
    def parameters(self) -> int:
        """All weights; the head counts once where it is the embedding."""
        expert = 3 * self.hidden * self.intermediate
        heads = 1 if self.tied else 2
        return self.layers * (self.attention + self.experts * expert) + heads * self.embedding + self.small


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as far as it is known without its weights.

    Attributes:
        name: on our command line. repo: on the hub; None for a model that is known by its folder alone.
        folder: where it is stored on this machine, or None. packed: whether that folder is a pack already.
        licence: as its publisher states it, "" if unknown. gated: whether the publisher asks to accept terms first,
            as last known; the hub decides at run time. chat: how turns are written, in words; None for a base model,
            which has no chat template; "" if unknown.
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


APACHE = "Apache-2.0"
_INST, _TAGS = "[INST] turns by its own chat template", "<|user|> and <|assistant|> turns by its own chat template"
_OLMOE = Sizes(
    model_type="olmoe",
    layers=16,
    hidden=2048,
    intermediate=1024,
    experts=64,
    top_k=8,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=50304,
    window=4096,
)
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


# In the order in which they are listed where no machine is known (`engine.plan.in_order` knows one): the smallest that
# can chat first, base models last.
PUBLISHED = (
    Entry(
        "olmoe-1b-7b-instruct",
        _OLMOE,
        "allenai/OLMoE-1B-7B-0924-Instruct",
        licence=APACHE,
        gated=False,
        chat=_TAGS,
    ),
    _mistral("mixtral-8x7b-instruct", _8X7B, "Mixtral-8x7B-Instruct-v0.1", _INST),
    _mistral("mixtral-8x22b-instruct", _8X22B, "Mixtral-8x22B-Instruct-v0.1", _INST),
    _mistral("mixtral-8x7b", _8X7B, "Mixtral-8x7B-v0.1", None),
)
