"""The model families that floe-chat runs: what distinguishes each from the others, all in one record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .deepseek import DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from .derived import derived
from .ernie import ERNIE4_5_MOE
from .family import Family
from .gemma import GEMMA4
from .glm import GLM4_MOE
from .gpt_oss import GPT_OSS
from .granite import GRANITEMOE
from .lfm2 import LFM2_MOE
from .mixtral import MIXTRAL
from .olmoe import OLMOE
from .phimoe import PHIMOE
from .qwen import QWEN2_MOE, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from ...kernels.activation import Activation

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        MIXTRAL,
        OLMOE,
        QWEN3_MOE,
        QWEN2_MOE,
        PHIMOE,
        DEEPSEEK,
        DEEPSEEK_V2,
        GPT_OSS,
        GLM4_MOE,
        GLM4_MOE_LITE,
        DEEPSEEK_V3,
        GRANITEMOE,
        ERNIE4_5_MOE,
        QWEN3_NEXT,
        QWEN3_5_MOE,
        LFM2_MOE,
        GEMMA4,
    )
}
"""By the model_type of config.json."""


def family_of(model_type: str, experts_by: Activation = "silu") -> Family:
    """The record of a family, or what stands for it where there is none; experts_by: what such experts compute."""
    return FAMILIES.get(model_type) or derived(model_type, experts_by)


def language_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config.json that describe the language model: nested ones where the model also sees or hears."""
    kind, nested = fields.get("model_type"), fields.get("text_config")
    for family in FAMILIES.values():
        if kind and kind == family.within:
            return {**(nested if isinstance(nested, Mapping) else {}), "model_type": family.model_type}
    if not isinstance(nested, Mapping) or not isinstance(kind, str) or kind in FAMILIES:
        return fields
    inner = nested.get("model_type")
    if not isinstance(inner, str) or inner in FAMILIES:
        return fields
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]} if "tie_word_embeddings" in fields else {}
    return {**tied, **nested}
