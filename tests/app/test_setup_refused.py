"""Models on a hub that cannot be packed are refused by config.json or the shards' headers, before any weights come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.setups import look_up
from floe_chat.app.setup.wish import Wish
from floe_chat.models import catalog
from floe_chat.models.errors import CheckpointError, FloeError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..helpers import explained, run_cli, write_tokenizer
from ..models.fakehub import FakeHub
from .wizardry import IMPATIENT, REPO, ended

Tensors = dict[str, Tensor]
QWEN: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a shared expert, in one shard."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    folder = tmp_path_factory.mktemp("published") / "qwen"
    folder.mkdir()
    model: Any = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=write_tokenizer(folder), **QWEN))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(qwen: Path, tmp_path: Path) -> Path:
    return shutil.copytree(qwen, tmp_path / "copy")


def served(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub({REPO: folder})
    hub.used_by(monkeypatch, tmp_path / "hub home")
    return hub


def quantized(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (quantized("awq"), f"{REPO} has AWQ weights, which cannot be read yet"),
        ({"quantization_config": {"bits": 4}}, "has quantized weights"),
        ({"model_type": "bailing_moe", "auto_map": {"AutoConfig": "x.Y"}}, f"{REPO} needs code of its own"),
        ({"model_type": "brand_new_moe"}, "'brand_new_moe' is not supported yet"),
        ({"model_type": "dbrx"} | quantized("fp8"), "DBRX is not supported yet"),
        ({"model_type": "llama", "num_experts": None}, f"{REPO} is not a Mixture-of-Experts model"),
    ],
    ids=str,
)
def test_config_json_says_why(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    with served(copy, tmp_path, monkeypatch) as hub:
        with pytest.raises(CheckpointError) as caught:
            look_up(Wish(REPO, "tiny"))
        shown = explained(run_cli("setup", REPO, "--yes"), 1)
        with Setup(Wish(REPO, "tiny"), tuning=IMPATIENT) as running:
            ended(running.start())
    assert said in caught.value.title and caught.value.hint
    assert running.error is not None and said in running.error.title
    assert said in shown and not any(request.storage for request in hub.requests)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def reshaped(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor[..., :-1].contiguous() if part in name else tensor for name, tensor in tensors.items()
    }


def as_integers(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor.to(torch.int8) if part in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("layers.1.mlp.shared_expert.up_proj"), "layers.1.mlp.shared_expert.up_proj.weight is missing"),
        (without("layers.1.mlp.experts.3.down_proj"), "No shard holds model.layers.1.mlp.experts.3.down_proj.weight"),
        (reshaped("experts.2.up_proj"), "experts.2.up_proj.weight is BF16 of (64, 63)"),
        (reshaped("shared_expert_gate"), "shared_expert_gate.weight is of shape (1, 63)"),
        (as_integers("experts.0.gate_proj"), "experts.0.gate_proj.weight is I8"),
    ],
    ids=range(5),
)
def test_headers_say_why(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors], said: str
) -> None:
    shard = copy / "model.safetensors"
    save_file(change(load_file(shard)), shard)
    with served(copy, tmp_path, monkeypatch) as hub:
        look_up(Wish(REPO, "tiny"))
        with Setup(Wish(REPO, "tiny"), tuning=IMPATIENT) as running:
            ended(running.start())
    error = running.error
    assert isinstance(error, FloeError) and said in error.cause and error.hint
    # One look at the header, and the rest of the shard never came.
    looked = [request.range for request in hub.requests if request.storage]
    assert looked == ["bytes=0-262143"]
    assert not list(catalog.models_folder().rglob("*.safetensors*"))


def test_the_same_model_unchanged_is_set_up(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(qwen, tmp_path, monkeypatch), Setup(Wish(REPO, "tiny"), tuning=IMPATIENT) as running:
        ended(running.start())
    assert running.error is None
