"""Random models of every family and of shapes that families may have, and a pass fed piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from floe_chat.engine.decoder.decoders import Decoder, FusedDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import KvForm
from floe_chat.engine.decoder.ways import Compiled, Way
from floe_chat.models.families import FAMILIES
from floe_chat.models.modules import library_model
from floe_chat.models.transformers_import import import_model_code
from torch import Tensor, nn

from ..families import YARN
from .driver import a_preset

LIMIT = 1e-5
WINDOW = 700
PRESET = a_preset("", 0.0, lossless=True)
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 37,
    "moe_intermediate_size": 29,
    "shared_expert_intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.2,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
}
STATES: dict[str, Any] = {
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral-odd": {"hidden_size": 35, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14},
    "mixtral-one-key-head": {"num_key_value_heads": 1, "num_hidden_layers": 10},
    "mixtral-all-key-heads": {"num_key_value_heads": 4},
    "mixtral-sliding": {"sliding_window": 9},
    "mixtral-sliding-far": {"sliding_window": 100},
    "mixtral-tied": {"tie_word_embeddings": True},
    "mixtral-top-1": {"num_experts_per_tok": 1},
    "mixtral-linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "mixtral-yarn": {
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral-llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "olmoe": {},
    "olmoe-shares": {"norm_topk_prob": True, "num_key_value_heads": 4},
    "olmoe-biased-clipped": {"attention_bias": True, "clip_qkv": 0.4},
    "qwen2_moe": {"layer_types": ["full_attention"] * 3},
    "qwen2_moe-mixed": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 7,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {"head_dim": 10},
    "glm4_moe": {"head_dim": 12, "num_local_experts": 6, "attention_bias": True, "n_group": 2, "topk_group": 1},
    "glm4_moe-scaled": {"head_dim": 12, "num_local_experts": 6, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "ernie4_5_moe": {"head_dim": 12, "moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1, "use_bias": True},
    "granitemoe": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "phimoe": {"attention_bias": True, "lm_head_bias": True, "sliding_window": None},
    "phimoe-longrope": {
        "num_local_experts": 16,
        "router_jitter_noise": 0.3,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
            "short_mscale": 1.1,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 1024,
        },
    },
    "mixtral-longrope": {
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 2.0,
            "short_factor": [1.0] * 6,
            "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 1024,
        },
    },
    "deepseek": {"n_routed_experts": 5, "first_k_dense_replace": 1},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v2-yarn": {**LATENT, "q_lora_rank": 17, "rope_parameters": YARN},
    "deepseek_v3": {
        **LATENT,
        "num_local_experts": 6,
        "num_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 17,
    },
    "deepseek_v3-apart": {**LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_interleave": False},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 20},
    "deepseek-biased": {"n_routed_experts": 5, "attention_bias": True},
    "qwen3_moe-biased": {"head_dim": 12, "attention_bias": True, "norm_topk_prob": True},
    "gemma4_text": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 7,
        "head_dim": 10,
        "global_head_dim": 14,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 2.0,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.3,
    },
    "lfm2_moe-biased": {
        "num_dense_layers": 0,
        "layer_types": ["full_attention", "conv", "conv"],
        "conv_bias": True,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "conv_L_cache": 4,
    },
    "qwen3_next": STATES,
    "qwen3_5_moe_text": STATES | {"linear_conv_kernel_dim": 3},
}

# With layers that keep a state; and with keys and values of each head in all layers, in 8 bits too.
STATEFUL = [name for name, fields in MODELS.items() if fields.keys() & {"linear_num_key_heads", "num_dense_layers"}]
EACH_HEAD = [name for name, fields in MODELS.items() if name not in STATEFUL and "kv_lora_rank" not in fields]


def make_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a family, weights, biases and norms alike."""
    import_model_code()
    from transformers import AutoConfig, AutoModelForCausalLM

    family = name.partition("-")[0]
    FAMILIES[family].register()
    config: Any = AutoConfig.for_model(family, **{**SIZES, **MODELS.get(name, {}), **changes})
    torch.manual_seed(len(name))
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    library_model.rename(model.model, FAMILIES[family])
    for leaf, buffer in model.named_buffers():
        if leaf.endswith(("correction_bias", "expert_bias")):
            nn.init.normal_(buffer, std=0.1)
        elif leaf.endswith("layer_scalar"):
            nn.init.uniform_(buffer, 0.5, 1.0)
    for leaf, parameter in model.named_parameters():
        if leaf.endswith("correction_bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.0 if leaf.endswith("bias") else 1.0, std=0.3)
        elif leaf.endswith(("gate.weight", "router.weight", "router.layer.weight", "router.proj.weight")):
            nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def blocks_of(model: Any) -> list[Any]:
    """Its modules with experts."""
    return FAMILIES[model.config.model_type].blocks(model)


def ids_of(length: int) -> list[int]:
    return torch.randint(0, 101, (length,)).tolist()


def feed(decoder: Decoder, kv: KVCache, ids: Sequence[int], pieces: Sequence[int]) -> Tensor:
    """Logits after each piece, (pieces, V)."""
    out: list[Tensor] = []
    for size in pieces:
        part = ids[kv.length : kv.length + size]
        out.append(decoder.forward(part, kv)[0].float().cpu())  # graphs leave them in pinned memory
        kv.computed(part, PRESET)
    return torch.stack(out)


def lean_pass(model: Any, form: KvForm | None = None, *, compiled: bool = True) -> FusedDecoder:
    """The lean pass with its compiled step, or by torch's operations alone."""
    lean = choose(model, WINDOW, form or KvForm())
    assert isinstance(lean, FusedDecoder) and isinstance(lean.way, Compiled), lean.reason
    if not compiled:
        lean.way = Way(lean)
    return lean


class Noting(nn.Module):
    """Experts that note what they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.calls.append((hidden.clone(), index.clone(), weights.clone()))
        return torch.zeros_like(hidden)


class Guessing(Noting):
    """Experts that guess what the next layer's will be called with."""

    def __init__(self, layer: int, guesses: list[Tensor]) -> None:
        super().__init__()
        self.layer, self.guesses = layer, guesses
        self.decoder: FusedDecoder | None = None

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        mine = hidden.clone()
        out = super().forward(hidden, index, weights) + hidden
        assert self.decoder is not None
        self.decoder.ahead(self.layer, None)  # a worse guess, which must leave no trace
        self.guesses.append(self.decoder.ahead(self.layer, out).clone())
        assert torch.equal(hidden, mine), "a guess overwrote what this layer computes with"
        return out
