"""Gemma 4: what is wrong with a checkpoint is said before it is packed, and what differs between layers counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.planning.footprint import kv_bytes
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families import FAMILIES
from floe_chat.models.packing.dense_part import DensePart
from torch import Tensor, nn

from .. import families
from ..helpers import edit_json, reference_model

Weights = dict[str, Tensor]
READERS: tuple[Callable[[Path], object], ...] = (read_config, Checkpoint, lambda folder: described(str(folder)))
LAYER = "model.language_model.layers.1."
SCALE, EXPERTS, HEADS = (f"{LAYER}{name}" for name in ("router.scale", "experts.down_proj", "self_attn.k_proj.weight"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make("gemma4", tmp_path_factory.mktemp("gemma") / "made")


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    """A checkpoint to change."""
    return Path(shutil.copytree(made, tmp_path / "source"))


def change(source: Path, **fields: Any) -> None:
    edit_json(source / "config.json", lambda given: given["text_config"].update(fields))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({"enable_moe_block": False, "num_experts": None, "top_k_experts": None}, "has no experts"),
    "embeddings of layers": ({"hidden_size_per_layer_input": 8}, "for each layer"),
    "keys of other layers": ({"num_kv_shared_layers": 2}, "keys and values of others"),
    "no order": ({"use_bidirectional_attention": "all"}, "does not write text"),
    "biases": ({"attention_bias": True}, "has biases"),
}


@pytest.mark.parametrize(("fields", "cause"), REFUSED.values(), ids=REFUSED)
def test_models_that_need_more_are_refused_in_a_sentence(source: Path, fields: dict[str, Any], cause: str) -> None:
    change(source, **fields)
    for read in READERS:
        with pytest.raises(CheckpointError, match="not a model that floe-chat supports") as caught:
            read(source)
        assert cause in caught.value.cause and caught.value.cause.count(". ") == 0 and caught.value.hint


def test_embeddings_of_layers_are_the_library_s_default(source: Path) -> None:
    edit_json(source / "config.json", lambda given: given["text_config"].pop("hidden_size_per_layer_input"))
    with pytest.raises(CheckpointError, match="not a model that floe-chat supports"):
        read_config(source)


BAD: dict[str, dict[str, Any]] = {
    "no experts": {"num_experts": 0},
    "more than there are": {"top_k_experts": 7},
    "no width": {"moe_intermediate_size": None},
    "odd heads": {"global_head_dim": 13},
    "huge heads": {"global_head_dim": 1 << 20},
    "heads that share nothing": {"num_global_key_value_heads": 3},
    "a kind that is not known": {"layer_types": ["sliding_attention", "conv"] * 2},
    "kinds of too few layers": {"layer_types": ["full_attention"]},
    "another width in one layer": {"per_layer_config": {"1": {"moe_intermediate_size": 64}}},
    "odd heads by layer": {"per_layer_config": {"1": {"head_dim": 13}, "3": {"head_dim": 13}}},
    "huge heads by layer": {"per_layer_config": {"1": {"head_dim": 1 << 20}, "3": {"head_dim": 1 << 20}}},
    "heads of one layer alone": {"per_layer_config": {"1": {"head_dim": 14}}},
    "a layer that is left out": {"per_layer_config": {"1": {"skip": ["mlp"]}, "3": {"skip": ["mlp"]}}},
    "layers by no number": {"per_layer_config": {"x": {"head_dim": 14}}},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_configurations_that_make_no_sense(source: Path, fields: dict[str, Any]) -> None:
    change(source, **fields)
    for read in READERS:
        with pytest.raises(CheckpointError, match="does not describe a model"):
            read(source)


def test_another_activation_is_refused(source: Path) -> None:
    change(source, hidden_activation="silu")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(source)
    assert "its experts use 'silu'" in caught.value.cause


def test_heads_may_be_stated_by_kind_or_layer_by_layer(source: Path, tmp_path: Path) -> None:
    """As published, and as transformers writes them."""
    before = described(str(source)).sizes
    assert before.wide and (before.wide.layers, before.wide.kv_heads, before.wide.head_dim) == (2, 1, 14)
    read_config(source).save_pretrained(tmp_path / "saved")
    assert "per_layer_config" in (tmp_path / "saved" / "config.json").read_text()
    assert described(str(tmp_path / "saved")).sizes == before


@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_sizes_are_those_of_what_is_packed_and_cached(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(families.make(name, tmp_path))
    sizes = described(str(tmp_path)).sizes
    assert sizes.parameters == sum(weight.numel() for weight in model.parameters())
    cache = model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kv_bytes(sizes, 16).of(1) == 2 * cached // 3
    coded = sum(layer.keys.shape[1] * 2 * (layer.keys.shape[-1] + 2) for layer in cache.layers)
    assert kv_bytes(sizes, 8).of(1) == coded


CHANGES: dict[str, tuple[Callable[[Weights], object], str]] = {
    "no scale": (lambda weights: weights.pop(SCALE), "layers.1.router.scale is missing; (40,) is needed"),
    "heads as the others": (
        lambda weights: weights.update({HEADS: torch.zeros(20, 40)}),
        "of shape (20, 40); (14, 40)",
    ),
    "no experts": (lambda weights: weights.pop(EXPERTS), f"No shard holds {EXPERTS}."),
}


@pytest.mark.parametrize(("how", "cause"), CHANGES.values(), ids=CHANGES)
def test_weights_that_do_not_fit(source: Path, how: Callable[[Weights], object], cause: str) -> None:
    error = families.refused(source, how)
    assert cause in error.cause and error.hint


def test_only_the_language_model_is_packed(source: Path) -> None:
    checkpoint = Checkpoint(source)
    assert all(name.startswith("model.language_model.") for name in checkpoint.places)
    plan = DensePart(checkpoint, 4).plan
    assert f"{LAYER}layer_scalar" in plan and "lm_head.q" in plan
    assert f"{LAYER}router.proj.weight" in plan and not any(name.startswith(EXPERTS) for name in plan)


def test_experts_input_tells_the_router_s_scores(source: Path) -> None:
    """By which predictors look ahead: the router itself reads the residual stream."""
    model: Any = reference_model(source)
    family, inputs, scores = FAMILIES["gemma4_text"], list[Tensor](), list[Tensor]()

    def note(_router: nn.Module, _given: object, found: tuple[Tensor, ...]) -> None:
        scores.append(found[0])

    def note_input(_experts: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0])

    for layer in model.model.layers:
        layer.router.register_forward_hook(note)
        layer.experts.register_forward_pre_hook(note_input)
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 40)[None])
        for layer, wanted, x in zip(model.model.layers, scores, inputs, strict=True):
            torch.testing.assert_close((x @ family.scores_by(layer).T).softmax(-1), wanted)
        layer = model.model.layers[0]
        layer.pre_feedforward_layernorm_2.weight[:3] = 0.0
        assert bool(family.scores_by(layer).isfinite().all())
