"""gather_rows and pool_scatter move whole records: byte for byte, and nothing beside them."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels import triton as kernels

from .layers import Widths, layer_on

SENTINEL = 0xA5
CHOICES = [[], [6], [5, 0, 3], [2, 2, 2], list(range(7))]


@pytest.mark.parametrize("neurons", CHOICES, ids=str)
@pytest.mark.parametrize(("hidden", "widths"), [(1, (2, 2, 3)), (40, (2, 4, 4)), (1088, (2, 16, 8))], ids=str)
def test_gather_copies_records_in_order(hidden: int, widths: Widths, neurons: list[int], device: torch.device) -> None:
    rows = layer_on(device, (3, 7, hidden, 1 if hidden < 64 else 64), widths).rows
    buffer = torch.full((len(neurons) + 2, rows.layout.nbytes), SENTINEL, dtype=torch.uint8, device=device)
    index = torch.tensor(neurons, dtype=torch.int64, device=device)
    kernels.gather_rows(rows, 1, index, buffer[1:-1])
    assert torch.equal(buffer[1:-1], rows.data[1][index])
    assert bool((buffer[[0, -1]] == SENTINEL).all())


@pytest.mark.parametrize("slots", [[], [9], [3, 0, 7], list(range(10))], ids=str)
def test_scatter_writes_its_slots_and_no_other(slots: list[int], device: torch.device) -> None:
    pool = torch.full((10, 192), SENTINEL, dtype=torch.uint8, device=device)
    expected = pool.clone()
    records = torch.arange(len(slots) * 192, device=device).view(-1, 192).to(torch.uint8)
    index = torch.tensor(slots, dtype=torch.int64, device=device)
    kernels.pool_scatter(pool, index, records)
    expected[index] = records
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in-place"])
@pytest.mark.parametrize(("count", "chunk"), [(0, 5), (1, 1), (3, 5), (50, 50), (13, 64)], ids=str)
@pytest.mark.parametrize("nbytes", [64, 192, 4608])
def test_a_lane_lands_as_its_head_says(
    count: int, chunk: int, nbytes: int, in_place: bool, device: torch.device
) -> None:
    pool = torch.full((200, nbytes), SENTINEL, dtype=torch.uint8, device=device)
    source = torch.randint(0, 256, (300, nbytes), dtype=torch.uint8, device=device)
    head = -(-(32 + 8 * chunk) // 64) * 64
    lane = torch.full((head + chunk * nbytes,), 0x5A, dtype=torch.uint8, device=device)
    index, slots = torch.randint(0, 300, (count,)), torch.randperm(200)[:count]
    lane[:24].view(torch.int64)[:] = torch.tensor([count, pool.data_ptr(), source.data_ptr()])
    numbers = lane[32:head].view(torch.int32)
    numbers[:count], numbers[chunk : chunk + count] = slots.to(device), index.to(device)
    if not in_place:
        lane[head : head + count * nbytes] = source[index.to(device)].flatten()
    kernels.land(lane, chunk, head, nbytes, in_place=in_place)
    expected = torch.full_like(pool, SENTINEL)
    expected[slots.to(device)] = source[index.to(device)]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("change", [{"head": 32}, {"head": 96}, {"chunk": 9}, {"nbytes": 65}], ids=str)
def test_a_lane_that_does_not_fit_is_refused(change: dict[str, int], device: torch.device) -> None:
    lane = torch.zeros(64 + 4 * 64, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="does not hold"):
        kernels.land(lane, **{"chunk": 4, "head": 64, "nbytes": 64, **change}, in_place=False)


def test_what_is_no_record_is_refused(device: torch.device) -> None:
    pool, records = torch.zeros(4, 63, dtype=torch.uint8), torch.zeros(1, 63, dtype=torch.uint8)
    with pytest.raises(ValueError, match="32-bit words"):
        kernels.pool_scatter(pool.to(device), torch.tensor([1]), records.to(device))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.pool_scatter(torch.zeros(64, 4, dtype=torch.uint8, device=device).T, torch.tensor([1]), records)


@pytest.mark.gpu
def test_gather_from_pinned_memory(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("pinned memory needs a CUDA device")
    rows = layer_on(torch.device("cpu"), (2, 37, 128, 64), (2, 4, 4)).rows
    pinned = type(rows)(rows.layout, rows.data.pin_memory())
    out = torch.zeros(3, rows.layout.nbytes, dtype=torch.uint8, device=device)
    kernels.gather_rows(pinned, 1, torch.tensor([5, 0, 36]), out)
    assert torch.equal(out.cpu(), rows.data[1][[5, 0, 36]])
