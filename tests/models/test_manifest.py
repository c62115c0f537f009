"""manifest.json is the first thing read of a folder from anywhere: nothing in it may break the reader."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.loader import load
from floe_chat.kernels.rule import Rule
from floe_chat.models.errors import PackError
from floe_chat.models.pack.dial_loss import DialLoss
from floe_chat.models.pack.manifest import FILE_NAME, Manifest, TunedPreset, layer_file
from floe_chat.models.pack.packed_model import PackedModel

from ..helpers import edit_json

WRONG: list[Any] = [None, True, -1, 0, 2.0, 1 << 70, float("nan"), "", "x", "../x", [], [1], {}, {"a": 1}]
# Free text or notes: the reader shows them and decides nothing by them.
FREE = {("name",), ("source", "name"), ("source", "commit"), ("calibration", "tokens")}


@pytest.fixture
def pack(tiny_pack: Path, tmp_path: Path) -> Path:
    """A pack whose manifest may be changed."""
    return Path(shutil.copytree(tiny_pack, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a reader that goes through an absurd number of layers, before it fills the memory."""
    named: list[int] = []

    def limited(layer: int) -> str:
        named.append(layer)
        assert len(named) < 200_000, "the reader believes in an absurd number of layers"
        return layer_file(layer)

    monkeypatch.setattr("floe_chat.models.pack.manifest.layer_file", limited)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Its fields but the checksum, behind which no wrong value would be seen."""
    fields: dict[str, Any] = json.loads((folder / FILE_NAME).read_text())
    del fields["sha256"]
    return fields


def silent(_step: str, _share: float) -> None:
    pass


def use(folder: Path) -> None:
    """Everything that a program does with a pack before it answers."""
    packed = PackedModel.open(folder)
    for layer in range(packed.manifest.architecture.layers):
        packed.layer(layer)
    packed.dense()
    packed.profile()
    packed.manifest.widths.describe()
    load(folder, None, "cpu", silent)


def paths(fields: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field and every object that holds fields; of the files, two stand for all."""
    for name, value in fields.items():
        if prefix == ("files",) and name not in ("config.json", "layer_01.safetensors"):
            continue
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, name))


