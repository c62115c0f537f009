"""How often a decode step waits for the device, and how much Python it runs meanwhile.

All that is waited for goes through `Device.arrived` and `to_host`. The device here is the CPU, so that nothing is
really waited for; what is counted is the engine's asking. While the host computes, neither device nor link has work.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from floe_chat.engine import host_copies
from floe_chat.engine.bench.synthetic import _to  # pyright: ignore[reportPrivateUsage]
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import Control, MoELayer
from floe_chat.engine.experts.whole_layers import ResidentLayer
from floe_chat.engine.host_copies import Copy, moved
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload import predictor
from floe_chat.engine.offload.device import Device
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.quality_presets import PRESETS, Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels import operations
from floe_chat.kernels.rule import LATE
from floe_chat.kernels.types import Calls
from floe_chat.models.catalog import asset
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

from ..helpers import relative_rms
from . import offloading
from .driver import a_preset, open_model
from .fake_card import REFUSED
from .margins import layers_of
from .offloading import EVERYTHING, SHAPES, offloaded

HIDDEN = SHAPES["mixtral"]["hidden"]
CHOSEN = torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.4]])
PLAIN = a_preset("Plain", 0.3, 0.2)


@pytest.fixture(scope="module")
def loaded(shape: Callable[[str], Path]) -> LoadedModel:
    return open_model(shape("mixtral"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """What the engine asks to have on the host."""
    seen, arrived = list[Copy](), Device.arrived

    def noted(self: Device, copy: Copy) -> list[Tensor]:
        seen.append(copy)
        return arrived(self, copy)

    monkeypatch.setattr(Device, "arrived", noted)
    return seen


@pytest.mark.parametrize(
    "preset",
    [
        PLAIN,
        a_preset("Dropping", 0.3, 0.2, drop=0.9),
        a_preset("Halving", 0.3, 0.2, drop=0.2, major=0.9),
        a_preset("Replacing", 0.3, 0.2, alpha=0.5),
        a_preset("All at once", 0.3, 0.2, drop=0.2, major=0.9, alpha=0.5),
        a_preset("Lenient", 0.3, 0.2, late=LATE),
        *PRESETS,
    ],
    ids=lambda preset: preset.name,
)
@pytest.mark.parametrize("predict", [None, "gate", "partial"])
def test_a_step_waits_once_per_layer(
    loaded: LoadedModel, asked: list[Copy], preset: Preset, predict: str | None
) -> None:
    with offloaded(loaded, preset, 0.5, predict=False) as shared:
        for block in loaded.model.model.layers:
            block.mlp.experts.neighbours = replace(block.mlp.experts.neighbours, gate=block.mlp.gate)
        assert isinstance(loaded.decoder, FusedDecoder)
        if predict is not None:
            shared.predictors = (predictor.make(predict, loaded.model, loaded.packed, loaded.decoder.ahead),)
        kv, loaded.control.counting = KVCache(), True
        for token in (5, 9, 17, 3, 42):
            asked.clear()
            assert loaded.decoder.forward([token], kv).isfinite().all()
            assert len(asked) == len(loaded.telemetry.layers)
            kv.computed([token], preset)
        loaded.control.counting = False
        guessed = sum(counts.guessed for counts in loaded.telemetry.layers)
        assert (guessed > 0) == (predict is not None)  # what was asked ahead was there in time


class Unwaiting(TorchDispatchMode):
    """Refuses what a host would wait for a card in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        assert not name.startswith(REFUSED), name
        assert not name.startswith("index") or all(each is None or each.dtype != torch.bool for each in args[1])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unwaiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU has a card's grouped product; the number of calls of each one."""
    cpu, seen = operations.choose("cpu"), list[int]()

    def apart(operation: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            assert operation is not None
            seen.extend(each.experts.numel() for each in given if isinstance(each, Calls))
            with _disable_current_modes():
                return operation(*given)

        return call

    def alone(x: Tensor, *given: Any) -> Tensor:
        seen.append(len(x))
        with _disable_current_modes():
            return cpu.expert_swiglu(x, given[0], given[1], 0, *given[2:])[0]

    several = apart(cpu.experts_swiglu)
    card = replace(cpu, grouped=True, select=apart(cpu.select), experts_swiglu=several, expert_at_once=alone)

    def choose(_device: torch.device | str) -> operations.Backend:
        return card

    monkeypatch.setattr(operations, "choose", choose)
    return seen


@pytest.mark.parametrize("mixed", [False, True], ids=["all on the card", "a layer on the card"])
def test_a_prompts_experts_on_a_card_are_one_product_and_no_wait(
    loaded: LoadedModel, mixed: bool, request: pytest.FixtureRequest
) -> None:
    preset, x = a_preset("All", 0.3, 0.2, drop=0.9, lossless=True), torch.randn(40, HIDDEN)
    index = torch.stack([torch.randperm(5)[:2] for _ in range(40)]).where(torch.rand(40, 1) < 0.3, torch.tensor([3, 1]))
    given = x, index, torch.rand(40, 2)
    with offloaded(loaded, preset, 0.5) as shared, torch.inference_mode():
        control, packed = loaded.control, layers_of(loaded)[0].packed
        parts = control, loaded.telemetry
        layer = ResidentLayer(0, packed, shared, *parts) if mixed else MoELayer(0, packed, *parts)
        wanted, calls = layer(*given), request.getfixturevalue("unwaiting")
        with Unwaiting(), pytest.MonkeyPatch.context() as refused:
            refused.setattr(Tensor, "tolist", None, raising=False)
            y = layer(*given)
        assert calls == [80] and relative_rms(y, wanted.double()) < 1e-5


def test_streamed_experts_are_a_product_each(loaded: LoadedModel, request: pytest.FixtureRequest) -> None:
    given = torch.randn(40, HIDDEN), torch.tensor([[3, 1]]).expand(40, 2), torch.rand(40, 2)
    with offloaded(loaded, PLAIN, 0.5, parts=Parts(cpu=False), predict=False), torch.inference_mode():
        layer = layers_of(loaded)[0]
        wanted, calls = layer(*given), request.getfixturevalue("unwaiting")
        assert relative_rms(layer(*given), wanted.double()) < 1e-5 and calls == [40, 40]


# Functions, of Python and of C, that one layer and token may call, several tokens' mean: lower these as they fall.
MOST = {False: 540, True: 690}


@pytest.mark.parametrize("predict", [False, True])
def test_a_layer_takes_so_many_calls(loaded: LoadedModel, predict: bool) -> None:
    calls, tokens = Counter[str](), 20

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_qualname if event == "call" else getattr(called, "__qualname__", str(called))
            calls[f"{event} {name}"] += 1

    with offloaded(loaded, PLAIN, 0.5, predict=predict), torch.inference_mode():
        made = layers_of(loaded)
        for token in range(2 * tokens):
            x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(token))
            chosen = torch.tensor([[token % 4, 3 - token % 4]])
            for layer in made:
                sys.setprofile(count if token >= tokens else None)
                try:
                    x = layer(x, chosen, CHOSEN[1])
                finally:
                    sys.setprofile(None)
    each = calls.total() / (tokens * len(made))
    assert 0 < each <= MOST[predict], (each, calls.most_common(30))


