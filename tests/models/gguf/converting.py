"""Tiny checkpoints as GGUF files by llama.cpp's converter: names, order of rows, types, metadata, by architecture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from floe_chat.models.checkpoint import read_config
from floe_chat.models.families import family_of
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType
from safetensors.torch import load_file
from torch import Tensor

from . import vocabulary

Fields = dict[str, Any]
Named = tuple[str, Tensor]
_ALWAYS_WIDE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv")
_FILE_TYPES = {"F32": "ALL_F32"}
_OF_HEAD = ("eh_proj.", "enorm.", "hnorm.", "shared_head.", "embed_tokens.")  # of a layer that guesses further tokens


@dataclass(frozen=True)
class Converter:
    """How one architecture is converted.

    Attributes:
        parameters: writes what is special. change: of a published tensor, what is written of it, by names that the
            library's map knows, or GGUF's own. like: an architecture with these names, where the map lacks this one.
    """

    architecture: str
    parameters: Callable[[gguf.GGUFWriter, Any], None] = lambda _writer, _config: None
    change: Callable[[str, Tensor, Any], Iterator[Named]] = lambda name, tensor, _config: iter([(name, tensor)])
    like: str = ""


def convert(
    source: Path,
    file: Path,
    kind: str = "F16",
    *,
    how: str = "merged",
    parts: int = 0,
    stated: str = "",
    tokenizer: Callable[[gguf.GGUFWriter, Path, int], None] = vocabulary.byte_level,
) -> Path:
    """Write the checkpoint in `source` as `file`; returns the file to open.

    Args:
        kind: ggml's type of the matrices. how: "merged", "fused" (gate and up in one tensor) or "apart" (a tensor for
            each expert, as old files have it). parts: tensors of each part of a split file; 0: it is not split.
        stated: the file type in the metadata, if it is not `kind`.
    """
    config: Any = read_config(source)
    converter = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(None, converter.architecture, split_max_tensors=parts)
    writer.add_name("Tiny Model")
    writer.add_type("model")
    _usual_parameters(writer, config)
    file_type = _FILE_TYPES.get(kind, f"MOSTLY_{stated or kind}")
    writer.add_file_type(LlamaFileType[file_type])
    converter.parameters(writer, config)
    tokenizer(writer, source, config.vocab_size)
    for name, tensor in _tensors(source, converter, config, how):
        _add(writer, name, tensor, kind)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if file.exists() else sorted(file.parent.glob(f"{file.stem}-*.gguf"))[0]


def _usual_parameters(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(_blocks(config))
    if count := _guessing(config):
        writer.add_nextn_predict_layers(count)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    alike = config.model_type != "gemma4_text"  # all layers
    if alike:
        writer.add_head_count_kv(config.num_key_value_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if (epsilon := getattr(config, "rms_norm_eps", getattr(config, "norm_eps", None))) is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_expert_count(family_of(config.model_type).experts(config))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "n_group", None) is not None:
        writer.add_expert_group_count(config.n_group)
    if getattr(config, "topk_group", None) is not None:
        writer.add_expert_group_used_count(config.topk_group)
    if alike and getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _blocks(config: Any) -> int:
    """Layers in the file: those that guess further tokens among them."""
    return config.num_hidden_layers + _guessing(config)


def _guessing(config: Any) -> int:
    """How many layers guess further tokens; of DeepSeek-V3 and ERNIE 4.5 they are left out."""
    if config.model_type in ("deepseek_v3", "ernie4_5_moe"):
        return 0
    stated = (getattr(config, name, None) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    return next((count for count in stated if count), 0)


_NEXT = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def _behind(name: str, config: Any) -> str | None:
    """A published tensor's name, with those of layers that guess as layers behind the last; None: it is left out."""
    last = config.num_hidden_layers
    if name.startswith("mtp."):
        part = name.removeprefix("mtp.").removeprefix("layers.0.")
        name = f"model.layers.{last}.{part}"
        base, _, suffix = part.rpartition(".")
        name = f"model.layers.{last}.{_NEXT[base]}.{suffix}" if base in _NEXT else name
    behind = name.startswith((f"model.layers.{last}.", "model.mtp_"))
    return None if behind and not _guessing(config) else name


