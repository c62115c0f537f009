"""What the operations must compute, written down once more: float64, neuron by neuron, from codes and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from floe_chat.kernels.activation import Activation, Projection
from floe_chat.kernels.codes import pack_codes, widened
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from torch import Tensor

# (E, F, H, group): odd sizes, a group as wide as the vector, several groups, more than one 256-value block of codes.
SIZES = [(1, 1, 1, 1), (3, 7, 40, 20), (6, 37, 96, 32), (2, 7, 130, 26), (4, 7, 320, 64), (5, 37, 40, 1)]


@dataclass(frozen=True)
class Form:
    """Which projection is the signal, what an expert's activation is, whether both projections have biases, and whether
    scales and zeros are bytes.
    """

    signal: Projection = "up"
    activation: Activation = "silu"
    biased: bool = False
    short: bool = False

    def __str__(self) -> str:
        return f"{self.signal}-{self.activation}" + "-biased" * self.biased + "-short" * self.short


FORMS = [
    Form(),
    Form("gate", short=True),
    Form("gate", "clamped", biased=True),
    Form("up", "clamped", biased=True, short=True),
    Form("up", "gelu", short=True),
    Form("gate", "gelu"),
    Form(short=True),
]
# (signal, other, down)
WIDTHS = [(2, 2, 2), (3, 3, 3), (4, 4, 4), (8, 8, 8), (16, 16, 16), (2, 4, 3), (3, 16, 2), (16, 3, 8), (4, 8, 16)]
# float32 differs from float64 by summation order alone; bfloat16 rounds every product's result to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Layer:
    """A layer as stored, and the float64 weights that the bytes stand for: signal, other and down (E, F, H).

    biases: (E, F) of signal and of other, zero where the form has none.
    """

    stored: SignalWeights
    rows: ExpertRows
    signal: Tensor
    other: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor]
    form: Form = Form()

    def of_signal(self, expert: int, z: Tensor) -> Tensor:
        """v (..., F) of an expert's signal projection's product z."""
        return self._of(self.form.signal == "gate", z + self.biases[0][expert])

    def of_other(self, expert: int, z: Tensor, neurons: Tensor | slice = slice(None)) -> Tensor:
        """What v is multiplied with, of the other projection's product z."""
        return self._of(self.form.signal != "gate", z + self.biases[1][expert, neurons])

    def _of(self, gate: bool, z: Tensor) -> Tensor:
        if self.form.activation == "clamped":
            return z.clamp(max=7) * (1 / (1 + torch.exp(-1.702 * z.clamp(max=7)))) if gate else z.clamp(-7, 7) + 1
        if self.form.activation == "gelu":
            return z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2 if gate else z
        return silu(z) if gate else z


def silu(z: Tensor) -> Tensor:
    """z sigmoid(z)."""
    return z / (1 + torch.exp(-z))


def make_layer(
    size: tuple[int, int, int, int], widths: tuple[int, int, int], form: Form = FORMS[0], *, seed: int = 0
) -> Layer:
    """Random codes, scales and zeros (or 16-bit values) of one layer."""
    experts, neurons, hidden, group = size
    generator = torch.Generator().manual_seed(seed)
    layouts = [VectorLayout(hidden, bits, group, form.short) for bits in widths]
    parts = [_random(experts * neurons, layout, generator) for layout in layouts]
    signal_layout = SignalLayout(layouts[0], torch.bfloat16, form.signal, form.activation)
    row_layout = RowLayout(layouts[1], layouts[2], torch.bfloat16, form.signal, form.activation, form.biased)
    codes, scale, zero = parts[0].stored
    q = codes.view(torch.uint8) if layouts[0].bits == 16 else pack_codes(codes, layouts[0].bits)
    vectors = [
        part.stored[0].view(torch.uint8) if layout.bits == 16 else layout.join(*part.stored)
        for layout, part in zip(layouts[1:], parts[1:], strict=True)
    ]
    shape = (experts, neurons, -1)
    scales = [part.view(*shape[:2], part.shape[1]) for part in layouts[0].stored(scale, zero)]
    biases = torch.randn(2, experts, neurons, generator=generator) * form.biased
    own, its = (biases[0], biases[1].flatten()) if form.biased else (None, None)
    return Layer(
        SignalWeights(signal_layout, q.view(shape), *scales, bias=own),
        ExpertRows(row_layout, row_layout.join(*vectors, bias=its).view(shape)),
        *(part.weights.view(experts, neurons, hidden) for part in parts),
        biases=(biases[0].double(), biases[1].double()),
        form=form,
    )


