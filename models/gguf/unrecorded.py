"""config.json of a family without a record, from a GGUF file's metadata: one table says which field a key is.

What a file leaves out is what llama.cpp computes for all models of that architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .metadata import Metadata
from .usual_fields import Fields, attention, usual

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """What distinguishes such an architecture from others.

    Attributes:
        model_type: transformers'. gating: what its router there makes of logits. fixed: fields that files do not say.
        every: of so many layers the last one sees everything, the others a window, in files that do not say which.
    """

    model_type: str
    gating: int = _SIGMOID
    fixed: Fields = field(default_factory=dict[str, object])
    every: int = 1


UNRECORDED = {
    "dots1": Unrecorded("dots1", fixed={"sliding_window": None}),
    "minimax-m2": Unrecorded("minimax_m2"),
    "afmoe": Unrecorded("afmoe", fixed={"mup_enabled": True}, every=4),
    "exaone-moe": Unrecorded("exaone_moe", every=4),
    "hunyuan-moe": Unrecorded("hunyuan_v1_moe", _SOFTMAX),
}
"""By llama.cpp's names."""

_WHOLES = {  # key -> the fields, of which a configuration has one
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "attention.sliding_window": ("sliding_window",),
}
_SCALES = "routed_scaling_factor", "route_scale"


def fields_of(data: Metadata, own: Unrecorded) -> Fields:
    """The fields of config.json.

    Raises:
        ValueError: the metadata lacks something, or says what transformers' model of this type does not compute.
    """
    known = _known(own.model_type)
    fields = {**usual(data, own.model_type), **attention(data), **own.fixed}
    for key, names in _WHOLES.items():
        if (name := next((name for name in names if name in known), None)) and data.says(key):
            fields[name] = data.whole(key)
    fields |= _routing(data, own, known)
    turned = data.whole("rope.dimension_count", fields["head_dim"])
    if turned != fields["head_dim"]:
        fields["rope_parameters"]["partial_rotary_factor"] = turned / fields["head_dim"]
    if "layer_types" in known and data.says("attention.sliding_window"):
        fields["layer_types"] = _layer_types(data, fields["num_hidden_layers"], own.every)
    if "attention_bias" in known:
        fields["attention_bias"] = data.has("blk.*.attn_q.bias")
    return fields


def _routing(data: Metadata, own: Unrecorded, known: frozenset[str]) -> Fields:
    """How experts are chosen and weighted."""
    fields: Fields = {}
    if (gating := data.whole("expert_gating_func", 0)) not in (0, own.gating):
        raise ValueError(f"its router works in way {gating}, which is not supported for this architecture")
    scale, name = data.real("expert_weights_scale", 0.0) or 1.0, next((each for each in _SCALES if each in known), None)
    if name is not None:
        fields[name] = scale
    elif scale != 1:
        raise ValueError(f"its experts' weights are scaled by {scale:g}, which is not supported for this architecture")
    normalized = data.flag("expert_weights_norm", default="norm_topk_prob" not in known)
    if "norm_topk_prob" in known:
        fields["norm_topk_prob"] = normalized
    elif not normalized:
        raise ValueError("its experts' weights do not add up to one, which is not supported for this architecture")
    return fields


def _layer_types(data: Metadata, layers: int, every: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    sliding = data.flags(key, layers) if data.says(key) else [bool((layer + 1) % every) for layer in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in sliding]


@lru_cache
def _known(model_type: str) -> frozenset[str]:
    """The fields of a type's configuration in transformers."""
    from ..transformers_import import import_library

    import_library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return frozenset(CONFIG_MAPPING[model_type]().to_dict())
