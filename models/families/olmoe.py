"""OLMoE (Ai2): many small experts; queries and keys are normalized over all heads together."""

from __future__ import annotations

from ..catalog_entry import CatalogEntry, Sizes
from .family import Family, GroupedQuery

_1B_7B = Sizes(
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
    head_norms=2 * 16 * 128,
)

OLMOE = Family(
    model_type="olmoe",
    called="OLMoE",
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": None,  # as many as queries
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "rope_theta": 1e4,
    },
    attention=GroupedQuery(
        normalized=lambda _config: True,
        biased=lambda config: (bool(config.attention_bias), bool(config.attention_bias)),
    ),
    published=tuple(
        CatalogEntry(
            name,
            _1B_7B,
            f"allenai/{repo}",
            licence="Apache-2.0",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template",
            released=released,
        )
        for name, repo, released in (
            ("olmoe-1b-7b-instruct", "OLMoE-1B-7B-0924-Instruct", "2024-09"),
            ("olmoe-1b-7b-0125-instruct", "OLMoE-1B-7B-0125-Instruct", "2025-01"),
        )
    ),
)
