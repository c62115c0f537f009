"""Interrupted packs go on where they were: after kills, full disks and lost shards, and end in the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.checkpoint_files import FolderShelf, Shards, TensorPlace
from floe_chat.models.errors import CheckpointError, FloeError, TryAgainError, UsageError
from floe_chat.models.families.storage import ExpertTensors
from floe_chat.models.pack.manifest import FILE_NAME, UNFINISHED, Manifest
from floe_chat.models.packing import journal, pack_run
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.packing.workplace import locked
from torch import Tensor

from ..helpers import calibration_tokens, edit_tensors, make_checkpoint

SPEC = PackSpec(up=3, gate=4, down=8, dense=8)
JOURNAL = Path(journal.FOLDER, "journal.jsonl")


class CutError(BaseException):
    """Ends packing wherever it is, as a kill would."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers in many shards, and text enough to learn to look ahead."""
    return make_checkpoint(tmp_path_factory.mktemp("resume") / "source", layers=3)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed pack holds."""
    folder = tmp_path_factory.mktemp("resume") / "whole"
    packed(source, folder)
    return contents(folder)


def packed(source: Path | FolderShelf, folder: Path, spec: PackSpec = SPEC, **options: Any) -> Manifest:
    return pack(Checkpoint(source), folder, spec, calibration_tokens(), "tiny", **options)


class Told:
    """What packing reported."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.left: list[float | None] = []

    def __call__(self, step: str, share: float, left: float | None) -> None:
        assert 0 <= share <= 1
        self.steps.append(step)
        self.left.append(left)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut_at(folder: Path, source: Path, layer: int, expert: int, spec: PackSpec = SPEC) -> None:
    """Pack until it is that expert's turn: when it is read once its layer's signal is known."""
    original = Checkpoint.whole_expert

    def read(self: Checkpoint, asked_layer: int, asked: int) -> ExpertTensors:
        if (asked_layer, asked) == (layer, expert) and '"signal":[' + str(layer) in (folder / JOURNAL).read_text():
            raise CutError
        return original(self, asked_layer, asked)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CutError):
        patch.setattr(Checkpoint, "whole_expert", read)
        packed(source, folder, spec)


@pytest.fixture(scope="module")
def half_pack(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume") / "half"
    cut_at(folder, source, 1, 2)
    return folder


@pytest.fixture
def half(half_pack: Path, tmp_path: Path) -> Path:
    """A pack that was interrupted in its second layer, to damage."""
    return Path(shutil.copytree(half_pack, tmp_path / "half"))


def test_nothing_that_was_finished_is_read_again(half: Path, source: Path, whole: dict[str, bytes]) -> None:
    read: list[str] = []
    told = Told()
    original = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str, index: int | None = None) -> Tensor:
        read.append(name)
        return original(self, name, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "tensor", tensor)
        packed(source, half, progress=told)
    assert told.steps[0] == pack_run.CONTINUES
    assert not [name for name in read if ".layers.0." in name or "embed" in name]
    assert not [name for name in read if ".layers.1." in name and ".experts." not in name]
    assert sorted({name.split("experts.")[1][0] for name in read if ".layers.1." in name}) == ["2", "3"]
    assert contents(half) == whole


@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (2, 0)])  # `half` is one of the layer between them
def test_a_cut_at_any_layer_changes_no_byte(
    tmp_path: Path, source: Path, whole: dict[str, bytes], layer: int, expert: int
) -> None:
    cut_at(tmp_path, source, layer, expert)
    packed(source, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked, so that none has to import torch")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 4))])
def test_kills_at_random_moments_change_no_byte(
    tmp_path: Path, source: Path, whole: dict[str, bytes], seed: int
) -> None:
    """Five kills of one pack, twenty in all."""
    begun = time.monotonic()
    packed(source, tmp_path / "undisturbed")
    usual, chance = time.monotonic() - begun, random.Random(seed)
    killed = 0
    for _ in range(5):
        child = os.fork()
        if child == 0:
            # Whatever happens here, pytest must not go on in two processes.
            try:
                packed(source, tmp_path / "p")
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 0.6) * usual)
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if not (tmp_path / "p" / FILE_NAME).exists() or (tmp_path / "p" / UNFINISHED).exists():
        packed(source, tmp_path / "p")
    assert killed and contents(tmp_path / "p") == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the other process is forked")
