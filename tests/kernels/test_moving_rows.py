"""gather_rows and pool_scatter move whole records: byte for byte, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import operations as kernels

from .oracle import make_layer

pytestmark = pytest.mark.usefixtures("on_backend")

SENTINEL = 0xA5
CHOICES = [
    pytest.param([], id="none"),
    pytest.param([6], id="one"),
    pytest.param([5, 0, 3], id="out-of-order"),
    pytest.param([2, 2, 2], id="repeated"),
    pytest.param(list(range(7)), id="all"),
]


@pytest.mark.parametrize("neurons", CHOICES)
@pytest.mark.parametrize("widths", [(2, 2, 3), (2, 4, 4), (2, 16, 8)], ids=str)
@pytest.mark.parametrize("hidden", [1, 40, 130])
def test_gather_copies_records_in_order(hidden: int, widths: tuple[int, int, int], neurons: list[int]) -> None:
    rows = make_layer((3, 7, hidden, 1), widths).rows
    buffer = torch.full((len(neurons) + 2, rows.layout.nbytes), SENTINEL, dtype=torch.uint8)
    kernels.gather_rows(rows, 1, torch.tensor(neurons, dtype=torch.long), buffer[1:-1])
    expected = [rows.data[1, neuron].tolist() for neuron in neurons]
    assert buffer[1:-1].tolist() == expected
    assert bool((buffer[[0, -1]] == SENTINEL).all())


@pytest.mark.parametrize("slots", [pytest.param([], id="none"), [9], [3, 0, 7], list(range(10))], ids=str)
def test_scatter_writes_its_slots_and_no_other(slots: list[int]) -> None:
    pool = torch.full((10, 64), SENTINEL, dtype=torch.uint8)
    records = torch.arange(len(slots) * 64).view(-1, 64).to(torch.uint8)
    kernels.pool_scatter(pool, torch.tensor(slots, dtype=torch.long), records)
    for slot in range(10):
        expected = records[slots.index(slot)].tolist() if slot in slots else [SENTINEL] * 64
        assert pool[slot].tolist() == expected


def test_scatter_undoes_gather() -> None:
    rows = make_layer((2, 7, 40, 20), (2, 4, 3)).rows
    neurons = torch.tensor([4, 1, 6])
    out = torch.full((3, rows.layout.nbytes), SENTINEL, dtype=torch.uint8)
    kernels.gather_rows(rows, 0, neurons, out)
    pool = torch.full((7, rows.layout.nbytes), SENTINEL, dtype=torch.uint8)
    kernels.pool_scatter(pool, neurons, out)
    assert torch.equal(pool[neurons], rows.data[0, neurons])


def buffer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.full(shape, SENTINEL, dtype=dtype)


NBYTES = make_layer((2, 7, 40, 20), (2, 4, 3)).rows.layout.nbytes


@pytest.mark.parametrize(
    ("expert", "neurons", "out"),
    [
        pytest.param(2, torch.tensor([0]), buffer(1, NBYTES), id="expert-too-large"),
        pytest.param(-1, torch.tensor([0]), buffer(1, NBYTES), id="expert-negative"),
        pytest.param(0, torch.tensor([0, 7]), buffer(2, NBYTES), id="neuron-too-large"),
        pytest.param(0, torch.tensor([0, -1]), buffer(2, NBYTES), id="neuron-negative"),
        pytest.param(0, torch.tensor([0], dtype=torch.int32), buffer(1, NBYTES), id="int32-index"),
        pytest.param(0, torch.tensor([[0]]), buffer(1, NBYTES), id="two-dimensional-index"),
        pytest.param(0, torch.tensor([0.0]), buffer(1, NBYTES), id="float-index"),
        pytest.param(0, torch.tensor([0, 1]), buffer(1, NBYTES), id="buffer-too-short"),
        pytest.param(0, torch.tensor([0]), buffer(1, NBYTES - 64), id="buffer-too-narrow"),
        pytest.param(0, torch.tensor([0]), buffer(NBYTES), id="buffer-flat"),
        pytest.param(0, torch.tensor([0]), buffer(1, NBYTES, dtype=torch.int16), id="buffer-int16"),
    ],
)
def test_gather_refuses_before_writing(expert: int, neurons: torch.Tensor, out: torch.Tensor) -> None:
    rows = make_layer((2, 7, 40, 20), (2, 4, 3)).rows
    with pytest.raises(ValueError):
        kernels.gather_rows(rows, expert, neurons, out)
    assert bool((out == SENTINEL).all())


@pytest.mark.parametrize(
    ("pool", "slots", "records"),
    [
        pytest.param(buffer(4, 64), torch.tensor([0, 4]), torch.zeros(2, 64, dtype=torch.uint8), id="slot-too-large"),
        pytest.param(buffer(4, 64), torch.tensor([0, -1]), torch.zeros(2, 64, dtype=torch.uint8), id="slot-negative"),
        pytest.param(buffer(4, 64), torch.tensor([1, 1]), torch.zeros(2, 64, dtype=torch.uint8), id="slot-twice"),
        pytest.param(buffer(4, 64), torch.tensor([0]), torch.zeros(2, 64, dtype=torch.uint8), id="too-many-records"),
        pytest.param(buffer(4, 64), torch.tensor([0]), torch.zeros(1, 128, dtype=torch.uint8), id="wide-record"),
        pytest.param(buffer(4, 64), torch.tensor([0]), torch.zeros(1, 64), id="float-records"),
        pytest.param(buffer(4, 64), torch.tensor([0.0]), torch.zeros(1, 64, dtype=torch.uint8), id="float-slots"),
        pytest.param(
            buffer(4, 64, dtype=torch.int32), torch.tensor([0]), torch.zeros(1, 64, dtype=torch.uint8), id="int32-pool"
        ),
        pytest.param(buffer(64), torch.tensor([0]), torch.zeros(1, 64, dtype=torch.uint8), id="flat-pool"),
        pytest.param(buffer(4, 64, 2), torch.tensor([0]), torch.zeros(1, 64, dtype=torch.uint8), id="deep-pool"),
    ],
)
def test_scatter_refuses_before_writing(pool: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.pool_scatter(pool, slots, records)
    assert bool((pool == SENTINEL).all())
