"""What a device lists, as a GPU leaves it: with room behind the last end that may hold anything."""

from __future__ import annotations

import pytest
import torch
from floe_chat.engine.host_copies import Copy
from floe_chat.engine.offload.asked import Asked, Listed

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


@pytest.mark.parametrize("empty", [(), (0,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)], ids=str)
def test_what_is_behind_the_last_end_is_no_answer(empty: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    calls: list[tuple[list[int], list[float]]] = []
    for call in range(4):
        count = 0 if call in empty else 3 + call
        own = torch.randperm(NEURONS, generator=generator)[:count].sort().values
        calls.append((own.tolist(), torch.rand(count, generator=generator).tolist()))
    found, also = listed(calls), torch.tensor([7])
    active, there, others = Asked(found[2], Copy([*found, also])).answer()
    assert others == [also] and active.neurons.dtype == torch.int32
    assert torch.equal(active.values, there)
    for start, end, (neurons, values) in zip(
        active.offsets[:-1].tolist(), active.offsets[1:].tolist(), calls, strict=True
    ):
        assert active.neurons[start:end].tolist() == neurons
        assert torch.equal(active.values[start:end], torch.tensor(values))


def test_no_calls_have_no_neurons() -> None:
    found = listed([])
    active, there, _ = Asked(found[2], Copy([*found])).answer()
    assert active.offsets.tolist() == [0] and not active.neurons.numel() and not there.numel()
