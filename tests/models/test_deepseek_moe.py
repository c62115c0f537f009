"""DeepSeekMoE, which transformers lacks: our classes against a plain definition of the published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from floe_chat.models.checkpoint import read_config
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families import FAMILIES
from safetensors.torch import load_file
from torch import Tensor

from .. import families
from ..helpers import edit_json, reference_model, relative_rms

NAME = "deepseek"
REMOTE = {"AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModelForCausalLM": "modeling_deepseek.Deepseek"}


class Plain:
    """The published model over its own tensors, one token sequence at a time, in float64. T tokens, H hidden size.

    Written after the paper (arXiv 2401.06066, section 3) and the code that comes with the published checkpoints.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        self.config = config
        self.weights: dict[str, Tensor] = {}
        for shard in folder.glob("*.safetensors"):
            self.weights |= {name: tensor.double() for name, tensor in load_file(shard).items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def turned(self, x: Tensor) -> Tensor:
        """Rope: the two halves of each head (heads, T, D) turn together."""
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, name: str, x: Tensor) -> Tensor:
        heads, keys = self.config.num_attention_heads, self.config.num_key_value_heads
        q, k, v = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        q = self.turned(q.unflatten(-1, (heads, -1)).transpose(0, 1))
        k = self.turned(k.unflatten(-1, (keys, -1)).transpose(0, 1)).repeat_interleave(heads // keys, 0)
        v = v.unflatten(-1, (keys, -1)).transpose(0, 1).repeat_interleave(heads // keys, 0)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))

    def block(self, layer: int, x: Tensor) -> Tensor:
        name, config = f"model.layers.{layer}.mlp", self.config
        if layer < config.first_k_dense_replace or layer % config.moe_layer_freq:
            return self.mlp(name, x)
        weights, chosen = self.linear(f"{name}.gate", x).softmax(-1).topk(config.num_experts_per_tok)
        rows: list[Tensor] = []
        for token in range(len(x)):
            experts = zip(weights[token], chosen[token].tolist(), strict=True)
            rows.append(sum((w * self.mlp(f"{name}.experts.{n}", x[token]) for w, n in experts), torch.zeros(())))
        return self.mlp(f"{name}.shared_experts", x) + torch.stack(rows)

    def logits(self, ids: list[int]) -> Tensor:
        """(T, V)."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            x = x + self.block(layer, self.norm(f"{name}.post_attention_layernorm", x))
        return self.linear("lm_head", self.norm("model.norm", x))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return families.make(NAME, tmp_path / "source")


def test_it_computes_what_the_published_model_does(source: Path) -> None:
    model, ids = reference_model(source), torch.randint(3, 250, (23,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got = model(input_ids=ids[None]).logits[0]
    assert relative_rms(got, Plain(source, model.config).logits(ids.tolist())) <= 1e-6


def test_every_second_layer_may_have_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**families.MODELS[NAME], "first_k_dense_replace": 0, "moe_layer_freq": 2}
    monkeypatch.setitem(families.MODELS, NAME, fields)
    source = families.make(NAME, tmp_path / "source")
    assert FAMILIES[NAME].expert_layers(read_config(source)) == [0, 2]
    test_it_computes_what_the_published_model_does(source)


def test_the_code_that_comes_with_it_is_not_run(source: Path) -> None:
    (source / "configuration_deepseek.py").write_text("raise SystemExit('it ran')")
    edit_json(source / "config.json", lambda fields: fields.update(auto_map=REMOTE))
    assert type(read_config(source)).__module__ == "floe_chat.models.families.deepseek_moe"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", True),
        ("mlp_bias", True),
        ("topk_method", "group_limited_greedy"),
        ("n_group", 2),
        ("routed_scaling_factor", 2.0),
    ],
)
def test_what_the_published_model_does_not_do_is_refused(source: Path, field: str, value: object) -> None:
    edit_json(source / "config.json", lambda fields: fields.update({field: value}))
    with pytest.raises(CheckpointError) as caught:
        read_config(source)
    assert f"its {field} is {value!r}" in caught.value.cause
