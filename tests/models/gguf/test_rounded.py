"""Files whose weights were rounded: read by the gguf library's rules, a slice at a time, and called by their name."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from floe_chat.models import catalog
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.gguf import rounding, values
from floe_chat.models.gguf.header import GgufTensor
from floe_chat.models.gguf.parts import Gguf
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.packing.pack import EXACT, pack
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from safetensors.torch import load_file, save_file
from torch import Tensor

from ... import families
from ...helpers import calibration_tokens, edit_json, make_checkpoint
from . import vocabulary
from .converting import convert
from .crafted import Crafted, word

BLOCKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
FEW_BITS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4"]


def on_disk(path: Path, kind: str, shape: tuple[int, ...], seed: int = 0) -> GgufTensor:
    """A tensor of random bytes, some way into a file; scales among them are small numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) // size * nbytes, dtype=np.uint8)
    raw.reshape(-1, nbytes)[:] &= 0x7B  # no exponent of a float16 is all ones
    path.write_bytes(bytes(96) + raw.tobytes() + bytes(7))
    return GgufTensor("x", kind, shape, path, 96, raw.size)


@pytest.mark.parametrize("kind", [*BLOCKED, *FEW_BITS])
def test_blocks_are_read_as_the_library_reads_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_disk(tmp_path / "x", kind, (3, 40, 512))
    whole = np.frombuffer((tmp_path / "x").read_bytes()[96:-7], dtype=np.uint8).reshape(120, -1)
    wanted = torch.from_numpy(gguf.dequantize(whole, Kind[kind]).copy()).view(3, 40, 512)
    assert torch.equal(values.values(tensor), wanted)
    monkeypatch.setattr(values, "_AT_ONCE", 7 * 512)  # parts of a slice
    for index in range(3):
        assert torch.equal(values.values(tensor, index), wanted[index])


def published(source: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in source.glob("*.safetensors"):
        found |= load_file(shard)
    return found


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_rounded_file_gives_what_its_blocks_stand_for(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)
    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", kind), tmp_path / "made")
    checkpoint = Checkpoint(shelf)
    assert shelf.rounding == kind and not checkpoint.exact and checkpoint.float16 == torch.bfloat16
    theirs = published(source)
    assert theirs.keys() == checkpoint.places.keys()
    for name, tensor in theirs.items():
        found = checkpoint.tensor(name)
        plain = tensor.ndim < 2 or ".gate." in name
        data = gguf.quantize(tensor.float().numpy(), Kind[kind])
        wanted = tensor.float() if plain else torch.from_numpy(gguf.dequantize(data, Kind[kind]))
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:  # whole rows change their places
            assert torch.equal(found.sort(0).values, wanted.sort(0).values)
        else:
            assert found.dtype == torch.float32 and torch.equal(found, wanted), name
    manifest = pack(checkpoint, tmp_path / "pack", EXACT, calibration_tokens(), "tiny")
    assert not manifest.unquantized and manifest.source.rounding == kind
    assert Manifest.read(tmp_path / "pack").source.rounding == kind


def of(kinds: dict[str, str], file_type: int | None) -> Gguf:
    tensors = {name: GgufTensor(name, kind, (256, 256), Path(), 0, size(kind)) for name, kind in kinds.items()}
    return Gguf(Path("x.gguf"), {} if file_type is None else {"general.file_type": file_type}, tensors)


def size(kind: str) -> int:
    values_, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    return 65536 // values_ * nbytes


EXPERT, HEAD = "blk.0.ffn_up_exps.weight", "output.weight"
CASES = [
    ("mixtral", {EXPERT: "Q4_K", HEAD: "Q6_K", "x": "Q4_K"}, LlamaFileType.MOSTLY_Q4_K_M, "Q4_K_M", True),
    ("mixtral", {EXPERT: "Q4_K", HEAD: "F16"}, LlamaFileType.MOSTLY_F16, "Q4_K", True),  # which it does not say
    ("mixtral", {EXPERT: "Q4_K", HEAD: "F16"}, None, "Q4_K", True),
    ("mixtral", {EXPERT: "Q4_K", HEAD: "F16"}, 4711, "Q4_K", True),
    ("mixtral", {EXPERT: "IQ2_S", HEAD: "F16"}, LlamaFileType.MOSTLY_IQ2_M, "IQ2_M", True),
    ("mixtral", {EXPERT: "Q8_0", HEAD: "Q8_0"}, LlamaFileType.MOSTLY_Q8_0, "Q8_0", False),
    ("mixtral", {EXPERT: "BF16", HEAD: "F32"}, LlamaFileType.MOSTLY_BF16, "", False),
    ("mixtral", {EXPERT: "MXFP4", HEAD: "F16"}, LlamaFileType.MOSTLY_MXFP4_MOE, "MXFP4_MOE", True),
    ("gpt_oss", {EXPERT: "MXFP4", HEAD: "BF16"}, LlamaFileType.MOSTLY_MXFP4_MOE, "", False),  # as published
    ("gpt_oss", {EXPERT: "MXFP4", HEAD: "Q8_0"}, LlamaFileType.MOSTLY_MXFP4_MOE, "Q8_0", False),
    ("gpt_oss", {EXPERT: "Q4_K", HEAD: "F16"}, LlamaFileType.MOSTLY_Q4_K_M, "Q4_K_M", True),
]


@pytest.mark.parametrize(("family", "kinds", "stated", "called", "coarse"), CASES)
def test_a_rounding_is_called_by_its_name(
    family: str, kinds: dict[str, str], stated: int | None, called: str, coarse: bool
) -> None:
    file = of(kinds, None if stated is None else int(stated))
    assert (rounding.rounding(file, family), rounding.is_coarse(file, family)) == (called, coarse)


def test_a_layer_that_guesses_tokens_is_left_alone(tmp_path: Path) -> None:
    """GLM-4.5's file holds one layer more than the model runs."""
    source = families.one_shard(families.make("glm4_moe", tmp_path / "source"))
    edit_json(source / "config.json", lambda fields: fields.update(num_nextn_predict_layers=1))
    weights = load_file(source / "model.safetensors")
    last = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.2.")}
    more = {name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in last.items()}
    save_file({**weights, **more}, source / "model.safetensors", {"format": "pt"})
    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", "BF16"), tmp_path / "made")
    assert any(name.startswith("blk.3.") for name in shelf.gguf.tensors)
    ours, theirs = Checkpoint(shelf), Checkpoint(source)
    assert ours.config.num_hidden_layers == 3 and ours.places.keys() == theirs.places.keys() == weights.keys()


def test_a_tensor_that_nobody_knows_is_no_small_matter(tmp_path: Path) -> None:
    """It may change what the others mean."""
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)

    def one_more(writer: gguf.GGUFWriter, folder: Path, vocabulary_size: int) -> None:
        vocabulary.byte_level(writer, folder, vocabulary_size)
        writer.add_tensor("blk.0.attn_q.scale", np.ones(1, dtype=np.float32))

    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", tokenizer=one_more), tmp_path / "made")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(shelf)
    assert "blk.0.attn_q.scale" in caught.value.cause


