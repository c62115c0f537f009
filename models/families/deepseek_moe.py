"""DeepSeekMoE for transformers, which lacks it: Llama's attention, and DeepSeek-V2's block of experts.

Imported when a model of this family is read: it imports transformers' model code.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    conversion_mapping,
)
from transformers import initialization as init
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Experts,
    DeepseekV2Moe,
    DeepseekV2TopkRouter,
)

# What the published model does without reading it from config.json, and parts of the library could do otherwise.
_ONLY = {
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "mlp_bias": False,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
}


@strict
class DeepseekConfig(LlamaConfig):
    """Its config.json; defaults are DeepSeekMoE 16B's."""

    model_type = "deepseek"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}

    moe_intermediate_size: int = 1408
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 6
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    topk_method: str = "greedy"
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0

    def validate_architecture(self) -> None:
        """Called by the library.

        Raises:
            ValueError: a router that the published model does not have.
        """
        super().validate_architecture()
        for name, value in _ONLY.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(f"its {name} is {given!r}; floe-chat computes {value!r}")


class _Pretrained(LlamaPreTrainedModel):
    """What the library asks of both classes."""

    config_class = DeepseekConfig
    _can_set_experts_implementation_cached_value = True  # the library would look for it in this file's text

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekV2TopkRouter | DeepseekV2Experts):
            for weight in module.parameters():
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)


class DeepseekModel(_Pretrained, LlamaModel):
    """Llama with experts behind the first layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            if index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0:
                layer.mlp = DeepseekV2Moe(config)
        self.post_init()


class DeepseekForCausalLM(_Pretrained, LlamaForCausalLM):
    """The same with an output head."""

    def __init__(self, config: Any) -> None:
        super(LlamaForCausalLM, self).__init__(config)  # which would make a Llama
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    """Let transformers' Auto classes make these."""
    AutoConfig.register(DeepseekConfig.model_type, DeepseekConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
    experts: Any = conversion_mapping.get_checkpoint_conversion_mapping("deepseek_v2")
    conversion_mapping.register_checkpoint_conversion_mapping(DeepseekConfig.model_type, experts, overwrite=True)
