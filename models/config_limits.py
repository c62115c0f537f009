"""Limits for a configuration's numbers: far beyond every published model, and small enough to compute with.

A config.json comes from a hub or in a pack. All code that reads one checks here before it makes a list, a table or a
tensor of such a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Name in config.json -> the least and the most; in brackets the largest that is known.
SIZES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 21),  # 262,144
    "hidden_size": (2, 1 << 16),  # 18,432
    "intermediate_size": (1, 1 << 18),  # 53,248
    "moe_intermediate_size": (1, 1 << 18),  # 16,384
    "shared_expert_intermediate_size": (1, 1 << 18),  # 20,480
    "n_shared_experts": (0, 1 << 8),  # 2
    "moe_num_shared_experts": (0, 1 << 8),  # 2
    "decoder_sparse_step": (1, 1 << 10),  # 2
    "first_k_dense_replace": (0, 1 << 10),  # 3
    "moe_layer_freq": (1, 1 << 10),  # 1
    "num_nextn_predict_layers": (0, 1 << 10),  # 1
    "num_dense_layers": (0, 1 << 10),  # 2
    "conv_L_cache": (1, 1 << 10),  # 3
    "linear_conv_kernel_dim": (1, 1 << 10),  # 4
    "linear_key_head_dim": (1, 1 << 10),  # 128
    "linear_value_head_dim": (1, 1 << 10),  # 128
    "linear_num_key_heads": (1, 1 << 10),  # 16
    "linear_num_value_heads": (1, 1 << 10),  # 64
    "kv_lora_rank": (1, 1 << 14),  # 512
    "q_lora_rank": (1, 1 << 14),  # 1,536
    "qk_rope_head_dim": (2, 1 << 10),  # 64
    "qk_nope_head_dim": (1, 1 << 10),  # 192
    "v_head_dim": (1, 1 << 10),  # 256
    "num_hidden_layers": (1, 1 << 10),  # 126
    "num_attention_heads": (1, 1 << 10),  # 128
    "num_key_value_heads": (1, 1 << 10),  # 128
    "num_local_experts": (1, 1 << 12),  # 2,048
    "num_experts_per_tok": (1, 1 << 8),  # 22
    "max_position_embeddings": (2, 1 << 24),  # 10,485,760
    "head_dim": (2, 1 << 10),  # 256
    "global_head_dim": (2, 1 << 10),  # 512
    "num_global_key_value_heads": (1, 1 << 10),  # 2
    "sliding_window": (1, 1 << 30),  # anything; beyond the window it changes nothing
    "ngram_vocab_size_base": (1, 1 << 26),  # 20,000,000
    "ngram_size": (2, 1 << 3),  # 3
    "heads_per_ngram": (1, 1 << 6),  # 8
}
FIGURES: dict[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "norm_eps": (0.0, 1.0),
    "clip_qkv": (1e-6, 1e6),
    "routed_scaling_factor": (1e-6, 1e6),
    "rope_theta": (1.0, 1e15),
}
_OPTIONAL = (
    *("head_dim", "sliding_window", "clip_qkv", "rope_theta", "num_key_value_heads", "max_position_embeddings"),
    *("moe_intermediate_size", "decoder_sparse_step", "first_k_dense_replace", "num_nextn_predict_layers"),
    *("moe_layer_freq", "num_global_key_value_heads"),
    *("n_shared_experts", "moe_num_shared_experts", "q_lora_rank"),
)
_MOST_LISTED, _MOST_LAYERS, _MOST_OTHERS = 1 << 12, 1 << 10, 1 << 24  # of fields that are not among these
_MOST_EXPERTS = 1 << 17  # of all layers: 30,720
_MOST_HASHES = 1 << 7  # of n-grams: 16; each layer's numbers of rows are primes behind those of the layers before


def in_force(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """A configuration's values without a sliding window that is switched off, which some write as 0. `defaults`: the
    family's, for values that are left out.
    """
    used = values.get("use_sliding_window", defaults.get("use_sliding_window"))
    return {**values, "sliding_window": None} if used is False else values


def out_of_range(name: str, value: Any) -> str | None:
    """Why a configuration's value is impossible, as a sentence; None if it is possible."""
    if name in SIZES:
        least, most = SIZES[name]
        if type(value) is not int:
            return f"Its {name} is {shown(value)}, not a whole number."
        if not least <= value <= most:
            return f"Its {name} is {shown(value)}; {least} to {most:,} is supported."
    elif name in FIGURES:
        low, high = FIGURES[name]
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            return f"Its {name} is {shown(value)}; a number from {low:g} to {high:g} is supported."
    return None


def problem(values: Mapping[str, Any]) -> str | None:
    """Why a configuration's values, by their names in config.json, describe no model; None if they do.

    Only the values that are given are checked, and None is accepted where transformers accepts it.
    """
    for name in (*SIZES, *FIGURES):
        value = values.get(name)
        if value is None and (name in _OPTIONAL or name not in values):
            continue
        if cause := out_of_range(name, value):
            return cause
    layers, experts = values.get("num_hidden_layers", 1), values.get("num_local_experts", 1)
    if layers * experts > _MOST_EXPERTS:
        return f"It has {layers:,} layers of {experts:,} experts; {_MOST_EXPERTS:,} experts in all are supported."
    if (chosen := values.get("num_experts_per_tok", 1)) > experts:
        return f"A token uses {chosen:,} of {experts:,} experts."
    heads, keys = values.get("num_attention_heads") or 1, values.get("num_key_value_heads") or 1
    if heads % keys:
        return f"{heads:,} attention heads cannot share {keys:,} key and value heads."
    known = "hidden_size" in values and values.get("num_attention_heads")  # a manifest names no heads
    size = values.get("head_dim") or (values["hidden_size"] // heads if known else 2)
    if size < 2 or size % 2:
        return f"Its attention heads have {size} values; an even number is needed."
    return None


def beyond(fields: Mapping[str, Any]) -> str | None:
    """Why a configuration whose fields nobody knows could take a machine's time or memory; None if it does not."""
    words, heads, layers = fields.get("ngram_size", 3), fields.get("heads_per_ngram", 8), fields.get("ple_layer_ids")
    hashes = (words - 1) * heads * len(layers) if isinstance(layers, list) and type(words) is type(heads) is int else 0
    if hashes > _MOST_HASHES:
        return f"Its n-grams are looked up in {shown(hashes)} ways; {_MOST_HASHES} are supported."
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if cause := beyond(value):
                return cause
        elif isinstance(value, list | tuple) and len(value) > _MOST_LISTED:
            return f"Its {shown(name)} has {len(value):,} entries; {_MOST_LISTED:,} are supported."
        elif type(value := largest(value)) is int and name not in SIZES and not name.endswith("_id"):
            most = _MOST_LAYERS if "layer" in name else _MOST_OTHERS
            if abs(value) > most:
                return f"Its {shown(name)} is {shown(value)}; up to {most:,} is supported."
    return None


def largest(value: Any) -> Any:
    """The largest of whole numbers that a configuration gives for each layer; of anything else, that."""
    return max(value, key=abs) if value and isinstance(value, list) and {*map(type, value)} == {int} else value


def shown(value: Any) -> str:
    """An untrusted value for an error message, shortened."""
    text = f"{value:,}" if type(value) is int and abs(value) < 1 << 64 else ascii(value) if type(value) is str else ""
    text = text or (f"{value:g}" if type(value) is float else f"a {type(value).__name__}")
    return text if len(text) <= 60 else f"{text[:60]}…"
