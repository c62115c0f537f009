"""Mixtral (Mistral AI): few wide experts, whose weights of a token sum to 1."""

from __future__ import annotations

from ..catalog_entry import CatalogEntry, Sizes
from .family import Family, GroupedQuery, Routing
from .storage import Apart

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
_INST = "[INST] turns, from its own chat template"


def _entry(name: str, sizes: Sizes, repo: str, released: str, chat: str | None = _INST) -> CatalogEntry:
    return CatalogEntry(
        name, sizes, f"mistralai/{repo}", licence="Apache-2.0", gated=True, chat=chat, released=released
    )


MIXTRAL = Family(
    model_type="mixtral",
    called="Mixtral",
    stored=(Apart("model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight", "w1", "w3", "w2"),),
    renames=((".block_sparse_moe.", ".mlp."),),
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
    },
    routing=Routing(normalized=True),
    attention=GroupedQuery(window=lambda config, _layer: config.sliding_window),
    published=(
        _entry("mixtral-8x7b-instruct", _8X7B, "Mixtral-8x7B-Instruct-v0.1", "2023-12"),
        _entry("mixtral-8x22b-instruct", _8X22B, "Mixtral-8x22B-Instruct-v0.1", "2024-04"),
        _entry("mixtral-8x7b", _8X7B, "Mixtral-8x7B-v0.1", "2023-12", None),
    ),
)
