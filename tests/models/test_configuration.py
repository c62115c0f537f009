"""A configuration that is read here has the values that transformers gives it; any other is left to transformers."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models import configuration
from floe_chat.models.configuration import Config, parse
from floe_chat.models.errors import PackError
from floe_chat.models.families import FAMILIES
from floe_chat.models.modules import light_modules

Fields = dict[str, Any]

MIXTRAL_8X7B: Fields = {  # as published, and as it was before transformers 5
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
OLMOE_1B_7B: Fields = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 50304,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PLAIN: dict[str, Fields] = {
    "Mixtral": MIXTRAL_8X7B,
    "OLMoE": OLMOE_1B_7B,
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


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", "-1e-5"])
def test_numbers_that_are_not_finite_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "mixtral", "rms_norm_eps": {value}}}')
    with pytest.raises(PackError, match="damaged") as caught:
        configuration.read(tmp_path)
    assert "rms_norm_eps" in caught.value.cause
