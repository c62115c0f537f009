"""Damaged packs: whatever happened to the files, the reader answers with a PackError that says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.models.errors import PackError
from floe_chat.models.pack import packed_model
from floe_chat.models.pack.manifest import FILE_NAME, FileEntry, Manifest, file_entry
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from ..helpers import edit_json, edit_tensors, reseal

LAYER = "layer_01.safetensors"


@pytest.fixture
def copy(tiny_pack: Path, tmp_path: Path) -> Path:
    """A pack of one's own to damage."""
    return Path(shutil.copytree(tiny_pack, tmp_path / "copy"))


def flip(path: Path, place: int) -> None:
    """Flip one bit in place: size and inode stay."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def refused(folder: Path, *, recheck: bool = False) -> PackError:
    with pytest.raises(PackError) as caught:
        PackedModel.open(folder, recheck=recheck)
    assert caught.value.title and caught.value.cause and caught.value.hint
    return caught.value


def files_of(folder: Path) -> list[str]:
    return sorted(Manifest.read(folder).files)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_every_damaged_file_is_named(copy: Path, damage: str) -> None:
    for name in files_of(copy):
        whole = (copy / name).read_bytes()
        if damage == "missing":
            (copy / name).unlink()
        elif damage == "truncated":
            (copy / name).write_bytes(whole[:-1])
        else:
            flip(copy / name, len(whole) // 2)
        assert name in refused(copy).cause
        (copy / name).write_bytes(whole)


@pytest.mark.parametrize("how", ["plain", "hides its time", "recheck"])
def test_a_flipped_bit_is_noticed_after_a_good_opening(copy: Path, how: str) -> None:
    if how == "hides its time" and os.name == "nt":
        pytest.skip("Windows keeps no time of the last change of a file's state")
    PackedModel.open(copy)
    before = (copy / LAYER).stat()
    flip(copy / LAYER, 20_000)
    # A coarse clock could give the change the same time stamp as the copy.
    os.utime(copy / LAYER, ns=(1, 1) if how == "plain" else (before.st_atime_ns, before.st_mtime_ns))
    assert LAYER in refused(copy, recheck=how == "recheck").cause


def test_a_replaced_file_is_noticed_after_a_good_opening(copy: Path) -> None:
    PackedModel.open(copy)
    stat = (copy / LAYER).stat()
    shutil.copyfile(copy / LAYER, copy / "new")
    flip(copy / "new", 20_000)
    os.utime(copy / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (copy / "new").replace(copy / LAYER)
    assert LAYER in refused(copy).cause


def test_a_damaged_pack_leaves_no_stamp(copy: Path) -> None:
    flip(copy / LAYER, 20_000)
    refused(copy)
    refused(copy)
    flip(copy / LAYER, 20_000)
    assert PackedModel.open(copy)


def test_a_second_opening_does_not_read_the_weights_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PackedModel.open(copy)

    def read_again(path: Path) -> Any:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("floe_chat.models.pack.packed_model.file_entry", read_again)
    assert PackedModel.open(copy)
    with pytest.raises(AssertionError, match="again"):
        PackedModel.open(copy, recheck=True)


def test_what_else_comes_into_a_manifest_makes_no_other_file_unproven(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PackedModel.open(copy)
    read: list[str] = []

    def look(path: Path) -> FileEntry:
        read.append(path.name)
        return file_entry(path)

    monkeypatch.setattr(packed_model, "file_entry", look)
    manifest = Manifest.read(copy)
    (copy / "more").write_text("x")
    replace(manifest, name="Renamed", beside={"more": file_entry(copy / "more")}).write(copy)
    PackedModel.open(copy)
    assert read == []
    os.utime(copy / LAYER, ns=(1, 1))
    PackedModel.open(copy)
    assert read == [LAYER]
    files = {**manifest.files, LAYER: replace(manifest.files[LAYER], sha256="0" * 64)}
    replace(manifest, files=files).write(copy)
    assert LAYER in refused(copy).cause and read == [LAYER, LAYER]


def test_a_file_that_changes_while_it_is_read_is_read_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(path: Path) -> FileEntry:
        found = file_entry(path)
        if path.name == LAYER:
            flip(path, 20_000)
            os.utime(path, ns=(1, 1))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(packed_model, "file_entry", look)
        PackedModel.open(copy)
    assert LAYER in refused(copy).cause


def test_a_stamp_that_finds_no_room_leaves_nothing(
    copy: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("floe_chat.models.private_file.os.fsync", refuse)
    PackedModel.open(copy)
    assert not [path for path in own_folders.rglob("*") if path.is_file() and "verified" in path.parts]


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\xfe\x00", b"[]", b'"x"', b"null", b"1"], ids=repr)
def test_a_garbage_stamp_only_means_checking_again(copy: Path, own_folders: Path, garbage: bytes) -> None:
    PackedModel.open(copy)
    stamps = [path for path in own_folders.rglob("*.json") if "verified" in path.parts]
    assert len(stamps) == 1
    stamps[0].write_bytes(garbage)
    flip(copy / LAYER, 20_000)
    refused(copy)


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
@pytest.mark.parametrize("open_to_others", ["folder", "file"])
def test_a_stamp_that_others_could_have_written_is_not_believed(
    copy: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch, open_to_others: str
) -> None:
    before = os.umask(0)
    try:
        PackedModel.open(copy)
    finally:
        os.umask(before)
    (stamp,) = [path for path in own_folders.rglob("*.json") if "verified" in path.parts]
    made = [path for path in own_folders.rglob("*") if "floe-chat" in path.parts]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} <= {0o700, 0o600}
    read: list[Path] = []

    def look(path: Path) -> FileEntry:
        read.append(path)
        return file_entry(path)

    monkeypatch.setattr(packed_model, "file_entry", look)
    PackedModel.open(copy)
    assert read == []
    (stamp if open_to_others == "file" else stamp.parent).chmod(0o777)
    PackedModel.open(copy)  # which closes both again
    assert read
    read.clear()
    PackedModel.open(copy)
    assert read == []


def test_a_cache_that_cannot_be_written_only_means_checking_again(
    copy: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folders / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_folders / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(own_folders / "file"))
    assert PackedModel.open(copy)


def test_a_file_that_cannot_be_read_is_explained(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path.open

    def no_permission(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.name == LAYER:
            raise PermissionError(13, "Permission denied")
        return original(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", no_permission)
    assert LAYER in refused(copy).cause


@pytest.mark.parametrize("name", ["rows", "up.q", "up.scale", "up.zero", "threshold"])
@pytest.mark.parametrize("lost", [True, False], ids=["missing", "wrong-shape"])
def test_tensors_that_do_not_fit_the_manifest_are_refused(copy: Path, name: str, lost: bool) -> None:
    def change(key: str, tensor: Tensor) -> Tensor | None:
        if key != name:
            return tensor
        return None if lost else tensor[:, :1].clone()

    edit_tensors(copy, change)
    reseal(copy)
    with pytest.raises(PackError):
        PackedModel.open(copy).layer(0)


@pytest.mark.parametrize("name", ["rows", "up.q", "up.scale", "threshold"])
def test_tensors_of_another_dtype_are_refused(copy: Path, name: str) -> None:
    def change(key: str, tensor: Tensor) -> Tensor:
        return tensor.to(torch.int32) if key == name else tensor

    edit_tensors(copy, change)
    reseal(copy)
    with pytest.raises(PackError):
        PackedModel.open(copy).layer(0)


@pytest.mark.parametrize("name", ["popularity", "router_score"])
@pytest.mark.parametrize("damage", ["missing", "columns", "dtype", "nan"])
def test_measures_that_do_not_fit_are_named(copy: Path, name: str, damage: str) -> None:
    def change(key: str, tensor: Tensor) -> Tensor | None:
        if key != name:
            return tensor
        spoilt = {"columns": tensor[:, 1:].clone(), "dtype": tensor.bfloat16(), "nan": tensor / 0 * 0}
        return spoilt.get(damage)

    edit_tensors(copy, change, "profile.safetensors")
    reseal(copy)
    with pytest.raises(PackError) as caught:
        PackedModel.open(copy).profile()
    assert name in caught.value.cause


def silent(_step: str, _share: float) -> None:
    pass


@pytest.mark.parametrize("name", ["lm_head.q", "model.layers.1.self_attn.k_proj.scale", "lm_head.zero"])
@pytest.mark.parametrize("damage", ["missing", "rows", "columns", "rank", "dtype"])
def test_dense_codes_that_do_not_fit_are_named(copy: Path, name: str, damage: str) -> None:
    def change(key: str, tensor: Tensor) -> Tensor | None:
        if key != name:
            return tensor
        other = torch.float32 if tensor.dtype == torch.float16 else torch.int8
        return {
            "missing": None,
            "rows": tensor[:-1].clone(),
            "columns": torch.cat([tensor, tensor], dim=1),
            "rank": tensor[None].clone(),
            "dtype": tensor.to(other),
        }[damage]

    edit_tensors(copy, change)
    reseal(copy)
    with pytest.raises(PackError) as caught:
        load(copy, None, "cpu", silent)
    assert name in caught.value.cause and "again" in caught.value.hint


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 1}, {"num_local_experts": 3}, {"hidden_size": 32}], ids=str)
def test_a_configuration_that_contradicts_the_manifest_is_refused(copy: Path, sizes: dict[str, int]) -> None:
    def change(fields: Any) -> None:
        fields.update(sizes)

    edit_json(copy / "config.json", change)
    reseal(copy)
    with pytest.raises(PackError):
        load(copy, None, "cpu", silent)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0{}"], ids=repr)
def test_a_tensor_file_that_is_none_is_refused(copy: Path, content: bytes) -> None:
    (copy / LAYER).write_bytes(content)
    reseal(copy)
    with pytest.raises(PackError):
        PackedModel.open(copy).layer(1)


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "checkpoint", "folder for a manifest"])
def test_what_is_no_pack_is_explained(tmp_path: Path, tiny_checkpoint: Path, kind: str) -> None:
    if kind == "folder for a manifest":
        (tmp_path / FILE_NAME).mkdir()
        refused(tmp_path)
        return
    places = {"missing": tmp_path / "no", "file": tmp_path / "f", "empty": tmp_path, "checkpoint": tiny_checkpoint}
    (tmp_path / "f").write_text("x")
    assert str(places[kind]) in refused(places[kind]).title
