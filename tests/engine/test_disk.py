"""Rows that are read from files, of a pack that RAM does not hold: the same bytes, the same answers, clear failures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.links.disk_files import DiskFiles, RowFile, disk_link
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.planning import disk_tier
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_checkpoint, make_pack
from .driver import answer, open_model, silent
from .margins import clear_prompt, prompt_of
from .offloading import needs_of

NBYTES, ROWS, SLOTS = 448, 4001, 700
SENTINEL = 0x5A


@pytest.fixture(params=[0, 100, 4096], ids=str)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[RowFile]:
    """Two files of rows, which do not begin or end with a sector."""
    made: list[RowFile] = []
    for name in ("first", "second"):
        rows = torch.randint(0, 256, (ROWS, NBYTES), dtype=torch.uint8)
        path = tmp_path / name
        path.write_bytes(b"h" * request.param + rows.numpy().tobytes())
        made.append(RowFile(rows, path, request.param))
    return made


def count(what: str) -> int:
    """How many descriptors ("fd") or threads ("task") this process has."""
    return sum(1 for _ in Path(f"/proc/self/{what}").iterdir())


def link_to(files: list[RowFile], chunk: int = 64) -> Link:
    return disk_link(DiskFiles(files), NBYTES, chunk)


def transfer(file: RowFile, target: torch.Tensor, index: list[int], first: int, *, urgent: bool) -> Transfer:
    slots = np.arange(first, first + len(index), dtype=np.int32)
    return Transfer(file.rows, np.array(index), target, slots, urgent=urgent, score=1.0, layer=0)


@pytest.mark.parametrize("chunk", [1, 7, 64, 5000])
def test_what_lands_is_what_the_file_has(files: list[RowFile], chunk: int) -> None:
    """Ascending rows with and without gaps, rows in any order, the first and the last, many transfers at once."""
    draw = np.random.default_rng(chunk)
    link = link_to(files, chunk)
    for _ in range(6):
        target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
        sent: list[tuple[Transfer, RowFile]] = []
        first = 0
        for number in range(4):
            count = int(draw.integers(0, SLOTS // 4))
            index = draw.choice(ROWS, count, replace=False)
            if number % 2:
                index.sort()
            if count > 2:
                index[:2] = 0, ROWS - 1
            index = np.unique(index) if number % 2 else index
            file = files[int(draw.integers(2))]
            made = transfer(file, target, index.tolist(), first, urgent=bool(draw.integers(2)))
            first += index.size
            link.submit(made)
            sent.append((made, file))
        for made, file in reversed(sent):
            link.wait(made)
            assert torch.equal(target[torch.from_numpy(made.slots).long()], file.rows[torch.from_numpy(made.index)])
        link.drain()
        assert (target[first:] == SENTINEL).all() and set(link.finished()) == {made for made, _ in sent}
    assert link.queued_bytes() == 0 and link.busy_s > 0
    link.close()


def test_a_file_that_became_shorter_ends_the_link(files: list[RowFile]) -> None:
    link = link_to(files)
    target = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
    os.truncate(files[0].path, files[0].path.stat().st_size // 2)
    cut = transfer(files[0], target, [3, ROWS - 2], 0, urgent=True)
    link.submit(cut)
    with pytest.raises(RuntimeError, match="shorter"):
        link.wait(cut)
    with pytest.raises(RuntimeError, match="shorter"):
        link.submit(transfer(files[1], target, [1], 5, urgent=True))
    link.close()


def test_rows_of_no_file_end_the_link(files: list[RowFile]) -> None:
    link = link_to(files)
    other = RowFile(files[0].rows.clone(), files[0].path, 0)
    asked = transfer(other, torch.zeros(SLOTS, NBYTES, dtype=torch.uint8), [1], 0, urgent=True)
    link.submit(asked)
    with pytest.raises(RuntimeError, match="not in a file"):
        link.wait(asked)
    link.close()


def test_closing_leaves_nothing_behind(files: list[RowFile]) -> None:
    link_to(files).close()
    before = count("fd"), count("task")
    for _ in range(5):
        link = link_to(files, 8)
        target = torch.zeros(SLOTS, NBYTES, dtype=torch.uint8)
        link.submit(transfer(files[0], target, list(range(0, 1400, 2)), 0, urgent=False))
        link.close()
        del link
    # What other tests left may end meanwhile; five links would leave 10 files and 160 threads.
    assert count("fd") <= before[0] + 2 and count("task") <= before[1] + 2


def test_a_missing_file_is_an_error_and_closes_the_others(files: list[RowFile], tmp_path: Path) -> None:
    before = count("fd")
    with pytest.raises(FileNotFoundError):
        DiskFiles([*files, RowFile(files[0].rows, tmp_path / "none", 0)])
    assert count("fd") <= before


SHARES = (0.0, 0.3, 0.9)
"""Of the memory between the least that works and all of the pack."""
PROMPTS = [prompt_of(seed, 9)[1:] for seed in range(3, 63)]
"""Short, since so many neurons come close to thresholds; with no token in common, which may bring one to its own."""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that take much beside keys and values."""
    folder = tmp_path_factory.mktemp("tier")
    source = make_checkpoint(folder / "source", hidden=64, intermediate=480, experts=8, layers=3)
    make_pack(source, folder / "pack", PackSpec(up=3, gate=4, down=4))
    return folder / "pack"


