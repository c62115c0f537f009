"""How often a decode step waits for the device: all that is waited for goes through `Device.arrived`.

The device here is the CPU, so that nothing is really waited for; what is counted is the engine's asking.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from floe_chat.engine.experts.moe_layer import Control
from floe_chat.engine.experts.offloaded_layer import Neighbours, OffloadedLayer
from floe_chat.engine.offload.device import Device
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.offload.links.copies import Copy, moved
from floe_chat.engine.offload.links.throttled_link import ThrottledLink
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.offload.predictor import GatePredictor, PartialPredictor
from floe_chat.engine.quality_presets import PRESETS, Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels.layouts import RowLayout, UpLayout, VectorLayout
from floe_chat.kernels.rule import LATE
from floe_chat.kernels.weights import ExpertRows, UpWeights
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
        super().__init__("counted", "cpu", ThrottledLink(nbytes, rate=1e12), rates)
        self.asked = 0

    def arrived(self, copy: Copy) -> list[Tensor]:
        self.asked += 1
        return super().arrived(copy)


def layers(device: Device, preset: Preset, *, predict: str | None) -> tuple[list[OffloadedLayer], Offload]:
    up_layout = UpLayout(VECTOR, torch.float16)
    generator = torch.Generator().manual_seed(1)

    def weights(*shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=generator)).half()

    records = weights(EXPERTS, NEURONS, 2 * HIDDEN).view(torch.uint8)
    none = torch.empty(EXPERTS, NEURONS, 0, dtype=torch.float16)
    table = torch.linspace(0, 1, 101).repeat(EXPERTS, 1)
    up = weights(EXPERTS, NEURONS, HIDDEN).view(torch.uint8)
    packed = PackedLayer(
        up=UpWeights(up_layout, up, none, none),
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
