"""Files of packs: laid out for any reader; damage is found, named and repaired from the source."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.models.catalog import models_folder
from floe_chat.models.checking.repair import repair
from floe_chat.models.checking.verify import Compared, compare, damages
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.pack.manifest import FILE_NAME, FRONTIER, Manifest, file_entry
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.pack.tensor_file import TensorFile, TensorShapes
from floe_chat.models.packing.pack import EXACT, PackSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..helpers import (
    calibration_tokens,
    edit_json,
    edit_tensors,
    explained,
    make_checkpoint,
    make_pack,
    relative_rms,
    reseal,
    run_cli,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("verify") / "source", layers=3)


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "sound"
    make_pack(source, folder, PackSpec())
    return folder


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def silent(_step: str, _share: float) -> None:
    pass


def silent_left(_step: str, _share: float, _left: float | None) -> None:
    pass


def damaged(folder: Path) -> dict[str, str]:
    return {damage.file: damage.cause for damage in damages(folder, Manifest.read(folder), silent)}


def spoil(path: Path) -> None:
    """One bit in the middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sound_pack_has_no_damage_and_every_file_is_told_of(sound: Path) -> None:
    told: list[tuple[str, float]] = []
    assert damages(sound, Manifest.read(sound), lambda step, share: told.append((step, share))) == []
    assert {name for name in Manifest.read(sound).files if any(name in step for step, _ in told)} == set(
        contents(sound)
    ) - {FILE_NAME}
    assert [share for _, share in told] == sorted(share for _, share in told)


def test_all_damaged_files_are_named_at_once(copy: Path) -> None:
    spoil(copy / "layer_01.safetensors")
    (copy / "tokenizer.json").unlink()
    (copy / "dense.safetensors").write_bytes(b"x")
    found = damaged(copy)
    assert set(found) == {"layer_01.safetensors", "tokenizer.json", "dense.safetensors"}
    assert "sha256" in found["layer_01.safetensors"] and "missing" in found["tokenizer.json"]


# Of each file one at a time.
SENSELESS: list[dict[tuple[str, str], float]] = [
    {
        ("layer_00.safetensors", "up.scale"): float("nan"),
        ("layer_01.safetensors", "threshold"): -1.0,  # thresholds fall
        ("layer_02.safetensors", "up.zero"): float("inf"),
        ("dense.safetensors", "model.norm.weight"): float("nan"),
        ("profile.safetensors", "popularity"): float("nan"),
    },
    {("dense.safetensors", "lm_head.scale"): float("inf")},
]


