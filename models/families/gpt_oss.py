"""gpt-oss (OpenAI): clamped experts with biases in blocks of four bits, attention sinks, and a window in every second
layer.
"""

from __future__ import annotations

from typing import Any

from ..catalog_entry import CatalogEntry, Sizes
from .family import Family, GroupedQuery, Routing
from .storage import Interleaved, Mxfp4


def _sizes(layers: int, experts: int) -> Sizes:
    return Sizes(
        model_type="gpt_oss",
        layers=layers,
        hidden=2880,
        intermediate=2880,
        experts=experts,
        top_k=4,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        window=131072,
        biases=layers * (64 * (64 + 2 * 8) + 2880 + 64 + experts + experts * (2 * 2880 + 2880)),
        windowed=layers // 2,
        sees=128,
    )


def _biases(config: Any) -> int:
    """Of routers and experts, and the sinks."""
    experts = config.num_local_experts * (1 + 2 * config.intermediate_size + config.hidden_size)
    return config.num_hidden_layers * (config.num_attention_heads + experts)


def _window(config: Any, layer: int) -> int | None:
    kinds = config.layer_types or ["sliding_attention", "full_attention"] * config.num_hidden_layers
    return int(config.sliding_window) if kinds[layer] == "sliding_attention" else None


_CHAT = "harmony messages, from its own chat template; it thinks first"

GPT_OSS = Family(
    model_type="gpt_oss",
    called="gpt-oss",
    wide=True,
    stored=(Mxfp4(), Interleaved()),
    experts_by="clamped",
    biased=True,
    routing=Routing(module="router", normalized=True),
    biases=_biases,
    attention=GroupedQuery(
        sinks=True,
        angles_once=True,
        biased=lambda config: (bool(config.attention_bias), bool(config.attention_bias)),
        window=_window,
    ),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    published=(
        CatalogEntry(
            "gpt-oss-20b",
            _sizes(24, 32),
            "openai/gpt-oss-20b",
            licence="Apache-2.0",
            gated=False,
            chat=_CHAT,
            thinks=True,
            released="2025-08",
            expert_bits=4.25,
        ),
        CatalogEntry(
            "gpt-oss-120b",
            _sizes(36, 128),
            "openai/gpt-oss-120b",
            licence="Apache-2.0",
            gated=False,
            chat=_CHAT,
            thinks=True,
            released="2025-08",
            expert_bits=4.25,
        ),
    ),
)
