"""What a device lists by width, as a GPU leaves it: with room behind the last end that may hold anything."""

from __future__ import annotations

import pytest
import torch
from floe_chat.engine.fetching import Asked, Copy, Listed
from torch import Tensor

NEURONS = 11


def listed(calls: list[tuple[list[int], list[float]]]) -> Listed:
    """The neurons and values of each call, in as much room as all neurons would take."""
    neurons = torch.full((len(calls) * NEURONS,), -1, dtype=torch.int32)
    values = torch.full((len(calls) * NEURONS,), torch.nan)
    ends, end = list[int](), 0
    for own, theirs in calls:
        start, end = end, end + len(own)
        neurons[start:end] = torch.tensor(own, dtype=torch.int32)
        values[start:end] = torch.tensor(theirs)
        ends.append(end)
    return torch.tensor(ends, dtype=torch.int64), neurons, values


@pytest.mark.parametrize("usual", range(5))
@pytest.mark.parametrize("empty", [(), (0,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)], ids=str)
def test_lists_of_two_widths_are_one_list_of_the_calls(usual: int, empty: tuple[int, ...]) -> None:
    """The first `usual` calls are in the first list, the others in the second; some have no neurons."""
    generator = torch.Generator().manual_seed(usual)
    calls: list[tuple[list[int], list[float]]] = []
    for call in range(4):
        count = 0 if call in empty else 3 + call
        own = torch.randperm(NEURONS, generator=generator)[:count].sort().values
        calls.append((own.tolist(), torch.rand(count, generator=generator).tolist()))
    nothing: tuple[list[int], list[float]] = ([], [])
    lists = [listed(calls[:usual] + [nothing] * (4 - usual)), listed([nothing] * usual + calls[usual:])]
    also = torch.tensor([7])
    active, there, others = Asked(lists, Copy([*(part for one in lists for part in one), also])).answer()
    assert others == [also] and active.neurons.dtype == torch.int64
    assert torch.equal(active.values, there)
    found: list[tuple[list[int], Tensor]] = []
    for start, end in zip(active.offsets[:-1].tolist(), active.offsets[1:].tolist(), strict=True):
        found.append((active.neurons[start:end].tolist(), active.values[start:end]))
    for (neurons, values), (own, theirs) in zip(found, calls, strict=True):
        assert neurons == own and torch.equal(values, torch.tensor(theirs))


def test_no_calls_have_no_neurons() -> None:
    lists = [listed([]), listed([])]
    active, there, _ = Asked(lists, Copy([part for one in lists for part in one])).answer()
    assert active.offsets.tolist() == [0] and not active.neurons.numel() and not there.numel()