def test_a_guess_that_comes_late_is_fetched_before_the_next_layer_waits(
    loaded: LoadedModel, asked: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device finds it before what the layer itself asks for."""

    def not_yet(_self: Device, _copy: Copy) -> bool:
        return False

    found = list[Tensor]()
    monkeypatch.setattr(Device, "there", not_yet)
    for predict in (False, True):
        with offloaded(loaded, EVERYTHING, 0.5, predict=predict) as shared:
            asked.clear()
            loaded.control.counting = True
            found.append(loaded.decoder.forward([7], KVCache()).clone())
            loaded.control.counting = False
            layers = loaded.telemetry.layers
            assert len(asked) == len(layers) + predict * (len(layers) - 1) and shared.scheduler.ahead is None
            assert all((counts.guessed > 0) == predict for counts in layers[1:])
    assert relative_rms(found[1], found[0]) <= 1e-5


def test_values_that_are_no_numbers_reach_the_result(loaded: LoadedModel) -> None:
    """They are active at any threshold; the session reports what made them."""
    with offloaded(loaded, PLAIN, 0.5), torch.inference_mode():
        for tokens in (1, 3):
            chosen, scores = (each.expand(tokens, 2).contiguous() for each in CHOSEN)
            for layer in layers_of(loaded):
                assert layer(torch.full((tokens, HIDDEN), torch.nan), chosen, scores).isnan().all()
                assert layer(torch.ones(tokens, HIDDEN), chosen, scores).isfinite().all()


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["as is", "reversed"])
def test_many_tensors_go_over_in_one_copy(order: slice) -> None:
    given = [
        torch.arange(3, dtype=torch.int64),
        torch.tensor([[1.5, 2.5]], dtype=torch.float32),
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.randn(3, 2).t().bfloat16(),
        torch.tensor([7, 8, 9], dtype=torch.uint8),
        torch.tensor([True, False]),
    ][order]
    moves: list[int] = []

    def move(packed: Tensor) -> Tensor:
        moves.append(packed.numel())
        return packed.clone()

    def wanted(tensor: Tensor) -> bool:
        return tensor.dtype != torch.bool

    found = moved(given, wanted, move)
    assert moves == [24 + 8 + 12 + 3]
    for before, after in zip(given, found, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)
        assert (after is before) == (before.dtype == torch.bool)


class Elsewhere(Tensor):
    """A tensor that claims to be on a device: whoever reads it waits."""

    is_cpu = False  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def _read(*_arguments: Any, **_named: Any) -> Any:
    raise AssertionError("the host waits for the device")


for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
    setattr(Elsewhere, name, _read)


def test_what_is_not_counted_yet_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def here(tensors: Sequence[Tensor]) -> Copy:
        return Copy([tensor.as_subclass(Tensor) for tensor in tensors])

    def count(counts: Tensor) -> None:
        seen.append(counts.tolist())

    monkeypatch.setattr("floe_chat.engine.telemetry.to_host", here)
    monkeypatch.setattr("floe_chat.engine.telemetry._UNCOUNTED", 4)
    telemetry = Telemetry(2, 4)
    for number in range(7):
        telemetry.count(count, torch.tensor([number]).as_subclass(Elsewhere))
        assert len(seen) == 4 * ((number + 1) // 4)
    telemetry.settle()
    assert seen == [[number] for number in range(7)]


def test_what_a_layer_left_uncounted_is_read_with_what_the_next_one_waits_for(
    loaded: LoadedModel, asked: list[Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def count(counts: Tensor) -> None:
        seen.append(counts.tolist())

    def started(packed: Tensor) -> Tensor:
        return packed.as_subclass(Tensor).clone()

    monkeypatch.setattr("floe_chat.engine.host_copies._started", started)
    with offloaded(loaded, PLAIN, 0.5, predict=False), torch.inference_mode():
        loaded.telemetry.count(count, torch.tensor([3, 4]).as_subclass(Elsewhere))
        assert seen == []
        layers_of(loaded)[0](torch.ones(1, HIDDEN), *CHOSEN)
        assert seen == [[3, 4]] and len(asked) == 1


class OnSecond(Elsewhere):
    """On another device."""

    device = torch.device("cuda:1")  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def test_tensors_of_two_devices_are_on_the_host_once_both_are_that_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two cards may be counted by one copy."""
    passed: list[object] = []

    class Event:
        def __init__(self) -> None:
            self.stream: object = None

        def record(self, stream: object) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.stream in passed

        def synchronize(self) -> None:
            passed.append(self.stream)

    def started(packed: Tensor) -> Tensor:
        return packed.as_subclass(Tensor).clone()

    for module in (torch.cpu, torch.cuda):
        monkeypatch.setattr(module, "Event", Event)
        monkeypatch.setattr(module, "current_stream", str)
    monkeypatch.setattr("floe_chat.engine.host_copies._started", started)
    given = torch.tensor([1.5]).as_subclass(Elsewhere), torch.tensor([7]).as_subclass(OnSecond), torch.tensor([2])
    copy = host_copies.to_host(given)
    assert copy.event is not None and not copy.event.query()
    passed.append("cuda:1")
    assert not copy.event.query()
    assert [tensor.tolist() for tensor in copy.arrived()] == [[1.5], [7], [2]]
    assert copy.event.query() and {*passed} == {"cpu", "cuda:1"}


def test_up_projections_are_brought_without_the_engines_thread(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes, noted, current = threading.Event(), list[object](), threading.local()

    class Stream:
        def wait_event(self, _event: object) -> None:
            noted.append("waits")

    class Event:
        def record(self, stream: object) -> None:
            assert stream is side
            noted.append("recorded")

    @contextlib.contextmanager
    def stream(given: object) -> Generator[None]:
        current.stream = given
        yield
        del current.stream

    def to_device(_self: Device, part: Tensor) -> Tensor:
        assert goes.wait(10) and threading.current_thread() is not threading.main_thread()
        noted.append(part.shape)
        return part.clone()

    def keep(_tensor: Tensor, stream: object) -> None:
        assert stream is compute

    def stream_of(_device: object) -> object:
        return getattr(current, "stream", compute)

    def made(_device: object) -> Stream:
        return side

    side, compute = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Device, "_to_device", to_device)
    monkeypatch.setattr(Tensor, "record_stream", keep)
    layer = layers_of(loaded)[0]
    device, up = offloading.device("throttled", layer), layer.packed.signal.one(1)
    device.place = "cuda:0"
    try:
        brought = device.bring(up)
        assert not noted
        goes.set()
        found = device.use(brought)
    finally:
        device.close()
    assert noted == [*(part.shape for part in up.parts().values()), "recorded", "waits"]
    for name, part in found.parts().items():
        assert torch.equal(part, up.parts()[name]) and part is not up.parts()[name]


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    packed, telemetry = PackedModel.open(asset("demo", "packed")), Telemetry(2, 8)
    made = [MoELayer(i, _to(packed.layer(i), "cuda"), Control(PLAIN), telemetry) for i in range(2)]
    for layer in made:
        layer.control.counting = True
    x, index, weights = (tensor.cuda() for tensor in (torch.ones(1, 256), *CHOSEN))
    made[0](x, index, weights)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in made:
            x = layer(x, index, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1)
    assert x.isfinite().all() and telemetry.layers[1].neurons > 0