def each(x: Tensor, limit: float) -> Tensor:
    """A threshold (B,) that all tokens of x (B, H) have."""
    return torch.full(x.shape[:1], limit, device=x.device)


@dataclass(frozen=True)
class _Part:
    stored: tuple[Tensor, Tensor, Tensor]
    weights: Tensor


def _random(count: int, layout: VectorLayout, generator: torch.Generator) -> _Part:
    if layout.bits == 16:
        values = torch.randn(count, layout.n, generator=generator).bfloat16()
        empty = torch.empty(count, 0, dtype=torch.float16)
        return _Part((values, empty, empty), values.double())
    codes = torch.randint(0, 1 << layout.bits, (count, layout.n), generator=generator, dtype=torch.uint8)
    scale = torch.rand(count, layout.groups, generator=generator) * 0.2 + 0.05
    zero = torch.rand(count, layout.groups, generator=generator) * (1 << layout.bits)
    scale, zero = (part.half() for part in widened(*layout.nearest(scale, zero), layout.bits))
    wide_scale, wide_zero = (part.double().repeat_interleave(layout.group, dim=1) for part in (scale, zero))
    return _Part((codes, scale, zero), (codes.double() - wide_zero) * wide_scale)


def make_x(tokens: int, hidden: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Random activations (B, H)."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed + 100)).to(dtype)


def make_calls(tokens: list[int], experts: list[int]) -> Calls:
    """Calls with weights that differ from each other."""
    weights = torch.linspace(0.1, 0.9, len(tokens))
    return Calls(torch.tensor(tokens, dtype=torch.long), torch.tensor(experts, dtype=torch.long), weights)


def signal_values(layer: Layer, x: Tensor, calls: Calls) -> list[Tensor]:
    """v = s(signal_e · x) of every call, all F of them, in float64 with weights as the operation's dtype sees them."""
    products = zip(calls.experts.tolist(), signal_products(layer, x, calls), strict=True)
    return [layer.of_signal(expert, product) for expert, product in products]


def signal_products(layer: Layer, x: Tensor, calls: Calls) -> list[Tensor]:
    """signal_e · x of every call, likewise."""
    pairs = zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)
    return [_seen(layer.signal[expert], x) @ x[token].double() for token, expert in pairs]


def swiglu(layer: Layer, x: Tensor, calls: Calls, chosen: list[Tensor], values: list[Tensor]) -> Tensor:
    """y[token] += weight · sum_n o(other_n · x) v_n down_n, (B, H) float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    pairs = zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)
    for call, (token, expert) in enumerate(pairs):
        z = _seen(layer.other[expert], x)[chosen[call]] @ x[token].double()
        h = layer.of_other(expert, z, chosen[call]) * values[call]
        y[token] += calls.weights[call].double() * (h @ _seen(layer.down[expert], x)[chosen[call]])
    return y


def _seen(weights: Tensor, x: Tensor) -> Tensor:
    return weights.to(x.dtype).double()


def as_active(chosen: list[Tensor], values: list[Tensor], dtype: torch.dtype) -> Active:
    """The neurons and values of every call in the form that operations exchange."""
    counts = torch.tensor([0, *(neurons.numel() for neurons in chosen)])
    return Active(counts.cumsum(0), torch.cat(chosen), torch.cat(values).to(dtype))


def threshold_between(values: Tensor, keep: float) -> float:
    """What about a share `keep` of |values| reaches, in the widest gap nearby, so that rounding decides nothing."""
    ordered = values.abs().sort().values
    if keep <= 0:
        return float(ordered[-1]) * 2 + 1
    middle = int((1 - keep) * (len(ordered) - 1))
    low, high = max(0, middle - 2), min(len(ordered), middle + 4)
    near = ordered[low:high]
    if not len(near) or float(near[-1] - near[0]) <= 1e-3 * float(ordered[-1]):
        near = ordered  # clamped values are all alike
    if keep >= 1 or len(near) < 2:
        return 0.0  # everything
    gap = int(near.diff().argmax())
    return float((near[gap] + near[gap + 1]) / 2)
