"""Fixtures that many tests share. Every test runs with data, cache and configuration folders of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, so that no test reads or writes the user's own files."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Mixtral in bfloat16, in several shards."""
    from .helpers import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_pack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_checkpoint` with 2-bit up and 4-bit rows."""
    from floe_chat.models.pack import PackSpec

    from .helpers import make_pack

    folder = tmp_path_factory.mktemp("packed") / "tiny"
    make_pack(tiny_checkpoint, folder, PackSpec())
    return folder


@pytest.fixture(scope="session")
def exact_pack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_checkpoint` with every weight at the source's 16 bit."""
    from floe_chat.models.pack import EXACT

    from .helpers import make_pack

    folder = tmp_path_factory.mktemp("packed") / "tiny-exact"
    make_pack(tiny_checkpoint, folder, EXACT)
    return folder
