"""ERNIE 4.5 (Baidu): shared experts, a first layer without experts, and a router whose choice a bias corrects."""

from __future__ import annotations

from typing import Any

from ..catalog_entry import CatalogEntry, Sizes
from .family import DraftHead, Family, GroupedQuery, Routing, SharedExpert

_21B_A3B = Sizes(
    model_type="ernie4_5_moe",
    layers=27,
    hidden=2560,
    intermediate=1536,
    experts=64,
    top_k=6,
    heads=20,
    kv_heads=4,
    head_dim=128,
    vocab=103424,
    window=131072,
    tied=True,
    dense_layers=1,
    dense_intermediate=12288,
    shared=2 * 1536,
    router_bias=True,
    draft="dense",
)

_TURNS = "User: and Assistant: turns, from its own chat template"


def _dense_layers(config: Any) -> list[int]:
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    last = config.num_hidden_layers - 1 if last == -1 else last
    return [n for n in range(config.num_hidden_layers) if (n + 1) % step or not first <= n <= last]


def _guessing(_config: Any) -> tuple[str, ...]:
    """The layers that guess further tokens."""
    return ("model.mtp_",)


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    called="ERNIE 4.5",
    renames=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    precise=("e_score_correction_bias",),
    width="moe_intermediate_size",
    dense_layers=_dense_layers,
    shared=SharedExpert("shared_experts", count="moe_num_shared_experts"),
    unused=_guessing,
    routing=Routing(normalized=True, precise=True, correction="gate.moe_statics.e_score_correction_bias"),
    attention=GroupedQuery(interleaved=True, biased=lambda config: (bool(config.use_bias), bool(config.use_bias))),
    head=DraftHead(
        layer="model.mtp_block.0.",
        joined="model.mtp_linear_proj.0.weight",
        embedding_norm="model.mtp_emb_norm.0.weight",
        hidden_norm="model.mtp_hidden_norm.0.weight",
        norm="model.norm.weight",
        stored=(),
        alone={"moe_layer_start_index": 1},
    ),
    defaults={
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 2,
        "tie_word_embeddings": True,
    },
    published=(
        CatalogEntry(
            "ernie-4.5-21b-a3b",
            _21B_A3B,
            "baidu/ERNIE-4.5-21B-A3B-PT",
            licence="Apache-2.0",
            gated=False,
            chat=_TURNS,
            released="2025-06",
        ),
        CatalogEntry(
            "ernie-4.5-21b-a3b-thinking",
            _21B_A3B,
            "baidu/ERNIE-4.5-21B-A3B-Thinking",
            licence="Apache-2.0",
            gated=False,
            chat=f"{_TURNS}; it thinks first",
            released="2025-09",
            thinks=True,
        ),
    ),
)
