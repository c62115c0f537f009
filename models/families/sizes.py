"""The sizes of a model of any family, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

from ..catalog_entry import Convolutions, Latent, Recurrent, Sizes
from .derived import Derived
from .family import Family, GroupedQuery
from .recognized import unrecognized

# A field of ours, and what families call it in config.json.
NAMES: dict[str, tuple[str, ...]] = {
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_k", "top_k_experts"),
}


def view(family: Family, fields: Mapping[str, Any]) -> Any:
    """The fields of a config.json as a configuration: with the family's defaults, its names, and None for the rest."""
    given = {**family.defaults, **fields}
    for name, others in NAMES.items():
        given[name] = next((fields[other] for other in others if fields.get(other) is not None), given.get(name))
    return _View(**given)


class _View(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


def sizes_of(family: Family, config: Any) -> Sizes:
    """`config`: transformers' configuration, ours, or a `view`; of a derived family, transformers'."""
    if isinstance(family, Derived):
        sizes = family.sizes(config)
        assert sizes.counted is not None
        return replace(sizes, counted=replace(sizes.counted, library=unrecognized(config)))
    windowed, sees = _windows(family, config)
    config, wide = family.parts(config)
    hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    with_experts = len(family.expert_layers(config))
    latent = _latent(config)
    head_dim = config.qk_nope_head_dim + latent.rope if latent else _head_dim(config)
    queries, keys = heads * head_dim, kv_heads * head_dim
    shared = family.shared
    attention = family.attention if isinstance(family.attention, GroupedQuery) else None
    normalized = attention.normalized(config) if attention else family.normed_heads
    biased = attention.biased(config) if attention else (False, False)
    per_head = attention.per_head if attention else family.normed_heads
    return Sizes(
        model_type=family.model_type,
        layers=with_experts,
        hidden=hidden,
        intermediate=family.neurons(config),
        experts=family.experts(config),
        top_k=config.num_experts_per_tok,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        window=getattr(config, "max_position_embeddings", None) or 4096,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        head_norms=(2 * head_dim if per_head else queries + keys) if normalized else 0,
        biases=family.biases(config) + layers * _biases(biased, queries + 2 * keys, hidden),
        dense_layers=layers - with_experts,
        dense_intermediate=config.intermediate_size if layers > with_experts else 0,
        shared=shared.neurons(config) if shared else 0,
        shared_gate=bool(shared and shared.gate),
        router_bias=bool(family.routing.correction),
        latent=latent,
        recurrent=_recurrent(config),
        gated_heads=family.gated_heads,
        wide=wide,
        windowed=windowed,
        sees=sees,
        draft=_draft(family, config),
    )


def _draft(family: Family, config: Any) -> Literal["", "experts", "dense"]:
    if family.head is None or not family.head.count(config):
        return ""
    return "experts" if family.head.stored else "dense"


def _windows(family: Family, config: Any) -> tuple[int, int]:
    """How many layers see a window of their own, and how many tokens the largest of these has.

    Raises:
        ValueError: kinds of layers that do not fit the layers.
    """
    if not isinstance(family.attention, GroupedQuery):
        return 0, 0
    longest = getattr(config, "max_position_embeddings", None) or 4096
    try:
        each = [family.attention.window(config, layer) for layer in range(config.num_hidden_layers)]
    except (IndexError, KeyError) as error:
        raise ValueError("its layer_types are not those of all layers") from error
    found = [window for window in each if window and window < longest]
    return len(found), max(found, default=0)


def _recurrent(config: Any) -> Recurrent | Convolutions | None:
    kinds: Any = getattr(config, "layer_types", None)
    if taps := getattr(config, "conv_L_cache", None):
        return Convolutions(kinds.count("conv"), taps, bool(config.conv_bias))
    heads = getattr(config, "linear_num_value_heads", None)
    if not heads:
        return None
    step = getattr(config, "full_attention_interval", None) or 4
    layers = kinds.count("linear_attention") if kinds else config.num_hidden_layers - config.num_hidden_layers // step
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    return Recurrent(layers, keys, values, heads, config.linear_key_head_dim, config.linear_conv_kernel_dim)


def _latent(config: Any) -> Latent | None:
    keys = getattr(config, "kv_lora_rank", None)
    if not keys:
        return None
    return Latent(getattr(config, "q_lora_rank", None) or 0, keys, config.qk_rope_head_dim, config.v_head_dim)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _biases(biased: tuple[bool, bool], projected: int, hidden: int) -> int:
    return biased[0] * projected + biased[1] * hidden