def changed(fields: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`, or without it (`value` is ...)."""
    fields = copy.deepcopy(fields)
    owner = fields
    for name in path[:-1]:
        owner = owner[name]
    if value is ...:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return fields


def test_wrong_values_never_raise_anything_but_a_pack_error(pack: Path, every_case: bool) -> None:
    fields = manifest_of(pack)
    escaped: list[str] = []
    accepted: list[str] = []
    for path in paths(fields):
        original = fields
        for name in path:
            original = original[name]
        values = [..., *(wrong for wrong in WRONG if wrong != original)]
        for value in values if every_case else values[len(path) % 3 :: 3]:
            (pack / FILE_NAME).write_text(json.dumps(changed(fields, path, value)))
            try:
                use(pack)
            except PackError as error:
                if not (error.title and error.cause and error.hint):
                    escaped.append(f"{'.'.join(path)} = {value!r}: a PackError without cause or hint")
            except Exception as error:  # noqa: BLE001
                escaped.append(f"{'.'.join(path)} = {value!r}: {type(error).__name__}: {error}")
            else:
                # Without its plain tables a pack is one of before.
                if path not in FREE and not (path[-1] == "plain" and value in (..., False)):
                    accepted.append(f"{'.'.join(path)} = {value!r}")
    assert not escaped, "\n".join(escaped)
    assert not accepted, "\n".join(accepted)


def test_a_change_to_the_manifest_itself_is_noticed(pack: Path) -> None:
    fields = json.loads((pack / FILE_NAME).read_text())
    (pack / FILE_NAME).write_text(json.dumps(fields))  # laid out otherwise
    assert Manifest.read(pack).sealed
    fields["calibration"]["tokens"] += 1
    (pack / FILE_NAME).write_text(json.dumps(fields))
    with pytest.raises(PackError, match="damaged") as caught:
        Manifest.read(pack)
    assert "manifest.json was changed" in caught.value.cause


def test_a_manifest_without_a_checksum_is_read_and_known_as_such(pack: Path) -> None:
    sealed = Manifest.read(pack)
    (pack / FILE_NAME).write_text(json.dumps(manifest_of(pack)))
    assert sealed.sealed and not Manifest.read(pack).sealed


ABSURD = [
    pytest.param(("architecture", "layers"), 3_000_000, id="layers"),
    pytest.param(("architecture", "experts"), 1 << 40, id="experts"),
    pytest.param(("architecture", "hidden"), 1 << 60, id="hidden"),
    pytest.param(("architecture", "intermediate"), 1 << 60, id="intermediate"),
    pytest.param(("architecture", "top_k"), 1 << 60, id="top-k"),
    pytest.param(("architecture", "top_k"), 3, id="top-k-of-another-model"),
    pytest.param(("architecture", "layers"), 1, id="layers-of-another-model"),
    pytest.param(("architecture", "experts"), 5, id="experts-of-another-model"),
    pytest.param(("architecture", "model_type"), "olmoe", id="family-of-another-model"),
    pytest.param(("widths", "group"), 7, id="group-that-does-not-divide"),
    pytest.param(("widths", "group"), 32, id="group-of-another-pack"),
    pytest.param(("widths", "up"), 2, id="up-of-another-pack"),
    pytest.param(("widths", "dense"), 8, id="dense-of-another-pack"),
    pytest.param(("widths", "dense"), 16, id="dense-of-a-wider-pack"),
    pytest.param(("widths", "dense"), 3, id="dense-that-does-not-exist"),
    pytest.param(("calibration", "quantiles"), 100, id="quantiles-of-another-pack"),
]


@pytest.mark.parametrize(("path", "value"), ABSURD)
def test_sizes_that_the_files_contradict_are_refused(pack: Path, path: tuple[str, ...], value: Any) -> None:
    (pack / FILE_NAME).write_text(json.dumps(changed(manifest_of(pack), path, value)))
    with pytest.raises(PackError):
        use(pack)


BAD_NAMES = ["../outside", "/etc/passwd", "a/b", "a\\b", "..", ".", "", "C:evil", "a\0b", "\ud800"]


@pytest.mark.parametrize(
    "name",
    [*BAD_NAMES, "x" * 5000],
    ids=ascii,
)
def test_file_names_that_leave_the_folder_are_refused(pack: Path, name: str) -> None:
    fields = manifest_of(pack)
    fields["files"][name] = fields["files"]["config.json"]
    (pack.parent / "outside").write_bytes((pack / "config.json").read_bytes())
    (pack / FILE_NAME).write_text(json.dumps(fields))
    with pytest.raises(PackError):
        PackedModel.open(pack)


GARBAGE = {
    "empty": b"",
    "open": b"{",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "text": b'"x"',
    "not-utf-8": b"\xff\xfe",
    "zeros": b"\0" * 100,
    "deep-list": b"[" * 100_000,
    "deep-object": b'{"a":' * 50_000,
    "long-number": b"9" * 10_000,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_refused(pack: Path, content: bytes) -> None:
    (pack / FILE_NAME).write_bytes(content)
    with pytest.raises(PackError):
        PackedModel.open(pack)


def test_a_pack_whose_experts_have_different_widths_is_refused_with_the_way_out(pack: Path) -> None:
    (pack / FILE_NAME).write_text(json.dumps(changed(manifest_of(pack), ("version",), 4)))
    with pytest.raises(PackError, match="cannot be read any more") as caught:
        PackedModel.open(pack)
    assert "fewer bits" in caught.value.cause and "floe-chat pack SOURCE" in caught.value.hint


@pytest.mark.parametrize("version", [0, 2, 10, "3", None, 2.5, [3]], ids=repr)
def test_other_versions_are_named(pack: Path, version: Any) -> None:
    (pack / FILE_NAME).write_text(json.dumps(changed(manifest_of(pack), ("version",), version)))
    with pytest.raises(PackError, match="version") as caught:
        PackedModel.open(pack)
    assert repr(version) in caught.value.cause and "pdate" in caught.value.hint
    assert "pack" in caught.value.hint and "again" in caught.value.hint


def test_manifest_comes_back(tiny_pack: Path, tmp_path: Path) -> None:
    rule = Rule(0.4, 0.7, drop=0.4, major=0.8, weighed=True, layers=(0.8, 1.2))
    tuned = (TunedPreset("Balanced", rule, 0.01, 1e6, "text", 100), TunedPreset("Fast", Rule(0.5), 0.05, 1e5))
    dials = DialLoss("text", 100, ((0.5, 0.0), (1.0, 2.5)), ((0.5, 0.01),), (), ())
    manifest = replace(Manifest.read(tiny_pack), tuned=tuned, dials=dials)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "curve", [[[0.5, -1.0]], [[0.5, 0.1], [0.5, 0.2]], [[0.0, 0.1]], [[1.5, 0.1]], [[0.5]], 3], ids=repr
)
def test_wrong_losses_of_dials_are_refused(pack: Path, curve: Any) -> None:
    dials = {"text": "", "tokens": 1, "sparsity": curve, "product": [], "drop": [], "major": []}
    (pack / FILE_NAME).write_text(json.dumps(manifest_of(pack) | {"dials": dials}))
    with pytest.raises(PackError, match="damaged"):
        Manifest.read(pack)


def test_packs_of_before_keep_their_version(tiny_pack: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(tiny_pack)
    assert manifest.calibration.weighed and manifest_of(tiny_pack)["version"] == 7
    wide = replace(manifest, widths=replace(manifest.widths, short=False))
    wide.write(tmp_path)
    assert manifest_of(tmp_path)["version"] == 6 and "short" not in manifest_of(tmp_path)["widths"]
    assert Manifest.read(tmp_path) == wide
    before = replace(wide, calibration=replace(manifest.calibration, weighed=False), signals=())
    before.write(tmp_path)
    fields = manifest_of(tmp_path)
    assert fields["version"] == 3 and "weighed" not in fields["calibration"]
    assert Manifest.read(tmp_path) == before
    edit_json(tmp_path / FILE_NAME, lambda fields: fields["calibration"].update(weighed=True))
    with pytest.raises(PackError, match="damaged"):
        Manifest.read(tmp_path)
