"""GLM-4.5 and its successors (Z.ai): grouped-query attention with rope on half of each head, a shared expert, a first
layer without experts, and a router of sigmoids with a correction bias.
"""

from __future__ import annotations

from typing import Any

from ..catalog_entry import CatalogEntry, Sizes
from .deepseek import further_layers, head_behind
from .family import Family, GroupedQuery, Routing, SharedExpert

_AIR = Sizes(
    model_type="glm4_moe",
    layers=45,
    hidden=4096,
    intermediate=1408,
    experts=128,
    top_k=8,
    heads=96,
    kv_heads=8,
    head_dim=128,
    vocab=151552,
    window=131072,
    dense_layers=1,
    dense_intermediate=10944,
    shared=1408,
    router_bias=True,
    biases=46 * 128 * (96 + 2 * 8),
    draft="experts",
)


def _first(config: Any) -> range:
    return range(min(config.first_k_dense_replace, config.num_hidden_layers))


GLM4_MOE = Family(
    model_type="glm4_moe",
    called="GLM-4.5",
    precise=("e_score_correction_bias",),
    width="moe_intermediate_size",
    dense_layers=_first,
    shared=SharedExpert("shared_experts"),
    unused=further_layers,
    routing=Routing(kind="sigmoid", precise=True, correction="gate.e_score_correction_bias"),
    attention=GroupedQuery(
        normalized=lambda config: bool(config.use_qk_norm),
        per_head=True,
        biased=lambda config: (bool(config.attention_bias), False),
    ),
    head=head_behind(first_k_dense_replace=0),
    defaults={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
    },
    published=(
        CatalogEntry(
            "glm-4.5-air",
            _AIR,
            "zai-org/GLM-4.5-Air",
            licence="MIT",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template; it thinks first",
            released="2025-07",
            # A layer that predicts a second token, with an embedding and a head of its own.
            unused=2_375_059_712 + 2 * 620_756_992,
            kept=2 * 620_756_992,
            fp8="zai-org/GLM-4.5-Air-FP8",
            thinks=True,
        ),
    ),
)
