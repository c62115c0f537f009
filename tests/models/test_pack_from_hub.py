"""A pack of a model that arrives while it is packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve
from floe_chat.models.packing.pack import EXACT, pack

from ..helpers import calibration_tokens
from .fakehub import ALWAYS, FakeHub, Fault

TUNING = Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.02)


def test_it_is_the_one_of_a_folder_byte_for_byte_whatever_the_network_does(
    tiny_checkpoint: Path, exact_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({"floe/tiny": tiny_checkpoint}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        hub.faults.append(Fault("GET /storage/", close_after=15_000, times=ALWAYS))
        with HubShelf(resolve("floe/tiny"), tmp_path / "fetched", tuning=TUNING) as shelf:
            manifest = pack(
                Checkpoint(shelf), tmp_path / "pack", replace(EXACT, signal="up"), calibration_tokens(), "tiny"
            )
            fetched = shelf.progress()
        commit = hub.repositories["floe/tiny"].commit
    assert (manifest.source.name, manifest.source.commit) == ("floe/tiny", commit)
    assert fetched.state == "done" and len(fetched.files) > 1
    assert not [path for path in (tmp_path / "fetched").iterdir() if path.suffix in (".safetensors", ".part")]
    packed = sorted(path.name for path in exact_pack.iterdir())
    assert sorted(path.name for path in (tmp_path / "pack").iterdir()) == packed
    for name in packed:
        if name != "manifest.json":  # which tells the source
            assert (tmp_path / "pack" / name).read_bytes() == (exact_pack / name).read_bytes(), name