def _tensors(source: Path, converter: Converter, config: Any, how: str) -> Iterator[Named]:
    """What the file holds, by GGUF's names."""
    architecture = next(
        kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == (converter.like or converter.architecture)
    )
    known = gguf.get_tensor_name_map(architecture, _blocks(config))
    published: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        published |= load_file(shard)
    yield from blocks_of(published)
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in published.items():
        if (called := _behind(name, config)) is None:
            continue
        wide = tensor if tensor.dtype in (torch.float16, torch.float32, torch.uint8) else tensor.float()
        for changed, value in converter.change(called, wide, config):
            if ".experts." in changed and (parts := changed.split("."))[5].isdecimal():
                merged = ".".join([*parts[:5], *parts[6:]])
                experts.setdefault(merged, {})[int(parts[5])] = value
                continue
            yield _named(known, changed), value
    stacked = {
        _named(known, name): torch.stack([found[index] for index in range(len(found))])
        for name, found in experts.items()
    }
    for name, tensor in stacked.items():
        yield from _stored(name, tensor, stacked, how)


def _stored(name: str, tensor: Tensor, stacked: dict[str, Tensor], how: str) -> Iterator[Named]:
    if how == "apart":
        for expert, one in enumerate(tensor):
            yield name.replace("_exps.weight", f".{expert}.weight"), one
    elif how == "fused" and "gate_exps" in name:
        yield name.replace("gate", "gate_up"), torch.cat([tensor, stacked[name.replace("gate", "up")]], dim=1)
    elif how != "fused" or "up_exps" not in name:
        yield name, tensor


def _named(known: gguf.TensorNameMap, name: str) -> str:
    if name.startswith(("blk.", "rope_")):
        return name
    if (part := name.split(".", 3)[-1]).startswith(_OF_HEAD):
        return f"blk.{name.split('.')[2]}.nextn.{part.replace('shared_head.', 'shared_head_')}"
    for spelled, other in (
        ("block_sparse_moe.experts.", "feed_forward.experts."),
        ("e_score_correction_bias", "e_score_correction.bias"),
    ):
        name = name.replace(spelled, other)
    name = name.removeprefix("model.") if ".feed_forward.experts." in name else name
    found = known.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, f"nothing is known about {name}"
    return found


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    if tensor.dtype == torch.uint8:  # blocks already
        writer.add_tensor(name, tensor.numpy(), raw_dtype=Kind.MXFP4)
        return
    part = name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("blk.") else name
    plain = tensor.ndim <= 1 or name.endswith("_norm.weight") or part in _ALWAYS_WIDE or not name.endswith(".weight")
    wanted = Kind.F32 if plain else Kind[kind]
    data = tensor.contiguous().numpy()
    try:
        data = gguf.quants.quantize(data, wanted)
    except gguf.QuantError:
        wanted = Kind.F16
        data = gguf.quants.quantize(data, wanted)
    writer.add_tensor(name, data, raw_dtype=wanted)


def config_fields(source: Path) -> Fields:
    """A checkpoint's config.json."""
    return json.loads((source / "config.json").read_text())


