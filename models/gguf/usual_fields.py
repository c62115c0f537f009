"""The fields of config.json that GGUF files of most architectures say in the same way."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .metadata import Metadata
from .values import values

Fields = dict[str, Any]

_MOST_LAYERS = 1 << 12
_PUBLISHED = (1.0, 4.0), (1.0, 1.0)  # low_freq_factor and high_freq_factor of Llama 3.1 and of Llama 4


def usual(data: Metadata, model_type: str) -> Fields:
    """What all families have."""
    heads = data.wholes("attention.head_count", _layers(data))[0]
    fields: Fields = {
        "model_type": model_type,
        "vocab_size": data.tensor("token_embd.weight").shape[0],
        "hidden_size": data.whole("embedding_length"),
        "num_hidden_layers": _layers(data),
        "num_attention_heads": heads,
        "max_position_embeddings": data.whole("context_length"),
        "num_experts_per_tok": data.whole("expert_used_count"),
        "rope_parameters": _rope(data),
        "tie_word_embeddings": not data.has("output.weight"),
    }
    if data.says("attention.layer_norm_rms_epsilon"):
        fields["rms_norm_eps"] = data.real("attention.layer_norm_rms_epsilon")
    if data.says("feed_forward_length"):
        fields["intermediate_size"] = max(data.wholes("feed_forward_length", fields["num_hidden_layers"]))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if data.says(f"tokenizer.ggml.{key}_token_id"):
            fields[f"{name}_token_id"] = data.whole(f"tokenizer.ggml.{key}_token_id")
    return fields


def _layers(data: Metadata) -> int:
    """Without those that guess further tokens."""
    count = data.whole("block_count") - data.whole("nextn_predict_layers", 0)
    if not 0 < count <= _MOST_LAYERS:
        raise ValueError(f"it claims {count:,} layers")
    return count


def guessing(data: Metadata) -> int:
    """How many layers behind the last guess further tokens, if the file holds them."""
    there = data.has(f"blk.{_layers(data)}.nextn.eh_proj.weight")
    return data.whole("nextn_predict_layers", 0) if there else 0


def attention(data: Metadata) -> Fields:
    """Of grouped queries."""
    heads, key = data.wholes("attention.head_count", _layers(data))[0], "attention.head_count_kv"
    return {
        "num_key_value_heads": max(data.wholes(key, _layers(data)))
        if data.says(key)
        else heads,  # 0 where a layer has none
        "head_dim": data.tensor("blk.*.attn_q.weight").shape[0] // heads,
    }


def latent(data: Metadata) -> Fields:
    """Of attention that keeps one short vector for all heads, as DeepSeek-V2 has it."""
    rope, keys = (
        data.whole("rope.dimension_count"),
        data.whole("attention.key_length_mla", data.whole("attention.key_length")),
    )
    return {
        "num_key_value_heads": data.whole("attention.head_count"),
        "q_lora_rank": data.whole("attention.q_lora_rank") if data.says("attention.q_lora_rank") else None,
        "kv_lora_rank": data.whole("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": keys - rope,
        "v_head_dim": data.whole("attention.value_length_mla", data.whole("attention.value_length", 0)),
    }


def _rope(data: Metadata) -> Fields:
    """As transformers has it; 10,000 is llama.cpp's default."""
    fields: Fields = {"rope_type": "default", "rope_theta": data.real("rope.freq_base", 10_000.0)}
    own = data.gguf.architecture != "gemma4" and data.has("rope_freqs.weight")
    if own and bool((values(data.tensor("rope_freqs.weight")) != 1).any()):
        return fields | llama3(values(data.tensor("rope_freqs.weight")), fields["rope_theta"])
    kind = data.text("rope.scaling.type")
    if kind in ("", "none", "longrope"):
        return fields
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its rope is scaled by {kind}")
    fields |= {"rope_type": kind, "factor": data.real("rope.scaling.factor")}
    if kind == "yarn":
        fields["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        for name, key in (("attention_factor", "attn"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            key = f"rope.scaling.yarn_{key}_factor" if key == "attn" else f"rope.scaling.yarn_{key}"
            if data.says(key):
                fields[name] = data.real(key)
    return fields


def llama3(divisors: Tensor, theta: float) -> Fields:
    """The scaling of Llama 3 that divides frequencies by these numbers (half a head), as config.json has it.

    Raises:
        ValueError: none that was published does.
    """
    wide = 2 * math.pi * theta ** (torch.arange(len(divisors)) / len(divisors))  # wavelengths
    factor, original = round(float(divisors.max()), 4), 8192
    for low, high in _PUBLISHED:
        between = (original / wide - low) / max(high - low, 1e-9)
        smooth = 1 / ((1 - between) / factor + between)
        wanted = torch.where(wide < original / high, 1.0, torch.where(wide > original / low, factor, smooth))
        if torch.allclose(wanted, divisors.float(), rtol=1e-3):
            own = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **own}
    raise ValueError("its rope has frequencies of its own, which are not supported yet")


def expert_width(data: Metadata) -> int:
    """How many neurons an expert has."""
    if data.says("expert_feed_forward_length"):
        return max(data.wholes("expert_feed_forward_length", 1))
    return data.tensor("blk.*.ffn_gate_exps.weight").shape[1]


def without_experts(data: Metadata, fields: Fields) -> list[int]:
    count = int(fields["num_hidden_layers"])
    with_some = {*data.layers_with("ffn_gate_inp.weight", count)}
    return [layer for layer in range(count) if layer not in with_some]
