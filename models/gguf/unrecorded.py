"""config.json of a family without a record, from a GGUF file's metadata: one table says which field a key is.

What a file leaves out is what llama.cpp computes for all models of that architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .metadata import Metadata
from .usual_fields import Fields, attention, latent, usual, without_experts

_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func
_MAVERICK = 128  # experts of the only Llama 4 that does not normalize queries and keys
_HYBRID = ("ssm_in", "linear_attention"), ("attn_q", "full_attention")


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """What distinguishes such an architecture from others.

    Attributes:
        model_type: transformers'. gating: what its router there makes of logits. fixed: fields that files do not say.
        every, full: of so many layers this one sees everything, the others a window, in files that do not say which.
        kinds: of layers, the first tensor that distinguishes them -> what its configuration calls them.
    """

    model_type: str
    gating: int = _SIGMOID
    fixed: Fields = field(default_factory=dict[str, object])
    every: int = 1
    full: int = -1
    kinds: tuple[tuple[str, str], ...] = ()


GRANITE_SHARED = Unrecorded("granitemoeshared", _SOFTMAX)
UNRECORDED = {
    "dots1": Unrecorded("dots1", fixed={"sliding_window": None}),
    "minimax-m2": Unrecorded("minimax_m2"),
    "afmoe": Unrecorded("afmoe", fixed={"mup_enabled": True}, every=4),
    "exaone-moe": Unrecorded("exaone_moe", every=4),
    "hunyuan-moe": Unrecorded("hunyuan_v1_moe", _SOFTMAX),
    "granitehybrid": Unrecorded("granitemoehybrid", _SOFTMAX, kinds=_HYBRID),
    "nemotron_h_moe": Unrecorded("nemotron_h", kinds=(*_HYBRID, ("ffn_gate_inp", "moe"))),
    "kimi-linear": Unrecorded(
        "kimi_linear",
        fixed={"norm_topk_prob": True},
        kinds=(("ssm_f_a", "linear_attention"), ("attn_kv_a_mqa", "full_attention")),
    ),
    "llama4": Unrecorded("llama4_text"),
    "laguna": Unrecorded("laguna", every=4, full=0),
    "mellum": Unrecorded("mellum", _SOFTMAX, {"norm_topk_prob": True}, every=4),
    "qwen3vlmoe": Unrecorded("qwen3_vl_moe_text", _SOFTMAX),
}
"""By llama.cpp's names."""

_WHOLES = {  # key -> the fields, of which a configuration has one
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        *("shared_intermediate_size", "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
    ),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "interleave_moe_layer_step": ("interleave_moe_layer_step",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "moe_latent_size": ("moe_latent_size",),
    "attention.sliding_window": ("sliding_window",),
    "kda.head_dim": ("linear_head_dim",),
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": ("mamba_n_heads", "mamba_num_heads"),
}
_REALS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "embedding_scale": ("embedding_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling",),
}
_BIASES = {  # tensor -> the fields that say whether there is one
    "attn_q": ("attention_bias",),
    "ssm_conv1d": ("mamba_conv_bias", "use_conv_bias"),
    "ssm_in": ("mamba_proj_bias", "use_bias"),
}
_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # else some of another vocabulary
_SCALES = "routed_scaling_factor", "route_scale", "moe_routed_scaling_factor"


def fields_of(data: Metadata, own: Unrecorded) -> Fields:
    """The fields of config.json.

    Raises:
        ValueError: the metadata lacks something, or says what transformers' model of this type does not compute.
    """
    known = _known(own.model_type)
    fields: Fields = {**_TOKENS, **usual(data, own.model_type), **attention(data), **own.fixed}
    fields["head_dim"] = data.whole("attention.key_length", fields["head_dim"])
    rope = fields.pop("rope_parameters")
    if "rope_parameters" in known:
        fields["rope_parameters"] = _rope(data, fields["head_dim"], rope, known["rope_parameters"] or {})
    if "position_embedding_type" in known:
        fields["position_embedding_type"] = "rope" if data.flag("rope.scaling.finetuned", default=True) else "nope"
    if "rms_norm_eps" not in known:
        fields.pop("rms_norm_eps", None)
    if "kv_lora_rank" in known:
        fields |= latent(data)
        del fields["head_dim"]
    if "intermediate_size_mlp" in known:
        fields["intermediate_size_mlp"] = data.whole("feed_forward_length")
        fields["intermediate_size"] = data.whole("expert_feed_forward_length")
        fields["use_qk_norm"] = data.whole("expert_count") != _MAVERICK
    fields |= _by_table(data, known, fields["num_hidden_layers"]) | _routing(data, own, known)
    return fields | _heads_of_states(data, fields, known) | _kinds_of_layers(data, own, fields, known)


