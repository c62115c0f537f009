"""The modules that a chat is opened with are transformers' own by name, shape and value, without transformers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import load
from floe_chat.models.modules import light_modules
from floe_chat.models.packing.pack import EXACT, PackSpec

from ..helpers import edit_json, make_checkpoint, make_pack, relative_rms

SIZES: dict[str, Any] = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {  # model_type first
    "mixtral": {"num_local_experts": 3, "head_dim": 10},
    "olmoe": {"num_experts": 5},
    "olmoe biases": {"num_experts": 5, "attention_bias": True, "norm_topk_prob": True},
    "mixtral linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "mixtral llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_names_shapes_and_rope_as_the_librarys(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.partition(" ")[0], **SIZES, **CONFIGS[name])
    theirs: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ours: Any = light_modules.tree(config, torch.bfloat16)
    assert light_modules.knows(config)
    expected = {n: (p.shape, p.dtype) for n, p in theirs.named_parameters() if ".experts." not in n}
    assert {n: (p.shape, p.dtype) for n, p in ours.named_parameters()} == expected
    positions = torch.tensor([[0, 1, 77, 4000]])
    x = torch.empty(0, dtype=torch.float32)
    for mine, own in zip(ours.model.rotary_emb(x, positions), theirs.model.rotary_emb(x, positions), strict=True):
        assert torch.equal(mine, own)
    for mine, own in zip(ours.model.layers, theirs.model.layers, strict=True):
        assert (mine.self_attn.head_dim, mine.self_attn.scaling) == (own.self_attn.head_dim, own.self_attn.scaling)
        assert mine.mlp.gate.top_k == own.mlp.gate.top_k
        assert getattr(mine.mlp.gate, "norm_topk_prob", None) == getattr(own.mlp.gate, "norm_topk_prob", None)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
@pytest.mark.parametrize("spec", [PackSpec(), EXACT], ids=["low", "exact"])
def test_a_chat_computes_what_the_library_does(family: str, spec: PackSpec, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    make_pack(make_checkpoint(tmp_path / "source", family=family), pack, spec)
    logits: list[torch.Tensor] = []
    for library in (False, True):
        loaded, _ = load(pack, "Exact" if spec is EXACT else "High", "cpu", lambda _step, _share: None, library=library)
        kv = KVCache()
        first = loaded.decoder.forward([1, 5, 9, 40, 41], kv)
        kv.computed([1, 5, 9, 40, 41], loaded.control.preset)
        logits += [first, loaded.decoder.forward([7], kv)]
        assert "floe-chat's own pass" in loaded.decoder.reason
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])


def test_a_rope_that_changes_with_the_length_takes_the_library(tmp_path: Path) -> None:
    from transformers import AutoConfig

    pack = tmp_path / "pack"
    source = make_checkpoint(tmp_path / "source")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    edit_json(source / "config.json", lambda fields: fields.update(rope_parameters=rope, head_dim=16))
    make_pack(source, pack, PackSpec())
    assert not light_modules.knows(AutoConfig.from_pretrained(pack))
    loaded, told = load(pack, None, "cpu", lambda _step, _share: None)
    assert "dense layers in transformers, because rope of the type dynamic" in told.reason
    ids = torch.tensor([[1, 5, 9]])
    ours = loaded.decoder.forward([1, 5, 9], KVCache())
    assert relative_rms(ours, loaded.model(input_ids=ids).logits[:, -1]) < 1e-6
