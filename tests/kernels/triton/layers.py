"""The oracle's layers on the device under test, and how far results may be from float64."""

from __future__ import annotations

from dataclasses import replace

import torch
from floe_chat.kernels.layouts import RowLayout, SignalLayout
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows
from torch import Tensor

from ..oracle import FORMS, Form, Layer, make_layer

Size = tuple[int, int, int, int]
Widths = tuple[int, int, int]
# Sizes that take the general path, as the oracle's, with fewer neurons (the interpreter is slow), ...
SLOW_SIZES: list[Size] = [(1, 1, 1, 1), (3, 7, 40, 20), (6, 19, 96, 32), (2, 7, 130, 26), (5, 7, 40, 1)]
# ... and the fast one: groups inside a chunk, of one or several; codes that fill two blocks of 256 and part of a third.
FAST_SIZES: list[Size] = [(2, 19, 64, 4), (3, 7, 128, 32), (2, 7, 320, 20), (2, 7, 384, 128), (1, 5, 576, 64)]
ALL_SIZES: list[Size] = [*SLOW_SIZES, *FAST_SIZES]
# Sums are float32. Results in 16 bit are rounded besides (Triton's interpreter cuts bfloat16 off where a GPU rounds).
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
TOLERANCE = {dtype: (2e-3 + rounding if rounding else 1e-5) for dtype, rounding in ROUNDING.items()}


def size_id(size: Size) -> str:
    """A name for a test's parameter."""
    return "E{}-F{}-H{}-g{}".format(*size)


def relative_rms(got: Tensor, expected: Tensor) -> float:
    """Root of the mean squared error over the root of the mean square of `expected`."""
    error = (got.cpu().double() - expected.double()).pow(2).mean().sqrt()
    return float(error / expected.double().pow(2).mean().sqrt().clamp_min(1e-30))


def layer_on(device: torch.device, size: Size, widths: Widths, form: Form = FORMS[0], *, seed: int = 0) -> Layer:
    """`make_layer` with its stored weights on a device; the float64 weights stay on the CPU."""
    layer = make_layer(size, widths, form, seed=seed)
    return replace(
        layer,
        stored=layer.stored.mapped(lambda part: part.to(device)),
        rows=ExpertRows(layer.rows.layout, layer.rows.data.to(device)),
    )


def float16_layer(device: torch.device, size: Size) -> Layer:
    """A layer of float16 weights."""
    layer = make_layer(size, (16, 16, 16))
    up, gate, down = (part.half() for part in (layer.signal, layer.other, layer.down))
    layout = RowLayout(layer.rows.layout.other, layer.rows.layout.down, torch.float16)
    records = layout.join(*(part.flatten(0, 1).contiguous().view(torch.uint8) for part in (gate, down)))
    stored = replace(layer.stored, layout=SignalLayout(layer.stored.layout.vector, torch.float16))
    stored = replace(stored, q=up.view(torch.uint8).to(device), scale=stored.scale.to(device))
    stored = replace(stored, zero=stored.zero.to(device))
    rows = ExpertRows(layout, records.view(*size[:2], -1).to(device))
    return Layer(stored, rows, up.double(), gate.double(), down.double(), layer.biases)


def calls_on(device: torch.device, calls: Calls) -> Calls:
    """The same calls on a device."""
    return Calls(calls.tokens.to(device), calls.experts.to(device), calls.weights.to(device))


def active_on(device: torch.device, active: Active) -> Active:
    """The same list with its neurons on a device; offsets stay on the CPU."""
    return Active(active.offsets, active.neurons.to(device), active.values.to(device))
