"""The compiled step with mixers that keep a state, against their definitions in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from floe_chat.kernels.cpu.native_delta import CHUNK
from floe_chat.kernels.cpu.native_delta import delta_rule as native_rule
from floe_chat.kernels.cpu.native_step import NativeStep, Place, placed
from floe_chat.kernels.mixers.convolution import Convolution
from floe_chat.kernels.mixers.delta import Delta, delta_rule
from floe_chat.kernels.step import DenseLayer, Router, dense_step
from floe_chat.kernels.weights import Norm
from torch import Tensor

from ..helpers import relative_rms
from .test_dense_step import NAN, compiled, make_projection, widened

__all__ = ["compiled"]  # a fixture of all tests here


@dataclass(frozen=True)
class Sizes:
    """Of a gated delta rule. heads: of values. shared: of queries and keys. bits: of the projections, 32 for plain."""

    hidden: int = 48
    heads: int = 4
    shared: int = 2
    key: int = 6
    value: int = 10
    taps: int = 4
    bits: int = 32

    @property
    def channels(self) -> int:
        return 2 * self.shared * self.key + self.heads * self.value


SIZES = {
    "small": Sizes(),
    "least": Sizes(1, 1, 1, 1, 2, 2),
    "odd": Sizes(35, 9, 3, 7, 19, 3),
    "4-bit": Sizes(128, 8, 8, 32, 64, bits=4),
    "wide": Sizes(192, 32, 16, 128, 128, bits=4),
    "8-bit": Sizes(64, 6, 2, 40, 70, 5, bits=8),
}
LIMIT = 2e-5


@dataclass(frozen=True)
class Short:
    """Sizes of a short convolution."""

    hidden: int = 48
    taps: int = 3
    bias: bool = False
    bits: int = 32


EVERY = SIZES | {
    "convolution": Short(),
    "convolution-least": Short(1, 2),
    "convolution-odd": Short(35, 5, bias=True),
    "convolution-4-bit": Short(128, 4, bias=True, bits=4),
}


def make_layer(s: Sizes | Short) -> DenseLayer:
    """Random weights."""
    torch.manual_seed(s.hidden)
    mixer = make_delta(s) if isinstance(s, Sizes) else make_convolution(s)
    first, out = mixer.sizes
    return DenseLayer(
        input_layernorm=Norm(1 + 0.3 * torch.randn(s.hidden)),
        post_attention_layernorm=Norm(1 + 0.3 * torch.randn(s.hidden)),
        eps=1e-5,
        mixer=mixer,
        first=make_projection(first, s.hidden, s.bits, bias=False),
        out=make_projection(s.hidden, out, s.bits, bias=False),
        router=Router(torch.randn(5, s.hidden), 2, norm_topk_prob=True),
    )


def make_convolution(s: Short) -> Convolution:
    return Convolution(torch.randn(s.taps, s.hidden) / s.taps, torch.randn(s.hidden) if s.bias else None)


def make_delta(s: Sizes) -> Delta:
    return Delta(
        s.heads,
        s.shared,
        s.key,
        s.value,
        torch.randn(s.taps, s.channels) / s.taps,
        torch.rand(s.heads) * 4,
        torch.randn(s.heads),
        1 + 0.3 * torch.randn(s.value),
        1e-4,
        make_projection(2 * s.heads, s.hidden, 32, bias=False),
    )


def wide(layer: DenseLayer) -> DenseLayer:
    """In float64."""
    delta = layer.mixer
    if isinstance(delta, Convolution):
        bias = None if delta.bias is None else delta.bias.double()
        return replace(widened(layer), mixer=Convolution(delta.conv.double(), bias))
    assert isinstance(delta, Delta)
    parts = {name: getattr(delta, name).double() for name in ("conv", "decay", "bias", "norm")}
    weight = delta.gates.weight
    assert isinstance(weight, Tensor)
    gates = replace(delta.gates, weight=weight.double())
    return replace(widened(layer), mixer=replace(delta, gates=gates, **parts))


def make_states(layer: DenseLayer, position: int) -> Tensor:
    """Of which the one that the token may not look at is NaN."""
    states = torch.full((2, layer.mixer.state), NAN)
    states[position % 2] = torch.randn(states.shape[1])
    return states


@pytest.mark.parametrize("sizes", EVERY.values(), ids=EVERY)
@pytest.mark.usefixtures("isa")
def test_it_is_the_definition_token_after_token(sizes: Sizes | Short) -> None:
    layer = make_layer(sizes)
    step, other, rope = NativeStep(layer), wide(layer), torch.zeros(2, 8)
    states = make_states(layer, 5)
    truth = states.double()
    for position in range(5, 12):
        x, before = torch.randn(1, sizes.hidden), states[position % 2].clone()
        ours = step(x, None, rope, states, position)
        theirs = dense_step(other, x.double(), None, rope.double(), truth, position)
        assert relative_rms(ours.stream, theirs.stream) <= LIMIT and relative_rms(ours.hidden, theirs.hidden) <= LIMIT
        assert relative_rms(states[1 - position % 2].double(), truth[1 - position % 2]) <= LIMIT
        assert torch.equal(states[position % 2], before), "a token that breaks off would have lost the state"
        again = step(x, None, rope, states, position)
        assert torch.equal(again.stream, ours.stream)


@pytest.mark.usefixtures("two_threads")
def test_texts_together_by_two_threads_are_each_alone_by_one() -> None:
    layer = make_layer(SIZES["wide"])
    step, rope, positions = NativeStep(layer), torch.zeros(2, 8), (3, 8, 0)
    x, states = torch.randn(3, 192), [make_states(layer, position) for position in positions]
    places = [Place(rope, [own.clone()], position) for own, position in zip(states, positions, strict=True)]
    together = step.together(0, x, None, placed([step], places))
    torch.set_num_threads(1)
    for row, (own, position) in enumerate(zip(states, positions, strict=True)):
        alone = step(x[row : row + 1], None, rope, own, position)
        assert torch.equal(together.stream[row], alone.stream[0]), "to the last bit"


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("isa", "two_threads")
def test_a_prompt_is_the_definition(sizes: Sizes, tokens: int) -> None:
    layer = make_layer(sizes)
    other = wide(layer)
    assert isinstance(layer.mixer, Delta) and isinstance(other.mixer, Delta)
    projected = torch.randn(tokens, sizes.channels + sizes.heads * sizes.value + 2 * sizes.heads)
    qkv, gates = projected.split([projected.shape[1] - 2 * sizes.heads, 2 * sizes.heads], 1)
    before = torch.randn(layer.mixer.state)
    after = torch.full_like(before, NAN)
    along = {end: torch.full_like(before, NAN) for end in range(CHUNK, tokens, 2 * CHUNK)}
    found = native_rule(qkv, gates, before, layer.mixer, after, along)
    state, start, wanted = before.double(), 0, list[Tensor]()
    for end, kept in (along | {tokens: after}).items():
        truth = torch.empty_like(state)
        wanted.append(delta_rule(qkv[start:end].double(), gates[start:end].double(), state, other.mixer, truth))
        assert relative_rms(kept, truth) <= LIMIT
        state, start = truth, end
    assert relative_rms(found, torch.cat(wanted)) <= LIMIT


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.usefixtures("isa", "two_threads")
def test_what_has_decayed_to_denormal_numbers_is_zero(tokens: int) -> None:
    """Each operation on one would take a processor some hundred cycles."""
    layer = make_layer(SIZES["small"])
    assert isinstance(layer.mixer, Delta)
    before = torch.full((layer.mixer.state,), 1e-39)
    after = torch.full_like(before, NAN)
    found = native_rule(torch.zeros(tokens, 104), torch.zeros(tokens, 8), before, layer.mixer, after, {})
    heads = after[3 * SIZES["small"].channels :]
    assert len(heads) == 4 * 6 * 10 and not heads.any() and not found.any()


def test_a_prompt_of_another_form_is_refused() -> None:
    layer = make_layer(SIZES["small"])
    assert isinstance(layer.mixer, Delta)
    delta = layer.mixer
    good = torch.zeros(70, 104), torch.zeros(70, 8), torch.zeros(layer.mixer.state)

    def rule(qkv: Tensor = good[0], gates: Tensor = good[1], before: Tensor = good[2], at: int = CHUNK) -> None:
        native_rule(qkv, gates, before, delta, good[2].clone(), {at: good[2].clone()})

    rule()
    wrong: list[dict[str, Any]] = [
        {"qkv": good[0][:, 1:]},
        {"qkv": good[0].double()},
        {"qkv": good[0].T.contiguous().T},
        {"gates": good[1][1:]},
        {"before": good[2][1:]},
        {"at": 63},
        {"at": 128},
    ]
    for one in wrong:
        with pytest.raises(ValueError):
            rule(**one)


def test_what_is_not_a_number_reaches_the_result() -> None:
    layer = make_layer(SIZES["small"])
    states = make_states(layer, 0)
    states[0, -1] = NAN
    stepped = NativeStep(layer)(torch.randn(1, 48), None, torch.zeros(2, 8), states, 0)
    assert bool(stepped.stream.isnan().any()) and bool(stepped.hidden.isnan().all())


LAYER, SHORT = make_layer(SIZES["small"]), make_layer(EVERY["convolution"])


def changed(**changes: Any) -> DenseLayer:
    assert isinstance(LAYER.mixer, Delta)
    return replace(LAYER, mixer=replace(LAYER.mixer, **changes))


@pytest.mark.parametrize(
    "layer",
    [
        changed(key_dim=5),
        changed(key_dim=0),
        changed(conv=torch.ones(4, 65)),
        changed(conv=torch.ones(1, 64)),
        changed(conv=torch.ones(64)),
        changed(decay=torch.ones(3)),
        changed(bias=torch.ones(4, dtype=torch.float64)),
        changed(norm=torch.ones(9)),
        changed(gates=make_projection(7, 48, 32, bias=False)),
        changed(gates=make_projection(8, 48, 8, bias=False)),
        replace(LAYER, first=make_projection(103, 48, 32, bias=False)),
        replace(LAYER, out=make_projection(48, 41, 32, bias=False)),
        replace(SHORT, mixer=Convolution(torch.ones(1, 48))),
        replace(SHORT, mixer=Convolution(torch.ones(3, 47))),
        replace(SHORT, mixer=Convolution(torch.ones(3, 48, dtype=torch.float64))),
        replace(SHORT, mixer=Convolution(torch.ones(3, 48), torch.ones(47))),
        changed(shared=3),
        changed(value_dim=0),
    ],
)
def test_weights_that_do_not_fit_are_refused(layer: DenseLayer) -> None:
    with pytest.raises(ValueError):
        NativeStep(layer)


def test_states_of_another_size_are_refused() -> None:
    step, (x, rope) = NativeStep(LAYER), (torch.randn(1, 48), torch.zeros(2, 8))
    for states in (torch.zeros(2, 7), torch.zeros(1, 352), torch.zeros(2, 352, dtype=torch.float64)):
        with pytest.raises(ValueError):
            step(x, None, rope, states, 0)
