"""LFM2 (Liquid AI): most layers are short convolutions, the others attention; the first have no experts."""

from __future__ import annotations

from typing import Any

from ..catalog_entry import CatalogEntry, Convolutions, Sizes
from .family import Family, GroupedQuery, Routing
from .storage import Apart


def _dense_layers(config: Any) -> range:
    return range(min(config.num_dense_layers or 0, config.num_hidden_layers))


_LFM2 = Sizes(
    model_type="lfm2_moe",
    layers=22,
    hidden=2048,
    intermediate=1792,
    experts=32,
    top_k=4,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab=65536,
    window=128000,
    tied=True,
    head_norms=2 * 64,
    dense_layers=2,
    dense_intermediate=7168,
    router_bias=True,
    recurrent=Convolutions(layers=18, taps=3),
)

LFM2_MOE = Family(
    model_type="lfm2_moe",
    called="LFM2 MoE",
    stored=(Apart("model.layers.{layer}.feed_forward.experts.{expert}.{part}.weight", "w1", "w3", "w2"),),
    renames=(("model.embedding_norm.", "model.norm."),),
    modules=(("embedding_norm", "norm"), ("pos_emb", "rotary_emb")),
    linears=(".q_proj", ".k_proj", ".v_proj", ".in_proj", ".out_proj", ".w1", ".w2", ".w3", "lm_head"),
    precise=(".expert_bias",),
    block="feed_forward",
    norm="ffn_norm",
    first_norm="operator_norm",
    eps="norm_eps",
    width="moe_intermediate_size",
    dense_layers=_dense_layers,
    routing=Routing(kind="sigmoid", correction="expert_bias"),
    normed_heads=True,
    states=True,
    attention=GroupedQuery(normalized=lambda _config: True, per_head=True, norms=("q_layernorm", "k_layernorm")),
    defaults={
        "num_dense_layers": 2,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "conv_bias": False,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
    },
    published=(
        CatalogEntry(
            "lfm2-8b-a1b",
            _LFM2,
            "LiquidAI/LFM2-8B-A1B",
            licence="LFM Open License v1.0",
            gated=False,
            chat="<|im_start|> turns, from its own chat template",
            released="2025-10",
        ),
    ),
)