def test_a_second_pack_into_the_folder_says_so(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    cut_at(tmp_path / "p", source, 1, 0)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(tmp_path / "p" / UNFINISHED, ""):
            os.write(told, b"x")
            signal.pause()
        os._exit(0)
    os.read(ready, 1)
    try:
        with pytest.raises(TryAgainError, match="Another") as caught:
            packed(source, tmp_path / "p")
        assert str(child) in caught.value.cause
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    packed(source, tmp_path / "p")
    assert contents(tmp_path / "p") == whole


def other_text() -> Tensor:
    return calibration_tokens() + 1


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path: Path, source: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "p"
    cut_at(folder, source, 1, 1)
    before = contents(folder) | {UNFINISHED: b""}
    other = make_checkpoint(tmp_path / "other", layers=3, seed=5)
    tries: dict[str, Callable[[], Any]] = {
        "up is 3 bit, not 2": lambda: packed(source, folder, PackSpec(up=2, gate=4, down=8, dense=8)),
        "dense is 8 bit, not 4": lambda: packed(source, folder, PackSpec(up=3, gate=4, down=8, dense=4)),
        "rounding is calibrated, not hqq": lambda: packed(source, folder, replace(SPEC, rounding="hqq")),
        "text": lambda: pack(Checkpoint(source), folder, SPEC, other_text(), "tiny"),
        "weights": lambda: packed(other, folder),
    }
    for cause, attempt in tries.items():
        with pytest.raises(UsageError, match="other settings") as caught:
            attempt()
        assert cause in caught.value.cause and "--fresh" in caught.value.hint
        assert contents(folder) | {UNFINISHED: b""} == before
    packed(source, folder)
    assert contents(folder) == whole


def test_hqq_continues_with_the_same_bytes(tmp_path: Path, source: Path) -> None:
    spec = PackSpec(up=2, gate=16, down=16, dense=8, rounding="hqq")
    cut_at(tmp_path / "p", source, 1, 1, spec)
    packed(source, tmp_path / "p", spec)
    packed(source, tmp_path / "q", spec)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


def test_fresh_starts_over(tmp_path: Path, source: Path) -> None:
    cut_at(tmp_path / "p", source, 2, 1)
    spec = PackSpec(up=2, gate=3, down=3, dense=4)
    packed(source, tmp_path / "p", spec, fresh=True)
    packed(source, tmp_path / "q", spec)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


@pytest.mark.parametrize("torn", [b"\xff\x00", b'{"expert":[2,3]}'], ids=repr)
def test_a_torn_last_line_is_nothing_that_was_finished(
    half: Path, source: Path, whole: dict[str, bytes], torn: bytes
) -> None:
    with (half / JOURNAL).open("ab") as file:
        file.write(torn)
    packed(source, half)
    assert contents(half) == whole


@pytest.mark.parametrize("line", [b"{", b"{}", b'{"expert":["a","b"]}', b"\xff"], ids=repr)
def test_a_damaged_journal_is_explained(half: Path, source: Path, line: bytes) -> None:
    with (half / JOURNAL).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FloeError, match="cannot be continued") as caught:
        packed(source, half)
    assert "--fresh" in caught.value.hint


@pytest.mark.parametrize("name", ["journal.jsonl", "state.safetensors"])
def test_a_flipped_bit_in_a_working_file_is_noticed(half: Path, source: Path, name: str) -> None:
    path = half / journal.FOLDER / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(FloeError, match="cannot be continued") as caught:
        packed(source, half)
    assert "damaged" in caught.value.cause


