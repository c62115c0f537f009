"""A hub with a tiny model, and what sets it up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.history import History
from floe_chat.app.setup.setups import Setups
from floe_chat.models import catalog

from ..helpers import make_checkpoint
from ..models.fakehub import FakeHub
from .settling import use_settling
from .wizardry import IMPATIENT, REPO


@pytest.fixture(scope="session", autouse=True)
def settling() -> Iterator[None]:
    """Keys are waited for by what they do."""
    with pytest.MonkeyPatch.context() as patch:
        use_settling(patch)
        yield


@pytest.fixture(autouse=True)
def closed_histories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every history that a test opens is closed after it: its thread keeps the whole screen in memory."""
    opened: list[History] = []
    make = History.__init__

    def kept(self: History, file: Path | None) -> None:
        opened.append(self)
        make(self, file)

    monkeypatch.setattr(History, "__init__", kept)
    yield
    for history in opened:
        history.close(timeout=0)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in several shards."""
    return make_checkpoint(tmp_path_factory.mktemp("published") / "tiny", hidden=32, intermediate=64)


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with it as REPO, which our code finds in HF_ENDPOINT."""
    with FakeHub({REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


@pytest.fixture
def setups() -> Iterator[Setups]:
    """A program's setups, with downloads that lose patience soon."""
    setups = Setups(IMPATIENT)
    yield setups
    setups.close()
    catalog.use_models_folder(None)
