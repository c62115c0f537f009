"""Tiny random checkpoints of every family, of odd sizes and in their published layout."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families import FAMILIES, language_fields
from floe_chat.models.families.storage import BLOCK
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.transformers_import import import_model_code
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .helpers import edit_json, write_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 37,
    "moe_intermediate_size": 29,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 700,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
}
_GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True}
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0],
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
_GATED_DELTA: dict[str, Any] = {
    "num_experts": 6,
    "head_dim": 16,
    "shared_expert_intermediate_size": 31,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# What a model sees with, by the model_type of the configuration that holds the language model's.
_VISION: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": {
        "depth": 1,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 40,
        "num_position_embeddings": 16,
    },
    "gemma4": {
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
}
_TWO_KINDS_OF_HEADS: dict[str, Any] = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "num_experts": 6,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "head_dim": 10,
    "global_head_dim": 14,
}
# By a name that says what is special: model_type first.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "sliding_window": None},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 6, "head_dim": 10, "norm_topk_prob": True},
    "qwen3_moe layers without experts": {"num_experts": 6, "head_dim": 10, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 31, "layer_types": ["full_attention"] * 3},
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_moe": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "phimoe": {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "rope_parameters": _LONG_ROPE},
    "deepseek": {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": YARN},
    "deepseek_v2 groups": {
        **_LATENT,
        **_GROUPS,
        "q_lora_rank": 20,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "glm4_moe": {**_GROUPS, "n_routed_experts": 6, "head_dim": 12, "attention_bias": True, "use_qk_norm": False},
    "glm4_moe normalized": {"n_routed_experts": 6, "head_dim": 12, "use_qk_norm": True, "first_k_dense_replace": 0},
    "glm4_moe_lite": {**_LATENT, **_GROUPS, "q_lora_rank": 20},
    "deepseek_v3": {**_LATENT, **_GROUPS, "q_lora_rank": 20, "first_k_dense_replace": 1},
    "gpt_oss": {
        "num_local_experts": 5,
        "head_dim": 10,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granitemoe": {
        "num_local_experts": 5,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "lfm2_moe": {
        "num_experts": 6,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "routed_scaling_factor": 1.3,
    },
    "lfm2_moe biases": {
        "num_experts": 6,
        "num_dense_layers": 0,
        "layer_types": ["full_attention", "conv", "conv"],
        "conv_bias": True,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        **_TWO_KINDS_OF_HEADS,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": "vision",
    },
    "gemma4_text": {**_TWO_KINDS_OF_HEADS, "tie_word_embeddings": False},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1, "tie_word_embeddings": True},
}


def make(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Path:
    """One of MODELS as transformers publishes it; correction biases stay at 32 bits, as in published checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**_SIZES, "vocab_size": write_tokenizer(folder), **MODELS[name], **changes}
    torch.manual_seed(seed)
    kind = name.partition(" ")[0]
    model = _model(kind, fields)
    _unsettle(model)
    model.to(dtype)
    for part, tensor in model.state_dict(keep_vars=True).items():
        if part.endswith(("correction_bias", "expert_bias")):
            tensor.data = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    # transformers would write the experts of those that see apart, but they are published as it has them in memory.
    model.save_pretrained(folder, max_shard_size="100KB", save_original_format=kind not in _VISION)
    if kind == "gemma4":
        edit_json(folder / "config.json", lambda given: _heads_by_kind(given["text_config"], fields))
    return folder


