"""A GGUF file of 16 bits by the official converter's rules gives the same pack, bit for bit, as its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.pack.manifest import DRAFT
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import EXACT, pack

from ... import families
from ...engine.driver import open_model
from ...helpers import calibration_tokens, edit_json
from . import vocabulary
from .converting import convert

# What the files do not say, as in published models.
STATED: dict[str, dict[str, Any]] = {"lfm2_moe": {"routed_scaling_factor": 1.0}}
SCALES = {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
NOT_CONVERTED = {
    "qwen3_moe layers without experts",  # the converter knows no names for their matrices
    "lfm2_moe biases",  # nor for a head of its own
    "qwen3_5_moe",  # is the same with names of its own
    "gemma4",
}
WITH_ONE = ("qwen3_next", "qwen3_5_moe_text")
"""Norms that the converter adds one to, which in float16 loses their last bits, and in bfloat16 does not."""


def packed(source: Path | GgufShelf, folder: Path) -> dict[str, bytes]:
    """The files of a pack that hold weights, of 16 bits: those of fewer follow from them."""
    pack(Checkpoint(source), folder, replace(EXACT, signal="gate"), calibration_tokens(2), "tiny")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def made(name: str, folder: Path, dtype: torch.dtype, *, head: bool = False) -> Path:
    source = families.make(name, folder, dtype)
    if head:
        families.add_head(source)
    families.one_shard(source)
    edit_json(source / "config.json", lambda fields: fields.update(STATED.get(name, {})))
    if name == "phimoe":
        edit_json(source / "config.json", lambda fields: fields["rope_parameters"].update(SCALES))
    return source


def converted(name: str, folder: Path, *, head: bool = False) -> tuple[Path, GgufShelf]:
    """The checkpoint, perhaps with a drafting head, and a file of its weights bit for bit."""
    dtype, kind = (torch.bfloat16, "BF16") if head or name in WITH_ONE else (torch.float16, "F16")
    source = made(name, folder / "source", dtype, head=head)
    way = "glm4" if name == "glm4_moe_lite" else "gpt-2"
    file = convert(source, folder / "tiny.gguf", kind, tokenizer=partial(vocabulary.byte_level, pre=way))
    return source, GgufShelf(file, folder / "made")


CONVERTED = [name for name in families.MODELS if name not in NOT_CONVERTED]
NOT_COMPUTED = {
    *("_name_or_path", "architectures", "dtype", "initializer_range", "pad_token_id", "eos_token_id"),
    # Of experts of another name, and of layers left out.
    *("moe_intermediate_size", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
}
DEFAULTS = {"head_dim": 10, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "rms_norm_eps": 1e-5}
"""What the file states where the checkpoint leaves it out."""


@pytest.mark.some(10)
@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_is_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Its weights bit for bit, and each field that is computed with."""
    source, shelf = converted(name, tmp_path)
    ours, theirs = Checkpoint(shelf), Checkpoint(source)
    assert ours.exact and ours.float16 == theirs.float16 and not shelf.rounding
    assert ours.dense_names() == theirs.dense_names() and len(ours.dense_names()) > 3
    for part in ours.dense_names():
        assert torch.equal(ours.tensor(part), theirs.tensor(part)), part
    for layer in range(len(theirs.layers)):
        for expert in range(theirs.experts):
            mine, published = (checkpoint.whole_expert(layer, expert) for checkpoint in (ours, theirs))
            assert all(torch.equal(*both) for both in zip(mine[:3], published[:3], strict=True))
            biases = zip(mine.biases or (), published.biases or (), strict=True)
            assert all(torch.equal(*both) for both in biases)
    said, wanted = (checkpoint.config.to_dict() for checkpoint in (ours, theirs))
    differ = {field for field in {*said, *wanted} - NOT_COMPUTED if said.get(field) != wanted.get(field)}
    differ -= {"rope_parameters"} if name == "gemma4_text" else set()  # whose part of a head is rounded to whole turns
    assert {field: said.get(field) for field in differ} == {field: DEFAULTS.get(field, ...) for field in differ}
    assert {wanted.get(field) for field in differ} <= {None}


# One of each way in which a file says things; the others pack by the same weights.
PACKED = ("mixtral", "qwen3_next", "deepseek_v2", "gemma4_text")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PACKED else pytest.mark.thorough) for name in CONVERTED]
)
def test_its_pack_is_its_checkpoints(name: str, tmp_path: Path) -> None:
    source, shelf = converted(name, tmp_path)
    ours, theirs = packed(shelf, tmp_path / "ours"), packed(source, tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and len(ours) > 3
    assert not [file for file in ours if ours[file] != theirs[file]]
    logits = [open_model(tmp_path / pack).decoder.forward([5, 100, 7, 42, 9], KVCache()) for pack in ("ours", "theirs")]
    assert torch.equal(*logits)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text"])
def test_its_head_is_its_checkpoints(name: str, tmp_path: Path) -> None:
    source, shelf = converted(name, tmp_path, head=True)
    ours, theirs = packed(shelf, tmp_path / "ours"), packed(source, tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and DRAFT in ours
    assert not [file for file in ours if ours[file] != theirs[file]]
    model = PackedModel.open(tmp_path / "ours")
    assert model.head() is not None and not model.headless


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "kind"), [("mixtral", "F32"), ("deepseek_v2", "BF16")])
def test_so_is_that_of_other_widths(name: str, kind: str, tmp_path: Path) -> None:
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[kind]
    source = made(name, tmp_path / "source", dtype)
    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", kind), tmp_path / "made")
    assert Checkpoint(shelf).exact  # until a number that 16 bits do not hold is read
    assert packed(shelf, tmp_path / "ours") == packed(source, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("name", "how", "parts"),
    [
        ("mixtral", "apart", 5),
        ("granitemoe", "merged", 7),
        pytest.param("qwen3_5_moe_text", "fused", 0, marks=pytest.mark.thorough),
    ],
)
def test_so_is_that_of_other_layouts(name: str, how: str, parts: int, tmp_path: Path) -> None:
    """Experts apart, as old files have them; gate and up in one tensor; a file in several parts."""
    dtype, kind = (torch.bfloat16, "BF16") if name in WITH_ONE else (torch.float16, "F16")
    source = made(name, tmp_path / "source", dtype)
    file = convert(source, tmp_path / "tiny.gguf", kind, how=how, parts=parts)
    ours = packed(GgufShelf(file, tmp_path / "made"), tmp_path / "ours")
    assert ours == packed(source, tmp_path / "theirs")
    if parts:
        files = sorted(tmp_path.glob("tiny-*.gguf"))
        assert len(files) > 3
        found = (GgufShelf(files[at], tmp_path / f"made{at}").headers() for at in (0, -1))
        assert next(found) == next(found), "any part will do"


def test_so_is_that_of_blocks_as_published(tmp_path: Path) -> None:
    _, coded = families.make_coded(tmp_path)
    families.one_shard(coded)
    shelf = GgufShelf(convert(coded, tmp_path / "tiny.gguf", "BF16", stated="MXFP4_MOE"), tmp_path / "made")
    assert Checkpoint(shelf).exact and not shelf.rounding
    assert packed(shelf, tmp_path / "ours") == packed(coded, tmp_path / "theirs")
