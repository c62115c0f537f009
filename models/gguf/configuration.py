"""The config.json that a GGUF file was converted with, from its metadata and the shapes of its tensors.

What a file does not say is what the published models of that architecture have, and says so in a comment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import CheckpointError
from ..visible import as_name
from .header import shortest, unreadable
from .metadata import Metadata
from .parts import Gguf
from .unrecorded import GRANITE_SHARED, UNRECORDED, fields_of
from .usual_fields import Fields, attention, expert_width, guessing, latent, usual, without_experts
from .values import values

_SIGMOID = 2  # of expert_gating_func
_V3_EXPERTS = 256
_PHI_SCALE = 1.243163121016122  # of queries and keys in Phi-3.5-MoE; the file has another one, which llama.cpp uses
_GEMMA_ENDS = (1, 106, 50)  # <eos>, <turn|> and <|tool_response>; the file names one


def config_of(gguf: Gguf) -> Fields:
    """The fields of config.json.

    Raises:
        CheckpointError: the architecture is not supported, or the metadata lacks something or makes no sense.
    """
    make = _ARCHITECTURES.get(gguf.architecture)
    if make is None:
        raise CheckpointError(
            f"{gguf.name} has the architecture {as_name(gguf.architecture)}, which is not supported yet",
            "",
            f"GGUF files of these work: {', '.join(sorted(_ARCHITECTURES))}.",
        )
    try:
        return make(Metadata(gguf))
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise unreadable(gguf.path, f"Its header does not describe a model: {as_name(str(error))}.") from error


def _mixtral(data: Metadata) -> Fields:
    return {
        **usual(data, "mixtral"),
        **attention(data),
        "num_local_experts": data.whole("expert_count"),
        "sliding_window": None,  # published models have none
    }


def _olmoe(data: Metadata) -> Fields:
    return {
        **usual(data, "olmoe"),
        **attention(data),
        "num_experts": data.whole("expert_count"),
        "norm_topk_prob": False,  # as llama.cpp computes them
        "attention_bias": data.has("blk.*.attn_q.bias"),
    }


def _qwen2(data: Metadata) -> Fields:
    fields = {**usual(data, "qwen2_moe"), **attention(data)}
    return {
        **fields,
        "num_experts": data.whole("expert_count"),
        "moe_intermediate_size": expert_width(data),
        "shared_expert_intermediate_size": data.tensor("blk.*.ffn_gate_shexp.weight").shape[0],
        "norm_topk_prob": False,  # as llama.cpp computes them
        "qkv_bias": data.has("blk.*.attn_q.bias"),
        "mlp_only_layers": without_experts(data, fields),
        "use_sliding_window": False,
    }


def _qwen3(data: Metadata) -> Fields:
    fields = {**usual(data, "qwen3_moe"), **attention(data)}
    return {
        **fields,
        "num_experts": data.whole("expert_count"),
        "moe_intermediate_size": expert_width(data),
        "norm_topk_prob": True,  # as llama.cpp computes them
        "attention_bias": data.has("blk.*.attn_q.bias"),
        "mlp_only_layers": without_experts(data, fields),
        "use_sliding_window": False,
    }


def _gpt_oss(data: Metadata) -> Fields:
    fields = {**usual(data, "gpt_oss"), **attention(data)}
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # in published models
    kinds = ("sliding_attention", "full_attention")
    return {
        **fields,
        "intermediate_size": expert_width(data),
        "num_local_experts": data.whole("expert_count"),
        "sliding_window": data.whole("attention.sliding_window"),
        "layer_types": [kinds[layer % 2] for layer in range(fields["num_hidden_layers"])],
        "attention_bias": data.has("blk.*.attn_q.bias"),
    }


def _deepseek(data: Metadata) -> Fields:
    return {
        **usual(data, "deepseek"),
        **attention(data),
        "n_routed_experts": data.whole("expert_count"),
        "n_shared_experts": data.whole("expert_shared_count"),
        "moe_intermediate_size": expert_width(data),
        "first_k_dense_replace": data.whole("leading_dense_block_count", 0),
        "attention_bias": data.has("blk.*.attn_q.bias"),
    }


def _deepseek2(data: Metadata) -> Fields:
    """DeepSeek-V2, or what has sigmoids and a correction of them: V3, or GLM-4.7-Flash by its tokenizer."""
    sigmoid = data.has("blk.*.exp_probs_b.bias") or data.whole("expert_gating_func", 0) == _SIGMOID
    flash = data.text("tokenizer.ggml.pre") == "glm4"
    model_type = "glm4_moe_lite" if flash else "deepseek_v3" if sigmoid else "deepseek_v2"
    fields = usual(data, model_type)
    # Files from before these numbers were written: DeepSeek-V3's, of which there is one size.
    published = (8, 4) if model_type == "deepseek_v3" and data.whole("expert_count") == _V3_EXPERTS else (1, 1)
    groups = data.whole("expert_group_count", published[0])
    dense = without_experts(data, fields)
    if data.says("rope.scaling.yarn_log_multiplier"):
        scale = round(10 * data.real("rope.scaling.yarn_log_multiplier"), 6)  # both are the same in published models
        fields["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    if sigmoid:
        fields["rope_interleave"] = True
    else:
        fields["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    if flash:
        layers = range(fields["num_hidden_layers"])
        fields["mlp_layer_types"] = ["dense" if layer in dense else "sparse" for layer in layers]
    else:
        fields["first_k_dense_replace"] = len(dense)
    return {
        **fields,
        **latent(data),
        "n_routed_experts": data.whole("expert_count"),
        "n_shared_experts": data.whole("expert_shared_count"),
        "moe_intermediate_size": expert_width(data),
        "n_group": groups,
        "topk_group": data.whole("expert_group_used_count", published[1]),
        "routed_scaling_factor": data.real("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", default=False),
        "attention_bias": False,
        "num_nextn_predict_layers": guessing(data),
    }


def _glm4(data: Metadata) -> Fields:
    fields = {**usual(data, "glm4_moe"), **attention(data)}
    fields["rope_parameters"]["partial_rotary_factor"] = data.whole("rope.dimension_count") / fields["head_dim"]
    return {
        **fields,
        "n_routed_experts": data.whole("expert_count"),
        "n_shared_experts": data.whole("expert_shared_count"),
        "moe_intermediate_size": expert_width(data),
        "first_k_dense_replace": data.whole("leading_dense_block_count", 0),
        "n_group": data.whole("expert_group_count", 1),
        "topk_group": data.whole("expert_group_used_count", 1),
        "routed_scaling_factor": data.real("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", default=True),
        "use_qk_norm": data.has("blk.*.attn_q_norm.weight"),
        "attention_bias": data.has("blk.*.attn_q.bias"),
        "num_nextn_predict_layers": guessing(data),
    }


def _granite(data: Metadata) -> Fields:
    if data.has("blk.*.ffn_gate_shexp.weight"):
        return fields_of(data, GRANITE_SHARED)
    return {
        **usual(data, "granitemoe"),
        "num_key_value_heads": attention(data)["num_key_value_heads"],
        "num_local_experts": data.whole("expert_count"),
        "embedding_multiplier": data.real("embedding_scale", 1.0),
        "attention_multiplier": data.real("attention.scale", 1.0),
        "residual_multiplier": data.real("residual_scale", 1.0),
        "logits_scaling": data.real("logit_scale", 1.0),
        "attention_bias": data.has("blk.*.attn_q.bias"),
    }


def _ernie(data: Metadata) -> Fields:
    fields = {**usual(data, "ernie4_5_moe"), **attention(data)}
    return {
        **fields,
        "moe_num_experts": data.whole("expert_count"),
        "moe_k": fields.pop("num_experts_per_tok"),
        "moe_intermediate_size": expert_width(data),
        "moe_num_shared_experts": data.whole("expert_shared_count"),
        "moe_layer_start_index": data.whole("leading_dense_block_count", 0),
        "moe_layer_interval": data.whole("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
        "use_bias": data.has("blk.*.attn_q.bias"),
    }


def _lfm2(data: Metadata) -> Fields:
    fields = usual(data, "lfm2_moe")
    heads = data.wholes("attention.head_count_kv", fields["num_hidden_layers"])
    return {
        **fields,
        "norm_eps": fields.pop("rms_norm_eps"),
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_experts": data.whole("expert_count"),
        "moe_intermediate_size": expert_width(data),
        "num_dense_layers": data.whole("leading_dense_block_count", 0),
        "conv_L_cache": data.whole("shortconv.l_cache"),
        "conv_bias": data.has("blk.*.shortconv.conv.bias"),
        "use_expert_bias": data.has("blk.*.exp_probs_b.bias"),
        "norm_topk_prob": True,  # as llama.cpp computes them
        "routed_scaling_factor": data.real("expert_weights_scale", 1.0),
    }


def _phi(data: Metadata) -> Fields:
    fields = {**usual(data, "phimoe"), "num_key_value_heads": attention(data)["num_key_value_heads"]}
    if data.has("rope_factors_long.weight"):
        for kind in ("short", "long"):
            factors = [shortest(each) for each in values(data.tensor(f"rope_factors_{kind}.weight")).flatten().tolist()]
            fields["rope_parameters"] |= {f"{kind}_factor": factors, f"{kind}_mscale": _PHI_SCALE}
        original = data.whole("rope.scaling.original_context_length")
        fields["rope_parameters"] |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    return {
        **fields,
        "num_local_experts": data.whole("expert_count"),
        "sliding_window": data.whole("attention.sliding_window", 0) or None,
        "attention_bias": data.has("blk.*.attn_q.bias"),
        "lm_head_bias": data.has("output.bias"),
    }


def _recurrent(data: Metadata, model_type: str) -> Fields:
    """Qwen3-Next and Qwen3.5: most layers keep a state."""
    fields = usual(data, model_type)
    fields["num_key_value_heads"] = data.whole("attention.head_count_kv")
    heads, head_dim = data.whole("ssm.time_step_rank"), data.whole("attention.key_length")
    with_state = {*data.layers_with("ssm_out.weight", fields["num_hidden_layers"])}
    layers = range(fields["num_hidden_layers"])
    fields["rope_parameters"]["partial_rotary_factor"] = data.whole("rope.dimension_count") / head_dim
    return {
        **fields,
        "head_dim": head_dim,
        "layer_types": ["linear_attention" if layer in with_state else "full_attention" for layer in layers],
        "linear_conv_kernel_dim": data.whole("ssm.conv_kernel"),
        "linear_key_head_dim": data.whole("ssm.state_size"),
        "linear_num_key_heads": data.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": data.whole("ssm.inner_size") // heads,
        "num_experts": data.whole("expert_count"),
        "moe_intermediate_size": expert_width(data),
        "shared_expert_intermediate_size": data.tensor("blk.*.ffn_gate_shexp.weight").shape[0],
        "norm_topk_prob": True,  # as llama.cpp computes them
        "attention_bias": data.has("blk.*.attn_q.bias"),
        "mtp_num_hidden_layers": guessing(data),
    }


def _qwen3_5(data: Metadata) -> Fields:
    fields = _recurrent(data, "qwen3_5_moe_text")
    if data.says("rope.dimension_sections"):
        sections = [size for size in data.wholes("rope.dimension_sections", 3) if size]
        fields["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    return fields


def _gemma(data: Metadata) -> Fields:
    fields = usual(data, "gemma4_text")
    layers = fields["num_hidden_layers"]
    sliding = data.flags("attention.sliding_window_pattern", layers)
    heads, softcap = data.wholes("attention.head_count_kv", layers), "final_logit_softcapping"
    if data.whole("embedding_length_per_layer_input", 0) or data.whole("attention.shared_kv_layers", 0):
        raise ValueError("its layers share keys and values, or embed tokens once more, which is not supported yet")
    full, own = sliding.index(False), sliding.index(True) if True in sliding else sliding.index(False)
    wide = data.whole("attention.key_length")
    theta = fields.pop("rope_parameters")["rope_theta"]
    turned = _turned(data, wide)
    return {
        **fields,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
        "sliding_window": data.whole("attention.sliding_window"),
        "head_dim": data.whole("attention.key_length_swa"),
        "global_head_dim": wide,
        "num_key_value_heads": heads[own],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": not data.has(f"blk.{full}.attn_v.weight"),
        "num_experts": data.whole("expert_count"),
        "top_k_experts": fields.pop("num_experts_per_tok"),
        "moe_intermediate_size": expert_width(data),
        softcap: data.real(softcap) if data.says(softcap) else None,
        "eos_token_id": sorted({*_GEMMA_ENDS, fields.get("eos_token_id", 1)}),
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turned},
            "sliding_attention": {"rope_type": "default", "rope_theta": data.real("rope.freq_base_swa", 10_000.0)},
        },
    }


def _turned(data: Metadata, head_dim: int) -> float:
    """The share of a head that rope turns: of the rest, `rope_freqs` has frequencies that are next to none."""
    frequencies = values(data.tensor("rope_freqs.weight"))
    return 2 * int((frequencies == 1).sum()) / head_dim


_ARCHITECTURES: dict[str, Callable[[Metadata], Fields]] = {
    "llama": _mixtral,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2,
    "qwen3moe": _qwen3,
    "gpt-oss": _gpt_oss,
    "deepseek": _deepseek,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4,
    "granitemoe": _granite,
    "ernie4_5-moe": _ernie,
    "lfm2moe": _lfm2,
    "phimoe": _phi,
    "gemma4": _gemma,
    "qwen3next": lambda data: _recurrent(data, "qwen3_next"),
    "qwen35moe": _qwen3_5,
    **{name: partial(fields_of, own=own) for name, own in UNRECORDED.items()},
}
