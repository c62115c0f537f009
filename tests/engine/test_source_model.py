"""The streamed source against transformers' own forward."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.quality.source_model import SourceModel
from floe_chat.models.checkpoint import Checkpoint

from ..helpers import edit_json, edit_tensors, make_checkpoint, reference_model, relative_rms

TEXT = torch.randint(3, 250, (120,), generator=torch.Generator().manual_seed(7)).tolist()
SOURCES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral-float16": {"dtype": torch.float16, "experts": 3, "top_k": 1, "seed": 2},
    "olmoe": {"family": "olmoe", "experts": 6, "top_k": 3, "seed": 3},
}


def unread(_step: str) -> None:
    """Progress that nobody looks at."""


@pytest.mark.parametrize("name", SOURCES)
def test_streaming_is_the_ordinary_forward(tmp_path: Path, name: str) -> None:
    source = make_checkpoint(tmp_path / "source", **SOURCES[name])
    ids = torch.tensor(TEXT).view(3, 40)
    steps: list[str] = []
    streamed = SourceModel(Checkpoint(source), steps.append)
    with torch.inference_mode():
        whole = reference_model(source)(input_ids=ids, use_cache=False).logits
    assert relative_rms(streamed.logits(ids, 40), whole) <= 1e-5
    assert relative_rms(streamed.logits(ids, 7), whole[:, -7:]) <= 1e-5, "a second call reads everything again"
    assert any("layer 2 of 2" in step for step in steps)


def test_a_source_whose_head_is_its_embedding_is_streamed_too(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "tied"))
    edit_json(source / "config.json", lambda fields: fields.update(tie_word_embeddings=True))
    edit_tensors(source, lambda name, value: None if name == "lm_head.weight" else value)
    edit_json(source / "model.safetensors.index.json", lambda fields: fields["weight_map"].pop("lm_head.weight"))
    ids = torch.tensor([TEXT[:40]])
    with torch.inference_mode():
        whole = reference_model(source)(input_ids=ids, use_cache=False).logits
    assert relative_rms(SourceModel(Checkpoint(source), unread).logits(ids, 40), whole) <= 1e-5


def test_of_the_source_memory_holds_one_layer(tiny_checkpoint: Path) -> None:
    streamed = SourceModel(Checkpoint(tiny_checkpoint), unread)
    model: Any = streamed._model  # pyright: ignore[reportPrivateUsage]
    held: list[set[str]] = []

    def look(*_arguments: object) -> None:
        held.append({name.split(".")[2] for name, value in model.named_parameters() if not value.is_meta})

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_hook(look)
    streamed.logits(torch.tensor([TEXT[:8]]), 1)
    assert held == [{"0"}, {"1"}]
    assert all(value.is_meta for value in model.parameters())
    assert not list(model.model.layers[0].mlp.experts.parameters()), "experts are never held whole"
