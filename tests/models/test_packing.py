"""Packing into a folder: interrupted packs end in the same bytes, and other people's files are never touched."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.checkpoint_files import FolderShelf, Shards, TensorPlace
from floe_chat.models.errors import CheckpointError, FloeError, PackError, TryAgainError, UsageError
from floe_chat.models.families.storage import ExpertTensors
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve
from floe_chat.models.pack.manifest import FILE_NAME, UNFINISHED, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import journal, pack_run
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.packing.pack import EXACT, PackSpec, pack, working_bytes
from floe_chat.models.packing.workplace import locked
from torch import Tensor

from ..helpers import calibration_tokens, edit_tensors, make_checkpoint, make_pack, write_tokenizer
from .fakehub import ALWAYS, FakeHub, Fault


class Usage(NamedTuple):
    """What shutil.disk_usage returns."""

    total: int
    used: int
    free: int


class PowerCutError(BaseException):
    """Ends packing wherever it is, as a kill would: no handler for ordinary errors sees it."""


def cut_power(*_args: Any, **_kwargs: Any) -> None:
    raise PowerCutError


def in_the_second_layer(patch: pytest.MonkeyPatch) -> None:
    original = Checkpoint.whole_expert

    def read(self: Checkpoint, layer: int, expert: int) -> ExpertTensors:
        if (layer, expert) == (1, 2):
            cut_power()
        return original(self, layer, expert)

    patch.setattr(Checkpoint, "whole_expert", read)


def while_copying_small_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "copyfile", cut_power)


def before_the_dense_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DensePart, "store", cut_power)


def before_the_manifest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Manifest, "write", cut_power)


def before_the_rename_to(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A cut after the file was written beside its place, and before it moved there."""
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == name:
            cut_power()
        return original(self, target)

    def cut(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Path, "replace", replace)

    return cut


CUTS = [
    before_the_dense_part,
    in_the_second_layer,
    while_copying_small_files,
    before_the_manifest,
    before_the_rename_to(FILE_NAME),
    before_the_rename_to("journal.jsonl"),
    before_the_rename_to("state.safetensors"),
]
CUT_IDS = [*("before-dense", "second-layer", "small-files", "before-manifest", "inside-manifest", "journal", "state")]


def interrupted(source: Path, folder: Path, cut: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut(patch)
        with pytest.raises(PowerCutError):
            make_pack(source, folder, EXACT)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.some(3)
@pytest.mark.parametrize("cut", CUTS, ids=CUT_IDS)
def test_an_interrupted_pack_is_called_incomplete_and_packing_again_is_as_if_nothing_happened(
    tmp_path: Path, tiny_checkpoint: Path, exact_pack: Path, cut: Any
) -> None:
    interrupted(tiny_checkpoint, tmp_path / "p", cut)
    with pytest.raises(PackError, match="incomplete") as caught:
        PackedModel.open(tmp_path / "p")
    assert "again" in caught.value.hint
    make_pack(tiny_checkpoint, tmp_path / "p", EXACT)
    assert PackedModel.open(tmp_path / "p", recheck=True).manifest == Manifest.read(exact_pack)
    assert contents(tmp_path / "p") == contents(exact_pack)


def test_what_16_bits_do_not_hold_is_known_after_an_interruption(tmp_path: Path) -> None:
    """It is in the first half, which is not read again."""
    source = make_checkpoint(tmp_path / "source")

    def widen(name: str, tensor: Tensor) -> Tensor:
        return 1.01 * tensor.float() if ".0.block_sparse_moe.experts.1.w3" in name else tensor

    edit_tensors(source, widen)
    interrupted(source, tmp_path / "p", in_the_second_layer)
    manifest = make_pack(source, tmp_path / "p", EXACT)
    assert not manifest.unquantized
    assert manifest.source.loses == "model.layers.0.block_sparse_moe.experts.1.w3.weight"


@pytest.mark.some(1)
@pytest.mark.parametrize("mark", ['{"pid": 4194305, "started": 1.0}', "", '{"pid": "x"}'], ids=repr)
def test_a_folder_whose_writer_is_gone_is_taken_over(tmp_path: Path, tiny_checkpoint: Path, mark: str) -> None:
    (tmp_path / UNFINISHED).write_text(mark)
    make_pack(tiny_checkpoint, tmp_path, EXACT)
    assert PackedModel.open(tmp_path).manifest.unquantized


@pytest.mark.thorough
def test_nothing_of_an_interrupted_pack_survives_into_another_models(tmp_path: Path, tiny_checkpoint: Path) -> None:
    other = make_checkpoint(tmp_path / "other", layers=1, seed=7)
    (other / "generation_config.json").unlink()
    write_tokenizer(other)
    (tiny_checkpoint / "chat_template.jinja").write_text("{{ 'of the first model' }}")
    try:
        interrupted(tiny_checkpoint, tmp_path / "p", before_the_manifest)
    finally:
        (tiny_checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="other settings"):
        make_pack(other, tmp_path / "p", EXACT)
    pack(Checkpoint(other), tmp_path / "p", EXACT, calibration_tokens(), "x", fresh=True)
    make_pack(other, tmp_path / "fresh", EXACT)
    assert set(contents(tmp_path / "p")) == set(contents(tmp_path / "fresh"))


def test_the_folder_of_a_finished_pack_holds_nothing_unlisted(exact_pack: Path) -> None:
    assert set(contents(exact_pack)) == {FILE_NAME, *Manifest.read(exact_pack).files}


@pytest.mark.parametrize("stranger", ["model.safetensors", ".hidden"])
def test_a_folder_with_other_files_is_refused_and_left_alone(
    tmp_path: Path, tiny_checkpoint: Path, stranger: str
) -> None:
    (tmp_path / stranger).write_bytes(b"mine")
    with pytest.raises(UsageError) as caught:
        make_pack(tiny_checkpoint, tmp_path, EXACT)
    assert stranger in str(caught.value)
    assert contents(tmp_path) == {stranger: b"mine"}


def test_a_finished_pack_is_not_overwritten(tmp_path: Path, tiny_checkpoint: Path, exact_pack: Path) -> None:
    shutil.copytree(exact_pack, tmp_path / "p")
    before = contents(tmp_path / "p")
    with pytest.raises(UsageError, match="already"):
        make_pack(tiny_checkpoint, tmp_path / "p", EXACT)
    assert contents(tmp_path / "p") == before


def test_a_pack_is_not_written_over_its_source(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1)
    before = contents(source)
    with pytest.raises(UsageError):
        make_pack(source, tmp_path / "elsewhere" / ".." / "source", EXACT)
    assert contents(source) == before


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "p").write_text("mine")
    with pytest.raises(UsageError):
        make_pack(tiny_checkpoint, tmp_path / "p", EXACT)
    assert (tmp_path / "p").read_text() == "mine"


