"""Which models floe-chat can set up, and why not the others: their format, their family, or that they have no experts.
Decided by the typed name, and by the fields of a config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import CheckpointError, FloeError, UsageError
from .families import FAMILIES

SUPPORTED = {kind: family.called for kind, family in FAMILIES.items()}  # by the model_type of config.json
_ALL = " and ".join(SUPPORTED.values())
_HINT = f"{_ALL} models work, and `floe-chat plan` lists which of them run on this machine."

# Formats of converted weights, by what their files and repositories are called.
_FORMATS = (
    (r"gguf|ggml", "GGUF"),
    (r"awq", "AWQ"),
    (r"gptq", "GPTQ"),
    (r"exl[23]", "EXL2"),
    (r"mlx", "MLX"),
    (r"(bnb-)?(4|8)bit|int[48]|nf4|[mn]?x?fp[48]", "Quantized weights"),
)
# Mixture-of-Experts families that are not supported yet: model_type, name, and a pattern of their models' names (in
# lower case, with hyphens for all other signs).
_OTHERS = (
    ("qwen3_next", "Qwen3-Next", r"qwen-?3-next"),
    ("qwen3_5_moe", "Qwen3.5 MoE", r"qwen-?3-[5-9]-.*a\d+b|qwen-?3-[5-9]-moe"),
    ("qwen3_moe", "Qwen3 MoE", r"qwen-?3(-.*(a\d+b|moe).*|-coder.*|-max.*)?$"),
    ("qwen2_moe", "Qwen2 MoE", r"qwen-?(1-5|2|2-5)-.*(moe|a\d+)|qwen-?2-moe"),
    ("gpt_oss", "gpt-oss", r"gpt-?oss"),
    ("deepseek_v3", "DeepSeek", r"deepseek(-(v\d|r1|moe|coder-v2|prover-v2)|$)(?!.*distill)"),
    ("deepseek_v2", "DeepSeek", r"deepseek-?v2"),
    ("phimoe", "Phi-3.5-MoE", r"phi-?(3-5-)?moe"),
    ("glm4_moe_lite", "GLM-4.7-Flash", r"glm-?4-7-flash"),
    ("glm4_moe", "GLM-4.5", r"glm-?4-[5-9](?!v-9b)"),
    ("gemma4", "Gemma 4 MoE", r"gemma-?4-.*a\d+b"),
    ("lfm2_moe", "LFM2 MoE", r"lfm2-.*(a\d+b|moe)"),
    ("granitemoe", "Granite MoE", r"granite-.*(moe|a\d+[bm])"),
    ("ernie4_5_moe", "ERNIE 4.5 MoE", r"ernie-.*a\d+b"),
    ("hunyuan_v1_moe", "Hunyuan MoE", r"hunyuan-.*a\d+b"),
    ("llama4", "Llama 4", r"llama-?4"),
    ("minimax", "MiniMax", r"minimax"),
    ("kimi_k2", "Kimi K2", r"kimi-?k2"),
    ("nemotron_h", "Nemotron MoE", r"nemotron-.*a\d+b"),
    ("dbrx", "DBRX", r"dbrx"),
    ("grok", "Grok", r"grok-?[12]"),
    ("jamba", "Jamba", r"jamba"),
)
_DENSE = re.compile(
    r"(tiny-?)?llama-?[123]?(-|$)|mistral-(7b|nemo|small|large)|gemma(-?[1-3])?(-|$)|phi-?[1-4](-|$)"
    r"|qwen-?(1-5|2|2-5|3)-.*\d+b(-|$)|gpt-?2(-|$)|falcon|smollm|olmo-?[123]?(-|$)|vicuna|yi-\d+b|deepseek-.*distill"
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def refused(name: str) -> FloeError | None:
    """Why a model of this name cannot be used; None if the name does not say.

    `name` may be a hub id, a file, or what a person calls the model. A name with "mixtral", "olmoe" or something like
    "8x7b" in it is refused for its format alone: only config.json says what such a model is.
    """
    key = re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-")
    for pattern, called in _FORMATS:
        if re.search(rf"(^|-)({pattern})(-|$)", key):
            return UsageError(
                f"{called} cannot be read yet",
                f"{name}: floe-chat packs a model from its original 16-bit weights (*.safetensors).",
                "Name the repository that it was converted from, such as mistralai/Mixtral-8x7B-Instruct-v0.1.",
            )
    if re.search(r"mixtral|olmoe|\d+x\d+(-\d+)?b", key):
        return None
    called = next((called for _, called, pattern in _OTHERS if re.match(pattern, key)), None)
    if called is not None:
        return UsageError(*_not_yet(called))
    return UsageError(*_no_experts(name)) if _DENSE.match(key) else None


def refused_type(fields: Mapping[str, Any], what: str) -> FloeError | None:
    """Why a model with this config.json cannot be used, or None if its family is supported. `what` names the model."""
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in SUPPORTED:
        return None
    called = next((called for known, called, _ in _OTHERS if known == kind), None)
    experts = any(type(count := _field(fields, name)) is int and count > 1 for name in _COUNTS)
    if not isinstance(kind, str) or not kind:
        title, hint = f"{what} does not describe a model", "Download config.json again."
    elif called is None and not experts:
        title, _, hint = _no_experts(what)
    else:
        title, _, hint = _not_yet(called or f"A model of type {kind!r}")
    return CheckpointError(title, f"{what}: its model_type is {kind!r}.", hint)


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """A field of the configuration, or of the text part of one that also sees or hears."""
    inner = fields.get("text_config")
    return fields.get(name, inner.get(name) if isinstance(inner, Mapping) else None)


def _not_yet(called: str) -> tuple[str, str, str]:
    return f"{called} is not supported yet; {_ALL} are", "", _HINT


def _no_experts(name: str) -> tuple[str, str, str]:
    return f"{name} is not a Mixture-of-Experts model", "floe-chat runs only models with experts.", _HINT
