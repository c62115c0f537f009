"""A head in two planes: what can be drawn is exact, whatever is left unread of the rest."""

from __future__ import annotations

import math

import pytest
import torch
from floe_chat.kernels.codes import pack_codes, split_codes, unpack_codes
from floe_chat.kernels.cpu.native_ends import NativeEnds, draw
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.sampling import Filters
from floe_chat.kernels.step import ModelEnds
from floe_chat.kernels.weights import LinearWeights, Norm, Planes, Projection

from ..helpers import relative_rms

WORDS = 3000


def made(hidden: int, group: int, seed: int = 0, rows: int = WORDS) -> LinearWeights:
    drawn = torch.Generator().manual_seed(seed)
    q = torch.randint(256, (rows, hidden), generator=drawn, dtype=torch.uint8)
    scale = 0.002 + 0.003 * torch.rand(rows, hidden // group, generator=drawn)
    zero = 90 + 80 * torch.rand(rows, hidden // group, generator=drawn)
    return LinearWeights(VectorLayout(hidden, 8, group), q, scale.half(), zero.half())


def ends_of(
    weight: LinearWeights | Planes, hidden: int, *, biased: bool = False, cap: float | None = None
) -> NativeEnds:
    return NativeEnds(model_ends(weight, hidden, biased=biased, cap=cap))


def model_ends(weight: LinearWeights | Planes, hidden: int, *, biased: bool, cap: float | None) -> ModelEnds:
    drawn = torch.Generator().manual_seed(9)
    embedding = torch.zeros(WORDS, hidden)
    bias = torch.randn(WORDS, generator=drawn) if biased else None
    norm = 0.2 + torch.rand(hidden, generator=drawn)
    return ModelEnds(embedding, Norm(norm), 1e-5, Projection(weight, bias), cap=cap)


def in_two(weights: LinearWeights) -> Planes:
    planes = Planes.of(weights)
    assert planes is not None
    return planes


@pytest.mark.parametrize("n", [1, 5, 63, 64, 100, 128, 300])
def test_codes_are_split_into_halves(n: int) -> None:
    codes = torch.randint(256, (7, n), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    high, low = split_codes(codes)
    assert torch.equal(high, pack_codes(codes >> 4, 4)) and torch.equal(low, pack_codes(codes & 15, 4))
    assert torch.equal(16 * unpack_codes(high, n, 4) + unpack_codes(low, n, 4), codes)


@pytest.mark.parametrize(("n", "group"), [(128, 64), (192, 64), (60, 60), (67, 1), (1, 1)])
def test_two_planes_add_up_to_the_whole(n: int, group: int) -> None:
    weights = made(n, group)
    planes, whole = in_two(weights), weights.dense(torch.float64)
    assert relative_rms(planes.dense(torch.float64), whole) < 1e-6
    low = planes.low.dense(torch.float64).view(WORDS, -1, group).square().mean(-1)
    assert (planes.spread > 0.3 * low.amax(0)).all() and (low.mean(0) < planes.spread).all()
    assert 0.01 < relative_rms(planes.high.dense(torch.float64), whole) < 0.2
    assert planes.nbytes <= weights.nbytes + 2 * 2 * weights.scale.numel() + WORDS


def test_no_planes_of_other_widths_or_of_scales_without_room() -> None:
    weights = made(64, 64, rows=3)
    with pytest.raises(ValueError, match="8 bits"):
        Planes.of(LinearWeights(VectorLayout(64, 4, 64), weights.q[:, :32], weights.scale, weights.zero))
    assert Planes.of(LinearWeights(weights.vector, weights.q, weights.scale * 4e6, weights.zero)) is None


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "group"), [(256, 64), (192, 64), (100, 50)])
@pytest.mark.parametrize(("x_bits", "cap"), [(22, None), (8, None), (22, 6.0), (8, 6.0)])
def test_logits_within_reach_are_exact_and_others_are_further_below(
    n: int, group: int, x_bits: int, cap: float | None, biased: bool
) -> None:
    weights = made(n, group)
    whole, two = (ends_of(each, n, biased=biased, cap=cap) for each in (weights, in_two(weights)))
    drawn = torch.Generator().manual_seed(n + x_bits)
    read = 0
    for _ in range(20):
        x = torch.randn(1, n, generator=drawn) * torch.rand(1, n, generator=drawn).square()
        exact = two.logits(x, x_bits)
        assert relative_rms(exact, whole.logits(x, x_bits)) < (1e-5 if x_bits == 22 else 2e-3)
        for reach in (0.0, 0.5, 2.0):
            found, least = two.logits(x, x_bits, reach), exact.max() - reach
            near = exact >= least
            assert torch.equal(found[near], exact[near])
            assert (found[~near] < least).all() and relative_rms(found, exact) < 0.2
            read += int((found == exact).sum())
        assert torch.equal(two.logits(x, x_bits, math.inf), exact)
    assert 60 <= read < 60 * WORDS // 2  # else nothing would have been left unread


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("cap", [0.7, 6.0, 300.0])
@pytest.mark.parametrize(("n", "group"), [(256, 64), (100, 50)])
def test_capped_logits_are_the_definition(n: int, group: int, cap: float) -> None:
    weights = made(n, group)
    plain = model_ends(weights, n, biased=True, cap=None)
    weight, bias = plain.head.weight, plain.head.bias
    assert isinstance(weight, LinearWeights) and bias is not None
    head = Projection(weight.dense(torch.float64), bias.double())
    truth = ModelEnds(plain.embedding, Norm(plain.norm.weight.double()), plain.eps, head, cap=cap)
    for size in (0.1, 1.0, 30.0):
        x = torch.randn(1, n, generator=torch.Generator().manual_seed(n)) * size
        for each in (weights, in_two(weights)):
            found = ends_of(each, n, biased=True, cap=cap).logits(x)
            assert relative_rms(found, truth.logits(x.double())) < 1e-5 and found.abs().max() <= cap


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("cap", [None, 6.0])
@pytest.mark.parametrize("filters", [Filters(0.0), Filters(0.7, 0, 1.0, 0.05), Filters(1.3, 40, 1.0, 0.02)], ids=str)
def test_the_same_tokens_are_drawn(filters: Filters, cap: float | None) -> None:
    """As `floe_decode` draws them (decode.cpp, reach_of)."""
    two = ends_of(in_two(made(256, 64)), 256, cap=cap)
    reach = filters.temperature * (1e-3 - math.log(filters.min_p)) if filters.temperature else 0.0
    drawn = torch.Generator().manual_seed(5)
    for uniform in torch.rand(100, dtype=torch.float64, generator=drawn).tolist():
        x = torch.randn(1, 256, generator=drawn)
        near, exact = (two.logits(x, 8, each)[0] for each in (reach, math.inf))
        assert draw(near, filters, uniform) == draw(exact, filters, uniform)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("planes", [True, False])
def test_several_tokens_are_each_alone(planes: bool) -> None:
    whole = made(256, 64)
    ends, x = ends_of(in_two(whole) if planes else whole, 256, cap=5.0), torch.randn(4, 256)
    for reach in (0.0, 2.0, math.inf):
        alone = torch.cat([ends.logits(row, 15, reach) for row in x.split(1)])
        assert torch.equal(ends.logits(x, 15, reach), alone)
    with pytest.raises(ValueError):
        ends.logits(torch.randn(5, 256))


@pytest.mark.usefixtures("isa")
def test_what_is_not_a_number_stays_so() -> None:
    two = ends_of(in_two(made(128, 64)), 128)
    x = torch.randn(1, 128)
    x[0, 3] = math.nan
    assert two.logits(x, 22, 1.0).isnan().all()


def test_a_head_that_does_not_fit_is_refused() -> None:
    planes = in_two(made(128, 64))
    for broken in (
        Planes(planes.high, in_two(made(64, 64)).low, planes.spread),
        Planes(planes.high, planes.low, planes.spread[1:]),
        Planes(planes.high, planes.low, planes.spread.double()),
    ):
        with pytest.raises(ValueError):
            ends_of(broken, 128)
    for cap in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError):
            ends_of(planes, 128, cap=cap)
