"""One token of the mixers that keep a state, with position and states read from memory, against their definitions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu import native
from floe_chat.kernels.mixers.convolution import Convolution, convolution
from floe_chat.kernels.mixers.delta import Delta, delta_rule
from floe_chat.kernels.mixers.grouped import KeptTokens
from floe_chat.kernels.weights import Projection
from torch import Tensor

from ..covering import covering
from ..helpers import relative_rms
from .oracle import BACKENDS, Subject

NAN = float("nan")
WHERE = [name for name in BACKENDS if name not in native.ISAS]  # on a CPU there is one way
LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Rule:
    """Sizes of a gated delta rule, and the dtype of what is computed."""

    heads: int = 4
    shared: int = 2
    key: int = 6
    value: int = 10
    taps: int = 4
    dtype: torch.dtype = torch.float32

    def mixer(self) -> Delta:
        channels = 2 * self.shared * self.key + self.heads * self.value
        return Delta(
            self.heads,
            self.shared,
            self.key,
            self.value,
            (torch.randn(self.taps, channels) / self.taps).to(self.dtype),
            torch.rand(self.heads) * 4,
            torch.randn(self.heads),
            (1 + 0.3 * torch.randn(self.value)).to(self.dtype),
            1e-4,
            Projection(torch.empty(0)),
        )


@dataclass(frozen=True)
class Short:
    """Sizes of a short convolution."""

    channels: int = 48
    taps: int = 3
    bias: bool = False
    dtype: torch.dtype = torch.float32

    def mixer(self) -> Convolution:
        weights = torch.randn(self.taps, self.channels) / self.taps, torch.randn(self.channels)
        conv, bias = (part.to(self.dtype) for part in weights)
        return Convolution(conv, bias if self.bias else None)


CASES: dict[str, Rule | Short] = {
    "small": Rule(),
    "least": Rule(1, 1, 1, 1, 2),
    "odd": Rule(9, 3, 7, 19, 3),
    "every-head-its-own": Rule(3, 3, 5, 33, 5, torch.float16),
    "qwen": Rule(4, 2, 128, 128, dtype=torch.bfloat16),
    "convolution": Short(),
    "convolution-least": Short(1, 2),
    "convolution-odd": Short(133, 5, bias=True, dtype=torch.float16),
    "convolution-lfm2": Short(256, 3, dtype=torch.bfloat16),
}
# The definitions round each step to 16 bits, the kernels the result alone; and the interpreter cuts bfloat16 off.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ROUNDED = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def wide(mixer: Delta | Convolution) -> Any:
    """In float64."""
    names = ("conv", "decay", "bias", "norm") if isinstance(mixer, Delta) else ("conv", "bias")
    parts = {name: part.double() for name in names if (part := getattr(mixer, name)) is not None}
    return replace(mixer, **parts)


def truth(given: tuple[Tensor, ...], before: Tensor, mixer: Delta | Convolution) -> tuple[Tensor, Tensor]:
    """The output, and the state behind the token, in float64."""
    after = torch.empty_like(before).double()
    inputs = [part.double() for part in given]
    if isinstance(mixer, Delta):
        return delta_rule(inputs[0], inputs[1], before.double(), wide(mixer), after), after
    return convolution(inputs[0], before.double(), wide(mixer), after), after


def given_of(mixer: Delta | Convolution, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A token's projections."""
    first = torch.randn(1, mixer.sizes[0]).to(dtype)
    return (first, torch.randn(1, 2 * mixer.heads).to(dtype)) if isinstance(mixer, Delta) else (first,)


def kept_of(states: list[Tensor], position: int) -> KeptTokens:
    device = states[0].device
    return KeptTokens(
        torch.tensor([each.data_ptr() for each in states], device=device),
        torch.tensor([position], device=device),
        ring=len(states[0]),
    )


def call(subject: Subject, given: tuple[Tensor, ...], kept: KeptTokens, mixer: Delta | Convolution) -> Tensor:
    there = [subject.there(part) for part in given]
    operation = subject.kernels.delta_one if isinstance(mixer, Delta) else subject.kernels.convolve_one
    return operation(*there, kept, LAYER, subject.there(mixer)).cpu()


