"""The head that guesses further tokens, as a pack's file: written, added, damaged, left out, and fetched alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.models.checking.repair import add_draft
from floe_chat.models.checking.verify import LIMITS, damages, senseless
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families import FAMILIES
from floe_chat.models.hub.ready_pack import in_folder
from floe_chat.models.hub.remote_checkpoint import HubTensors
from floe_chat.models.hub.repository import resolve
from floe_chat.models.pack.draft_head import PackedHead
from floe_chat.models.pack.manifest import DRAFT, FILE_NAME, Manifest, file_entry
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.draft_part import WITHOUT, DraftPart
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.packing.pack_run import PackReport
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..helpers import calibration_tokens, make_pack, relative_rms
from .fakehub import FakeHub

LOW = PackSpec(up=3, gate=4, down=4, dense=4, signal="up")
FAMILY = "glm4_moe_lite"


class PowerCutError(BaseException):
    """Ends packing wherever it is, as a kill would."""


def silent(_step: str, _share: float, _left: float | None = None) -> None:
    """Progress that nobody looks at."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "source"
    families.make(FAMILY, folder)
    families.add_head(folder)
    return folder


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "tiny"
    make_pack(source, folder, LOW)
    return folder


@pytest.fixture(scope="module")
def headless(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headless") / "tiny"
    make_pack(source, folder, replace(LOW, draft=False))
    return folder


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "tiny"))


def packs(source: Path, folder: Path, told: PackReport = silent) -> Manifest:
    return pack(Checkpoint(source), folder, LOW, calibration_tokens(), "tiny", told)


def test_the_head_changes_nothing_else_of_a_pack(packed: Path, headless: Path) -> None:
    ours, without = contents(packed), contents(headless)
    assert ours.keys() - without.keys() == {DRAFT}
    manifests = [Manifest.read(folder) for folder in (packed, headless)]
    assert {name for name in without if ours[name] != without[name]} == {FILE_NAME}
    assert replace(manifests[0], beside={}) == manifests[1]
    assert PackedModel.open(headless).head() is None and not PackedModel.open(headless).headless


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [FAMILY, "qwen3_next", "ernie4_5_moe"])
def test_its_weights_are_rounded_as_the_packs(name: str, tmp_path: Path) -> None:
    """To within what such widths lose, and the plan knows how many bytes that is."""
    folder = families.make(name, tmp_path / "source")
    theirs = families.add_head(folder)
    manifest = make_pack(folder, tmp_path / "pack", LOW)
    head = PackedModel.open(tmp_path / "pack").head()
    assert isinstance(head, PackedHead) and not isinstance(head.joined, Tensor)
    assert relative_rms(head.joined.dense(torch.float32), theirs.joined.float()) <= LIMITS[4]
    takes = Footprint.of_pack(manifest, read_config(tmp_path / "pack"))
    whole = (tmp_path / "pack" / DRAFT).stat().st_size
    tensors = load_file(tmp_path / "pack" / DRAFT)
    ours = sum(tensor.nbytes for part, tensor in tensors.items() if not part.startswith("_pad."))
    assert abs(takes.draft - ours) <= 2 * 29 + 64  # what is of 32 bits
    assert ours <= whole
    if head.experts is None:
        return
    gates, downs = (
        theirs.model.state_dict()[f"model.layers.0.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj")
    )
    for expert in range(len(gates)):
        gate, up = gates[expert].chunk(2)
        other, down = head.experts.rows.layout.read(head.experts.rows.data[expert], torch.float32)
        assert relative_rms(head.experts.signal.dense(expert, torch.float32), up) <= LIMITS[3]
        assert relative_rms(other, gate) <= LIMITS[4] and relative_rms(down, downs[expert].T) <= LIMITS[4]


