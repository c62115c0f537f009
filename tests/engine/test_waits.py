"""How often a decode step waits for the device: all that is fetched goes through `Device.fetched`.

The device here is the CPU, so that nothing is really waited for; what is counted is the engine's asking.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.engine import devices
from floe_chat.engine.devices import Device
from floe_chat.engine.links import ThrottledLink
from floe_chat.engine.moe import Control
from floe_chat.engine.offload import Offload, Parts
from floe_chat.engine.offloaded import OffloadedLayer
from floe_chat.engine.placement import Rates
from floe_chat.engine.predictor import GatePredictor
from floe_chat.engine.quality import Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels.layouts import ExpertRows, RowLayout, UpLayout, UpWeights, VectorLayout
from floe_chat.models.packed import PackedLayer
from torch import Tensor

LAYERS, EXPERTS, NEURONS, HIDDEN = 2, 4, 24, 64


class Counted(Device):
    """Notes what the engine asks to have on the host."""

    def __init__(self, nbytes: int) -> None:
        rates = Rates(1e9, 1e-6, 1e9, 1e9, 1e-6, 1e10, 1e-6)
        super().__init__("counted", "cpu", ThrottledLink(nbytes, rate=1e12), rates)
        self.asked = 0

    def fetched(self, *tensors: Tensor) -> list[Tensor]:
        self.asked += 1
        return super().fetched(*tensors)


def layers(device: Device, preset: Preset, *, predict: bool) -> tuple[list[OffloadedLayer], Offload]:
    vector = VectorLayout(HIDDEN, 16, HIDDEN)
    layout, up_layout = RowLayout(vector, vector, torch.float16), UpLayout(vector, torch.float16)
    generator = torch.Generator().manual_seed(1)

    def weights(*shape: int) -> Tensor:
        return (0.1 * torch.randn(*shape, generator=generator)).half()

    records = weights(EXPERTS, NEURONS, 2 * HIDDEN).view(torch.uint8)
    none = torch.empty(EXPERTS, NEURONS, 0, dtype=torch.float16)
    table = torch.linspace(0, 1, 101).repeat(EXPERTS, 1)
    packed = PackedLayer(
        up=UpWeights(up_layout, weights(EXPERTS, NEURONS, HIDDEN).view(torch.uint8), none, none),
        rows=ExpertRows(layout, records),
        thresholds=table,
        products=table,
    )
    control = Control(preset)
    control.counting = True
    shared = Offload(device, Parts(), [packed] * LAYERS, EXPERTS * NEURONS)
    if predict:
        routers = [weights(EXPERTS, HIDDEN).float() for _ in range(LAYERS)]
        shared.predictor = GatePredictor(routers, [torch.ones(HIDDEN)])
    made = [OffloadedLayer(i, packed, packed, shared, control, Telemetry(LAYERS, EXPERTS)) for i in range(LAYERS)]
    made[0].following = made[1]
    made[0].router = made[1].router = weights(EXPERTS, HIDDEN).float()
    return made, shared


@pytest.mark.parametrize(
    ("preset", "predict", "waits"),
    [
        (Preset("Plain", 0.3, 0.2), False, 2),  # of two layers: one each
        (Preset("Dropping", 0.3, 0.2, drop=0.2, major=0.45), False, 4),  # the router's choice comes first
        (Preset("Replacing", 0.3, 0.2, alpha=0.5), False, 4),
        (Preset("Plain", 0.3, 0.2), True, 3),  # the list of neurons that is guessed for the second layer
    ],
    ids=["plain", "drop", "replace", "predict"],
)
def test_a_step_waits_once_per_layer_for_what_it_needs(preset: Preset, predict: bool, waits: int) -> None:
    vector = VectorLayout(HIDDEN, 16, HIDDEN)
    nbytes = RowLayout(vector, vector, torch.float16).nbytes
    device = Counted(nbytes)
    made, _ = layers(device, preset, predict=predict)
    with torch.inference_mode():
        for token in range(5):
            x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(token))
            before = device.asked
            for layer in made:
                x = x + layer(x, torch.tensor([[token % 4, 3 - token % 4]]), torch.tensor([[0.6, 0.4]]))
            assert device.asked - before == waits
            assert x.isfinite().all()
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

    moved: Any = devices._moved(given, wanted, move)  # pyright: ignore[reportPrivateUsage]
    assert moves == [24 + 8 + 12 + 3]
    for before, after in zip(given, moved, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)
        assert (after is before) == (before.dtype == torch.bool)