@pytest.fixture(scope="module")
def wide(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack with float16 scales, as those of before: of bytes none can be wrong."""
    folder = tmp_path_factory.mktemp("wide") / "pack"
    make_pack(source, folder, PackSpec(short=False))
    return folder


@pytest.fixture
def wide_copy(wide: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wide, tmp_path / "wide"))


@pytest.mark.parametrize("wrong", SENSELESS, ids=["each file", "a scale of the dense part"])
def test_values_that_make_no_sense_are_found_behind_a_right_sha256(
    wide_copy: Path, wrong: dict[tuple[str, str], float]
) -> None:
    for (file, name), value in wrong.items():
        weights = load_file(wide_copy / file)
        weights[name].view(-1)[-1] = value
        save_file(weights, wide_copy / file)
    reseal(wide_copy)
    assert damaged(wide_copy).keys() == {file for file, _ in wrong}


def test_row_scales_that_are_not_finite_are_found(wide_copy: Path) -> None:
    copy = wide_copy

    def change(name: str, tensor: Tensor) -> Tensor:
        if name != "rows":
            return tensor
        tensor = tensor.clone()
        tensor[2, 5, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)  # float16 infinity
        return tensor

    edit_tensors(copy, change)
    reseal(copy)
    assert {file for file in damaged(copy) if file.startswith("layer")} == {f"layer_0{n}.safetensors" for n in range(3)}
    assert "gate of expert 2" in damaged(copy)["layer_00.safetensors"]


def test_a_dense_tensor_that_is_missing_is_found(copy: Path) -> None:
    edit_tensors(copy, lambda name, tensor: None if name == "model.layers.1.self_attn.k_proj.zero" else tensor)
    reseal(copy)
    assert "k_proj.zero" in damaged(copy)["dense.safetensors"]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("how", "files"),
    [
        ("spoilt", ["layer_00.safetensors", "profile.safetensors", "tokenizer.json", "config.json"]),
        ("missing", ["layer_01.safetensors", "dense.safetensors", "profile.safetensors", "tokenizer_config.json"]),
        ("missing", ["layer_01.safetensors", "layer_02.safetensors"]),
    ],
    ids=["spoilt", "missing", "layers"],
)
def test_repair_brings_back_the_very_bytes(sound: Path, copy: Path, source: Path, files: list[str], how: str) -> None:
    for name in files:
        spoil(copy / name) if how == "spoilt" else (copy / name).unlink()
    assert set(damaged(copy)) == set(files)
    assert repair(Checkpoint(source), copy, files, calibration_tokens(), silent_left) == []
    assert contents(copy) == contents(sound)


@pytest.mark.thorough
def test_a_pack_rounded_by_hqq_is_repaired_by_hqq(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "p"
    make_pack(source, folder, PackSpec(up=2, gate=4, down=4, rounding="hqq"))
    before, files = contents(folder), ["layer_01.safetensors", "dense.safetensors"]
    for name in files:
        spoil(folder / name)
    assert repair(Checkpoint(source), folder, files, calibration_tokens(), silent_left) == []
    assert contents(folder) == before


def test_repair_reads_only_what_it_needs(copy: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str, index: int | None = None) -> Tensor:
        read.append(name)
        return original(self, name, index)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    spoil(copy / "layer_01.safetensors")
    repair(Checkpoint(source), copy, ["layer_01.safetensors"], calibration_tokens(), silent_left)
    assert len(read) == 12 and all(".layers.1." in name and ".experts." in name for name in read)


def test_repair_with_another_text_says_so_and_leaves_a_sound_pack(copy: Path, source: Path) -> None:
    spoil(copy / "layer_02.safetensors")
    changed = repair(Checkpoint(source), copy, ["layer_02.safetensors"], calibration_tokens() + 1, silent_left)
    assert changed == ["layer_02.safetensors"] and damaged(copy) == {}
    assert PackedModel.open(copy, recheck=True)


@pytest.mark.thorough
def test_a_pack_of_before_is_repaired_with_tables_as_it_has_them(wide_copy: Path, source: Path) -> None:
    """Of the signal alone, not of the signal times the router's weight; its manifest stays one of before."""
    now = PackedModel.open(wide_copy)
    manifest = dataclasses.replace(
        now.manifest, calibration=dataclasses.replace(now.manifest.calibration, weighed=False)
    )
    weighed, rows = now.layer(1).thresholds.clone(), now.layer(1).rows.data.clone()
    manifest.write(wide_copy)
    spoil(wide_copy / "layer_01.safetensors")
    assert repair(Checkpoint(source), wide_copy, ["layer_01.safetensors"], calibration_tokens(), silent_left) == [
        "layer_01.safetensors"
    ]
    mended = PackedModel.open(wide_copy, recheck=True)
    assert not mended.manifest.calibration.weighed and torch.equal(mended.layer(1).rows.data, rows)
    assert relative_rms(mended.layer(1).thresholds, weighed) > 1e-3


def test_repair_keeps_presets_and_name(copy: Path, source: Path) -> None:
    preset = {"name": "Fast", "sparsity": 0.5, "product": 0.1, "drop": 0.0, "major": 0.0, "kl": 0.1}
    edit_json(copy / FILE_NAME, lambda fields: fields.update(name="Own", tuned=[{**preset, "bytes_per_token": 1.0}]))
    before = Manifest.read(copy)
    spoil(copy / "layer_00.safetensors")
    repair(Checkpoint(source), copy, ["layer_00.safetensors"], calibration_tokens(), silent_left)
    assert Manifest.read(copy) == before


def test_repair_from_another_model_is_refused(copy: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", layers=3, experts=5)
    before = contents(copy)
    with pytest.raises(CheckpointError, match="not the source"):
        repair(Checkpoint(other), copy, ["layer_00.safetensors"], calibration_tokens(), silent_left)
    assert contents(copy) == before


def by_bits(found: list[Compared]) -> dict[int, float]:
    return {bits: max(m.error for m in found if m.bits == bits) for bits in {m.bits for m in found}}


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (EXACT, {16}),
        (PackSpec(up=2, gate=4, down=3), {2, 3, 4, 8, 16}),
        pytest.param(
            PackSpec(up=2, gate=3, down=4, dense=8, rounding="hqq"), {2, 3, 4, 8, 16}, marks=pytest.mark.thorough
        ),
    ],
    ids=["exact", "calibrated", "hqq"],
)
def test_every_width_explains_how_far_the_values_are_off(
    tmp_path: Path, source: Path, spec: PackSpec, bits: set[int]
) -> None:
    make_pack(source, tmp_path / "p", spec)
    found = compare(PackedModel.open(tmp_path / "p"), Checkpoint(source), [0, 2], silent)
    assert all(matrix.good for matrix in found), [matrix for matrix in found if not matrix.good]
    assert len([matrix for matrix in found if "expert" in matrix.name]) == 2 * 4 * 3
    errors = by_bits(found)
    assert set(errors) == bits and errors[16] == 0
    assert all(errors[width] > limit for width, limit in ((2, 0.3), (3, 0.1), (4, 0.05), (8, 0.002)) if width in errors)


