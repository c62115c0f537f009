"""Rows that are read from files: the same bytes as in memory, whatever is asked for, and clear failures."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.links.disk_files import DiskFiles, RowFile, disk_link
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.links.transfer import Transfer

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
    for _ in range(3):
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
