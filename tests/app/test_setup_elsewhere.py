"""A copy of a model that another program downloaded is packed instead of a download, where the user agrees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups
from floe_chat.models import catalog
from floe_chat.models.pack.manifest import Manifest

from ..families import one_shard
from ..helpers import make_checkpoint, run_cli
from ..models.fakehub import FakeHub
from ..models.gguf.converting import convert
from .scripted import until
from .wizardry import REPO, around, entry_of, machine_of, results, see, shown, surveyor

BITS = ("--up", "3", "--rows", "4", "--dense", "4", "--no-tune")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return one_shard(make_checkpoint(folder, hidden=32, intermediate=64, dtype=torch.float16))


@pytest.fixture(scope="module")
def file(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("file") / "tiny-Q4_0.gguf", "Q4_0")


@pytest.fixture
def copy(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in LM Studio's folder, in a home of its own."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))
    folder = tmp_path / ".lmstudio" / "models" / "somebody" / "tiny-GGUF"
    folder.mkdir(parents=True)
    return Path(shutil.copyfile(file, folder / file.name))


def test_it_is_packed_if_the_user_agrees(copy: Path, published: Path, hub: FakeHub) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, stdin=b"y\ny\ny\n", terminal=True)
    assert done.code == 0, done.err
    assert "in the folders of LM Studio" in done.err and f"{copy.stem} of LM Studio: " in done.err
    assert f"Pack {copy.stem} instead of downloading" in done.err and "rounded twice" in done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == "Q4_0"
    assert copy.is_file() and not [one for one in hub.requests if "safetensors" in str(one)]


@pytest.mark.parametrize("answers", ["n\ny\n", "y\nn\ny\n", "y\n\ny\n"], ids=["no look", "no copy", "as a rule not"])
def test_it_is_left_alone_if_the_user_does_not(copy: Path, published: Path, hub: FakeHub, answers: str) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, stdin=answers.encode(), terminal=True)
    assert done.code == 0, done.err
    assert ("of LM Studio: " in done.err) == answers.startswith("y")
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == ""


def test_nobody_looks_unasked(copy: Path, published: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(_entry: object = None) -> None:
        pytest.fail("looked")

    monkeypatch.setattr("floe_chat.app.setup.elsewhere.copies", looked)
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, "--yes")
    assert done.code == 0 and "LM Studio" not in done.err


def test_a_script_can_ask_for_it(copy: Path, published: Path, hub: FakeHub) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, "--yes", "--look")
    assert done.code == 0, done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == "Q4_0"
    copy.unlink()
    again = run_cli("setup", REPO, "--name", "another", *BITS, "--yes", "--look")
    assert again.code == 0 and "There is no copy of another in the folders of LM Studio" in again.err


async def test_the_wizard_looks_on_a_key(copy: Path, published: Path, setups: Setups) -> None:
    wizard = WizardScreen(setups, entries=[entry_of(published)], surveyor=surveyor())
    async with around(wizard) as pilot:
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "Speed: ", "L looks in the folders of LM Studio")
        assert "Q4_0" not in shown(pilot)
        await pilot.press("l")
        await see(pilot, "tiny-q4_0-lmstudio", "a Q4_0 file", "rounded twice")
        await pilot.press("k")
        await see(pilot, "KL, nats", "measured on the demo model")
        await pilot.press("k", "enter")
        await see(pilot, "is ready", "Enter chats with it")
        await pilot.press("enter")
        await until(pilot, lambda: bool(results(pilot)))
    assert Manifest.read(catalog.models_folder() / "tiny-q4_0-lmstudio").source.rounding == "Q4_0"
