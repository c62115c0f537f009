"""The modules of a causal language model that hold its weights, by transformers' names, without transformers' code.

Importing that code takes longer than all else that a chat needs before its first answer, and where the engine's fused
pass runs (engine/decoder/fused_pass.py) none of it is called: only weights, sizes and rope's frequencies are read. The
library's own model (library_model.py) stays what everything is tested against, and what runs for other families.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..families import FAMILIES, family_of
from ..families.family import GroupedQuery

STATIC_ROPE = (
    "default",
    "linear",
    "llama3",
    "yarn",
    "proportional",
)  # whose tables do not change with the length of the text


def knows(config: Any) -> bool:
    """Whether `tree` makes all of this model, and the engine's fused pass computes it without the library."""
    family = FAMILIES.get(config.model_type)
    if family is None or not family.plain or family.dense_layers(config):
        return False
    rope: Any = config.rope_parameters
    return rope["rope_type"] in STATIC_ROPE and not rope.get("partial_rotary_factor")


def tree(config: Any, dtype: torch.dtype) -> nn.Module:
    """What `AutoModelForCausalLM.from_config` makes of a configuration of one of our families, without forward passes.

    Only its rotary embedding can be called. Experts are missing: library_model.py puts its own there. Made on whatever
    device is torch's default.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    model = nn.Module()
    model.embed_tokens = _weight(vocabulary, hidden, dtype=dtype)
    model.layers = nn.ModuleList(_layer(config, dtype) for _ in range(config.num_hidden_layers))
    model.norm = _weight(hidden, dtype=dtype)
    model.rotary_emb = Rotary(config)
    whole = nn.Module()
    whole.config = config
    whole.model = model
    whole.lm_head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    return whole


class Rotary(nn.Module):
    """Rope's tables of a configuration: cos and sin (1, T, D) of positions (1, T).

    Attributes:
        rope_type: as in the configuration, one of STATIC_ROPE.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rope_type: str = config.rope_parameters["rope_type"]
        dim = _head_dim(config)
        if self.rope_type == "default":
            base = config.rope_parameters["rope_theta"]
            steps = torch.arange(0, dim, 2, dtype=torch.float, device="cpu") / dim  # slow on the meta device
            frequencies, self.scaling = 1.0 / base**steps, 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, self.scaling = ROPE_INIT_FUNCTIONS[self.rope_type](config)
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: only for its dtype and device."""
        turns = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        both = torch.cat((turns, turns), dim=-1)
        return (both.cos() * self.scaling).to(x.dtype), (both.sin() * self.scaling).to(x.dtype)


def _layer(config: Any, dtype: torch.dtype) -> nn.Module:
    layer = nn.Module()
    layer.input_layernorm = _weight(config.hidden_size, dtype=dtype)
    layer.self_attn = _attention(config, dtype)
    layer.post_attention_layernorm = _weight(config.hidden_size, dtype=dtype)
    layer.mlp = nn.Module()
    family = family_of(config.model_type)
    gate: Any = _weight(family.experts(config), config.hidden_size, dtype=dtype)
    layer.mlp.gate = gate
    gate.top_k = config.num_experts_per_tok
    if family.routing.normalized is None:
        gate.norm_topk_prob = config.norm_topk_prob
    layer.mlp.experts = nn.Module()
    return layer


def _attention(config: Any, dtype: torch.dtype) -> nn.Module:
    hidden, dim = config.hidden_size, _head_dim(config)
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    kind = family_of(config.model_type).attention
    assert isinstance(kind, GroupedQuery)
    biased, out_biased = kind.biased(config)
    attention: Any = nn.Module()
    attention.head_dim, attention.scaling = dim, dim**-0.5
    attention.q_proj = nn.Linear(hidden, queries, bias=biased, dtype=dtype)
    attention.k_proj = nn.Linear(hidden, keys, bias=biased, dtype=dtype)
    attention.v_proj = nn.Linear(hidden, keys, bias=biased, dtype=dtype)
    attention.o_proj = nn.Linear(queries, hidden, bias=out_biased, dtype=dtype)
    if kind.normalized(config):
        sizes = (dim, dim) if kind.per_head else (queries, keys)
        attention.q_norm, attention.k_norm = (_weight(size, dtype=dtype) for size in sizes)
    return attention


def _weight(*shape: int, dtype: torch.dtype) -> nn.Module:
    """A module that has a weight and nothing else: a norm's, or a router's."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
    return module


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