def test_another_models_weights_are_noticed(sound: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", layers=3, seed=3)
    found = compare(PackedModel.open(sound), Checkpoint(other), [1], silent)
    # Norms are ones in both.
    assert not [matrix for matrix in found if matrix.good and "norm" not in matrix.name]
    with pytest.raises(CheckpointError, match="not the source"):
        compare(PackedModel.open(sound), Checkpoint(make_checkpoint(tmp_path / "small", layers=2)), [0], silent)


def test_one_expert_in_the_place_of_another_is_noticed(copy: Path, source: Path) -> None:
    def swap(name: str, tensor: Tensor) -> Tensor:
        return tensor[[1, 0, 2, 3]] if name in ("rows", "up.q", "up.scale", "up.zero") else tensor

    edit_tensors(copy, swap)
    reseal(copy)
    found = compare(PackedModel.open(copy), Checkpoint(source), [1], silent)
    bad = {matrix.name.split(",")[1] for matrix in found if not matrix.good}
    assert bad == {" expert 1", " expert 2"}


def test_the_command_finds_repairs_and_compares(source: Path, tmp_path: Path) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "p"
    text.write_text("A person asked, and the machine answered as well as it could. " * 20)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert (
        "too short"
        in run_cli(*("pack", str(source), str(folder), "--text", str(short), "--rounding", "calibrated")).err
    )
    assert run_cli("pack", str(source), str(folder), "--text", str(text)).code == 0
    ran = run_cli("verify", str(folder))
    assert ran.code == 0 and "intact" in ran.out
    spoil(folder / "layer_01.safetensors")
    ran = run_cli("verify", str(folder))
    assert ran.code == 1 and "layer_01.safetensors" in ran.out and "--repair" in ran.out
    fields: dict[str, Any] = json.loads(run_cli("verify", str(folder), "--json").out)
    assert not fields["good"] and [damage["file"] for damage in fields["damaged"]] == ["layer_01.safetensors"]
    assert run_cli("verify", str(folder), "--repair").code == 2
    arguments = ("verify", str(folder), "--repair", "--source", str(source), "--text", str(text), "--json")
    ran = run_cli(*arguments)
    fields = json.loads(ran.out)
    assert ran.code == 0 and fields["good"] and fields["repaired"] == ["layer_01.safetensors"] and fields["compared"]
    assert "not the file it was" not in ran.err


@pytest.fixture
def tuned(copy: Path) -> Path:
    """With what `floe-chat tune` leaves in it."""
    (copy / FRONTIER).write_text('{"points": [1, 2, 3]}')
    dataclasses.replace(Manifest.read(copy), beside={FRONTIER: file_entry(copy / FRONTIER)}).write(copy)
    return copy


def test_a_change_of_the_manifest_or_of_what_lies_beside_is_named(tuned: Path) -> None:
    count = len(list(tuned.iterdir()))
    assert f"all {count} files are intact" in run_cli("verify", str(tuned)).out
    spoil(tuned / FRONTIER)
    ran = run_cli("verify", str(tuned))
    assert ran.code == 1 and "damaged   frontier.json" in ran.out and "floe-chat tune" in ran.out
    assert "--repair" not in ran.out  # it cannot be packed
    text = (tuned / FILE_NAME).read_text()
    (tuned / FILE_NAME).write_text(text.replace('"tokens": 128', '"tokens": 129'))
    for command in (("verify",), ("ask", "hi", "-m")):
        ran = run_cli(*command, str(tuned))
        assert ran.code == 1 and "manifest.json was changed" in ran.err


def test_repair_leaves_what_cannot_be_packed(tuned: Path, source: Path) -> None:
    spoil(tuned / FRONTIER)
    ran = run_cli("verify", str(tuned), "--repair", "--source", str(source))
    assert ran.code == 1 and "frontier.json" in ran.out and "repaired" not in ran.out


def test_what_an_earlier_version_kept_no_checksum_of_is_named(tuned: Path) -> None:
    edit_json(tuned / FILE_NAME, lambda fields: fields.pop("beside"))
    ran = run_cli("verify", str(tuned))
    assert ran.code == 0 and "unknown   manifest.json" in ran.out and "unknown   frontier.json" in ran.out
    assert json.loads(run_cli("verify", str(tuned), "--json").out)["unrecorded"] == [FILE_NAME, FRONTIER]


def test_a_damaged_copy_is_called_by_its_own_name_and_how_to_repair_it_is_said(
    sound: Path, source: Path, own_folders: Path
) -> None:
    copy = Path(shutil.copytree(sound, models_folder() / "foo"))
    assert run_cli("verify", "foo").out.startswith("foo: ")
    assert json.loads(run_cli("ask", "hi", "-m", "foo", "--json", "--max-tokens", "1").out)["model"] == "foo"
    spoil(copy / "layer_00.safetensors")
    assert f"floe-chat verify {copy}" in run_cli("ask", "hi", "-m", "foo").err
    told = run_cli("verify", "foo", "--source", str(source)).out
    assert "Pack these files again" in told and f"verify {copy} --repair --source {source}" in told
    assert "--repair" in explained(run_cli("verify", "foo", "--text", "nofile"), 2)


ODD: TensorShapes = {
    "bytes": (torch.uint8, (3, 7)),
    "nothing": (torch.float16, (3, 0)),
    "halves": (torch.float16, (5,)),
    "brain": (torch.bfloat16, (2, 3, 5)),
    "floats": (torch.float32, (1,)),
    "aligned": (torch.uint8, (64,)),
    "longs": (torch.int64, (9,)),
}


def places(path: Path) -> Iterator[tuple[str, int]]:
    """Every tensor's name and first byte in the file, read from the header without any library."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__" and not name.startswith("_pad."):
            yield name, 8 + length + entry["data_offsets"][0]


def filled(plan: TensorShapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in plan.items()}


def test_tensors_written_in_any_order_are_read_by_safetensors(tmp_path: Path) -> None:
    values = filled(ODD)
    with TensorFile(tmp_path / "t.safetensors", ODD) as file:
        for name in reversed(values):
            file[name].copy_(values[name])
    read = load_file(tmp_path / "t.safetensors")
    assert {name for name in read if not name.startswith("_pad.")} == set(values)
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in values.items())


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "t.safetensors", ODD):
        pass
    assert {name: place % 64 for name, place in places(tmp_path / "t.safetensors")} == dict.fromkeys(ODD, 0)


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"\xff" * 10_000)
    with TensorFile(path, {"a": (torch.uint8, (3,))}) as file:
        assert not file["a"].any()
    assert path.stat().st_size < 1000


def test_a_full_disk_is_known_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="space"):
        TensorFile(tmp_path / "t.safetensors", ODD)


def test_a_file_system_that_cannot_claim_space_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with TensorFile(tmp_path / "t.safetensors", ODD) as file:
        file["longs"].fill_(7)
    assert load_file(tmp_path / "t.safetensors")["longs"].tolist() == [7] * 9


@pytest.mark.parametrize("bits", [2, 3, 16])
def test_packed_files_are_aligned_and_readable(tmp_path: Path, bits: int) -> None:
    checkpoint = make_checkpoint(tmp_path / "source", hidden=40, intermediate=37, experts=3, layers=1)
    make_pack(checkpoint, tmp_path / "packed", PackSpec(up=bits, gate=bits, down=bits))
    files = sorted((tmp_path / "packed").glob("*.safetensors"))
    assert [path.name for path in files] == ["dense.safetensors", "layer_00.safetensors", "profile.safetensors"]
    for path in files:
        assert {name: place % 64 for name, place in places(path) if place % 64} == {}
        assert load_file(path)