def _by_table(data: Metadata, known: Fields, layers: int) -> Fields:
    fields: Fields = {}
    for key, names in _WHOLES.items():
        if (name := _first(names, known)) and data.says(key):
            fields[name] = max(data.wholes(key, layers))
    for key, names in _REALS.items():
        if (name := _first(names, known)) and data.says(key):
            fields[name] = data.real(key)
    for tensor, names in _BIASES.items():
        fields |= {name: data.has(f"blk.*.{tensor}.bias") for name in names if name in known}
    return fields


def _rope(data: Metadata, head_dim: int, full: Fields, typical: Fields) -> Fields:
    """Of all layers, or of each kind of them where a configuration of this type has it so."""
    windowed = {"rope_type": "default", "rope_theta": data.real("rope.freq_base_swa", full["rope_theta"])}
    for rope, key, kind in ((full, "", "full_attention"), (windowed, "_swa", "sliding_attention")):
        turned = data.whole(f"rope.dimension_count{key}", head_dim) / head_dim
        if turned != 1 or "partial_rotary_factor" in typical.get(kind, {}):
            rope["partial_rotary_factor"] = turned
    if data.says("rope.dimension_sections"):
        sections = [size for size in data.wholes("rope.dimension_sections", 4) if size]
        full |= {"mrope_section": sections, "mrope_interleaved": True}
    return {"full_attention": full, "sliding_attention": windowed} if "full_attention" in typical else full


def _first(names: tuple[str, ...], known: Fields) -> str:
    """The name that a configuration has; "" if none."""
    return next((name for name in names if name in known), "")


def _routing(data: Metadata, own: Unrecorded, known: Fields) -> Fields:
    """How experts are chosen and weighted."""
    fields: Fields = {}
    if (gating := data.whole("expert_gating_func", 0)) not in (0, own.gating):
        raise ValueError(f"its router works in way {gating}, which is not supported for this architecture")
    if "n_group" not in known and (groups := data.whole("expert_group_count", 1)) > 1:
        raise ValueError(f"its router chooses among {groups} groups, which is not supported for this architecture")
    scale = data.real("expert_weights_scale", 0.0) or 1.0
    if name := _first(_SCALES, known):
        fields[name] = scale
    elif scale != 1:
        raise ValueError(f"its experts' weights are scaled by {scale:g}, which is not supported for this architecture")
    unsaid = own.fixed.get("norm_topk_prob", "norm_topk_prob" not in known)
    normalized = data.flag("expert_weights_norm", default=unsaid)
    if "norm_topk_prob" in known:
        fields["norm_topk_prob"] = normalized
    elif not normalized:
        raise ValueError("its experts' weights do not add up to one, which is not supported for this architecture")
    return fields


def _heads_of_states(data: Metadata, fields: Fields, known: Fields) -> Fields:
    """Sizes of the heads of layers that keep a state."""
    if "linear_num_heads" in known:
        return {"linear_num_heads": data.tensor("blk.*.ssm_f_b.weight").shape[0] // data.whole("kda.head_dim")}
    if not (name := _first(("mamba_d_head", "mamba_head_dim"), known)):
        return {}
    inner = data.whole("ssm.inner_size")
    expand = {"mamba_expand": inner // fields["hidden_size"]} if "mamba_expand" in known else {}
    return {name: inner // data.whole("ssm.time_step_rank"), **expand}


def _kinds_of_layers(data: Metadata, own: Unrecorded, fields: Fields, known: Fields) -> Fields:
    """What each layer is, as far as a configuration says it."""
    layers, found = range(fields["num_hidden_layers"]), Fields()
    if own.kinds:
        found[_first(("layers_block_type", "layer_types"), known)] = [_kind(data, own, layer) for layer in layers]
    elif "layer_types" in known and data.says("attention.sliding_window"):
        found["layer_types"] = _windows(data, len(layers), own)
    if "mlp_layer_types" in known:
        dense = without_experts(data, fields)
        found["mlp_layer_types"] = ["dense" if layer in dense else "sparse" for layer in layers]
    if "num_attention_heads_per_layer" in known:
        heads = data.wholes("attention.head_count", len(layers))
        each = data.tensor("blk.0.attn_gate.weight").shape[0] == heads[0]
        found |= {"num_attention_heads_per_layer": heads, "gating": "per-head" if each else "per-element"}
    return found


def _kind(data: Metadata, own: Unrecorded, layer: int) -> str:
    kind = next((kind for tensor, kind in own.kinds if data.has(f"blk.{layer}.{tensor}.weight")), None)
    if kind is None:
        raise ValueError(f"layer {layer} is of no kind that is known")
    return kind


def _windows(data: Metadata, layers: int, own: Unrecorded) -> list[str]:
    key = "attention.sliding_window_pattern"
    sliding = [bool((layer - own.full) % own.every) for layer in range(layers)]
    sliding = data.flags(key, layers) if data.says(key) else sliding
    return ["sliding_attention" if each else "full_attention" for each in sliding]


@lru_cache
def _known(model_type: str) -> Fields:
    """The fields of a type's configuration in transformers, as they usually are."""
    from ..transformers_import import import_library

    import_library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]().to_dict()