@pytest.fixture(scope="module")
def needs(pack: Path) -> Needs:
    """In RAM, where the dense part and keys and values have 32 bits."""
    return replace(needs_of(pack, 4), dense=disk_tier.dense_bytes(PackedModel.open(pack)))


def opened(pack: Path, room: int, patch: pytest.MonkeyPatch, reserve: int = 0) -> tuple[LoadedModel, str]:
    """The pack with so much room in RAM, and so much that stays free; and how it was opened."""
    patch.setattr(disk_tier, "room", lambda: room)
    patch.setattr(disk_tier, "reserve", lambda: reserve)
    loaded, told = load(pack, None, "cpu", silent)
    return loaded, told.reason


def _always(*_given: object) -> tuple[float, float]:
    return 0.0, 1.0


@pytest.mark.parametrize("share", SHARES)
def test_answers_are_those_of_a_pack_in_ram(
    pack: Path, needs: Needs, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_model(pack)
    prompt, want = clear_prompt(whole, lambda ids: answer(whole, ids, max_new_tokens=12).tokens, PROMPTS)
    room = needs.least() + int(share * (needs.whole() - needs.least()))
    monkeypatch.setattr(disk_tier, "disk_reads", _always)  # even where the system's cache would do
    loaded, reason = opened(pack, room, monkeypatch)
    assert "read from the disk" in reason and loaded.offload is not None and loaded.device == "cpu"
    assert not loaded.offload.parts.cpu and loaded.offload.memory.nbytes < room
    for _ in range(2):
        assert answer(loaded, prompt, max_new_tokens=12).tokens == want
    assert loaded.offload.moved()[0] > 0
    loaded.close()


def test_how_a_pack_is_opened(pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the edge the system's cache would hold the pack, or nearly: the tier's smaller share would read more."""
    whole, reserve = needs.whole(), (needs.whole() - needs.least()) // 2
    for room, free, tier, words in (
        (whole, 0, False, ""),
        (whole - reserve, reserve, False, ""),
        (whole - reserve - reserve // 8, reserve, False, "the system reads the rest"),
        (whole - reserve // 4, 0, True, "the rows used most stay there"),
        (needs.least() - 1, 0, False, "less than the"),
    ):
        loaded, reason = opened(pack, room, monkeypatch, free)
        assert (loaded.offload is not None) == tier and words in reason and ("RAM" in reason) == bool(words)
        loaded.close()


@pytest.mark.usefixtures("no_library")
def test_without_the_compiled_link_the_system_reads_the_pack(
    pack: Path, needs: Needs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, reason = opened(pack, needs.least(), monkeypatch)
    assert loaded.offload is None and "because it was not compiled" in reason
    loaded.close()
