"""What the operations must compute, written down once more: float64, neuron by neuron, from codes and scales.

And the backends that have to compute it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from floe_chat.kernels.activation import Activation, Projection
from floe_chat.kernels.codes import pack_codes, widened
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.reference import rounded
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from torch import Tensor

# Triton decides at import whether it interprets: `triton/test_processes.py` starts the tests once more, for it alone.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", *native.ISAS, *["triton"] * torch.cuda.is_available()]
CPU = torch.device("cpu")
Size = tuple[int, int, int, int]
Widths = tuple[int, int, int]
# (E, F, H, group): odd sizes, a group as wide as the vector, groups of one, of part of a 64-value chunk, of one chunk
# and of several, and parts of a 256-value block of codes.
# Interpreted, a program is a loop of Python's: one of each kind there, all of them where they are compiled.
SIZES: list[Size] = [(1, 1, 1, 1), (3, 7, 128, 32), (2, 7, 130, 26), (2, 7, 384, 128)]
if not INTERPRETED:
    SIZES.extend([(3, 7, 40, 20), (6, 19, 96, 32), (5, 7, 40, 1), (2, 19, 64, 4), (2, 7, 320, 20), (1, 5, 576, 64)])
LARGE: list[Size] = [(2, 70, 320, 64), (2, 33, 512, 128), (1, 130, 1152, 64), (1, 9, 2880, 64), (1, 20, 4096, 64)]
# Every size on every backend; the large ones on the CPU's instruction sets.
PLACES = [(name, size) for name in BACKENDS for size in (SIZES + LARGE * (name in native.ISAS))]


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
    Form("up", "gelu", short=True),
    Form("up", "limited"),
    Form("up", "relu2", short=True),
]
if not INTERPRETED:
    FORMS.extend([Form("up", "clamped", biased=True, short=True), Form("gate", "gelu")])
    FORMS.extend([Form("gate", "limited", short=True), Form(short=True)])
# (signal, other, down)
WIDTHS: list[Widths] = [(3, 4, 4), (2, 2, 3), (4, 8, 2), (8, 3, 16), (16, 16, 8)]
if not INTERPRETED:
    WIDTHS.extend([(2, 2, 2), (3, 3, 3), (4, 4, 4), (8, 8, 8), (16, 16, 16), (2, 4, 3), (3, 16, 2), (16, 3, 8)])
# Relative errors. float32 differs from float64 by summation order alone; the reference rounds weights and products to
# bfloat16 too; Triton's interpreter cuts bfloat16 off where a GPU rounds.
LIMITS = {
    "reference": {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3},
    "native": {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3},
    "triton": {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 3e-3},
}


def moved(part: Any, device: torch.device) -> Any:
    """A tensor, or all in a record, on a device; a list's offsets stay on the CPU."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, tuple):
        return tuple(moved(one, device) for one in part)
    if isinstance(part, Active):
        return Active(part.offsets, part.neurons.to(device), part.values.to(device))
    if isinstance(part, SignalWeights):
        return part.mapped(lambda tensor: tensor.to(device))
    if not is_dataclass(part) or isinstance(part, type):
        return part
    given = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return replace(part, **{name: moved(one, device) for name, one in given.items()})


@dataclass(frozen=True)
class Subject:
    """A backend under test. kernels: its functions. kind: which of `LIMITS`."""

    name: str
    kernels: Any
    device: torch.device = CPU

    @property
    def kind(self) -> str:
        return self.name if self.name in LIMITS else "native"

    def __call__(self, operation: str, *given: Any, **how: Any) -> Any:
        """What an operation gives for arguments from the CPU, which it leaves alone; back on the CPU."""
        sent = [self.there(part) for part in given]
        before = [part.clone() for part in sent if isinstance(part, Tensor)]
        found = self.back(getattr(self.kernels, operation)(*sent, **how))
        for part, kept in zip((part for part in sent if isinstance(part, Tensor)), before, strict=True):
            assert torch.equal(part.nan_to_num(9), kept.nan_to_num(9))
        return found

    def there(self, part: Any) -> Any:
        """An argument on the backend's device."""
        return moved(part, self.device)

    def back(self, part: Any) -> Any:
        """A result on the CPU."""
        assert not isinstance(part, Active) or part.offsets.is_cpu
        return moved(part, CPU)

    def sees(self, x: Tensor, vector: VectorLayout, x_bits: int = 22, *, whole: bool = False) -> Tensor:
        """x in a product with such a vector: float64, or x's own type if weights are rounded to that.

        Args:
            whole: whether the operation unpacks whole experts and multiplies them by the library.
        """
        if x.dtype == torch.bfloat16 and (self.kind == "reference" or (self.kind == "triton" and whole)):
            return x
        counted = self.kind == "native" or (self.kind == "triton" and not whole)
        if counted and x_bits == 8 and vector.bits != 16 and vector.group % 64 == 0:
            return rounded(x.float(), 8).double()
        return x.double()

    def limit(self, dtype: torch.dtype, x_bits: int = 22) -> float:
        """How far from the formula, on x as it `sees` it, a result may be."""
        return LIMITS[self.kind][dtype] if self.kind == "reference" or x_bits != 15 else 5e-4


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
        if self.form.activation == "limited":
            return silu(z.clamp(max=10)) if gate else z.clamp(-10, 10)
        if self.form.activation == "relu2":
            return torch.ones_like(z) if gate else z.clamp(min=0) ** 2
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
    signal, other, down = widths
    if form.activation == "relu2":
        other = 0
    layouts = [VectorLayout(hidden, bits, group, form.short) for bits in (signal, other, down)]
    parts = [_random(experts * neurons, layout, generator) for layout in layouts]
    signal_layout = SignalLayout(layouts[0], torch.bfloat16, form.signal, form.activation)
    row_layout = RowLayout(layouts[1], layouts[2], torch.bfloat16, form.signal, form.activation, form.biased)
    codes, scale, zero = parts[0].stored
    q = codes.view(torch.uint8) if layouts[0].bits == 16 else pack_codes(codes, layouts[0].bits)
    vectors = [
        part.stored[0].view(torch.uint8) if layout.bits in (0, 16) else layout.join(*part.stored)
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
    if not layout.bits:
        nothing = torch.empty(count, 0, dtype=torch.uint8)
        return _Part((nothing, nothing, nothing), torch.zeros(count, layout.n, dtype=torch.float64))
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
    """Random activations (B, H), a few of them large as in hidden states; products with them are near 1."""
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed + 100)) / hidden**0.5
    x[:, :: max(2, hidden // 3)] *= 3
    return x.to(dtype)


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
