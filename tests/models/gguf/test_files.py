"""Rounded files give what their blocks stand for; lying headers are refused before anything large is read."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from floe_chat.models import catalog
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.gguf import rounding, values
from floe_chat.models.gguf.header import GgufTensor, OnDisk, read_header
from floe_chat.models.gguf.parts import Gguf, open_gguf
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.packing.draft_part import WITHOUT, draft_part
from floe_chat.models.packing.pack import EXACT, PackSpec, make_manifest, pack
from gguf import GGMLQuantizationType as Kind
from gguf import LlamaFileType
from safetensors.torch import load_file, save_file
from torch import Tensor

from ... import families
from ...helpers import calibration_tokens, edit_json, make_checkpoint
from . import vocabulary
from .converting import convert
from .crafted import ARRAY, TEXT, Crafted, key, listed, number, tensor, text, word

BLOCKED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
FEW_BITS = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4"]


def on_disk(path: Path, kind: str, shape: tuple[int, ...], seed: int = 0) -> GgufTensor:
    """A tensor of random bytes, some way into a file; scales among them are small numbers."""
    size, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) // size * nbytes, dtype=np.uint8)
    raw.reshape(-1, nbytes)[:] &= 0x7B  # no exponent of a float16 is all ones
    path.write_bytes(bytes(96) + raw.tobytes() + bytes(7))
    return GgufTensor("x", kind, shape, OnDisk(path), 96, raw.size)


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


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_a_rounded_file_gives_what_its_blocks_stand_for(kind: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", dtype=torch.float16)
    shelf = GgufShelf(convert(source, tmp_path / "tiny.gguf", kind), tmp_path / "made")
    checkpoint = Checkpoint(shelf)
    assert shelf.rounding == kind and not checkpoint.exact and checkpoint.float16 == torch.bfloat16
    theirs = published(source)
    assert theirs.keys() == checkpoint.places.keys()
    for name, wanted in theirs.items():
        found = checkpoint.tensor(name)
        plain = wanted.ndim < 2 or ".gate." in name
        data = gguf.quantize(wanted.float().numpy(), Kind[kind])
        wanted = wanted.float() if plain else torch.from_numpy(gguf.dequantize(data, Kind[kind]))
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:  # whole rows change their places
            assert torch.equal(found.sort(0).values, wanted.sort(0).values)
        else:
            assert found.dtype == torch.float32 and torch.equal(found, wanted), name
    manifest = pack(checkpoint, tmp_path / "pack", EXACT, calibration_tokens(), "tiny")
    assert not manifest.unquantized and manifest.source.rounding == kind
    assert Manifest.read(tmp_path / "pack").source.rounding == kind


def of(kinds: dict[str, str], file_type: int | None) -> Gguf:
    tensors = {name: GgufTensor(name, kind, (256, 256), OnDisk(Path()), 0, size(kind)) for name, kind in kinds.items()}
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


def test_a_head_of_an_unexpected_form_is_left_out_with_the_reason(tmp_path: Path) -> None:
    source = families.make("glm4_moe", tmp_path / "source")
    families.add_head(source)
    whole = open_gguf(convert(families.one_shard(source), tmp_path / "tiny.gguf", "BF16"))
    experts = whole.tensors["blk.3.ffn_up_exps.weight"]
    one_less = replace(experts, shape=(experts.shape[0] - 1, *experts.shape[1:]))
    narrow = replace(whole.tensors["blk.3.attn_q.weight"], shape=(20, 40))
    cases: dict[str, tuple[GgufTensor | None, str]] = {
        "blk.3.nextn.eh_proj.weight": (None, "tiny.gguf does not hold it."),
        "blk.3.nextn.hnorm.weight": (None, "It lacks model.layers.3.hnorm.weight."),
        "blk.3.ffn_up_exps.weight": (one_less, "It lacks model.layers.3.mlp.experts.5.up_proj.weight."),
        "blk.3.attn_q.weight": (narrow, "model.layers.3.self_attn.q_proj.weight is BF16 of (20, 40)"),
    }
    for name, (instead, why) in cases.items():
        tensors = {key: instead if key == name else tensor for key, tensor in whole.tensors.items()}
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        checkpoint = Checkpoint(GgufShelf(replace(whole, tensors=kept), tmp_path / "made"))
        manifest = make_manifest(checkpoint, PackSpec(), torch.empty(0, dtype=torch.long), "tiny")
        said = list[str]()
        assert draft_part(checkpoint, manifest, said.append) is None
        assert said[0].startswith(f"{WITHOUT}: {why}")


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


LLAMA = word("general.architecture", "llama")
HUGE = 1 << 60
UP = "blk.0.ffn_up_exps.weight"


LIES: dict[str, tuple[Crafted, str]] = {
    "another format": (Crafted(magic=b"PK\3\4"), "not a GGUF file"),
    "big-endian": (Crafted(version=3 << 24), "big-endian"),
    "version 1": (Crafted(version=1), "version 1"),
    "a later version": (Crafted(version=9), "version 9"),
    "many keys": (Crafted(key_count=HUGE), "claims 1,152,921,504,606,846,976 keys"),
    "some keys too many": (Crafted(key_count=60_000), "is cut off"),
    "many tensors": (Crafted(tensor_count=HUGE), "claims 1,152,921,504,606,846,976 tensors"),
    "some tensors too many": (Crafted(tensor_count=3000), "is cut off"),
    "a long key": (Crafted(keys=[LLAMA, text("x", HUGE)]), "claims"),
    "a long text": (Crafted(keys=[LLAMA, key("x", TEXT, text("y", HUGE))]), "claims"),
    "a text behind the end": (Crafted(keys=[LLAMA, key("x", TEXT, text("y", 100_000))]), "is cut off"),
    "a text that is none": (Crafted(keys=[LLAMA, key("x", TEXT, text(b"\xff\xfe"))]), "not UTF-8"),
    "many texts": (Crafted(keys=[LLAMA, listed(TEXT, HUGE)]), "claims"),
    "some texts too many": (Crafted(keys=[LLAMA, listed(TEXT, 1 << 20)]), "is cut off"),
    "many numbers": (Crafted(keys=[LLAMA, listed(10, HUGE)]), "claims"),
    "some numbers too many": (Crafted(keys=[LLAMA, listed(10, 1 << 20)]), "is cut off"),
    "a list of lists": (Crafted(keys=[LLAMA, listed(ARRAY, 1)]), "unknown type 9"),
    "an unknown type": (Crafted(keys=[LLAMA, key("x", 77, b"")]), "unknown type 77"),
    "a key twice": (Crafted(keys=[LLAMA, LLAMA]), "'general.architecture' twice"),
    "a tensor twice": (Crafted(tensors=[tensor(UP), tensor(UP, start=32)]), "twice"),
    "no dimensions": (Crafted(tensors=[tensor(UP, ())]), "0 dimensions"),
    "many dimensions": (Crafted(tensors=[tensor(UP, dimensions=HUGE >> 32)]), "dimensions"),
    "an empty tensor": (Crafted(tensors=[tensor(UP, (0, 3))]), "impossible size"),
    "an endless tensor": (Crafted(tensors=[tensor(UP, (1 << 40, 1 << 40))]), "impossible size"),
    "a tensor beyond the file": (Crafted(tensors=[tensor(UP, (100, 100))]), "its header needs"),
    "an offset beyond the file": (Crafted(tensors=[tensor(UP, start=1 << 30)]), "its header needs"),
    "an impossible offset": (Crafted(tensors=[tensor(UP, start=(1 << 64) - 32)]), "impossible"),
    "an odd offset": (Crafted(tensors=[tensor(UP, start=4)]), "not where it could be"),
    "two in one place": (Crafted(tensors=[tensor(UP), tensor("x")]), "not where it could be"),
    "an unknown tensor type": (Crafted(tensors=[tensor(UP, kind=999)]), "type 999, which is not known"),
    "a type of no weights": (Crafted(tensors=[tensor(UP, kind=int(Kind.I32))]), "type I32, which is not read"),
    "a type that is not read": (
        Crafted(tensors=[tensor(UP, (2, 64), kind=int(Kind.NVFP4))]),
        "type NVFP4, which is not read",
    ),
    "half a block": (Crafted(tensors=[tensor(UP, (2, 33), kind=int(Kind.Q8_0))]), "no whole number of Q8_0 blocks"),
    "an alignment of three": (Crafted(keys=[LLAMA, number("general.alignment", 3)]), "power of two"),
    "a huge alignment": (Crafted(keys=[LLAMA, number("general.alignment", 1 << 31)]), "power of two"),
    "an alignment that is a text": (Crafted(keys=[LLAMA, word("general.alignment", "x")]), "power of two"),
    "no architecture": (Crafted(keys=[]), "does not name an architecture"),
    "an architecture of another kind": (Crafted(keys=[number("general.architecture", 3)]), "does not name"),
    "a mad number of parts": (Crafted(keys=[LLAMA, number("split.count", 1 << 31)]), "number of parts"),
}


def refused(path: Path) -> CheckpointError:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            open_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    return caught.value


@pytest.mark.parametrize(("crafted", "words"), LIES.values(), ids=LIES)
def test_a_lying_header_is_refused(crafted: Crafted, words: str, tmp_path: Path) -> None:
    error = refused(crafted.write(tmp_path / "lie.gguf"))
    assert words in error.cause and error.title == "lie.gguf cannot be read" and error.cause.count(". ") <= 1


def test_a_sound_header_is_read_and_every_cut_one_refused(tmp_path: Path) -> None:
    whole = Crafted(keys=[LLAMA, number("llama.block_count", 1), listed(TEXT, 2, text("a") + text("b"))])
    path = whole.write(tmp_path / "whole.gguf")
    found = read_header(path)
    assert found.values["list"] == ["a", "b"] and found.tensors[UP].shape == (2, 3)
    assert found.tensors[UP].start % 32 == 0 and found.tensors[UP].nbytes == 24
    content = path.read_bytes()
    for length in range(len(content) - 40):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_numbers_are_those_that_were_meant(tmp_path: Path) -> None:
    given = {"a": 1e-6, "b": 1_000_000.0, "c": 0.7071, "d": 1.243163121016122}
    keys = [key(name, 6, struct.pack("<f", value)) for name, value in given.items()]
    found = read_header(Crafted(keys=[LLAMA, *keys]).write(tmp_path / "x.gguf")).values
    assert [found[name] for name in "abc"] == [1e-6, 1e6, 0.7071] and found["d"] == pytest.approx(given["d"], rel=1e-7)


def kind(value: str) -> Crafted:
    return Crafted(keys=[LLAMA, word("general.type", value)])


def named(architecture: str, *keys: bytes, tensors: tuple[str, ...] = (UP,)) -> Crafted:
    given = [tensor(name, start=32 * number) for number, name in enumerate(tensors)]
    return Crafted(keys=[word("general.architecture", architecture), *keys], tensors=given)


NO_MODELS: dict[str, tuple[Crafted, str]] = {
    "sees": (kind("mmproj"), "sees or hears"),
    "sees, by its architecture": (named("clip"), "sees or hears"),
    "adapter": (kind("adapter"), "an adapter"),
    "matrix": (kind("imatrix"), "an importance matrix"),
    "draft": (named("eagle3"), "is a draft model"),
    "block draft": (named("dflash-draft"), "is a draft model"),
    "further tokens": (
        named("glm4moe", number("glm4moe.nextn_predict_layers", 1), tensors=("blk.46.ffn_up_exps.weight",)),
        "is a draft model",
    ),
    "vocabulary": (named("llama", tensors=()), "holds no weights"),
    "vocabulary, as published": (Crafted(tensors=[], padded=False), "holds no weights"),
    "dense": (named("llama", tensors=("blk.0.ffn_up.weight",)), "not a Mixture-of-Experts model"),
}


@pytest.mark.parametrize(("crafted", "words"), NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_model_is_refused(crafted: Crafted, words: str, tmp_path: Path) -> None:
    error = refused(crafted.write(tmp_path / "other.gguf"))
    assert words in error.title and error.title.startswith("other.gguf ")


def part(number_: int, count: int, folder: Path, name: str = "") -> Path:
    keys = [LLAMA, number("split.no", number_), number("split.count", count), number("split.tensors.count", count)]
    file = Crafted(keys=keys, tensors=[tensor(f"blk.{number_}.ffn_up_exps.weight")])
    return file.write(folder / (name or f"m-{number_ + 1:05}-of-{count:05}.gguf"))


def whole_split(folder: Path) -> list[Path]:
    return [part(number, 3, folder) for number in range(3)]


SPLITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "one is missing": (lambda folder: (folder / "m-00002-of-00003.gguf").unlink(), "m-00002-of-00003.gguf is missing"),
    "one is another's": (lambda folder: part(0, 3, folder, "m-00002-of-00003.gguf"), "not part 2 of 3"),
    "one is of another split": (lambda folder: part(1, 4, folder, "m-00002-of-00003.gguf"), "not part 2 of 3"),
    "it was renamed": (
        lambda folder: (folder / "m-00001-of-00003.gguf").rename(folder / "first.gguf"),
        "its name does not say which",
    ),
}


@pytest.mark.parametrize(("change", "words"), SPLITS.values(), ids=SPLITS)
def test_a_split_file_that_is_not_whole_is_refused(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    whole_split(tmp_path)
    change(tmp_path)
    error = refused(min(tmp_path.iterdir()))
    assert words in f"{error.title} {error.cause}"


def test_any_part_of_a_split_file_opens_all_of_it(tmp_path: Path) -> None:
    for path in whole_split(tmp_path):
        found = open_gguf(path)
        assert found.path.name == "m-00001-of-00003.gguf" and len(found.tensors) == 3


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for name in ("folder.gguf", "absent.gguf"):
        assert name in refused(tmp_path / name).title
    (tmp_path / "empty.gguf").touch()
    assert "not a GGUF file" in refused(tmp_path / "empty.gguf").cause