def test_an_interruption_in_it_changes_no_byte(
    source: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DraftPart._packed  # pyright: ignore[reportPrivateUsage]

    def cut(self: DraftPart, expert: int) -> dict[str, Tensor]:
        if expert == 3:
            raise PowerCutError
        return whole(self, expert)

    with monkeypatch.context() as patch:
        patch.setattr(DraftPart, "_packed", cut)
        with pytest.raises(PowerCutError):
            packs(source, tmp_path / "p")
    packs(source, tmp_path / "p")
    assert contents(tmp_path / "p") == contents(packed)


def test_a_head_that_is_not_whole_is_left_out_with_the_reason(source: Path, headless: Path, tmp_path: Path) -> None:
    partial = Path(shutil.copytree(source, tmp_path / "source"))
    families.drop(partial, "model.layers.3.hnorm.weight")
    said = list[str]()
    manifest = packs(partial, tmp_path / "p", lambda step, _share, _left: said.append(step))
    assert not manifest.beside and f"{WITHOUT}: It lacks model.layers.3.hnorm.weight." in said
    assert (tmp_path / "p" / "layer_00.safetensors").read_bytes() == (headless / "layer_00.safetensors").read_bytes()


def test_a_head_is_added_later_and_a_kill_loses_nothing(
    source: Path, packed: Path, headless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(headless, tmp_path / "tiny"))
    whole = contents(packed)

    def cut(*_args: Any) -> None:
        raise PowerCutError

    for owner, name in ((DraftPart, "_packed"), (Manifest, "write")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cut)
            with pytest.raises(PowerCutError):
                add_draft(Checkpoint(source), folder, silent)
        assert PackedModel.open(folder).head() is None
    add_draft(Checkpoint(source), folder, silent)
    assert contents(folder) == whole
    bare = families.make(FAMILY, tmp_path / "bare")
    with pytest.raises(CheckpointError, match="has no drafting head"):
        add_draft(Checkpoint(bare), folder, silent)


def test_a_damaged_or_missing_head_is_left_out_and_made_again(source: Path, packed: Path, copy: Path) -> None:
    whole = (packed / DRAFT).read_bytes()
    (copy / DRAFT).write_bytes(whole[:-9] + bytes(255 - byte for byte in whole[-9:]))
    model = PackedModel.open(copy)
    assert model.head() is None and "damaged" in model.headless
    manifest = Manifest.read(copy)
    assert [damage.file for damage in damages(copy, manifest, silent)] == [DRAFT]
    add_draft(Checkpoint(source), copy, silent)
    assert contents(copy) == contents(packed) and not damages(copy, Manifest.read(copy), silent)
    (copy / DRAFT).unlink()
    model = PackedModel.open(copy)
    assert model.head() is None and "cannot be read" in model.headless


@pytest.mark.some(3)
@pytest.mark.parametrize("part", ["joined.q", "hidden_norm.weight", "experts.rows", "model.norm.weight", "q_a_proj.q"])
def test_a_head_of_other_shapes_is_refused_though_its_hash_is_right(copy: Path, part: str) -> None:
    tensors = load_file(copy / DRAFT)
    name = next(name for name in tensors if name.endswith(part))
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, copy / DRAFT)
    manifest = Manifest.read(copy)
    replace(manifest, beside={DRAFT: file_entry(copy / DRAFT)}).write(copy)
    damage = senseless(copy, Manifest.read(copy), silent)
    assert damage is not None and damage.file == DRAFT and name.removesuffix(".q") in damage.cause
    assert [one.file for one in damages(copy, Manifest.read(copy), silent)] == [DRAFT]
    model = PackedModel.open(copy)
    assert part == "q_a_proj.q" or (model.head() is None and name.removesuffix(".q") in model.headless)


def test_a_rounded_head_is_packed_as_what_its_codes_stand_for(source: Path, tmp_path: Path) -> None:
    from .test_quantized import rounded

    expected = rounded(source, tmp_path / "copy", "FP8 of makers")
    assert any(name.startswith("model.layers.3.") for name in expected)
    plain = Path(shutil.copytree(source, tmp_path / "plain"))
    for file in plain.glob("*.safetensors"):
        save_file({key: expected.get(key, tensor) for key, tensor in load_file(file).items()}, file)
    for name in ("copy", "plain"):
        make_pack(tmp_path / name, tmp_path / "packs" / name, LOW)
    ours, wanted = (load_file(tmp_path / "packs" / name / DRAFT) for name in ("copy", "plain"))
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_a_ready_pack_brings_it(packed: Path) -> None:
    offer = in_folder(packed)
    assert offer is not None and DRAFT in offer.files and offer.described(str(packed), "").draft


def test_only_its_tensors_are_fetched(source: Path, packed: Path, headless: Path, tmp_path: Path) -> None:
    """Of a hub, by ranges of its shards."""
    folder = Path(shutil.copytree(headless, tmp_path / "tiny"))
    families.one_shard(shard := Path(shutil.copytree(source, tmp_path / "source")))
    with FakeHub({"floe/tiny": shard}) as hub, pytest.MonkeyPatch.context() as patch:
        hub.used_by(patch, tmp_path / "home")
        record = FAMILIES[FAMILY].head
        assert record is not None
        begins = record.begins(read_config(folder))
        with HubTensors(resolve("floe/tiny"), tmp_path / "fetched", begins) as shelf:
            add_draft(Checkpoint(shelf), folder, silent)
            fetched = shelf.progress()
    own = sum(tensor.nbytes for tensor in load_file(source / "head.safetensors").values())
    assert fetched.done == fetched.total <= own
    assert (folder / DRAFT).read_bytes() == (packed / DRAFT).read_bytes()