@covering({"on_backend": WHERE, "case": list(CASES)}, {"position": [0, 7, (1 << 33) + 1], "ring": [2, 5]})
def test_tokens_one_after_the_other_are_the_definition(
    case: str, position: int, ring: int, on_backend: Subject
) -> None:
    torch.manual_seed(position % 97)
    sizes = CASES[case]
    mixer, dtype, device = sizes.mixer(), sizes.dtype, on_backend.device
    states = [torch.full((ring, mixer.state), NAN, device=device) for _ in range(LAYERS)]
    first = mixer.state - mixer.heads * mixer.key_dim * mixer.value_dim if isinstance(mixer, Delta) else mixer.state
    before = torch.randn(mixer.state)
    before[:first] = before[:first].to(dtype).float()  # those were projected
    states[LAYER][position % ring] = before.to(device)
    limit = (LIMITS if on_backend.name == "triton" else ROUNDED)[dtype]
    for at in range(position, position + 3):
        given, before = given_of(mixer, dtype), states[LAYER][at % ring].cpu()
        states[LAYER][(at + 1) % ring] = NAN
        expected, after = truth(given, before, mixer)
        y = call(on_backend, given, kept_of(states, at), mixer)
        assert y.dtype == dtype and y.shape == expected.shape
        assert relative_rms(y, expected) <= limit
        assert relative_rms(states[LAYER][(at + 1) % ring].cpu(), after) <= limit
        assert torch.equal(states[LAYER][at % ring].cpu(), before), "a token that breaks off would have lost the state"
        assert all(bool(states[other].isnan().all()) for other in range(LAYERS) if other != LAYER)


@covering({"on_backend": WHERE, "wrong": ["state", "infinite state", "step", "query"]})
def test_what_is_not_a_number_reaches_its_heads(wrong: str, on_backend: Subject) -> None:
    torch.manual_seed(1)
    mixer = Rule().mixer()
    states = [torch.randn(2, mixer.state, device=on_backend.device) for _ in range(LAYERS)]
    qkv, gates = given_of(mixer, torch.float32)
    if "state" in wrong:
        states[LAYER][0, -1] = float("inf") if "infinite" in wrong else NAN
    elif wrong == "step":
        gates[0, -1] = NAN
    else:
        qkv[0, 11] = NAN  # of the second head of queries, which two heads share
    y = call(on_backend, (qkv, gates), kept_of(states, 4), mixer).view(4, 10)
    hit = 2 if wrong == "query" else 3
    assert y[hit:].isnan().all() and y[:hit].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    delta, short = Rule().mixer(), Short(bias=True).mixer()
    (qkv, gates), (given,) = given_of(delta, torch.float32), given_of(short, torch.float32)
    kept = kept_of([torch.zeros(2, delta.state) for _ in range(LAYERS)], 0)
    other = KeptTokens(kept.addresses.int(), kept.position)
    for wrong in (
        (qkv[:, 1:], gates, kept, 1, delta),
        (qkv.repeat(2, 1), gates, kept, 1, delta),
        (qkv, gates[:, 1:], kept, 1, delta),
        (qkv, gates, other, 1, delta),
        (qkv, gates, kept, LAYERS, delta),
        (qkv, gates, kept, -1, delta),
        *((qkv, gates, kept, 1, replace(delta, **{name: size})) for name in ("shared", "key_dim") for size in (0, 3)),
        (qkv, gates, kept, 1, replace(delta, conv=delta.conv[:1])),
        (qkv, gates, kept, 1, replace(delta, decay=delta.decay.double())),
        (qkv, gates, kept, 1, replace(delta, bias=delta.bias[1:])),
        (qkv, gates, kept, 1, replace(delta, norm=delta.norm[1:])),
    ):
        with pytest.raises(ValueError):
            kernels.delta_one(*wrong)
    for wrong in (
        (given[:, 1:], kept, 1, short),
        (given, other, 1, short),
        (given, kept, LAYERS, short),
        (given, kept, 1, replace(short, conv=short.conv[:1])),
        (given, kept, 1, replace(short, bias=given[0])),
    ):
        with pytest.raises(ValueError):
            kernels.convolve_one(*wrong)
