"""The benchmark of moving rows: which figures there are; no test waits for a clock."""

from __future__ import annotations

import pytest
import torch
from floe_chat.engine.bench import transfer
from floe_chat.engine.machine import read_floor
from floe_chat.engine.machine.random_weights import Shapes

from .fake_cuda import FakeCuda

TINY = Shapes(128, 400, cache=0)


@pytest.fixture(autouse=True)
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_floor, "LEAST", 1 << 16)
    monkeypatch.setattr("floe_chat.engine.machine.random_weights.last_level_cache", lambda: 1 << 10)


@pytest.mark.parametrize("quick", [False, True])
def test_packing_is_measured_by_chunk_and_copies_are_named_as_missing(quick: bool) -> None:
    table = transfer.run(threads=1, runs=1, quick=quick, shapes=TINY, gpu=None, no_gpu="there is no card")
    titles = [section.title for section in table.sections]
    assert ["16-bit" in title for title in titles] == ([False] if quick else [False, True])
    for section in table.sections:
        names = [row.name for row in section.rows if row.name != read_floor.READ]
        chunks = ["5 neurons", "50 neurons"] if quick else ["1 neuron", *(f"{n} neurons" for n in (5, 10, 25, 50))]
        assert names == ["memcpy", "torch index_select", *chunks, "all at once"]
        assert all(row.peer == "torch index_select" for row in section.rows if "neuron" in row.name)
    assert table.device == "cpu" and table.facts["gpu"] == "none: there is no card"
    assert "not measured: there is no card" in table.notes[0] and "figure 7" in table.notes[1]


def test_what_is_packed_is_what_was_chosen() -> None:
    rows = transfer.rows_of(TINY, 4, 2)
    for figure in transfer.packing(rows, [7, 80]):
        assert figure.work(0) > 0
    chosen = transfer.chosen_of(TINY.neurons)
    assert chosen.numel() == 80 and bool((chosen.diff() > 0).all())


def test_the_figures_of_copies_work_on_another_device() -> None:
    rows = transfer.rows_of(TINY, 4, 2)
    figures = transfer.copying(rows, [30, 80], "cpu") + transfer.in_place(rows, [30, 80], "cpu")
    names = [figure.name for figure in figures]
    assert names[:2] == [transfer.LINK, "torch index_select, copied"]
    assert names[2:5] == [f"30 neurons, {streams}" for streams in ("1 stream", "2 streams", "4 streams")]
    assert names[-2:] == ["30 neurons, in place", "all at once, in place"]
    assert all((figure.floor, figure.peer) == (transfer.LINK, transfer.NAIVE) for figure in figures[2:])
    assert {figure.work(1) for figure in figures[1:]} == {80 * rows.layout.nbytes}


def test_rows_are_pinned_while_they_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, rows = FakeCuda(monkeypatch), transfer.rows_of(TINY, 4, 2).data
    with transfer.pinned(rows, "cpu") as obstacle:
        assert obstacle == "" and rows.is_pinned()
    assert not rows.is_pinned()
    cuda.refused = "operation not supported"
    with transfer.pinned(rows, "cpu") as obstacle:
        assert obstacle.endswith("operation not supported") and not rows.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_on_a_gpu() -> None:
    table = transfer.run(runs=1, quick=True, shapes=TINY, gpu="cuda")
    names = [row.name for row in table.sections[1].rows]
    assert table.device == "cuda" and any("stream" in name for name in names)
    assert any("in place" in name for name in names) or "was not measured" in table.notes[0]
