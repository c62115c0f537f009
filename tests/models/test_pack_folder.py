"""Packing into a folder: interruptions leave a folder that says so, other people's files are never touched."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import FloeError, PackError, UsageError
from floe_chat.models.families.storage import ExpertTensors
from floe_chat.models.pack.manifest import FILE_NAME, UNFINISHED, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.dense_part import DensePart
from floe_chat.models.packing.pack import EXACT, PackSpec, pack, working_bytes

from ..helpers import calibration_tokens, make_checkpoint, make_pack, write_tokenizer


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


@pytest.mark.parametrize("mark", ['{"pid": 4194305, "started": 1.0}', "", '{"pid": "x"}'], ids=repr)
def test_a_folder_whose_writer_is_gone_is_taken_over(tmp_path: Path, tiny_checkpoint: Path, mark: str) -> None:
    (tmp_path / UNFINISHED).write_text(mark)
    make_pack(tiny_checkpoint, tmp_path, EXACT)
    assert PackedModel.open(tmp_path).manifest.unquantized


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


def test_progress_rises_to_one_and_the_source_stays_as_it_was(tmp_path: Path, tiny_checkpoint: Path) -> None:
    before = contents(tiny_checkpoint)
    shares: list[float] = []
    source = Checkpoint(tiny_checkpoint)
    pack(source, tmp_path / "p", EXACT, calibration_tokens(), "x", lambda _step, share, _left: shares.append(share))
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 8
    assert contents(tiny_checkpoint) == before


@pytest.mark.parametrize(
    "spec", [{"up": 5}, {"gate": 1}, {"down": 0}, {"up": 32}, {"dense": 3}, {"dense": 2}, {"dense": 0}], ids=str
)
def test_widths_that_do_not_exist_are_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="bit"):
        PackSpec(**spec)
