"""GGUF files of families without a record give the packs of their checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.gguf.configuration import config_of
from floe_chat.models.gguf.header import GgufTensor, OnDisk
from floe_chat.models.gguf.parts import Gguf
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.gguf.unrecorded import GRANITE_SHARED, UNRECORDED
from floe_chat.models.gguf.usual_fields import llama3
from floe_chat.models.packing.pack import EXACT, pack
from floe_chat.models.transformers_import import import_model_code
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ... import families
from ...engine.driver import open_model
from ...engine.test_derived import config_of as small
from ...engine.test_derived import model_of
from ...helpers import calibration_tokens, write_tokenizer
from .converting import convert

# What the small configurations leave as it is in no published model.
PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
    "afmoe": {"mup_enabled": True, "route_scale": 2.826},
    "dots1": {"sliding_window": None, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "granitemoehybrid": {
        "position_embedding_type": "nope",
        "max_position_embeddings": 2**20,
        "mamba_chunk_size": 256,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.25,
        "logits_scaling": 6.0,
    },
    "granitemoeshared": {"embedding_multiplier": 12.0, "logits_scaling": 6.0},
    "llama4_text": {
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
        "intermediate_size_mlp": 160,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "laguna": {
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "num_attention_heads_per_layer": [4, 8, 8, 8],
        "moe_routed_scaling_factor": 2.5,
        "gating": "per-head",
    },
    "qwen3_vl_moe_text": {
        "moe_intermediate_size": 48,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_latent_size": 48,
        "chunk_size": 128,
        "sliding_window": None,
        "intermediate_size": 32,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
SEEING = {"qwen3_vl_moe_text": "qwen3_vl_moe"}  # published only with what also sees
NOT_COMPUTED = {
    *("_name_or_path", "architectures", "dtype", "initializer_range", "pad_token_id", "eos_token_id", "bos_token_id"),
    *("max_window_layers", "output_router_logits", "router_aux_loss_coef", "transformers_version", "use_cache"),
    *("num_nextn_predict_layers", "eod_token_id", "sep_token_id", "head_dim", "num_local_experts"),
}


def made(kind: str, folder: Path) -> Path:
    import_model_code()
    config = small(SEEING.get(kind, kind))
    fields, own = config.to_dict(), PUBLISHED.get(kind, {})
    config = type(config)(**fields | ({"text_config": fields["text_config"] | own} if kind in SEEING else own))
    folder.mkdir()
    model_of(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return families.one_shard(folder)


def converted(kind: str, folder: Path) -> tuple[Checkpoint, Checkpoint]:
    """What a file gives, and the checkpoint of which it was made."""
    source = made(kind, folder / "source")
    shelf = GgufShelf(convert(source, folder / "tiny.gguf", "BF16"), folder / "made")
    return Checkpoint(shelf), Checkpoint(source)


KINDS = [own.model_type for own in (*UNRECORDED.values(), GRANITE_SHARED)]


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_its_checkpoint(kind: str, tmp_path: Path) -> None:
    """Its weights bit for bit, and each field that is computed with."""
    ours, theirs = converted(kind, tmp_path)
    assert ours.exact and not ours.shelf.rounding and not ours.unused
    assert {*ours.places} == {*theirs.places}
    for name in theirs.places:
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
    said, wanted = (checkpoint.config.to_dict() for checkpoint in (ours, theirs))
    fields = {*said, *wanted} - NOT_COMPUTED
    assert {name: (said.get(name), wanted.get(name)) for name in fields if said.get(name) != wanted.get(name)} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_its_pack_answers_as_its_checkpoints(kind: str, tmp_path: Path) -> None:
    for checkpoint, name in zip(converted(kind, tmp_path), ("theirs", "ours"), strict=True):
        pack(checkpoint, tmp_path / name, replace(EXACT, signal="up"), calibration_tokens(2), "tiny")
    logits = [open_model(tmp_path / pack).decoder.forward([5, 100, 7, 42, 9], KVCache()) for pack in ("ours", "theirs")]
    assert torch.equal(*logits)


@pytest.mark.parametrize("high", [1.0, 4.0])
def test_llama3s_scaling_is_found_by_what_it_does(high: float) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    config = LlamaConfig(head_dim=128, rope_parameters=rope, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** -(torch.arange(64) / 64)
    assert llama3(plain / frequencies, 5e5) == {"rope_type": "llama3", **scaling}
    with pytest.raises(ValueError, match="frequencies of its own"):
        llama3(torch.linspace(1, 8, 64), 5e5)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("minimax-m2.expert_gating_func", 1, "way 1"),
        ("minimax-m2.expert_weights_scale", 2.5, "scaled by 2.5"),
        ("minimax-m2.expert_weights_norm", False, "add up to one"),
        ("minimax-m2.expert_group_count", 8, "8 groups"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(
    key: str, value: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"token_embd.weight": (300, 64), "blk.0.attn_q.weight": (64, 64)}
    tensors = {name: GgufTensor(name, "F32", shape, OnDisk(Path()), 0, 0) for name, shape in shapes.items()}
    said = {"block_count": 1, "embedding_length": 64, "context_length": 256, "expert_used_count": 2}
    usual = {f"minimax-m2.{name}": number for name, number in {**said, "attention.head_count": 4}.items()}
    gguf = Gguf(Path("x.gguf"), {"general.architecture": "minimax-m2", **usual}, tensors)
    assert config_of(gguf)["num_attention_heads"] == 4
    monkeypatch.setitem(gguf.values, key, value)
    with pytest.raises(CheckpointError, match=words):
        config_of(gguf)
