"""Configurations read here have transformers' values, limits and modules; any other is left to transformers."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import load
from floe_chat.models import config_limits, configuration
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.configuration import Config, parse
from floe_chat.models.errors import CheckpointError, PackError
from floe_chat.models.families import FAMILIES
from floe_chat.models.modules import light_modules
from floe_chat.models.packing.pack import EXACT, PackSpec

from ..helpers import edit_json, make_checkpoint, make_pack, relative_rms

Fields = dict[str, Any]

PUBLISHED: dict[str, Fields] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")
)  # from before transformers 5
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PLAIN: dict[str, Fields] = {
    "Mixtral": PUBLISHED["mixtral-8x7b"],
    "OLMoE": PUBLISHED["olmoe-1b-7b-instruct"] | {"rope_scaling": None, "torch_dtype": "bfloat16", "use_cache": True},
    "mixtral, nothing said": {"model_type": "mixtral"},
    "olmoe, nothing said": {"model_type": "olmoe"},
    "today's rope": {"model_type": "mixtral", "rope_parameters": ROPE},
    "rope's base alone": {"model_type": "olmoe", "rope_parameters": {"rope_theta": 5e5}},
    "rope's base beside it": {"model_type": "mixtral", "rope_theta": 77.0, "rope_parameters": {"rope_type": "default"}},
    "rope's base twice": {"model_type": "mixtral", "rope_theta": 77.0, "rope_parameters": {"rope_theta": 78}},
    "rope of nothing": {"model_type": "olmoe", "rope_parameters": {}},
    "rope of null": {"model_type": "olmoe", "rope_parameters": None},
    "every option": {
        "model_type": "olmoe",
        "attention_bias": True,
        "clip_qkv": 8.0,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": None,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "head_dim": 64,
    },
    "window": {"model_type": "mixtral", "sliding_window": 4096, "head_dim": 96},
    "null for what may be": {"model_type": "mixtral", "sliding_window": None, "head_dim": None},
    "experts by the other name": {"model_type": "mixtral", "num_experts": 4},
    "experts by both names": {"model_type": "olmoe", "num_experts": 16, "num_local_experts": 16},
    "fields of nobody": {"model_type": "mixtral", "something": [1], "eos_token_id": [2, 3], "pad_token_id": -1},
}
UNUSUAL: dict[str, Fields] = {
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "yarn, as it was": {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    "part of a head": {"partial_rotary_factor": 0.5},
    "rope by its old word": {"rope_parameters": {"type": "default"}},
    "kinds of layers": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    "two numbers of experts": {"num_experts": 4, "num_local_experts": 8},
}
REFUSED: dict[str, Fields] = {
    "text for a number": {"hidden_size": "4096"},
    "a broken number": {"vocab_size": 32000.0},
    "true for a number": {"num_attention_heads": True},
    "null": {"num_key_value_heads": None},
    "whole number for a broken one": {"rms_norm_eps": 1},
    "number for a truth": {"tie_word_embeddings": 1},
    "odd heads": {"head_dim": 31},
    "no layers": {"num_hidden_layers": 0},
    "no heads": {"num_attention_heads": 0},
    "negative": {"hidden_size": -4096},
    "more experts than there are": {"num_experts_per_tok": 9},
    "another activation": {"hidden_act": "gelu"},
    "rope is a list": {"rope_parameters": [1]},
    "layers that differ": {"per_layer_config": {"0": {"num_local_experts": 2}}},
}


def write(folder: Path, fields: Fields) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", PLAIN)
def test_every_value_is_transformers_own(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    own, theirs = configuration.read(write(tmp_path, PLAIN[name])), AutoConfig.from_pretrained(tmp_path)
    assert isinstance(own, Config)
    for field in dataclasses.fields(own):
        value, missing = getattr(own, field.name), None if field.name != "attention_bias" else False
        missing = False if field.name == "norm_topk_prob" else missing
        expected: Any = getattr(theirs, field.name, missing)
        assert (value, type(value)) == (expected, type(expected)), field.name
    assert light_modules.knows(own) and light_modules.knows(theirs)


def test_every_family_that_needs_no_library_is_read_here() -> None:
    for name, family in FAMILIES.items():
        if family.plain:
            assert parse({"model_type": name}).model_type == name
        else:
            with pytest.raises(ValueError, match="model type"):
                parse({"model_type": name})


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_plain_is_transformers_to_read(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoConfig

    write(tmp_path, {"model_type": "mixtral", **UNUSUAL[name]})
    with caplog.at_level(logging.INFO, "floe_chat.models"):
        read = configuration.read(tmp_path)
    assert read.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert "transformers reads" in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="damaged"):
        configuration.read(write(tmp_path, {"model_type": "mixtral", **REFUSED[name]}))


@pytest.mark.parametrize(
    "content", [None, "", "[]", "null", "{}", '{"model_type": ["mixtral"]}', "[" * 100_000, "\x80"]
)
def test_a_file_that_is_no_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(PackError, match="damaged"):
        configuration.read(tmp_path)


SOUND: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "head_dim": 128,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
}
OF_NO_RECORD = "ngram_vocab_size_base", "ngram_size", "heads_per_ngram"  # what no family with a record has
OWN = {name: limits for name, limits in config_limits.SIZES.items() if name not in OF_NO_RECORD}
BAD: list[tuple[str, Any]] = [
    *((name, value) for name, (least, most) in OWN.items() for value in (least - 1, most + 1)),
    *((name, value) for name in OWN for value in (2 * 10**9, 10**30, "x")),
    *((name, value) for name in config_limits.FIGURES for value in (math.nan, math.inf, -1.0, "x")),
    ("num_experts", 10**9),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", True),
    ("num_experts_per_tok", 9),
    ("num_key_value_heads", 7),
    ("head_dim", 33),
]


OTHERS: dict[str, tuple[str, ...]] = {  # families with the fields that Mixtral does not have
    "qwen2_moe": ("shared_expert_intermediate_size", "moe_intermediate_size", "decoder_sparse_step"),
    "ernie4_5_moe": ("moe_num_shared_experts",),
    "deepseek": ("moe_layer_freq",),
    "gemma4_text": ("global_head_dim", "num_global_key_value_heads"),
    "lfm2_moe": ("num_dense_layers", "conv_L_cache", "norm_eps"),
    "qwen3_5_moe_text": (
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
    "deepseek_v3": (
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_shared_experts"),
        *("num_nextn_predict_layers", "first_k_dense_replace", "routed_scaling_factor"),
    ),
}


def write_sound(folder: Path, **fields: Any) -> Path:
    """A configuration of a family that has the fields."""
    kind = next((kind for kind, names in OTHERS.items() if fields.keys() & set(names)), "mixtral")
    sizes: dict[str, Any] = {} if kind == "mixtral" else {"moe_intermediate_size": 64, "num_key_value_heads": 32}
    sizes |= {"enable_moe_block": True, "hidden_size_per_layer_input": 0} if kind == "gemma4_text" else {}
    (folder / "config.json").write_text(json.dumps(SOUND | {"model_type": kind} | sizes | fields))
    return folder


def test_a_sound_configuration_is_accepted(tmp_path: Path) -> None:
    write_sound(tmp_path)
    assert config_limits.problem(SOUND) is None
    assert read_config(tmp_path).head_dim == configuration.read(tmp_path).head_dim == 128
    assert described(str(tmp_path)).sizes.layers == 32


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_number_beyond_its_limits_is_refused_wherever_it_is_read(name: str, value: Any, tmp_path: Path) -> None:
    write_sound(tmp_path, **{name: value})
    for read in (read_config, Checkpoint):
        with pytest.raises(CheckpointError, match="does not describe a model") as caught:
            read(tmp_path)
        assert len(caught.value.cause) < 200
    with pytest.raises(PackError, match="damaged"):
        configuration.read(tmp_path)
    if name in config_limits.SIZES and name != "sliding_window":
        with pytest.raises(CheckpointError, match="does not describe a model"):
            described(str(tmp_path))


@pytest.mark.parametrize("name", OF_NO_RECORD)
def test_a_number_of_a_family_without_a_record_has_limits(name: str) -> None:
    least, most = config_limits.SIZES[name]
    assert config_limits.problem(SOUND | {name: most}) is None
    for value in (least - 1, most + 1):
        assert name in (config_limits.problem(SOUND | {name: value}) or "")


def test_sizes_that_are_too_large_together_are_refused(tmp_path: Path) -> None:
    most = {name: config_limits.SIZES[name][1] for name in ("num_hidden_layers", "num_local_experts")}
    write_sound(tmp_path, **most)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert "layers of" in caught.value.cause
    with pytest.raises(CheckpointError):
        described(str(tmp_path))


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, math.nan, [1], None, True])
def test_a_value_is_shown_shortly(value: Any) -> None:
    assert 0 < len(config_limits.shown(value)) <= 61


PROGRAM = """
import sys, threading, time
from pathlib import Path
from floe_chat.models.checkpoint import read_config

folder, failed = Path(sys.argv[1]), []

def read(wait):
    time.sleep(wait)
    try:
        read_config(folder)
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")

threads = [threading.Thread(target=read, args=(0.02 * i,)) for i in range(40)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(set(failed)))
"""


@pytest.mark.thorough
def test_threads_that_come_while_it_is_imported_find_its_names(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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


@pytest.mark.some(1)
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
