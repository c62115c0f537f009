"""Gemma 4 (Google): experts beside a dense MLP; few layers see all tokens, the others a window, with other heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import config_limits
from ..catalog_entry import AssistantSizes, CatalogEntry, Sizes, Wide
from .family import Assistant, Between, Family, GroupedQuery, Routing, SharedExpert
from .storage import Stacked

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NESTED = "model.language_model."  # what published checkpoints have for "model.": they see, too
_PART = "layers.{layer}.experts.{part}"


def _register() -> None:
    """Its configuration gets the names that those of other families have."""
    from ..transformers_import import import_library

    import_library()
    from transformers import Gemma4TextConfig

    Gemma4TextConfig.attribute_map = {"num_experts_per_tok": "top_k_experts", "hidden_act": "hidden_activation"}


def _refused(fields: Mapping[str, Any]) -> str:
    if not fields.get("enable_moe_block"):
        return "It has no experts: enable_moe_block is not true in its config.json."
    if fields.get("hidden_size_per_layer_input", 256):
        return "It embeds tokens once more for each layer (hidden_size_per_layer_input), which is not supported yet."
    if fields.get("num_kv_shared_layers"):
        return "Some of its layers use keys and values of others (num_kv_shared_layers), which is not supported yet."
    if fields.get("use_bidirectional_attention") == "all":
        return "Its tokens see those behind them (use_bidirectional_attention), so it does not write text."
    return "Its attention has biases, which is not supported yet." if fields.get("attention_bias") else ""


def _kinds(config: Any) -> list[str]:
    """Of each layer: by default every sixth sees all tokens; the last one always does."""
    count, stated = config.num_hidden_layers, config.layer_types
    kinds = [_SLIDING if (layer + 1) % 6 else _FULL for layer in range(count)] if stated is None else list(stated)
    if len(kinds) != count or not {*kinds} <= {_FULL, _SLIDING}:
        raise ValueError(f"its layer_types are not {count} of {_FULL} and {_SLIDING}")
    return [*kinds[:-1], _FULL]


def _window(config: Any, layer: int) -> int | None:
    return int(config.sliding_window) if _kinds(config)[layer] == _SLIDING else None


def _parts(config: Any) -> tuple[Any, Wide | None]:
    kinds, stated = _kinds(config), config.per_layer_config
    if stated is None or isinstance(stated, Mapping):  # a config.json as it is
        own = _stated_heads(config, kinds)
    else:  # transformers' configuration, which has no size of heads that all layers share
        full = stated[_FULL]
        own = {"num_key_value_heads": full.num_key_value_heads, "head_dim": full.head_dim}
        config = stated[_SLIDING if _SLIDING in kinds else _FULL]
    if cause := config_limits.problem({"num_attention_heads": config.num_attention_heads, **own}):
        raise ValueError(cause)
    heads, size = own["num_key_value_heads"], own["head_dim"]
    return config, Wide(kinds.count(_FULL), heads, size, keys_alone=bool(config.attention_k_eq_v))


def _stated_heads(config: Any, kinds: list[str]) -> dict[str, Any]:
    """Of layers that see all tokens: by fields of their own, or layer by layer, as transformers writes them."""
    usual = {"num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim}
    stated: Mapping[Any, Any] | None = config.per_layer_config
    if stated is None:
        heads = config.num_global_key_value_heads if config.attention_k_eq_v else None
        return {"num_key_value_heads": heads or config.num_key_value_heads, "head_dim": config.global_head_dim}
    by_layer = {int(layer): dict(entry) for layer, entry in stated.items()}
    first, *others = [by_layer.pop(layer, {}) for layer, kind in enumerate(kinds) if kind == _FULL]
    if any(by_layer.values()) or any(other != first for other in others) or first.keys() - usual.keys():
        raise ValueError("its per_layer_config says more than the heads of layers that see all tokens")
    return usual | first


def _more(config: Any) -> int:
    """Five more norms in each layer, and of each router a factor per input and one per expert."""
    return int(config.num_hidden_layers * (6 * config.hidden_size + config.num_experts))


def _scores_by(router: Any, norm: Tensor) -> Tensor:
    """The router normalizes the residual stream by itself: of the experts' input, their norm's weights are undone."""
    return router.proj.weight * (router.scale * router.scalar_root_size / norm).nan_to_num(0.0, 0.0, 0.0)


_GEMMA4 = Sizes(
    model_type="gemma4_text",
    layers=30,
    hidden=2816,
    intermediate=704,
    experts=128,
    top_k=8,
    heads=16,
    kv_heads=8,
    head_dim=256,
    vocab=262144,
    window=262144,
    tied=True,
    head_norms=2 * 256,
    biases=30 * (6 * 2816 + 128),
    shared=2112,
    wide=Wide(layers=5, kv_heads=2, head_dim=512, keys_alone=True),
    windowed=25,
    sees=1024,
    draft=AssistantSizes(hidden=1024, intermediate=8192, layers=4, wide=1),
)

_ATTENTION = GroupedQuery(normalized=lambda _config: True, per_head=True, window=_window)

# Published as gemma4_assistant; those of the smallest models order their vocabulary, which no model with experts does.
_ASSISTANT = Family(
    model_type="gemma4_text",
    called="Gemma 4's assistant",
    norm="pre_feedforward_layernorm",
    activation="gelu_pytorch_tanh",
    dense_layers=lambda config: range(config.num_hidden_layers),
    experts_by="gelu",
    sandwich=Between("post_attention_layernorm", "post_feedforward_layernorm"),
    parts=_parts,
    attention=_ATTENTION,
)

GEMMA4 = Family(
    model_type="gemma4_text",
    within="gemma4",
    called="Gemma 4 MoE",
    wide=True,
    stored=tuple(Stacked(start + _PART, "gate_up_proj", "down_proj") for start in (_NESTED, "model.")),
    renames=((_NESTED, "model."),),
    unused=lambda _config: ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    block="",
    norm="pre_feedforward_layernorm_2",
    width="moe_intermediate_size",
    activation="gelu_pytorch_tanh",
    shared=SharedExpert("mlp", width="intermediate_size"),
    routing=Routing("router", kind="scaled", normalized=False, scores_by=_scores_by),
    experts_by="gelu",
    biases=_more,
    normed_heads=True,
    sandwich=Between(
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        before="pre_feedforward_layernorm",
        beside="post_feedforward_layernorm_1",
        experts="post_feedforward_layernorm_2",
    ),
    parts=_parts,
    attention=_ATTENTION,
    assistant=Assistant("gemma4_assistant", _ASSISTANT),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    refused=_refused,
    register=_register,
    published=(
        CatalogEntry(
            "gemma-4-26b-a4b-it",
            _GEMMA4,
            "google/gemma-4-26B-A4B-it",
            licence="Apache-2.0",
            gated=False,
            chat="<|turn> turns, from its own chat template; it thinks first",
            released="2026-04",
            thinks=True,
            unused=569_548_080 + 3_244_032,
            assistant="google/gemma-4-26B-A4B-it-assistant",
        ),
    ),
)
