"""The cache of the source's logits that an evaluation keeps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality.source_model import SourceModel, identify
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import logits_cache
from torch import Tensor

from ..helpers import edit_json, edit_tensors
from .evaluating import TEXT, cache_folder, measured, shorten, unread


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each batch that the source really computed."""
    calls: list[int] = []
    original = SourceModel.logits

    def counting(self: SourceModel, ids: Tensor, keep: int) -> Tensor:
        calls.append(ids.shape[0])
        return original(self, ids, keep)

    monkeypatch.setattr(SourceModel, "logits", counting)
    return calls


def test_the_source_is_computed_once(tiny_pack: Path, tiny_checkpoint: Path, computed: list[int]) -> None:
    notes: list[str] = []
    first = measured(tiny_pack, tiny_checkpoint, "High", notes=notes)
    assert (computed, notes) == ([2, 4], [])  # windows, then prompts
    assert measured(tiny_pack, tiny_checkpoint, "High", notes=notes) == first
    assert (computed, notes) == ([2, 4], [])
    files = list(cache_folder().iterdir())
    assert len(files) == 4 and not any(path.suffix == ".part" for path in files)
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    measured(tiny_pack, tiny_checkpoint, "High", ids=TEXT[::-1])
    assert computed == [2, 4, 2, 4], "another text is another entry"


def test_another_source_is_another_entry(tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    packed = PackedModel.open(tiny_pack)
    before = identify(Checkpoint(copy), packed)
    assert before == identify(Checkpoint(copy), packed)
    edit_tensors(copy, lambda name, value: value + 1 if ".experts.2.w2" in name else value)
    assert identify(Checkpoint(copy), packed) != before


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "cut short": lambda entry: os.truncate(entry, 100),
    "another byte": lambda entry: entry.write_bytes(entry.read_bytes()[:-1] + bytes([entry.read_bytes()[-1] ^ 1])),
    "foreign": lambda entry: edit_json(entry.with_suffix(".json"), lambda fields: fields.update(format="another")),
    "no JSON": lambda entry: entry.with_suffix(".json").write_text("["),
    "another shape": lambda entry: logits_cache._store(entry.parent, entry.stem, torch.zeros(1, 2, 3)),  # pyright: ignore[reportPrivateUsage]
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_computed_again_and_said_so(damage: Damage) -> None:
    logits, notes, calls = torch.randn(2, 4, 64), list[str](), list[int]()

    def compute() -> Tensor:
        calls.append(1)
        return logits

    def asked() -> Tensor:
        return logits_cache.cached("key", (2, 4, 64), notes.append, compute)

    assert torch.equal(asked(), logits) and torch.equal(asked(), logits) and (len(calls), notes) == (1, [])
    entry = cache_folder() / "key.safetensors"
    fields = json.loads(entry.with_suffix(".json").read_text())
    assert set(fields) == {"format", "key", "size", "sha256"}
    damage(entry)
    assert torch.equal(asked(), logits) and len(calls) == 2 and len(notes) == 1 and "computed again" in notes[0]
    assert torch.equal(asked(), logits) and len(calls) == 2 and len(notes) == 1, "the entry is whole again"


def test_a_cache_that_cannot_be_written_only_costs_time() -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file where the folder should be")
    notes: list[str] = []
    assert logits_cache.cached("key", (1, 1, 1), notes.append, lambda: torch.ones(1, 1, 1)).item() == 1
    assert any("could not be cached" in note for note in notes)


def test_the_cache_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.ones(1, 4, 64)
    monkeypatch.setattr(logits_cache, "LIMIT_BYTES", 3000)
    for number in range(4):
        logits_cache.cached(f"k{number}", (1, 4, 64), unread, lambda: logits)
        entry = cache_folder() / f"k{number}.safetensors"
        os.utime(entry, (number, number))
    assert sorted(path.stem for path in cache_folder().glob("*.json")) == ["k2", "k3"]
    assert sum(path.stat().st_size for path in cache_folder().glob("*.safetensors")) <= 3000
