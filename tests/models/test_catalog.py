"""Finding a model by name or folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from floe_chat.models.catalog import asset, find, installed, models_folder
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import FloeError, PackError, UsageError
from floe_chat.models.packed import PackedModel


@pytest.fixture
def named(tiny_pack: Path) -> str:
    """A pack in the user's models folder."""
    models_folder().mkdir(parents=True)
    shutil.copytree(tiny_pack, models_folder() / "mine")
    return "mine"


def test_a_name_means_a_folder_of_the_models_folder(named: str) -> None:
    assert find(named) == models_folder() / "mine"


@pytest.mark.parametrize("form", ["absolute", "relative", "trailing-slash"])
def test_a_path_means_itself(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.chdir(tiny_pack.parent)
    given = {"absolute": str(tiny_pack), "relative": f"./{tiny_pack.name}", "trailing-slash": f"{tiny_pack}/"}[form]
    assert find(given).resolve() == tiny_pack.resolve()


def test_the_home_sign_is_understood(tiny_pack: Path, own_folders: Path) -> None:
    shutil.copytree(tiny_pack, own_folders / "p")
    assert find("~/p").resolve() == (own_folders / "p").resolve()


def test_a_name_goes_before_a_folder_in_the_current_directory(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / named).mkdir()
    monkeypatch.chdir(tmp_path)
    assert find(named) == models_folder() / "mine"


@pytest.mark.parametrize(
    "name",
    ["nonesuch", "no/such/folder", "~nosuchuser/pack", "x" * 5000, "x/" * 3000, "a\0b", "../../..nonesuch", "-"],
    ids=lambda name: ascii(name)[:20],
)
def test_what_is_not_there_is_explained(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(name)
    assert "demo" in caught.value.cause and caught.value.hint and caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_folder_without_a_pack_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FloeError) as caught:
        find(name)
    assert caught.value.cause and caught.value.hint


def test_a_checkpoint_is_told_from_a_pack(tiny_checkpoint: Path) -> None:
    with pytest.raises(PackError, match="not packed"):
        find(str(tiny_checkpoint))


def test_installed_lists_good_and_bad(named: str) -> None:
    (models_folder() / "broken").mkdir()
    (models_folder() / "broken" / "manifest.json").write_text("{")
    (models_folder() / "a file").write_text("not a model")
    found = {model.name: model for model in installed()}
    assert set(found) == {"demo", "mine", "broken"}
    assert found[named].trouble is None and found[named].bytes > 100_000
    assert found["broken"].trouble


def test_the_demo_is_whole_and_packed_from_its_checkpoint() -> None:
    packed = PackedModel.open(find("demo"), recheck=True)
    source = Checkpoint(asset("demo", "checkpoint"))
    dense, published = packed.dense(), set(source.dense_names())
    assert all(torch.equal(dense[name], source.tensor(name)) for name in published & set(dense))
    rounded = {
        name.removesuffix(".weight") + part for name in published - set(dense) for part in (".q", ".scale", ".zero")
    }
    assert set(dense) - published == rounded
    assert packed.manifest.architecture.layers == source.config.num_hidden_layers


def test_assets_are_there() -> None:
    assert len(asset("calibration.txt").read_text(encoding="utf-8")) > 10_000
