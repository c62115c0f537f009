"""Tiny checkpoints as GGUF files, by the rules of llama.cpp's converter: names, order of rows, types, metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from floe_chat.models.checkpoint import read_config
from floe_chat.models.families import FAMILIES
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from safetensors.torch import load_file
from torch import Tensor

from . import vocabulary

Fields = dict[str, Any]
Named = tuple[str, Tensor]
_ALWAYS_WIDE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv")
_FILE_TYPES = {"F32": "ALL_F32"}


@dataclass(frozen=True)
class Converter:
    """How one architecture is converted.

    Attributes:
        parameters: writes what is special. change: of a published tensor, what is written of it, by names that the
            library's map knows, or GGUF's own.
    """

    architecture: str
    parameters: Callable[[gguf.GGUFWriter, Any], None] = lambda _writer, _config: None
    change: Callable[[str, Tensor, Any], Iterator[Named]] = lambda name, tensor, _config: iter([(name, tensor)])


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
    from .architectures import ARCHITECTURES

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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    alike = config.model_type != "gemma4_text"  # all layers
    if alike:
        writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if (epsilon := getattr(config, "rms_norm_eps", getattr(config, "norm_eps", None))) is not None:
        writer.add_layer_norm_rms_eps(epsilon)
    writer.add_expert_count(FAMILIES[config.model_type].experts(config))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "n_group", None) is not None:
        writer.add_expert_group_count(config.n_group)
    if getattr(config, "topk_group", None) is not None:
        writer.add_expert_group_used_count(config.topk_group)
    if alike and getattr(config, "head_dim", None) is not None:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _blocks(config: Any) -> int:
    """Layers in the file: those of GLM-4.5 that guess further tokens among them."""
    return config.num_hidden_layers + (config.num_nextn_predict_layers if config.model_type == "glm4_moe" else 0)


def _tensors(source: Path, converter: Converter, config: Any, how: str) -> Iterator[Named]:
    """What the file holds, by GGUF's names."""
    from .architectures import blocks_of

    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == converter.architecture)
    known = gguf.get_tensor_name_map(architecture, _blocks(config))
    published: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        published |= load_file(shard)
    yield from blocks_of(published)
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in published.items():
        wide = tensor if tensor.dtype in (torch.float16, torch.float32, torch.uint8) else tensor.float()
        for changed, value in converter.change(name, wide, config):
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
