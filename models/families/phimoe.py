"""Phi-3.5-MoE (Microsoft): 16 experts chosen two times one by SparseMixer; LayerNorm with biases; long rope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..catalog_entry import CatalogEntry, Sizes
from .family import Family, GroupedQuery, Routing
from .storage import Apart

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor

_3_5 = Sizes(
    model_type="phimoe",
    layers=32,
    hidden=4096,
    intermediate=6400,
    experts=16,
    top_k=2,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32064,
    window=131072,
    biases=32 * (3 * 4096 + 128 * (32 + 2 * 8)) + 4096 + 32064,
)


def _biases(config: Any) -> int:
    """Of norms and head."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    return norms + (config.vocab_size if config.lm_head_bias else 0)


def _register() -> None:
    """Texts beyond the length that rope was made for get their own frequencies: transformers 5.23 finds them, and then
    turns by the others.
    """
    from ..transformers_import import import_model_code

    import_model_code()
    import torch
    from transformers.modeling_rope_utils import dynamic_rope_update
    from transformers.models.phimoe import modeling_phimoe

    def forward(rope: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        stated, scale = rope.config.rope_parameters, rope.attention_scaling
        if rope.rope_type != "default":
            long = int(position_ids.max()) >= stated["original_max_position_embeddings"]
            scale = stated["long_mscale" if long else "short_mscale"]
        turns = (position_ids[..., None].float() * rope.inv_freq.to(x.device)).repeat(1, 1, 2)
        return (turns.cos() * scale).to(x.dtype), (turns.sin() * scale).to(x.dtype)

    theirs: Any = modeling_phimoe.PhimoeRotaryEmbedding
    theirs.forward = torch.no_grad()(dynamic_rope_update(forward))


PHIMOE = Family(
    model_type="phimoe",
    called="Phi-3.5-MoE",
    stored=(Apart("model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight", "w1", "w3", "w2"),),
    renames=((".block_sparse_moe.gate.", ".mlp.router."),),
    routing=Routing(module="router", kind="sparsemixer", normalized=False),
    biases=_biases,
    attention=GroupedQuery(
        biased=lambda config: (config.attention_bias, config.attention_bias),
        window=lambda config, _layer: config.sliding_window,
    ),
    register=_register,
    published=(
        CatalogEntry(
            "phi-3.5-moe-instruct",
            _3_5,
            "microsoft/Phi-3.5-MoE-instruct",
            licence="MIT",
            gated=False,
            chat="<|user|> and <|assistant|> turns, from its own chat template",
            released="2024-08",
        ),
    ),
)