def random_blocks(*rows: int) -> tuple[Tensor, Tensor]:
    """Blocks (*rows, 16) of any bytes, and scales of a few sizes."""
    generator = torch.Generator().manual_seed(sum(rows))
    blocks = torch.randint(0, 256, (*rows, BLOCK // 2), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(118, 126, rows, dtype=torch.uint8, generator=generator)


def make_coded(folder: Path, neurons: int = 32) -> tuple[Path, Path]:
    """A gpt-oss at 16 bits, and the same with its experts in blocks."""

    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    with pytest.MonkeyPatch.context() as patch:
        sizes = {**MODELS["gpt_oss"], "hidden_size": 64, "intermediate_size": neurons, "head_dim": 16}
        patch.setitem(MODELS, "gpt_oss", sizes)
        plain, coded = make("gpt_oss", folder / "plain"), make("gpt_oss", folder / "coded")
    for source in (plain, coded):
        for file in source.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in [*tensors.items()]:
                if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                    experts, columns, rows = tensor.shape
                    blocks, scales = random_blocks(experts, rows, columns // BLOCK)
                    if source is plain:
                        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
                    else:
                        del tensors[name]
                        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            save_file(tensors, file, {"format": "pt"})
    found = {name: file.name for file in coded.glob("*.safetensors") for name in load_file(file)}
    (coded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return plain, coded


def one_shard(source: Path) -> Path:
    """Put all of a checkpoint's weights into one file, in the order of their names."""
    weights: dict[str, Tensor] = {}
    for shard in source.glob("*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    (source / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    return source


def _heads_by_kind(text: dict[str, Any], fields: dict[str, Any]) -> None:
    """As published: transformers writes what differs between layers one by one, and the library reads both."""
    del text["per_layer_config"]
    text.update({name: fields[name] for name in ("global_head_dim", "num_global_key_value_heads")})


def _model(kind: str, fields: dict[str, Any]) -> Any:
    import_model_code()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    FAMILIES[str(language_fields({"model_type": kind})["model_type"])].register()
    if kind not in _VISION:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    config = AutoConfig.for_model(kind, text_config=fields, vision_config=_VISION[kind])
    return AutoModelForImageTextToText.from_config(config)


def _unsettle(model: nn.Module) -> None:
    """Norms and factors that are not one, biases that are not zero, and routers that prefer some experts."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
        elif name.endswith((".gate.weight", ".router.weight")):
            nn.init.normal_(parameter, std=0.3)
        elif name.endswith(".router.proj.weight"):  # of inputs that are as small as a hidden size is large
            nn.init.normal_(parameter, std=2.0)
    for name, buffer in model.named_buffers():
        if name.endswith(".layer_scalar"):
            buffer.fill_(0.9)


_BEHIND, _MTP = "model.layers.3.", "model.mtp_"
_V3 = (_BEHIND, f"{_BEHIND}eh_proj", f"{_BEHIND}enorm", f"{_BEHIND}hnorm", f"{_BEHIND}shared_head.norm")
_NEXT = ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
# Of a head: the beginning of its layer's names, and the names of what joins its inputs, both norms and the last one.
HEADS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"), _NEXT),
    **dict.fromkeys(("glm4_moe", "glm4_moe normalized", "glm4_moe_lite", "deepseek_v3"), _V3),
    "ernie4_5_moe": (f"{_MTP}block.0.", f"{_MTP}linear_proj.0", f"{_MTP}emb_norm.0", f"{_MTP}hidden_norm.0", ""),
}
_ALONE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["full_attention"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
}
_ALONE["qwen3_5_moe"] = _ALONE["qwen3_5_moe_text"] = _ALONE["qwen3_next"]


@dataclass(frozen=True)
class Head:
    """transformers' model of one layer, which is a head's, with random weights, and what comes before it."""

    model: Any
    joined: Tensor
    norms: tuple[Tensor, Tensor]
    shares_norm: bool

    def logits(self, of: Any, ids: Tensor, hidden: Tensor) -> Tensor:
        """By the definition, of each token but the first and what the model's last norm gave before it: (T - 1, V)."""
        return of.lm_head(self.states(of, ids, hidden))

    def states(self, of: Any, ids: Tensor, hidden: Tensor) -> Tensor:
        """What these logits are of, (T - 1, H)."""
        first = of.model.norm
        both = of.model.embed_tokens(ids[None, 1:]), hidden[None, :-1]
        normed = list[Tensor]()
        for x, weight in zip(both, self.norms, strict=True):
            norm = copy.deepcopy(first)
            norm.weight.data = weight.float()
            normed.append(norm(x))
        x = torch.cat(normed, -1) @ self.joined.float().T
        if self.shares_norm:
            self.model.model.norm = of.model.norm
        return self.model.model(inputs_embeds=x, use_cache=False).last_hidden_state[0]

    def guesses(self, of: Any, text: Sequence[int], count: int, seen: int) -> list[int]:
        """The first behind a text: what is seen of it goes through the head at once."""
        hidden = of.model(input_ids=torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0][-seen:]
        ids, found = torch.tensor(text[-len(hidden) - 1 :]), list[int]()
        for _ in range(count):
            own = self.states(of, ids, torch.cat([hidden, hidden[:1]]))[-1:]
            found.append(int(of.lm_head(own).argmax()))
            ids, hidden = torch.cat([ids, torch.tensor(found[-1:])]), torch.cat([hidden, own])
        return found


def _state_heads(source: Path, kind: str) -> None:
    def stated(fields: dict[str, Any]) -> None:
        name = "mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers"
        fields.get("text_config", fields)[name] = 1

    edit_json(source / "config.json", stated)


def add_head(source: Path, seed: int = 1) -> Head:
    """A random head in a checkpoint's last shard, by its published names; returned as its layer in transformers."""
    import_model_code()
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source)
    kind = config.model_type
    _state_heads(source, kind)
    config = getattr(config, "text_config", config)
    for name, value in {"num_hidden_layers": 1, **_ALONE[kind]}.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    _unsettle(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.05)
    layer, joined, *norms = HEADS[kind]
    hidden = config.hidden_size
    own = [torch.randn(hidden, 2 * hidden) * 0.1, *(torch.randn(hidden) * 0.1 + 0.5 for _ in norms[:2])]
    own = [tensor.bfloat16() for tensor in own]
    tensors = dict(zip((f"{name}.weight" for name in (joined, *norms[:2])), own, strict=True))
    for name, tensor in model.state_dict().items():
        tensor = tensor if name.endswith("correction_bias") else tensor.bfloat16()
        part = name.partition("layers.0.")[2]
        if part.endswith("experts.gate_up_proj") and not kind.startswith("qwen3_5"):
            for expert, both in enumerate(tensor):
                each = zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
                base = f"{layer}{part.removesuffix('gate_up_proj')}{expert}."
                tensors |= {f"{base}{side}.weight": values.contiguous() for side, values in each}
        elif part.endswith("experts.down_proj") and not kind.startswith("qwen3_5"):
            base = f"{layer}{part.removesuffix('down_proj')}"
            tensors |= {f"{base}{expert}.down_proj.weight": down.contiguous() for expert, down in enumerate(tensor)}
        elif part:
            tensors[f"{layer}{part}"] = tensor
        elif name == "model.norm.weight" and norms[2]:
            tensors[f"{norms[2]}.weight"] = tensor
    if joined.startswith(_BEHIND):  # copies of the model's own, as some are published with
        tensors |= {f"{layer}{part}.weight": torch.zeros(2, hidden) for part in ("embed_tokens", "shared_head.head")}
    file = "head.safetensors"
    save_file(tensors, source / file, {"format": "pt"})

    def listed(index: dict[str, Any]) -> None:
        index["weight_map"] |= dict.fromkeys(tensors, file)

    edit_json(source / "model.safetensors.index.json", listed)
    return Head(model.eval(), own[0], (own[1], own[2]), not norms[2])


_SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    **dict.fromkeys(("vocab_size_per_layer_input", "hidden_size_per_layer_input"), 0),
    "enable_moe_block": False,
    "num_kv_shared_layers": 3,
}


@dataclass(frozen=True)
class Assistant:
    """transformers' small model that guesses another one's tokens, with random weights."""

    model: Any

    def steps(self, of: Any, text: Sequence[int], count: int) -> list[Tensor]:
        """Logits (V,) of its guesses behind a text, each of what the one before is likeliest to be."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()  # whose layers keep whole texts
        ran = of.model(input_ids=torch.tensor([text[:-1]]), past_key_values=cache, use_cache=True)
        shared = {
            kind: (layer.keys, layer.values)
            for kind, layer in zip(of.config.layer_types, cache.layers, strict=True)  # the last one of each kind
        }
        token, hidden, found = text[-1], ran.last_hidden_state[:, -1:], list[Tensor]()
        for _ in range(count):
            both = torch.cat([of.model.embed_tokens(torch.tensor([[token]])), hidden], -1)
            place = torch.tensor([[len(text) - 1]])
            gave = self.model(inputs_embeds=both, position_ids=place, shared_kv_states=shared)
            found.append(gave.logits[0, 0])
            token, hidden = int(found[-1].argmax()), gave.last_hidden_state
        return found

    def guesses(self, of: Any, text: Sequence[int], count: int, _seen: int) -> list[int]:
        """The first behind a text."""
        return [int(logits.argmax()) for logits in self.steps(of, text, count)]


def add_assistant(source: Path, folder: Path, seed: int = 1) -> Assistant:
    """A random one for a checkpoint, as transformers publishes it, in a folder of its own."""
    import_model_code()
    from transformers import AutoConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    model: Any = AutoConfig.from_pretrained(source)
    kind, model = model.model_type, model.get_text_config()
    fields: dict[str, Any] = {**_SIZES, **MODELS[kind], **_SMALL, "vocab_size": model.vocab_size}
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        # Some releases of transformers refuse a model of which all layers see another one's keys and values.
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(lambda own: ["reuse"] * own.num_hidden_layers))
        config = Gemma4AssistantConfig(backbone_hidden_size=model.hidden_size, text_config=Gemma4TextConfig(**fields))
        made: Any = Gemma4AssistantForCausalLM(config)
    _unsettle(made)
    made.bfloat16().save_pretrained(folder)
    made.float().model.rotary_emb = type(made.model.rotary_emb)(made.config.text_config)  # which was rounded, too
    return Assistant(made.eval())


def drop(source: Path, name: str) -> None:
    """Take a tensor out of a checkpoint."""
    index = "model.safetensors.index.json"
    file = source / json.loads((source / index).read_text())["weight_map"][name]
    save_file({part: tensor for part, tensor in load_file(file).items() if part != name}, file, {"format": "pt"})
    edit_json(source / index, lambda fields: fields["weight_map"].pop(name))


def refused(source: Path, change: Callable[[dict[str, Tensor]], object]) -> CheckpointError:
    """What is said of a checkpoint's dense part after a change of its weights, which are then in one shard."""
    weights = load_file(one_shard(source) / "model.safetensors")
    change(weights)
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        DensePart(Checkpoint(source), 4)
    return caught.value
