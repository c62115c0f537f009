"""The small model that guesses another one's tokens, as a file of that one's pack."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.models.checking.repair import add_draft
from floe_chat.models.checking.verify import LIMITS, damages, senseless
from floe_chat.models.checkpoint import read_config
from floe_chat.models.errors import CheckpointError, UsageError
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack.assistant import CONFIG, PackedAssistant
from floe_chat.models.pack.manifest import DRAFT, Manifest, file_entry
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.assistant_part import AssistantSource
from floe_chat.models.packing.pack import PackSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..helpers import edit_json, make_pack, relative_rms

LOW = PackSpec(up=3, gate=4, down=4, dense=4, signal="up")
GEMMA4 = FAMILIES["gemma4_text"]


def silent(_step: str, _share: float, _left: float | None = None) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.make("gemma4", tmp_path_factory.mktemp("gemma") / "source")


@pytest.fixture(scope="module")
def assistant(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assistant") / "small"
    families.add_assistant(source, folder)
    return folder


@pytest.fixture(scope="module")
def bare(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    make_pack(source, folder, LOW)
    return folder


@pytest.fixture(scope="module")
def packed(bare: Path, assistant: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(bare, tmp_path_factory.mktemp("packed") / "tiny"))
    add_draft(AssistantSource(assistant, GEMMA4), folder, silent)
    return folder


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "tiny"))


def test_it_changes_nothing_else_of_a_pack(bare: Path, packed: Path, assistant: Path) -> None:
    manifest = Manifest.read(packed)
    assert [*manifest.beside] == [DRAFT] and replace(manifest, beside={}) == Manifest.read(bare)
    assert not damages(packed, manifest, silent) and PackedModel.open(bare).head() is None
    found = PackedModel.open(packed).head()
    assert isinstance(found, PackedAssistant)
    theirs = load_file(assistant / "model.safetensors")
    for name, part in (("pre_projection", found.joined), ("post_projection", found.back)):
        assert not isinstance(part, Tensor)
        assert relative_rms(part.dense(torch.float32), theirs[f"{name}.weight"].float()) <= LIMITS[4]
    assert not any("k_proj" in name or "embed_tokens" in name for name in found.dense)
    assert Footprint.of_pack(manifest, read_config(packed)).draft == (packed / DRAFT).stat().st_size


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"backbone_hidden_size": 48}, "It reads 48 numbers of a token; this model gives 40."),
        ({"vocab_size": 100}, "Its vocab_size is 100; this model's is 259."),
        ({"sliding_window": 9}, "Its sliding_window is 9; this model's is 7."),
        ({"num_key_value_heads": 4}, "Its num_key_value_heads is 4; this model's is 2."),
        ({"global_head_dim": 18}, "Its global_head_dim is 18; this model's is 14."),
        ({"use_ordered_embeddings": True}, "an order of its own"),
        ({"num_hidden_layers": 4000}, "Its num_hidden_layers is 4,000"),
        ({"hidden_size": 32}, "It has BF16 of (24, 80) as pre_projection.weight; numbers of (32, 80) are needed."),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_one_that_does_not_fit_is_refused_in_a_sentence(
    assistant: Path, copy: Path, tmp_path: Path, changes: dict[str, Any], cause: str
) -> None:
    other, before = Path(shutil.copytree(assistant, tmp_path / "other")), (copy / DRAFT).read_bytes()

    def changed(fields: dict[str, Any]) -> None:
        for name, value in changes.items():
            (fields if name in fields else fields["text_config"])[name] = value
        if "global_head_dim" in changes:
            del fields["text_config"]["per_layer_config"]
            fields["text_config"] |= {"num_global_key_value_heads": 1}

    edit_json(other / "config.json", changed)
    with pytest.raises(CheckpointError) as caught:
        add_draft(AssistantSource(other, GEMMA4), copy, silent)
    assert cause in caught.value.cause
    assert (copy / DRAFT).read_bytes() == before


def test_other_models_are_no_assistants(source: Path, assistant: Path, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not Gemma 4's assistant"):
        AssistantSource(source, GEMMA4)
    with pytest.raises(UsageError, match="cannot be packed with this model"):
        AssistantSource(assistant, FAMILIES["mixtral"])
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        AssistantSource(tmp_path, GEMMA4)
    other = Path(shutil.copytree(assistant, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    del tensors["post_projection.weight"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        add_draft(AssistantSource(other, GEMMA4), copy, silent)
    assert "It has nothing as post_projection.weight" in caught.value.cause


@pytest.mark.parametrize(
    "part", [CONFIG, "joined.q", "back.scale", "lm_head.q", "model.layers.1.self_attn.q_norm.weight"]
)
def test_a_hostile_one_is_refused_though_its_hash_is_right(copy: Path, part: str) -> None:
    tensors = load_file(copy / DRAFT)
    if part == CONFIG:
        fields = json.loads(bytes(tensors[part].tolist()))
        fields["text_config"]["num_hidden_layers"] = 1 << 40
        tensors[part] = torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)
    else:
        tensors[part] = tensors[part][:-1].contiguous()
    save_file(tensors, copy / DRAFT)
    manifest = Manifest.read(copy)
    replace(manifest, beside={DRAFT: file_entry(copy / DRAFT)}).write(copy)
    damage = senseless(copy, Manifest.read(copy), silent)
    assert damage is not None and damage.file == DRAFT
    assert ("num_hidden_layers" if part == CONFIG else part.rpartition(".")[0]) in damage.cause