@pytest.mark.parametrize("name", ["layer_00.safetensors", "layer_01.safetensors", "dense.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_files_that_were_lost_meanwhile_are_noticed(half: Path, source: Path, name: str, damage: str) -> None:
    if damage == "missing":
        (half / name).unlink()
    else:
        os.truncate(half / name, 1000)
    with pytest.raises(FloeError, match="cannot be continued") as caught:
        packed(source, half)
    assert name in caught.value.cause and "--fresh" in caught.value.hint


def test_damage_of_the_source_keeps_what_was_done(tmp_path: Path, whole: dict[str, bytes], source: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    bad = "model.layers.2.block_sparse_moe.experts.1.w2.weight"

    def spoil(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.clone() if name == bad else tensor
        if name == bad:
            tensor[-1, -1] = torch.nan
        return tensor

    edit_tensors(copy, spoil)
    with pytest.raises(CheckpointError, match="Expert 1 of layer 2"):
        packed(copy, tmp_path / "p")
    for path in source.glob("*.safetensors"):  # downloaded again
        shutil.copyfile(path, copy / path.name)
    told = Told()
    packed(copy, tmp_path / "p", progress=told)
    assert told.steps[0] == pack_run.CONTINUES and not [step for step in told.steps if "layer 1 of" in step]
    assert contents(tmp_path / "p") == whole


class Arriving(Shards):
    """A shelf whose shards are here only between being asked for and being given back."""

    commit: str | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = FolderShelf(folder)
        self.name = self._folder.name
        self.expected: list[str] = []
        self.here: list[str] = []
        self.most = 0
        self.gone: list[str] = []

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        return self._folder.headers()

    def small(self, name: str) -> Path | None:
        return self._folder.small(name)

    def order(self, files: Sequence[str]) -> None:
        self.expected = list(files)

    def path(self, file: str) -> Path:
        assert file not in self.gone, f"{file} was given back and is asked for again"
        if file not in self.here and self.expected:
            assert file == self.expected.pop(0), "the order that was announced is another"
            self.here.append(file)
            self.most = max(self.most, len(self.here))
        return self._folder.path(file)

    def done(self, file: str) -> None:
        self.gone.append(file)
        if file in self.here:
            self.here.remove(file)


def test_a_shelf_gives_the_same_pack_and_gets_every_shard_back_early(tmp_path: Path) -> None:
    # As in published models, a shard holds more than a layer, and a layer's norms may lie in the next one.
    source = make_checkpoint(tmp_path / "source", layers=5, intermediate=24)
    packed(source, tmp_path / "whole")
    cut_at(tmp_path / "cut", source, 2, 1)
    for name in ("undisturbed", "cut"):
        shelf = Arriving(source)
        shards = list(shelf.headers())
        pack(Checkpoint(shelf), tmp_path / name, SPEC, calibration_tokens(), "tiny")
        assert contents(tmp_path / name) == contents(tmp_path / "whole")
        assert sorted(shelf.gone) == sorted(shards) and not shelf.here and not shelf.expected
        assert len(shards) > 4 and 1 <= shelf.most <= 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB, where mounting one is permitted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)]
    if not sys.platform.startswith("linux") or shutil.which("mount") is None:
        pytest.skip("there is no tmpfs")
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int
    used: int
    free: int


def test_a_disk_that_fills_up_while_packing_is_explained_and_waited_for(
    small_disk: Path, source: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FloeError, match="too small"):
        packed(source, small_disk / "p")
    with monkeypatch.context() as patch:  # somebody else fills the disk after it was looked at
        patch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, 1 << 40))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        with pytest.raises(FloeError, match="failed") as caught:
            packed(source, small_disk / "p")
    assert "No space left" in caught.value.cause and "to continue" in caught.value.hint
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    told = Told()
    packed(source, small_disk / "p", progress=told)
    assert told.steps[0] == pack_run.CONTINUES and contents(small_disk / "p") == whole


def test_time_left_is_told_once_something_is_done(tmp_path: Path, source: Path) -> None:
    told = Told()
    packed(source, tmp_path, progress=told)
    known = [seconds for seconds in told.left if seconds is not None]
    assert told.left[0] is None and told.left[-1] is None and known and min(known) > 0  # nothing is left at the end


@pytest.mark.parametrize("device", ["cuda:77", "rubbish"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, source: Path, device: str) -> None:
    with pytest.raises(UsageError, match=device) as caught:
        packed(source, tmp_path / "p", PackSpec(device=device))
    assert "Choose cpu, cuda" in caught.value.hint and "ipu" not in caught.value.cause
    assert not (tmp_path / "p").exists()
