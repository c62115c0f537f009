"""DeepSeekMoE, DeepSeek-V2 and V3, and GLM-4.7-Flash, which is built like V3: shared experts, layers without experts at
the beginning, and in all but the first attention through a latent vector.
"""

from __future__ import annotations

from typing import Any

from ..catalog_entry import CatalogEntry, Latent, Sizes
from .family import LATENT, DraftHead, Family, GroupedQuery, Routing, SharedExpert, ThroughLatent

_16B = Sizes(
    model_type="deepseek",
    layers=27,
    hidden=2048,
    intermediate=1408,
    experts=64,
    top_k=6,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=102400,
    window=4096,
    dense_layers=1,
    dense_intermediate=10944,
    shared=2 * 1408,
)
_V2_LITE = Sizes(
    model_type="deepseek_v2",
    layers=26,
    hidden=2048,
    intermediate=1408,
    experts=64,
    top_k=6,
    heads=16,
    kv_heads=16,
    head_dim=192,
    vocab=102400,
    window=163840,
    dense_layers=1,
    dense_intermediate=10944,
    shared=2 * 1408,
    latent=Latent(queries=0, keys=512, rope=64, value=128),
)
_FLASH = Sizes(
    model_type="glm4_moe_lite",
    layers=46,
    hidden=2048,
    intermediate=1536,
    experts=64,
    top_k=4,
    heads=20,
    kv_heads=20,
    head_dim=256,
    vocab=154880,
    window=202752,
    dense_layers=1,
    dense_intermediate=10240,
    shared=1536,
    router_bias=True,
    latent=Latent(queries=768, keys=512, rope=64, value=256),
    draft="experts",
)


def _first(config: Any) -> range:
    return range(min(config.first_k_dense_replace or 0, config.num_hidden_layers))


def _dense(config: Any) -> set[int]:
    """The first layers, and behind them all but every n-th."""
    first, step = _first(config), config.moe_layer_freq or 1
    return {layer for layer in range(config.num_hidden_layers) if layer in first or layer % step}


def _register() -> None:
    from ..transformers_import import import_model_code

    import_model_code()
    from .deepseek_moe import register

    register()


def further_layers(config: Any) -> tuple[str, ...]:
    """The layers behind the last, which guess a second token in training."""
    last, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0) or 0
    return tuple(f"model.layers.{layer}." for layer in range(last, last + more))


def head_behind(**alone: Any) -> DraftHead:
    """The first of these, as DeepSeek-V3 has it; alone: see `DraftHead`."""
    layer = "model.layers.{layer}."
    return DraftHead(
        layer=layer,
        joined=f"{layer}eh_proj.weight",
        embedding_norm=f"{layer}enorm.weight",
        hidden_norm=f"{layer}hnorm.weight",
        norm=f"{layer}shared_head.norm.weight",
        alone=alone,
    )


def _flash_dense(config: Any) -> list[int]:
    kinds = config.mlp_layer_types or ["dense"]
    return [layer for layer, kind in enumerate(kinds) if kind != "sparse"]


_LINEARS = (*LATENT, ".q_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj", "lm_head")

DEEPSEEK = Family(
    model_type="deepseek",
    called="DeepSeekMoE",
    width="moe_intermediate_size",
    dense_layers=_dense,
    shared=SharedExpert("shared_experts"),
    routing=Routing(normalized=False, precise=True),
    attention=GroupedQuery(biased=lambda config: (bool(config.attention_bias), bool(config.attention_bias))),
    register=_register,
    defaults={"first_k_dense_replace": 0, "n_shared_experts": 2, "attention_bias": False},
    published=(
        CatalogEntry(
            "deepseek-moe-16b-chat",
            _16B,
            "deepseek-ai/deepseek-moe-16b-chat",
            licence="DeepSeek licence",
            gated=False,
            chat="User: and Assistant: turns, from its own chat template",
            released="2024-01",
        ),
    ),
)

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    called="DeepSeek-V2",
    linears=_LINEARS,
    width="moe_intermediate_size",
    dense_layers=_first,
    shared=SharedExpert("shared_experts"),
    routing=Routing(normalized=False, precise=True),
    attention=ThroughLatent(interleaved=lambda _config: True, angles_once=True),
    defaults={
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    published=tuple(
        CatalogEntry(
            name,
            _V2_LITE,
            f"deepseek-ai/{repo}",
            licence="DeepSeek licence",
            gated=False,
            chat="User: and Assistant: turns, from its own chat template",
            released=released,
            made_for=made_for,
        )
        for name, repo, released, made_for in (
            ("deepseek-v2-lite-chat", "DeepSeek-V2-Lite-Chat", "2024-05", ""),
            ("deepseek-coder-v2-lite-instruct", "DeepSeek-Coder-V2-Lite-Instruct", "2024-06", "code"),
        )
    ),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    called="DeepSeek-V3",
    linears=_LINEARS,
    precise=("e_score_correction_bias",),
    width="moe_intermediate_size",
    dense_layers=_first,
    shared=SharedExpert("shared_experts"),
    unused=further_layers,
    routing=Routing(kind="sigmoid", precise=True, correction="gate.e_score_correction_bias"),
    attention=ThroughLatent(interleaved=lambda config: bool(config.rope_interleave)),
    head=head_behind(first_k_dense_replace=0),
    defaults={
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
)

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    called="GLM-4.7-Flash",
    linears=_LINEARS,
    precise=("e_score_correction_bias",),
    width="moe_intermediate_size",
    dense_layers=_flash_dense,
    shared=SharedExpert("shared_experts"),
    unused=further_layers,
    routing=Routing(kind="sigmoid", precise=True, correction="gate.e_score_correction_bias"),
    attention=ThroughLatent(interleaved=lambda config: bool(config.rope_interleave)),
    head=head_behind(mlp_layer_types=["sparse"]),
    defaults={
        "mlp_layer_types": None,
        "n_shared_experts": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    published=(
        CatalogEntry(
            "glm-4.7-flash",
            _FLASH,
            "zai-org/GLM-4.7-Flash",
            licence="MIT",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template; it thinks first",
            released="2026-01",
            # The drafting head, with an embedding and a head of its own.
            unused=643_706_240 + 2 * 317_194_240,
            thinks=True,
        ),
    ),
)