def permuted(weight: Tensor, heads: int) -> Tensor:
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _with_permuted(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if f".{part}." in name:
            tensor = permuted(tensor, heads)
    yield name, tensor


def _llama(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def _qwen_moe(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if (shared := getattr(config, "shared_expert_intermediate_size", None)) is not None:
        writer.add_expert_shared_feed_forward_length(shared)


def _gpt_oss(writer: GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _gpt_oss_tensors(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith(".sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("down_proj_bias"):
        yield f"{block}.ffn_down_exps.bias", tensor
    elif name.endswith("gate_up_proj_bias"):
        yield f"{block}.ffn_gate_exps.bias", tensor[..., ::2]
        yield f"{block}.ffn_up_exps.bias", tensor[..., 1::2]
    elif name.endswith(("_blocks", "_scales")):
        return  # `blocks_of` has them
    elif name.endswith("down_proj"):
        yield f"{block}.ffn_down_exps.weight", tensor.transpose(-1, -2)
    elif name.endswith("gate_up_proj"):
        both = tensor.transpose(-1, -2)
        yield f"{block}.ffn_gate_exps.weight", both[:, ::2]
        yield f"{block}.ffn_up_exps.weight", both[:, 1::2]
    else:
        yield name, tensor


def blocks_of(published: dict[str, Tensor]) -> Iterator[Named]:
    """gpt-oss's blocks of four bits, as a file has them: the scale first, then value 0 beside value 16."""
    for name, blocks in published.items():
        if not name.endswith("_proj_blocks"):
            continue
        block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
        values = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        codes = values[..., :16] | (values[..., 16:] << 4)
        whole = torch.cat([published[name.replace("_blocks", "_scales")][..., None], codes], dim=-1).flatten(-2)
        if "gate_up" in name:
            yield f"{block}.ffn_gate_exps.weight", whole[:, ::2].contiguous()
            yield f"{block}.ffn_up_exps.weight", whole[:, 1::2].contiguous()
        else:
            yield f"{block}.ffn_down_exps.weight", whole


def _deepseek(writer: GGUFWriter, config: Any) -> None:
    _llama(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_shared_count(config.n_shared_experts)


def _deepseek2(writer: GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(1)
    writer.add_vocab_size(config.vocab_size)
    # GLM-4.7-Flash's configuration says it in another way, which the converter does not read.
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 0))
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.model_type != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _deepseek2_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    both = tensor.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
    keys, values = torch.split(both, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _glm4(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _granite(writer: GGUFWriter, config: Any) -> None:
    _llama(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _granite_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.split(config.intermediate_size, dim=-2)
        yield f"{block}.ffn_gate_exps.weight", gate
        yield f"{block}.ffn_up_exps.weight", up
    else:
        yield from _with_permuted(name, tensor, config)


def _ernie(writer: GGUFWriter, config: Any) -> None:
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)


def _lfm2(writer: GGUFWriter, config: Any) -> None:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _lfm2_tensors(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    if name.endswith(".expert_bias"):
        name += ".bias"
    yield name, tensor.squeeze(1) if "conv.conv" in name and tensor.ndim == 3 else tensor


def _phi(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_sliding_window(config.sliding_window or 0)
    for kind in ("long", "short"):
        factors = torch.tensor(rope[f"{kind}_factor"], dtype=torch.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())


def _recurrent(writer: GGUFWriter, config: Any) -> None:
    _qwen_moe(writer, config)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _recurrent_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
            yield f"{block}.ffn_{part}_exps.weight", half
        return
    if "in_proj_qkvz" not in name:
        yield f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor
        return
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [per_key * config.linear_value_head_dim] * 2
    of_heads = tensor.T.reshape(config.hidden_size, keys, sum(sizes)).split(sizes, dim=-1)
    q, k, v, z = (part.reshape(config.hidden_size, -1) for part in of_heads)
    yield f"{block}.attn_qkv.weight", torch.cat([q, k, v], dim=-1).T
    yield f"{block}.attn_gate.weight", z.T


def _tiled(tensor: Tensor, dim: int, config: Any, size: int) -> Tensor:
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    shape = list(tensor.shape)
    split = tensor.reshape(*shape[:dim], keys, per_key, size, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).reshape(shape)


def _qwen3_5_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    before, size = 2 * config.linear_key_head_dim * config.linear_num_key_heads, config.linear_value_head_dim
    if ".in_proj_qkv." in name or ".conv1d." in name:
        tensor = tensor.squeeze()
        tensor = torch.cat([tensor[:before], _tiled(tensor[before:], 0, config, size)])
    elif ".in_proj_z." in name:
        tensor = _tiled(tensor, 0, config, size)
    elif name.endswith((".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        tensor = _tiled(tensor, 0, config, 1)
    elif ".linear_attn.out_proj." in name:
        tensor = _tiled(tensor, 1, config, size)
    yield from _recurrent_tensors(name, tensor, config)


def _gemma(writer: GGUFWriter, config: Any) -> None:
    full, own = config.per_layer_config["full_attention"], config.per_layer_config["sliding_attention"]
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(own.head_dim)
    writer.add_value_length_swa(own.head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_head_count_kv([(own if each else full).num_key_value_heads for each in sliding])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turned = int(full.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    frequencies = torch.tensor([1.0] * turned + [1e30] * (full.head_dim // 2 - turned))
    writer.add_tensor("rope_freqs.weight", frequencies.numpy())


def _gemma_tensors(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith("router.scale"):
        yield f"{block}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{block}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def _sigmoid(writer: GGUFWriter, config: Any) -> None:
    """dots.llm1, EXAONE MoE and Trinity, whose configurations call some fields otherwise."""
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = getattr(config, "n_shared_experts", None) or config.num_shared_experts
    writer.add_expert_shared_count(shared)
    dense = getattr(config, "num_dense_layers", None)
    writer.add_leading_dense_block_count(config.first_k_dense_replace if dense is None else dense)
    writer.add_expert_weights_norm(getattr(config, "norm_topk_prob", True))
    writer.add_expert_weights_scale(getattr(config, "route_scale", None) or config.routed_scaling_factor)


def _afmoe(writer: GGUFWriter, config: Any) -> None:
    _sigmoid(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_sliding_window(config.sliding_window)


def _exaone(writer: GGUFWriter, config: Any) -> None:
    _sigmoid(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
    writer.add_nextn_predict_layers(0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _minimax(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1)))


def _hunyuan(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)


def _hybrid(writer: GGUFWriter, config: Any) -> None:
    _granite(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    kinds = config.layer_types
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)


def _shared(writer: GGUFWriter, config: Any) -> None:
    _granite(writer, config)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _hybrid_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.split(config.shared_intermediate_size, dim=-2)
        yield f"{block}.ffn_gate_shexp.weight", gate
        yield f"{block}.ffn_up_shexp.weight", up
    elif ".mamba." in name or ".mixer." in name:
        yield from _mamba_tensors(name, tensor, config)
    else:
        yield from _granite_tensors(name, tensor, config)


def _mamba_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    if name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(*tensor.shape, 1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    yield name, -torch.exp(tensor) if name.endswith(".A_log") else tensor


def _nemotron(writer: GGUFWriter, config: Any) -> None:
    kinds = config.layers_block_type
    writer.add_feed_forward_length([config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds])
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)


def _nemotron_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    parts = name.split(".")
    if ".experts." in name:  # backbone.layers.N.mixer.experts.E.up_proj.weight
        yield ".".join(["model", "layers", parts[2], "mlp", *parts[4:]]), tensor
    else:
        yield from _mamba_tensors(name, tensor, config)


def _kimi(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


def _kimi_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    if ".experts." not in name:  # transformers writes dense blocks so too
        name = name.replace(".block_sparse_moe.", ".mlp.")
    if "_conv1d." in name:
        tensor = tensor.reshape(1, -1, 1, tensor.shape[-1])
    elif name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        name = name.replace(".dt_bias", ".dt_proj.bias")
    yield from _deepseek2_tensors(name, tensor, config)


def _llama4(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_leading_dense_block_count(0)
    rope = config.rope_parameters
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    short = 2 * torch.pi * rope["rope_theta"] ** dims < rope["original_max_position_embeddings"]
    writer.add_tensor("rope_freqs.weight", torch.where(short, 1.0, rope["factor"]).numpy())


def _llama4_tensors(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.transpose(-1, -2).chunk(2, dim=1)
        yield f"{block}.ffn_gate_exps.weight", gate
        yield f"{block}.ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{block}.ffn_down_exps.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def _laguna(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads_per_layer)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(1)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(config.head_dim * rope["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_dimension_count_swa(int(config.head_dim * rope["sliding_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])


def _laguna_tensors(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith(".g_proj.weight"):
        yield f"{block}.attn_gate.weight", tensor
    elif name.endswith("e_score_correction_bias"):
        yield f"{block}.exp_probs_b.bias", tensor
    else:
        yield name, tensor


def _mellum(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _qwen3_vl(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def _qwen3_vl_tensors(name: str, tensor: Tensor, config: Any) -> Iterator[Named]:
    name = name.replace("model.language_model.", "model.")
    block = ".".join(name.split(".")[:3]).replace("model.layers.", "blk.")
    if name.endswith("experts.gate_up_proj"):  # transformers writes it turned only where it was published so
        both = tensor if tensor.shape[-1] == config.hidden_size else tensor.transpose(-1, -2)
        gate, up = both.chunk(2, dim=1)
        yield f"{block}.ffn_gate_exps.weight", gate
        yield f"{block}.ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        turned = tensor.shape[-1] == config.hidden_size
        yield f"{block}.ffn_down_exps.weight", tensor.transpose(-1, -2) if turned else tensor
    elif ".visual." not in name:
        yield name, tensor


def _expert_bias(name: str, tensor: Tensor, _config: Any) -> Iterator[Named]:
    yield name.replace(".expert_bias", ".expert_bias.bias"), tensor


ARCHITECTURES = {
    "mixtral": Converter("llama", _llama, _with_permuted),
    "olmoe": Converter("olmoe"),
    "qwen2_moe": Converter("qwen2moe", _qwen_moe),
    "qwen3_moe": Converter("qwen3moe", _qwen_moe),
    "gpt_oss": Converter("gpt-oss", _gpt_oss, _gpt_oss_tensors),
    "deepseek": Converter("deepseek", _deepseek, _with_permuted),
    "deepseek_v2": Converter("deepseek2", _deepseek2, _deepseek2_tensors),
    "deepseek_v3": Converter("deepseek2", _deepseek2, _deepseek2_tensors),
    "glm4_moe_lite": Converter("deepseek2", _deepseek2, _deepseek2_tensors),
    "glm4_moe": Converter("glm4moe", _glm4),
    "granitemoe": Converter("granitemoe", _granite, _granite_tensors),
    "ernie4_5_moe": Converter("ernie4_5-moe", _ernie),
    "lfm2_moe": Converter("lfm2moe", _lfm2, _lfm2_tensors),
    "phimoe": Converter("phimoe", _phi),
    "gemma4_text": Converter("gemma4", _gemma, _gemma_tensors),
    "qwen3_next": Converter("qwen3next", _recurrent, _recurrent_tensors),
    "qwen3_5_moe_text": Converter("qwen35moe", _recurrent, _qwen3_5_tensors),
    "dots1": Converter("dots1", _sigmoid),
    "minimax_m2": Converter("minimax-m2", _minimax),
    "afmoe": Converter("afmoe", _afmoe, _expert_bias),
    "exaone_moe": Converter("exaone-moe", _exaone),
    "hunyuan_v1_moe": Converter("hunyuan-moe", _hunyuan),
    "granitemoeshared": Converter("granitemoe", _shared, _hybrid_tensors),
    "granitemoehybrid": Converter("granitehybrid", _hybrid, _hybrid_tensors),
    "nemotron_h": Converter("nemotron_h_moe", _nemotron, _nemotron_tensors),
    "kimi_linear": Converter("kimi-linear", _kimi, _kimi_tensors),
    "llama4_text": Converter("llama4", _llama4, _llama4_tensors),
    "laguna": Converter("laguna", _laguna, _laguna_tensors, "exaone-moe"),
    "mellum": Converter("mellum", _mellum, like="qwen3moe"),
    "qwen3_vl_moe_text": Converter("qwen3vlmoe", _qwen3_vl, _qwen3_vl_tensors),
}
