"""The compiled step with attention through a latent vector, whose keys are never made, against its definition in
float64, where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from floe_chat.kernels.cpu.native_step import NativeStep
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.mixers.grouped import Heads
from floe_chat.kernels.mixers.latent import Latent
from floe_chat.kernels.step import DenseLayer, Router, dense_step
from floe_chat.kernels.weights import LinearWeights, Norm, Projection
from torch import Tensor

from ..helpers import relative_rms
from .test_dense_step import CAPACITY, LIMITS, NAN, compiled, make_projection, widened

__all__ = ["compiled"]  # a fixture of all tests here


@dataclass(frozen=True)
class Sizes:
    """bits: of the projections, 32 for plain ones. asked: numbers of the vector of queries, 0 for none."""

    hidden: int = 48
    heads: int = 4
    rank: int = 20
    still: int = 10
    turned: int = 6
    value: int = 14
    asked: int = 0
    bits: int = 32
    kept: torch.dtype = torch.float32

    @property
    def dim(self) -> int:
        return self.rank + self.turned


SIZES = {
    "small": Sizes(),
    "least": Sizes(1, 1, 1, 1, 2, 1),
    "odd": Sizes(35, 7, 19, 9, 2, 3, kept=torch.float16),
    "asked": Sizes(asked=17),
    "half-asked": Sizes(40, 5, 64, 24, 8, 16, asked=33, kept=torch.float16),
    "8-bit": Sizes(128, 4, 128, 64, 32, 64, bits=8),
    "8-bit-asked": Sizes(192, 20, 512, 192, 64, 256, asked=256, bits=8, kept=torch.float16),
    "4-bit": Sizes(128, 16, 128, 24, 64, 40, bits=4, kept=torch.float16),
    "3-bit-odd": Sizes(50, 5, 36, 14, 6, 10, asked=30, bits=3),
    "2-bit": Sizes(256, 3, 192, 20, 8, 9, bits=2),
}


def make_layer(s: Sizes) -> DenseLayer:
    """Random weights."""
    torch.manual_seed(s.hidden)
    queries = s.heads * (s.still + s.turned)
    latent = Latent(
        Heads(s.heads, 1, s.dim, 0.4, cache_dtype=s.kept, inside=s.rank),
        s.still,
        s.turned,
        s.value,
        norm=1 + 0.3 * torch.randn(s.rank),
        eps=1e-4,
        made=make_projection(s.heads * (s.still + s.value), s.rank, s.bits, bias=False),
        asked=make_projection(queries, s.asked, s.bits, bias=False) if s.asked else None,
        asked_norm=1 + 0.3 * torch.randn(s.asked) if s.asked else None,
    )
    return DenseLayer(
        input_layernorm=Norm(1 + 0.3 * torch.randn(s.hidden)),
        post_attention_layernorm=Norm(1 + 0.3 * torch.randn(s.hidden)),
        eps=1e-5,
        mixer=latent,
        first=make_projection((s.asked or queries) + s.dim, s.hidden, s.bits, bias=False),
        out=make_projection(s.hidden, s.heads * s.value, s.bits, bias=False),
        router=Router(torch.randn(5, s.hidden), 2, norm_topk_prob=True),
    )


def make_input(s: Sizes, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, rope, and a store that is NaN wherever nobody may look."""
    torch.manual_seed(position)
    angles = torch.rand(s.turned // 2).mul(6).repeat(2)
    rope = torch.stack([angles.cos(), angles.sin()])
    rope[1, : s.turned // 2].neg_()
    kv = torch.full((CAPACITY, 1, s.dim), NAN)
    kv[:position] = torch.randn(position, 1, s.dim)
    return torch.randn(1, s.hidden), rope, kv.to(s.kept)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("isa")
def test_it_is_the_definition(sizes: Sizes) -> None:
    layer, limit = make_layer(sizes), LIMITS[sizes.kept]
    step, other = NativeStep(layer), widened(layer)
    for position in (0, 1, 63, 64, 200, CAPACITY - 1):
        x, rope, kv = make_input(sizes, position)
        before, wide = kv.clone(), kv.double() if sizes.kept == torch.float32 else kv.clone()
        ours = step(x, None, rope, kv, position)
        truth = dense_step(other, x.double(), None, rope.double(), wide, position)
        assert relative_rms(ours.stream, truth.stream) <= limit and relative_rms(ours.hidden, truth.hidden) <= limit
        assert relative_rms(kv[position].double(), wide[position].double()) <= limit
        before[position] = kv[position]
        assert torch.equal(kv.nan_to_num(99), before.nan_to_num(99)), "more was written than this token's place"


@pytest.mark.usefixtures("isa")
def test_scales_below_float16s_normal_numbers_count() -> None:
    """Threads read float32's own numbers of that kind as zero."""
    layer, (x, rope, kv) = make_layer(SIZES["8-bit"]), make_input(SIZES["8-bit"], 3)
    stored = layer.out.weight
    assert isinstance(stored, LinearWeights)
    small = replace(stored, scale=(stored.scale.float() / stored.scale.max() * 2**-16).half())
    layer = replace(layer, out=Projection(small, None))
    ours = NativeStep(layer)(x, None, rope, kv.clone(), 3)
    truth = dense_step(widened(layer), x.double(), None, rope.double(), kv.double(), 3)
    assert relative_rms(ours.stream - x, truth.stream - x) <= 1e-2 < float((truth.stream - x).abs().max())


def test_threads_change_no_bit(two_threads: None) -> None:
    sizes = SIZES["8-bit-asked"]  # large enough to be shared
    step, (x, rope, kv) = NativeStep(make_layer(sizes)), make_input(sizes, CAPACITY - 1)
    both = step(x, None, rope, kv, CAPACITY - 1)
    torch.set_num_threads(1)
    alone = step(x, None, rope, kv, CAPACITY - 1)
    assert torch.equal(both.stream, alone.stream)


@pytest.mark.parametrize(("x_bits", "limit"), [(22, 1e-5), (15, 1e-3), (8, 3e-2)])
def test_x_is_read_as_finely_as_asked(x_bits: int, limit: float) -> None:
    layer, (x, rope, kv) = make_layer(SIZES["8-bit"]), make_input(SIZES["8-bit"], 20)
    ours = NativeStep(layer)(x, None, rope, kv.clone(), 20, x_bits)
    assert relative_rms(ours.hidden, dense_step(layer, x, None, rope, kv, 20).hidden) <= limit


@pytest.mark.parametrize("where", ["x", "the vector", "the key"])
def test_what_is_not_a_number_reaches_the_result(where: str) -> None:
    x, rope, kv = make_input(SIZES["small"], 100)
    {"x": x[0], "the vector": kv[70, 0], "the key": kv[70, 0, 20:]}[where][3] = NAN
    stepped = NativeStep(make_layer(SIZES["small"]))(x, None, rope, kv, 100)
    assert bool(stepped.stream.isnan().any()) and bool(stepped.hidden.isnan().all())


LAYER = make_layer(SIZES["asked"])


def changed(**changes: Any) -> DenseLayer:
    assert isinstance(LAYER.mixer, Latent)
    return replace(LAYER, mixer=replace(LAYER.mixer, **changes))


def changed_heads(**changes: Any) -> DenseLayer:
    assert isinstance(LAYER.mixer, Latent)
    return changed(heads=replace(LAYER.mixer.heads, **changes))


@pytest.mark.parametrize(
    "layer",
    [
        changed(still=11),
        changed(turned=5),
        changed(turned=0),
        changed(value=0),
        changed(norm=torch.ones(19)),
        changed(norm=torch.ones(20, dtype=torch.float64)),
        changed(asked=None),
        changed(asked_norm=torch.ones(16)),
        changed(made=make_projection(96, 21, 32, bias=False)),
        changed(made=make_projection(96, 20, 32, bias=True)),
        changed(asked=make_projection(63, 17, 32, bias=False)),
        changed_heads(inside=None),
        changed_heads(inside=19),
        changed_heads(num_kv_heads=2),
        changed_heads(head_dim=28),
        changed_heads(cache_dtype=CODES),
        changed_heads(clip=0.5),
        changed_heads(sinks=torch.ones(4)),
        replace(LAYER, first=make_projection(44, 48, 32, bias=False)),
        replace(LAYER, out=make_projection(48, 57, 32, bias=False)),
    ],
)
def test_weights_that_do_not_fit_are_refused(layer: DenseLayer) -> None:
    with pytest.raises(ValueError):
        NativeStep(layer)
