"""Qwen's Mixture-of-Experts models: Qwen1.5-MoE and Qwen2 with a gated shared expert, Qwen3 with normalized heads, and
Qwen3-Next and Qwen3.5 with recurrent layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..catalog_entry import CatalogEntry, Recurrent, Sizes
from .family import LINEARS, DraftHead, Family, GroupedQuery, Routing, SharedExpert
from .storage import Apart, Stacked


def _dense_layers(config: Any) -> set[int]:
    """Layers without experts: those that are named, and all but every n-th."""
    named, step = config.mlp_only_layers or (), config.decoder_sparse_step or 1
    return {layer for layer in range(config.num_hidden_layers) if layer in named or (layer + 1) % step}


def _window(config: Any, layer: int) -> int | None:
    """Of some layers of Qwen2; published models use none."""
    kinds = getattr(config, "layer_types", None)
    if not config.use_sliding_window or not kinds or kinds[layer] != "sliding_attention":
        return None
    return int(config.sliding_window)


def _qwen3_window(config: Any, _layer: int) -> int | None:
    return config.sliding_window if config.use_sliding_window else None


_30B_A3B = Sizes(
    model_type="qwen3_moe",
    layers=48,
    hidden=2048,
    intermediate=768,
    experts=128,
    top_k=8,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    window=40960,
    head_norms=2 * 128,
)
_30B_A3B_2507 = replace(_30B_A3B, window=262144)
_A2_7B = Sizes(
    model_type="qwen2_moe",
    layers=24,
    hidden=2048,
    intermediate=1408,
    experts=60,
    top_k=4,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=151936,
    window=8192,
    biases=24 * 3 * 2048,
    shared=5632,
    shared_gate=True,
)
_57B_A14B = Sizes(
    model_type="qwen2_moe",
    layers=28,
    hidden=3584,
    intermediate=2560,
    experts=64,
    top_k=8,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    window=32768,
    biases=28 * 128 * (28 + 2 * 4),
    shared=20480,
    shared_gate=True,
)
_CHATML = "<|im_start|> turns, from its own chat template"


_IN_FP8 = "Qwen3-30B-A3B", "Qwen3-Coder-30B-A3B-Instruct", "Qwen3.6-35B-A3B"


def _entry(name: str, sizes: Sizes, repo: str, released: str, *, thinks: bool = False, **others: Any) -> CatalogEntry:
    chat = f"{_CHATML}; it thinks first" if thinks else _CHATML
    others = {"fp8": f"Qwen/{repo}-FP8", **others} if repo.startswith(_IN_FP8) else others
    given: dict[str, Any] = {"licence": "Apache-2.0", "chat": chat, "released": released, **others}
    return CatalogEntry(name, sizes, f"Qwen/{repo}", gated=False, thinks=thinks, **given)


_SHARED_EXPERT = SharedExpert("shared_expert", gate="shared_expert_gate", width="shared_expert_intermediate_size")
_SHARED_FIELDS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_hidden_layers": 24,
}

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    called="Qwen2 MoE",
    width="moe_intermediate_size",
    dense_layers=_dense_layers,
    shared=_SHARED_EXPERT,
    defaults={
        **_SHARED_FIELDS,
        "intermediate_size": 5632,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_local_experts": 60,
        "qkv_bias": True,
    },
    attention=GroupedQuery(window=_window, biased=lambda config: (bool(config.qkv_bias), False)),
    published=(
        _entry("qwen1.5-moe-a2.7b-chat", _A2_7B, "Qwen1.5-MoE-A2.7B-Chat", "2024-03", licence="Tongyi Qianwen licence"),
        _entry("qwen2-57b-a14b-instruct", _57B_A14B, "Qwen2-57B-A14B-Instruct", "2024-06"),
    ),
)

_RECURRENT_FIELDS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _one(config: Any) -> int:
    """No field of published Qwen3-Next models says it; what we make of a GGUF file does."""
    stated = getattr(config, "mtp_num_hidden_layers", None)
    return 1 if stated is None else stated


_HEAD_EXPERTS = "mtp.layers.0.mlp.experts."
_HEAD = DraftHead(
    layer="mtp.layers.0.",
    joined="mtp.fc.weight",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    norm="mtp.norm.weight",
    stored=(
        Stacked(f"{_HEAD_EXPERTS}{{part}}", "gate_up_proj", "down_proj"),
        Apart(f"{_HEAD_EXPERTS}{{expert}}.{{part}}.weight"),
    ),
    alone={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
    count=lambda config: getattr(config, "mtp_num_hidden_layers", None) or 0,
)
_GATED = GroupedQuery(normalized=lambda _config: True, per_head=True, gated=True)

# Not listed: too large for the machines that the list is for.
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    called="Qwen3-Next",
    unused=lambda _config: ("mtp.",),
    linears=(*LINEARS, ".in_proj_qkvz", ".out_proj"),
    precise=(".A_log", ".dt_bias"),
    width="moe_intermediate_size",
    dense_layers=_dense_layers,
    shared=_SHARED_EXPERT,
    gated_heads=True,
    centred=True,
    states=True,
    attention=_GATED,
    head=replace(_HEAD, count=_one),
    defaults={
        **_SHARED_FIELDS,
        **_RECURRENT_FIELDS,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 10,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_local_experts": 512,
    },
)

_QWEN3_5 = Sizes(
    model_type="qwen3_5_moe_text",
    layers=40,
    hidden=2048,
    intermediate=512,
    experts=256,
    top_k=8,
    heads=16,
    kv_heads=2,
    head_dim=256,
    vocab=248320,
    window=262144,
    head_norms=2 * 256,
    shared=512,
    shared_gate=True,
    recurrent=Recurrent(layers=30, keys=16 * 128, values=32 * 128, heads=32, key_dim=128, taps=4),
    gated_heads=True,
    draft="experts",
)

_NESTED = "model.language_model."  # what published checkpoints have for "model.": they see, too
_EXPERTS = "layers.{layer}.mlp.experts."

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    within="qwen3_5_moe",
    called="Qwen3.5 MoE",
    stored=(
        Stacked(f"{_NESTED}{_EXPERTS}{{part}}", "gate_up_proj", "down_proj"),
        Stacked(f"model.{_EXPERTS}{{part}}", "gate_up_proj", "down_proj"),
        Apart(f"{_NESTED}{_EXPERTS}{{expert}}.{{part}}.weight"),
        Apart(),
    ),
    renames=((_NESTED, "model."),),
    unused=lambda _config: ("model.visual.", "mtp."),
    linears=(*LINEARS, ".in_proj_qkv", ".in_proj_z", ".out_proj"),
    precise=QWEN3_NEXT.precise,
    width="moe_intermediate_size",
    shared=_SHARED_EXPERT,
    routing=Routing(normalized=True),
    gated_heads=True,
    centred=True,
    states=True,
    attention=_GATED,
    head=_HEAD,
    defaults={
        **_RECURRENT_FIELDS,
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_local_experts": 256,
        "tie_word_embeddings": False,
    },
    published=tuple(
        _entry(
            f"qwen{version}-35b-a3b",
            _QWEN3_5,
            f"Qwen{version}-35B-A3B",
            released,
            thinks=True,
            unused=446_571_248 + 844_640_768,
            kept=446_571_248,
        )
        for version, released in (("3.5", "2026-02"), ("3.6", "2026-04"))
    ),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    called="Qwen3 MoE",
    width="moe_intermediate_size",
    dense_layers=_dense_layers,
    defaults={
        **_SHARED_FIELDS,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "attention_bias": False,
    },
    attention=GroupedQuery(
        normalized=lambda _config: True,
        per_head=True,
        biased=lambda config: (bool(config.attention_bias), bool(config.attention_bias)),
        window=_qwen3_window,
    ),
    published=(
        _entry("qwen3-30b-a3b", _30B_A3B, "Qwen3-30B-A3B", "2025-04", thinks=True),
        _entry("qwen3-30b-a3b-instruct-2507", _30B_A3B_2507, "Qwen3-30B-A3B-Instruct-2507", "2025-07"),
        _entry("qwen3-30b-a3b-thinking-2507", _30B_A3B_2507, "Qwen3-30B-A3B-Thinking-2507", "2025-07", thinks=True),
        _entry(
            "qwen3-coder-30b-a3b-instruct", _30B_A3B_2507, "Qwen3-Coder-30B-A3B-Instruct", "2025-07", made_for="code"
        ),
    ),
)
