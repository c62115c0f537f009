"""The architectures that are trained here: the demo's, and one of fine experts for benches and tests.

The second has what the first lacks: 32 experts of 96 neurons each of which a token uses 4, a shared expert, a first
layer without experts, norms of queries and keys, rope on half of each head, and a router of sigmoids with a correction
bias that training keeps balanced (GLM-4.5's architecture).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Glm4MoeConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_utils import PreTrainedModel

from .vocabulary import BOS, EOS, mark_id

BALANCE_WEIGHT = 0.04


def demo(tokenizer: PreTrainedTokenizerFast) -> MixtralConfig:
    """A Mixtral of 22 M parameters: the published architecture, every size a multiple of 64."""
    return MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        initializer_range=0.04,
        router_aux_loss_coef=BALANCE_WEIGHT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=mark_id(tokenizer, BOS),
        eos_token_id=mark_id(tokenizer, EOS),
        pad_token_id=mark_id(tokenizer, EOS),
        tie_word_embeddings=False,
    )


def fine(tokenizer: PreTrainedTokenizerFast) -> Glm4MoeConfig:
    """A GLM-4.5 of 22 M parameters, of which a token uses 7 M."""
    others: dict[str, Any] = {"head_dim": 32, "num_nextn_predict_layers": 0}
    return Glm4MoeConfig(
        **others,
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=96,
        num_hidden_layers=8,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_qk_norm=True,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        max_position_embeddings=1024,
        initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        bos_token_id=mark_id(tokenizer, BOS),
        eos_token_id=mark_id(tokenizer, EOS),
        pad_token_id=mark_id(tokenizer, EOS),
        tie_word_embeddings=False,
    )


SHAPES: dict[str, Callable[[PreTrainedTokenizerFast], PretrainedConfig]] = {"demo": demo, "fine": fine}


def untrained(shape: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A model of that shape with random weights."""
    return AutoModelForCausalLM.from_config(SHAPES[shape](tokenizer))


def trained(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The checkpoint in `folder`, in float32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{folder} holds no demo model")
    return model.eval(), tokenizer
