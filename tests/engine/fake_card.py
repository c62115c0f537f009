"""A card without one: what would be captured in a CUDA graph runs again on the CPU, and must behave like a graph.

A graph repeats the launches of its capture with the arguments of its capture, on the same addresses. So each replay has
to do the same operations with the same numbers on the same memory: a value that Python had at capture would show as
another number, a tensor that is not static as another address. Memory of the capture's own is overwritten behind each
replay. Nothing may ask for a value on the device, nor make a shape of it. Kernels are one operation each, as on a card.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import graphs
from floe_chat.engine.decoder.card import card_draft, card_ends, card_layers, card_lists, card_token
from floe_chat.engine.decoder.quantized_linear import PackedLinear
from floe_chat.kernels import operations
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

REFUSED = (
    *("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave"),
    *("lift_fresh", "is_nonzero", "equal", "pin_memory"),
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "matmul", "linear", "einsum"),  # cuBLAS wants memory of its own
)
OPERATIONS = (
    *("route", "select", "moe_step", "experts_step", "list_active", "add_listed", "plain"),
    *("attend_one", "latent_one", "delta_one", "convolve_one"),
)
ROW_BY_ROW = "plain", "route"  # torch's products of several tokens have other noise than of one; ours have not


def flat(value: Any, into: list[Any]) -> list[Any]:
    """Append the tensors and plain values of a structure."""
    if isinstance(value, Tensor | int | float | str):
        into.append(value)
    elif isinstance(value, list | tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            flat(each, into)
    elif isinstance(value, dict):
        for name, each in value.items():  # pyright: ignore[reportUnknownVariableType]
            if name != "x_bits":  # kernels of a card ignore it
                flat(each, into)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name != "native":  # what the CPU's kernels made of the others
                flat(getattr(value, field.name), into)
    else:
        into.append(value)
    return into


# Launch nothing; `to` of the type that it is.
VIEWS = (
    *("view", "reshape", "detach", "split", "split_with_sizes", "slice", "select", "unsqueeze", "expand", "chunk"),
    "to",
)


class Recording(TorchDispatchMode):
    """One run: what was done, on which memory that was there before, and what memory was made."""

    def __init__(self, host: set[int]) -> None:
        super().__init__()
        self.host, self.log, self.outside = host, list[list[object]](), set[int]()
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = str(func), flat((args, kwargs or {}), [])
        plain = name.removeprefix("aten.").partition(".")[0]
        assert not plain.startswith(REFUSED), f"{name} in a capture"
        if plain.startswith("index"):
            tensors = [each for each in given if isinstance(each, Tensor)]
            assert not any(each.dtype == torch.bool for each in tensors[1:]), f"{name} has a shape that depends on data"
        used = self.note(name, given)
        assert plain == "copy_" or not self.host & used, f"{name} on memory of the host"
        out = func(*args, **(kwargs or {}))
        self.make(out)
        return out

    def note(self, name: str, given: list[Any]) -> set[int]:
        """Log an operation; the addresses of what it is given."""
        entry, used = list[object]([name]), set[int]()
        for each in given:
            if isinstance(each, Tensor):
                entry.append((each.dtype, each.shape, each.stride(), each.storage_offset()))
                used.add(_address(each))
            else:
                entry.append(repr(each))
        self.outside |= used - self.made.keys()
        self.log.append(entry)
        return used

    def make(self, out: Any) -> None:
        for each in flat(out, []):
            if isinstance(each, Tensor) and _address(each) not in self.outside:
                self.made[_address(each)] = each.untyped_storage()

    def poison(self) -> None:
        for storage in self.made.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN, or an index of -1


def _each_row(compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Tensor, weight: Any, *rest: Any, **named: Any) -> Any:
        if len(x) == 1 or (isinstance(weight, Tensor) and weight.ndim == 3):
            return compute(x, weight, *rest, **named)
        found = [compute(row, weight, *rest, **named) for row in x.split(1)]
        return torch.cat(found) if isinstance(found[0], Tensor) else tuple(map(torch.cat, zip(*found, strict=True)))

    return call


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeCard:
    """Captures that are checked, and how often somebody waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[FakeGraph] = []
        self.host: set[int] = set()
        self.running: Recording | None = None
        self.waits = self.replays = 0
        self.refuses: Exception | None = None  # the next capture

        def possible(_device: torch.device) -> bool:
            return True

        def pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            made = torch.zeros(shape, dtype=dtype)
            self.host.add(_address(made))
            self._kept.append(made)
            return made

        def capture(work: graphs.Work, _device: torch.device) -> FakeGraph:
            if self.refuses is not None:
                raise self.refuses
            self.captures.append(FakeGraph(self, work))
            return self.captures[-1]

        self._kept: list[Tensor] = []
        monkeypatch.setattr(graphs, "possible", possible)
        for module in (card_draft, card_ends, card_layers, card_lists):
            monkeypatch.setattr(module, "pinned", pinned)
        for module in (card_draft, card_token, card_ends, card_layers, card_lists):
            monkeypatch.setattr(module, "capture", capture)
        for name in OPERATIONS:
            compute = getattr(operations, name)
            compute = _each_row(compute) if name in ROW_BY_ROW else compute
            monkeypatch.setattr(operations, name, self._one_operation(name, compute))
        monkeypatch.setattr(PackedLinear, "forward", self._one_operation("linear", PackedLinear.forward))

    def _one_operation(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            recording = self.running
            if recording is None:
                return compute(*given, **named)
            of = [(each.weights, each.bias) if isinstance(each, PackedLinear) else each for each in given]
            recording.note(name, flat((of, named), []))
            self.running = None
            try:
                with _disable_current_modes():
                    out = compute(*given, **named)
            finally:
                self.running = recording
            recording.make(out)
            return out

        return call

    def run(self, work: graphs.Work, outputs: tuple[Tensor, ...] | None = None) -> tuple[Recording, tuple[Tensor, ...]]:
        """Run it, with its results in `outputs`, if there are any already: a replay writes where the capture did."""
        recording = self.running = Recording(self.host)
        try:
            with recording:
                made = work()
        finally:
            self.running = None
        if outputs is None:
            outputs = tuple(map(torch.clone, made))
        for mine, new in zip(outputs, made, strict=True):
            mine.copy_(new)
        recording.poison()
        return recording, outputs


class FakeGraph:
    """One capture, after a run that stands for its warming up."""

    def __init__(self, card: FakeCard, work: graphs.Work) -> None:
        self._card, self._work = card, work
        card.run(work)
        self._captured, self.outputs = card.run(work)

    def operations(self) -> list[str]:
        """The names of what was captured, in order."""
        return [str(entry[0]).removeprefix("aten.").partition(".")[0] for entry in self._captured.log]

    def replay(self) -> None:
        profiled = sys.getprofile()
        sys.setprofile(None)  # a card runs this by itself
        self._card.replays += 1
        replayed, _ = self._card.run(self._work, self.outputs)
        for before, now in zip(self._captured.log, replayed.log, strict=True):
            assert before == now, "a replay repeats what was captured, with the same numbers"
        assert replayed.outside == self._captured.outside, "something was read or written that is not static"
        sys.setprofile(profiled)

    def wait(self) -> None:
        self._card.waits += 1


class Calls:
    """Counts calls from Python of anything, Python's own functions and compiled ones."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            self.names.append(frame.f_code.co_qualname)
        elif event == "c_call":
            self.names.append(getattr(what, "__qualname__", repr(what)))