@pytest.mark.parametrize(
    ("key", "value"), [("llama.block_count", 1 << 20), ("llama.expert_count", 77), ("llama.embedding_length", 65)]
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(key: str, value: int, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)

    def lying(writer: gguf.GGUFWriter, folder: Path, vocabulary_size: int) -> None:
        vocabulary.byte_level(writer, folder, vocabulary_size)
        writer.add_uint32(key, value)

    file = convert(source, tmp_path / "tiny.gguf", tokenizer=lying)
    with pytest.raises(CheckpointError):
        DensePart(Checkpoint(GgufShelf(file, tmp_path / "made")), 4)


def test_an_unknown_architecture_names_those_that_work(tmp_path: Path) -> None:
    crafted = Crafted(keys=[word("general.architecture", "grok\x1b[2J")])
    with pytest.raises(CheckpointError) as caught:
        GgufShelf(crafted.write(tmp_path / "x.gguf"), tmp_path / "made")
    assert "grok" in caught.value.title and "\x1b" not in caught.value.title
    assert "llama" in caught.value.hint and "qwen3moe" in caught.value.hint and not (tmp_path / "made").exists()


def test_sizes_that_cannot_be_are_blamed_on_the_file(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)

    def lying(writer: gguf.GGUFWriter, folder: Path, vocabulary_size: int) -> None:
        vocabulary.byte_level(writer, folder, vocabulary_size)
        writer.add_uint32("llama.expert_used_count", 1 << 30)

    file = convert(source, tmp_path / "tiny.gguf", tokenizer=lying)
    with pytest.raises(CheckpointError) as opened:
        Checkpoint(GgufShelf(file, tmp_path / "made"))
    with pytest.raises(CheckpointError) as planned:
        catalog.described(file)
    for caught in (opened, planned):
        assert caught.value.title == "tiny.gguf cannot be read" and "made" not in str(caught.value)