def test_a_disk_that_is_too_small_is_known_at_once(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nearly_full(_path: Path) -> Usage:
        return Usage(1 << 20, (1 << 20) - 10_000, 10_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(FloeError, match="too small"):
        make_pack(tiny_checkpoint, tmp_path / "p", EXACT)
    assert not list((tmp_path / "p").glob("*.safetensors"))


@pytest.mark.some(1)
@pytest.mark.parametrize("dense", [4, 16])
def test_the_disk_that_a_pack_takes_is_foreseen(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, dense: int
) -> None:
    spec = PackSpec(dense=dense)
    manifest = make_pack(tiny_checkpoint, tmp_path / "p", spec)
    weights = sum(entry.size for name, entry in manifest.files.items() if name.endswith(".safetensors"))
    free = int(0.9 * weights)

    def usage(_path: Path) -> Usage:
        return Usage(1 << 30, (1 << 30) - free, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(FloeError, match="too small"):
        make_pack(tiny_checkpoint, tmp_path / "q", spec)
    free = weights + working_bytes(manifest)
    make_pack(tiny_checkpoint, tmp_path / "q", spec)


def test_a_disk_that_fills_up_is_explained(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, _destination: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(FloeError) as caught:
        make_pack(tiny_checkpoint, tmp_path / "p", EXACT)
    assert "No space left" in caught.value.cause and caught.value.hint


@pytest.mark.parametrize(
    "spec", [{"up": 5}, {"gate": 1}, {"down": 0}, {"up": 32}, {"dense": 3}, {"dense": 2}, {"dense": 0}], ids=str
)
def test_widths_that_do_not_exist_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="bit"):
        PackSpec(**spec)


SPEC = PackSpec(up=3, gate=4, down=8, dense=8)
JOURNAL = Path(journal.FOLDER, "journal.jsonl")


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
        self.shares: list[float] = []
        self.left: list[float | None] = []

    def __call__(self, step: str, share: float, left: float | None) -> None:
        assert 0 <= share <= 1
        self.steps.append(step)
        self.shares.append(share)
        self.left.append(left)


def cut_at(folder: Path, source: Path, layer: int, expert: int, spec: PackSpec = SPEC) -> None:
    """Pack until it is that expert's turn: when it is read once its layer's signal is known."""
    original = Checkpoint.whole_expert

    def read(self: Checkpoint, asked_layer: int, asked: int) -> ExpertTensors:
        if (asked_layer, asked) == (layer, expert) and '"signal":[' + str(layer) in (folder / JOURNAL).read_text():
            raise PowerCutError
        return original(self, asked_layer, asked)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCutError):
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


@pytest.mark.some(1)
@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (2, 0)])  # `half` is one of the layer between them
def test_a_cut_at_any_layer_changes_no_byte(
    tmp_path: Path, source: Path, whole: dict[str, bytes], layer: int, expert: int
) -> None:
    cut_at(tmp_path, source, layer, expert)
    packed(source, tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked, so that none has to import torch")
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
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
    cut_at(tmp_path / "p", source, 0, 1)
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
    cut_at(folder, source, 0, 1)
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


@pytest.mark.thorough
def test_hqq_continues_with_the_same_bytes(tmp_path: Path, source: Path) -> None:
    spec = PackSpec(up=2, gate=16, down=16, dense=8, rounding="hqq")
    cut_at(tmp_path / "p", source, 1, 1, spec)
    packed(source, tmp_path / "p", spec)
    packed(source, tmp_path / "q", spec)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


def test_fresh_starts_over(tmp_path: Path, source: Path) -> None:
    cut_at(tmp_path / "p", source, 1, 1)
    packed(source, tmp_path / "p", EXACT, fresh=True)
    packed(source, tmp_path / "q", EXACT)
    assert contents(tmp_path / "p") == contents(tmp_path / "q")


@pytest.mark.some(1)
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


@pytest.mark.parametrize("left", [1, 3, -5, -1])
def test_a_journal_that_lost_its_end_gives_the_same_pack_or_none(
    half: Path, source: Path, whole: dict[str, bytes], left: int
) -> None:
    """The state of calibration may be ahead of it."""
    lines = (half / JOURNAL).read_bytes().splitlines(keepends=True)
    (half / JOURNAL).write_bytes(b"".join(lines[:left]))
    ahead = sum(b'"expert":[0,' in line for line in lines[:left]) < 4
    with pytest.raises(FloeError, match="cannot be continued") if ahead else nullcontext():
        packed(source, half)
    assert ahead or contents(half) == whole


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
    source = make_checkpoint(tmp_path / "source", layers=4, intermediate=24)
    packed(source, tmp_path / "whole")
    cut_at(tmp_path / "cut", source, 2, 1)
    for name in ("undisturbed", "cut"):
        shelf = Arriving(source)
        shards = list(shelf.headers())
        pack(Checkpoint(shelf), tmp_path / name, SPEC, calibration_tokens(), "tiny")
        assert contents(tmp_path / name) == contents(tmp_path / "whole")
        assert sorted(shelf.gone) == sorted(shards) and not shelf.here and not shelf.expected
        assert len(shards) > 3 and 1 <= shelf.most <= 2


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


def test_progress_rises_to_one_and_the_source_stays_as_it_was(tmp_path: Path, tiny_checkpoint: Path) -> None:
    before, told = contents(tiny_checkpoint), Told()
    packed(tiny_checkpoint, tmp_path / "p", EXACT, progress=told)
    assert told.shares == sorted(told.shares) and told.shares[-1] == 1.0 and len(told.shares) > 8
    assert contents(tiny_checkpoint) == before
    known = [seconds for seconds in told.left if seconds is not None]
    assert told.left[0] is None and told.left[-1] is None and known and min(known) > 0  # nothing is left at the end


@pytest.mark.parametrize("device", ["cuda:77", "rubbish"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, source: Path, device: str) -> None:
    with pytest.raises(UsageError, match=device) as caught:
        packed(source, tmp_path / "p", PackSpec(device=device))
    assert "Choose cpu, cuda" in caught.value.hint and "ipu" not in caught.value.cause
    assert not (tmp_path / "p").exists()


TUNING = Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.02)


def test_it_is_the_one_of_a_folder_byte_for_byte_whatever_the_network_does(
    tiny_checkpoint: Path, exact_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({"floe/tiny": tiny_checkpoint}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        hub.faults.append(Fault("GET /storage/", close_after=15_000, times=ALWAYS))
        with HubShelf(resolve("floe/tiny"), tmp_path / "fetched", tuning=TUNING) as shelf:
            manifest = pack(
                Checkpoint(shelf), tmp_path / "pack", replace(EXACT, signal="up"), calibration_tokens(), "tiny"
            )
            fetched = shelf.progress()
        commit = hub.repositories["floe/tiny"].commit
    assert (manifest.source.name, manifest.source.commit) == ("floe/tiny", commit)
    assert fetched.state == "done" and len(fetched.files) > 1
    assert not [path for path in (tmp_path / "fetched").iterdir() if path.suffix in (".safetensors", ".part")]
    packed = sorted(path.name for path in exact_pack.iterdir())
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == packed
    for name in packed:
        if name != "manifest.json":  # which tells the source
            assert (tmp_path / "pack" / name).read_bytes() == (exact_pack / name).read_bytes(), name
