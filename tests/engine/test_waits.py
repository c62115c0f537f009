"""How often a decode step waits for the device, and how much Python it runs meanwhile.

All that is waited for goes through `Device.arrived` and `to_host`. While the host computes, neither device nor link is
given work.

The device here is the CPU, so that nothing is really waited for; what is counted is the engine's asking.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from floe_chat.engine import host_copies
from floe_chat.engine.bench.synthetic import _to  # pyright: ignore[reportPrivateUsage]
from floe_chat.engine.experts.moe_layer import Control, MoELayer
from floe_chat.engine.experts.offloaded_layer import Neighbours, OffloadedLayer
from floe_chat.engine.host_copies import Copy, moved
from floe_chat.engine.offload.device import Device
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.offload.links.link import throttled_link
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.offload.predictor import GatePredictor, PartialPredictor
from floe_chat.engine.quality_presets import PRESETS, Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.rule import LATE
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from floe_chat.models.pack.packed_model import PackedLayer
from torch import Tensor

from .driver import a_preset

LAYERS, EXPERTS, NEURONS, HIDDEN = 2, 4, 24, 64

VECTOR = VectorLayout(HIDDEN, 16, HIDDEN)
LAYOUT = RowLayout(VECTOR, VECTOR, torch.float16)
NBYTES = LAYOUT.nbytes


class Counted(Device):
    """Notes what the engine asks to have on the host."""

    def __init__(self, nbytes: int) -> None:
        rates = Rates(1e9, 1e-6, 1e9, 1e9, 1e-6, 1e10, 1e-6)
        super().__init__("counted", "cpu", throttled_link(nbytes, rate=1e12), rates)
        self.asked = 0

    def arrived(self, copy: Copy) -> list[Tensor]:
        self.asked += 1
        return super().arrived(copy)


def layers(device: Device, preset: Preset, *, predict: str | None) -> tuple[list[OffloadedLayer], Offload]:
    signal_layout = SignalLayout(VECTOR, torch.float16)
    generator = torch.Generator().manual_seed(1)

    def weights(*shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=generator)).half()

    records = weights(EXPERTS, NEURONS, 2 * HIDDEN).view(torch.uint8)
    none = torch.empty(EXPERTS, NEURONS, 0, dtype=torch.float16)
    table = torch.linspace(0, 1, 101).repeat(EXPERTS, 1)
    up = weights(EXPERTS, NEURONS, HIDDEN).view(torch.uint8)
    packed = PackedLayer(
        signal=SignalWeights(signal_layout, up, none, none),
        rows=ExpertRows(LAYOUT, records),
        thresholds=table,
        products=table,
    )
    control = Control(preset)
    control.counting = True
    shared = Offload(device, Parts(), [packed] * LAYERS, EXPERTS * NEURONS)
    routers = [weights(EXPERTS, HIDDEN).float() for _ in range(LAYERS)]
    if predict == "gate":
        shared.predictor = GatePredictor(routers, [torch.ones(HIDDEN)])
    if predict == "partial":
        shared.predictor = PartialPredictor(
            routers, lambda _layer, output: torch.ones(1, HIDDEN) if output is None else output + 1
        )
    made = [OffloadedLayer(i, packed, packed, shared, control, Telemetry(LAYERS, EXPERTS)) for i in range(LAYERS)]
    gate = SimpleNamespace(weight=weights(EXPERTS, HIDDEN).float())
    made[0].neighbours, made[1].neighbours = Neighbours(gate, made[1]), Neighbours(gate)
    return made, shared


PLAIN = a_preset("Plain", 0.3, 0.2)


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
def test_a_step_waits_once_per_layer(preset: Preset, predict: str | None) -> None:
    device = Counted(NBYTES)
    made, _ = layers(device, preset, predict=predict)
    with torch.inference_mode():
        for token in range(5):
            x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(token))
            for layer in made:
                before = device.asked
                x = x + layer(x, torch.tensor([[token % 4, 3 - token % 4]]), torch.tensor([[0.6, 0.4]]))
                assert device.asked - before == 1
            assert x.isfinite().all()
    guessed = sum(counts.guessed for counts in made[1].telemetry.layers)
    assert (guessed > 0) == (predict is not None)  # what was asked ahead was there in time
    device.close()


# Functions, of Python and of C, that one layer and token may call, several tokens' mean: lower these as they fall. Half
# of the steps here copy rows.
MOST = {None: 425, "gate": 700}


@pytest.mark.parametrize("predict", [None, "gate"])
def test_a_layer_takes_so_many_calls(predict: str | None) -> None:
    device = Counted(NBYTES)
    made, _ = layers(device, PLAIN, predict=predict)
    calls, tokens = Counter[str](), 20

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            name = frame.f_code.co_qualname if event == "call" else getattr(called, "__qualname__", str(called))
            calls[f"{event} {name}"] += 1

    with torch.inference_mode():
        for token in range(2 * tokens):
            x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(token))
            chosen, weights = torch.tensor([[token % 4, 3 - token % 4]]), torch.tensor([[0.6, 0.4]])
            for layer in made:
                sys.setprofile(count if token >= tokens else None)
                try:
                    x = layer(x, chosen, weights)
                finally:
                    sys.setprofile(None)
    device.close()
    each = calls.total() / (tokens * len(made))
    assert 0 < each <= MOST[predict], calls.most_common(30)


class Late(Counted):
    """What is asked ahead takes until the next layer waits."""

    def there(self, copy: Copy) -> bool:
        return False


def test_a_guess_that_comes_too_late_is_left_alone() -> None:
    device = Late(NBYTES)
    made, shared = layers(device, PLAIN, predict="gate")
    want, _ = layers(Counted(NBYTES), PLAIN, predict=None)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.4]])
    with torch.inference_mode():
        for layer, other in zip(made, want, strict=True):
            assert torch.allclose(layer(x, *chosen), other(x, *chosen), rtol=1e-5)
    assert device.asked == LAYERS and shared.scheduler.ahead is None
    assert sum(counts.guessed for counts in made[1].telemetry.layers) == 0
    device.close()


def test_values_that_are_no_numbers_reach_the_result() -> None:
    """They are active at any threshold; the session reports what made them."""
    device = Counted(NBYTES)
    made, _ = layers(device, PLAIN, predict="gate")
    with torch.inference_mode():
        for tokens in (1, 3):
            chosen, scores = torch.tensor([[1, 2]] * tokens), torch.tensor([[0.6, 0.4]] * tokens)
            for layer in made:
                assert layer(torch.full((tokens, HIDDEN), torch.nan), chosen, scores).isnan().all()
                assert layer(torch.ones(tokens, HIDDEN), chosen, scores).isfinite().all()
    device.close()


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


def resident(preset: Preset) -> tuple[list[MoELayer], Telemetry]:
    """Layers whose rows are all on their device."""
    device = Counted(NBYTES)
    made, _ = layers(device, preset, predict=None)
    device.close()
    control, telemetry = made[0].control, Telemetry(LAYERS, EXPERTS)
    return [MoELayer(i, layer.packed, control, telemetry) for i, layer in enumerate(made)], telemetry


def read_stats(telemetry: Telemetry) -> None:
    telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1)


def test_what_is_not_counted_yet_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def here(tensors: Sequence[Tensor]) -> Copy:
        return Copy([tensor.as_subclass(Tensor) for tensor in tensors])

    def count(counts: Tensor) -> None:
        seen.append(counts.tolist())

    monkeypatch.setattr("floe_chat.engine.telemetry.to_host", here)
    monkeypatch.setattr("floe_chat.engine.telemetry._UNCOUNTED", 4)
    telemetry = Telemetry(LAYERS, EXPERTS)
    for number in range(7):
        telemetry.count(count, torch.tensor([number]).as_subclass(Elsewhere))
        assert len(seen) == 4 * ((number + 1) // 4)
    telemetry.settle()
    assert seen == [[number] for number in range(7)]


def test_what_a_layer_left_uncounted_is_read_with_what_the_next_one_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def count(counts: Tensor) -> None:
        seen.append(counts.tolist())

    def started(packed: Tensor) -> Tensor:
        return packed.as_subclass(Tensor).clone()

    def recorded(_stream: object) -> None:
        pass

    event = SimpleNamespace(record=recorded, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr("floe_chat.engine.host_copies._started", started)
    device = Counted(NBYTES)
    made, _ = layers(device, PLAIN, predict=None)
    made[0].telemetry.count(count, torch.tensor([3, 4]).as_subclass(Elsewhere))
    assert seen == []
    made[0](torch.ones(1, HIDDEN), torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.4]]))
    assert seen == [[3, 4]] and device.asked == 1
    device.close()


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

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    monkeypatch.setattr("floe_chat.engine.host_copies._started", started)
    given = torch.tensor([1.5]).as_subclass(Elsewhere), torch.tensor([7]).as_subclass(OnSecond), torch.tensor([2])
    copy = host_copies.to_host(given)
    assert copy.event is not None and not copy.event.query()
    passed.append("cuda:1")
    assert not copy.event.query()
    assert [tensor.tolist() for tensor in copy.arrived()] == [[1.5], [7], [2]]
    assert copy.event.query() and {*passed} == {"cpu", "cuda:1"}


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made, telemetry = resident(PLAIN)
    made = [MoELayer(layer.index, _to(layer.packed, "cuda"), layer.control, telemetry) for layer in made]
    given = torch.ones(1, HIDDEN), torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.4]])
    x, index, weights = (tensor.cuda() for tensor in given)
    made[0](x, index, weights)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in made:
            x = layer(x, index, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    read_stats(telemetry)
    assert x.isfinite().all() and telemetry.layers[1].neurons > 0
