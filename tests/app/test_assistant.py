"""Gemma 4's assistant comes with a setup, and is added to a model that lacks it, from the hub or a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.wish import wish
from floe_chat.models import catalog
from floe_chat.models.pack.manifest import DRAFT, Manifest

from .. import families
from ..helpers import explained, run_cli
from ..models.fakehub import FakeHub
from .wizardry import IMPATIENT, ended

GEMMA = "google/gemma-4-26B-A4B-it"
LISTED = f"{GEMMA}-assistant"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gemma")
    source = families.make("gemma4", folder / "source")
    families.add_assistant(source, folder / "small")
    return source, folder / "small"


def test_a_setup_fetches_it_and_a_later_one_adds_it(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, small = folders
    with FakeHub({GEMMA: source, LISTED: small}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        with Setup(wish(GEMMA, "tiny"), tuning=IMPATIENT) as running:
            done = ended(running.start()).progress()
        assert running.error is None and done.state == "done" and not done.notices
        folder = catalog.find("tiny")
        assert DRAFT in Manifest.read(folder).beside
        assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny"]
        whole = (folder / DRAFT).read_bytes()
        (folder / DRAFT).write_bytes(whole[:-1])
        repaired = run_cli("verify", "tiny", "--repair")
        assert repaired.code == 0 and (folder / DRAFT).read_bytes() == whole, repaired.err
    with FakeHub({GEMMA: source}) as hub:
        hub.used_by(monkeypatch, tmp_path / "other home")
        with Setup(wish(GEMMA, "bare"), tuning=IMPATIENT) as running:
            done = ended(running.start()).progress()
        assert running.error is None and "floe-chat setup bare" in done.notices[-1]
    with FakeHub({GEMMA: source, LISTED: small}) as hub:
        hub.used_by(monkeypatch, tmp_path / "third home")
        added = run_cli("setup", "bare", "--yes")
    assert added.code == 0 and "without the assistant" in added.err and "has its assistant now" in added.err, added.err
    assert (catalog.find("bare") / DRAFT).read_bytes() == whole
    assert "drafting  an assistant of" in run_cli("plan", "bare").out


def test_one_is_given_by_hand(folders: tuple[Path, Path], tiny_checkpoint: Path, tmp_path: Path) -> None:
    source, small = folders
    pack = "pack", str(source), str(tmp_path / "tiny"), "--assistant"
    assert "is not Gemma 4's assistant" in explained(run_cli(*pack, str(source)), 1)
    assert not (tmp_path / "tiny").exists()
    other = "pack", str(tiny_checkpoint), str(tmp_path / "other"), "--assistant", str(small)
    assert "cannot be packed with this model" in explained(run_cli(*other), 2)
    made = run_cli(*pack, str(small))
    assert made.code == 0 and DRAFT in Manifest.read(tmp_path / "tiny").beside, made.err
    shutil.copytree(tmp_path / "tiny", catalog.models_folder() / "mine")
    again = run_cli("setup", "mine", "--assistant", str(small), "--yes")
    assert again.code == 0 and "has its assistant now" in again.err, again.err
    shutil.copytree(catalog.asset("demo", "packed"), catalog.models_folder() / "other")
    assert "takes no assistant" in explained(run_cli("setup", "other", "--assistant", str(small), "--yes"), 2)
    assert "exclude" in explained(run_cli("setup", "mine", "--assistant", str(small), "--no-draft"), 2)
