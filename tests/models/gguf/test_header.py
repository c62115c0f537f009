"""Files with lying headers are refused in a sentence, before anything large is read; so is what is no model."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from floe_chat.models.errors import CheckpointError
from floe_chat.models.gguf.header import read_header
from floe_chat.models.gguf.parts import open_gguf
from gguf import GGMLQuantizationType as Kind

from .crafted import ARRAY, TEXT, Crafted, key, number, tensor, text, word

LLAMA = word("general.architecture", "llama")
HUGE = 1 << 60
UP = "blk.0.ffn_up_exps.weight"


def listed(kind: int, count: int, raw: bytes = b"") -> bytes:
    return key("list", ARRAY, struct.pack("<IQ", kind, count) + raw)


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
    "an unknown tensor type": (Crafted(tensors=[tensor(UP, kind=999)]), "type 999"),
    "a type of no weights": (Crafted(tensors=[tensor(UP, kind=int(Kind.I32))]), "type 26"),
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
