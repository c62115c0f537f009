"""Every number of a configuration has limits wherever it is read: none makes floe-chat hang or take all memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models import config_limits, configuration
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError, PackError

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
BAD: list[tuple[str, Any]] = [
    *((name, value) for name, (least, most) in config_limits.SIZES.items() for value in (least - 1, most + 1)),
    *((name, value) for name in config_limits.SIZES for value in (2 * 10**9, 10**30, "x")),
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


def write(folder: Path, **fields: Any) -> Path:
    """A configuration of a family that has the fields."""
    kind = next((kind for kind, names in OTHERS.items() if fields.keys() & set(names)), "mixtral")
    sizes: dict[str, Any] = {} if kind == "mixtral" else {"moe_intermediate_size": 64, "num_key_value_heads": 32}
    sizes |= {"enable_moe_block": True, "hidden_size_per_layer_input": 0} if kind == "gemma4_text" else {}
    (folder / "config.json").write_text(json.dumps(SOUND | {"model_type": kind} | sizes | fields))
    return folder


def test_a_sound_configuration_is_accepted(tmp_path: Path) -> None:
    write(tmp_path)
    assert config_limits.problem(SOUND) is None
    assert read_config(tmp_path).head_dim == configuration.read(tmp_path).head_dim == 128
    assert described(str(tmp_path)).sizes.layers == 32


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_number_beyond_its_limits_is_refused_wherever_it_is_read(name: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, **{name: value})
    for read in (read_config, Checkpoint):
        with pytest.raises(CheckpointError, match="does not describe a model") as caught:
            read(tmp_path)
        assert len(caught.value.cause) < 200
    with pytest.raises(PackError, match="damaged"):
        configuration.read(tmp_path)
    if name in config_limits.SIZES and name != "sliding_window":
        with pytest.raises(CheckpointError, match="does not describe a model"):
            described(str(tmp_path))


def test_sizes_that_are_too_large_together_are_refused(tmp_path: Path) -> None:
    most = {name: config_limits.SIZES[name][1] for name in ("num_hidden_layers", "num_local_experts")}
    write(tmp_path, **most)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert "layers of" in caught.value.cause
    with pytest.raises(CheckpointError):
        described(str(tmp_path))


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, math.nan, [1], None, True])
def test_a_value_is_shown_shortly(value: Any) -> None:
    assert 0 < len(config_limits.shown(value)) <= 61
