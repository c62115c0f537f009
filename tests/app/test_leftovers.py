"""What failed and abandoned setups left is listed with its size, and deleted by one key or one command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from floe_chat.app.setup.leftovers import clear, leftovers
from floe_chat.app.setup.setups import Setups
from floe_chat.app.setup.wish import Wish, unfinished, write_note
from floe_chat.models import catalog
from floe_chat.models.errors import TryAgainError
from floe_chat.models.packing.workplace import locked

from ..helpers import explained, run_cli
from .scripted import until
from .test_models_screen import screen, to
from .wizardry import around, see, shown


def left(name: str, marker: str = "download.lock", size: int = 100_000) -> Path:
    """A folder as a killed download or pack leaves it."""
    folder = catalog.models_folder() / name
    folder.mkdir(parents=True)
    (folder / marker).write_text("{}")
    (folder / "layer_00.safetensors.part").write_bytes(bytes(size))
    return folder


def test_what_is_left_and_what_is_not(tiny_pack: Path, tmp_path: Path) -> None:
    downloads, packed = left("gone.download"), left("gone", "packing.json")
    for name in ("other", "other.download"):
        left(name)
    begun = Wish("floe/other", "other")
    write_note(begun)
    shutil.copytree(tiny_pack, catalog.models_folder() / "sound")
    (catalog.models_folder() / "sound" / "packing.json").write_text("{}")  # being repaired
    (catalog.models_folder() / "photos.download").mkdir()
    (catalog.models_folder() / "photos.download" / "sea.jpg").write_bytes(b"sea")
    shutil.copytree(packed, tmp_path / "elsewhere")
    (catalog.models_folder() / "linked").symlink_to(tmp_path / "elsewhere")
    (one,) = leftovers()
    assert (one.name, one.paths) == ("gone", (packed, downloads)) and one.bytes >= 200_000
    assert unfinished() == [begun]
    clear(one)
    assert leftovers() == [] and not packed.exists() and not downloads.exists()
    names = {"other", "other.download", "other.setup.json", "sound", "photos.download", "linked"}
    assert {path.name for path in catalog.models_folder().iterdir()} == names


def test_what_is_in_use_stays() -> None:
    folder = left("busy", "packing.json")
    with locked(folder / "packing.json", "test"), pytest.raises(TryAgainError, match="is using"):
        clear(leftovers()[0])
    assert folder.exists()
    clear(leftovers()[0])
    assert not folder.exists()


def test_the_commands() -> None:
    folder = left("gone.download")
    found = json.loads(run_cli("models", "--json").out)
    assert [(one["name"], one["paths"]) for one in found["left"]] == [("gone", [str(folder)])]
    assert found["left"][0]["bytes"] >= 100_000
    text = run_cli("models").out
    assert "Left over" in text and "gone" in text and "kB" in text and "did not end" in text
    assert "--yes" in explained(run_cli("models", "remove", "gone"), 2)
    assert run_cli("models", "remove", "gone", "--yes").code == 0
    assert not folder.exists() and "Left over" not in run_cli("models").out


async def test_one_key_deletes_it(published: Path, setups: Setups) -> None:
    folders = left("gone.download"), left("gone", "packing.json")
    note = catalog.models_folder() / "gone.setup.json"
    note.write_text("[]")
    async with around(screen(setups, published)) as pilot:
        await see(pilot, "Left over by setups")
        await to(pilot, "gone")
        await see(pilot, "is ignored", "X deletes it")
        await pilot.press("x")
        await see(pilot, "gone, 2", *map(str, (note.name,)), "Y deletes")
        await pilot.press("y")
        await until(pilot, lambda: not note.exists() and "Left over" not in shown(pilot))
    assert not any(folder.exists() for folder in folders)
