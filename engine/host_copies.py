"""Tensors of a device on their way to the host, in one copy that need not be awaited at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class Copy:
    """Tensors that are on the host once the device has reached an event.

    Attributes:
        event: after the copy; None if nothing had to be copied. at: virtual seconds, if those count.
    """

    tensors: list[Tensor]
    event: Any = None
    at: float = 0.0

    def arrived(self) -> list[Tensor]:
        """The tensors, once the device is that far."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


def moved(
    tensors: Sequence[Tensor], wanted: Callable[[Tensor], bool], move: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Copies of the wanted tensors, by one `move` of all their bytes; the others unchanged."""
    moved = list(tensors)
    # The widest first, so that each is aligned.
    chosen = sorted((i for i, tensor in enumerate(tensors) if wanted(tensor)), key=lambda i: -tensors[i].element_size())
    if chosen:
        packed = move(torch.cat([tensors[i].contiguous().view(-1).view(torch.uint8) for i in chosen]))
        parts = packed.split([tensors[i].nbytes for i in chosen])
        for i, part in zip(chosen, parts, strict=True):
            moved[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
    return moved


def to_host(tensors: Sequence[Tensor]) -> Copy:
    """Start the copy of the tensors that are on a GPU, or on several."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if not devices:
        return Copy(list(tensors))
    copied, events = list(tensors), list[Any]()
    for device in devices:
        copied = moved(copied, lambda tensor: not tensor.is_cpu and tensor.device == device, _started)  # noqa: B023
        card = torch.get_device_module(device)
        event = card.Event()
        event.record(card.current_stream(device))
        events.append(event)
    return Copy(copied, events[0] if len(events) == 1 else _All(events))


class _All:
    """The events of several devices as one."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


def _started(packed: Tensor) -> Tensor:
    return torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed, non_blocking=True)
