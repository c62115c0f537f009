"""Models that also see: of their files only the language model's configuration, tensors and stop tokens count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families import FAMILIES, language_fields
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.tokenizer.chat_format import ChatFormat
from safetensors.torch import load_file, save_file

from .. import families
from ..helpers import edit_json

NESTED, ALONE = "qwen3_5_moe", "qwen3_5_moe_text"
READERS: tuple[Callable[[Path], object], ...] = (read_config, Checkpoint, lambda folder: described(str(folder)))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make(NESTED, tmp_path_factory.mktemp("nested") / "source")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return families.make(NESTED, tmp_path / "source")


def config(folder: Path, **fields: Any) -> Path:
    """A folder with nothing but the configuration, some nested fields changed."""
    folder.mkdir(exist_ok=True)
    text = {**families.MODELS[NESTED], "hidden_size": 40, "num_attention_heads": 4, "vocab_size": 259, **fields}
    (folder / "config.json").write_text(json.dumps({"model_type": NESTED, "text_config": text}))
    return folder


def test_its_sizes_are_those_of_the_language_model_alone(published: Path, tmp_path: Path) -> None:
    alone = families.make(ALONE, tmp_path)
    assert described(str(published)).sizes == described(str(alone)).sizes
    assert described(json.loads((published / "config.json").read_text())).sizes.model_type == ALONE
    ours, theirs = (read_config(folder).to_dict() for folder in (published, alone))
    about_files = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {name for name in ours if ours[name] != theirs[name]} <= about_files


def test_what_it_sees_with_is_not_packed(source: Path) -> None:
    save_file({"mtp.norm.weight": torch.ones(40)}, source / "more.safetensors")
    (source / "model.safetensors.index.json").unlink()
    checkpoint = Checkpoint(source)
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in checkpoint.places)
    assert {name for stage in DensePart(checkpoint, 4).stages for name in stage} == set(checkpoint.dense_names())
    assert any(name.startswith("model.visual.") for shard in source.glob("*.safetensors") for name in load_file(shard))


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", ["together", "apart"])
@pytest.mark.parametrize("kind", [NESTED, ALONE])
def test_experts_are_read_wherever_they_are_stored(published: Path, tmp_path: Path, kind: str, layout: str) -> None:
    """Published together; transformers writes them apart."""

    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    loader: Any = AutoModelForCausalLM if kind == ALONE else AutoModelForImageTextToText
    theirs = loader.from_pretrained(published, dtype=torch.bfloat16)
    fresh = loader.from_config(theirs.config, dtype=torch.bfloat16)  # it does not know how it was published
    fresh.load_state_dict(theirs.state_dict())
    fresh.save_pretrained(tmp_path, save_original_format=layout == "apart")
    own, known = Checkpoint(tmp_path), Checkpoint(published)
    assert own.storage.together == (layout == "together") and known.storage.together
    assert own.dense_names()[1].startswith("model.language_model." if kind == NESTED else "model.")
    for layer in range(3):
        for expert in range(6):
            pairs = zip(own.expert(layer, expert), known.expert(layer, expert), strict=True)
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_nested_stop_tokens_end_an_answer(source: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        edit_json(source / file, lambda fields: fields.pop("eos_token_id", None))
    edit_json(source / "config.json", lambda fields: fields["text_config"].update(eos_token_id=[7, 9]))
    assert ChatFormat(source).stop_ids == (2, 7, 9)


@pytest.mark.parametrize("changed", [{"num_experts": 0}, {"hidden_size": "x"}, {"num_hidden_layers": 10**9}], ids=str)
def test_nested_numbers_have_their_limits(changed: dict[str, Any], tmp_path: Path) -> None:
    config(tmp_path, **changed)
    for read in READERS:
        with pytest.raises(CheckpointError, match="does not describe a model"):
            read(tmp_path)


@pytest.mark.parametrize("nested", [None, [], 7, "x"], ids=repr)
def test_a_language_model_that_is_missing_is_refused(nested: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": NESTED, "text_config": nested}))
    with pytest.raises(CheckpointError, match="does not describe a model"):
        described(str(tmp_path))
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)


def test_other_models_have_no_nested_fields() -> None:
    fields = {"model_type": "mixtral", "hidden_size": 64, "text_config": {"hidden_size": 32}}
    assert language_fields(fields) is fields
    assert all(language_fields({"model_type": name})["model_type"] == name for name in FAMILIES)


def test_nested_weights_that_are_quantized_are_refused(source: Path) -> None:
    edit_json(source / "config.json", lambda fields: fields.update(quantization_config={"quant_method": "torchao"}))
    for read in READERS:
        with pytest.raises(CheckpointError, match="torchao weights"):
            read(source)
