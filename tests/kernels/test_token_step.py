"""All layers in one call against layer after layer: dense step, the selection's definition, experts.

And tokens drawn in one call against one call after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from floe_chat.kernels import reference
from floe_chat.kernels.codes import group_size, pack_codes
from floe_chat.kernels.cpu import native
from floe_chat.kernels.cpu.binding import Stop
from floe_chat.kernels.cpu.native_ends import NativeEnds, draw
from floe_chat.kernels.cpu.native_step import NativeStep, Place
from floe_chat.kernels.cpu.native_token import Draw, Drawn, NativeToken
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.sampling import Filters
from floe_chat.kernels.step import ExpertLayer, ModelEnds
from floe_chat.kernels.types import Limits
from floe_chat.kernels.weights import LinearWeights, Norm, Planes, Projection
from torch import Tensor

from ..helpers import relative_rms
from .oracle import make_layer as make_experts
from .test_dense_step import Sizes, make_input, make_layer

NAN = float("nan")
SHAPES = {
    "small": (Sizes(), (5, 7, 48, 16), (2, 4, 4)),
    "one of one": (Sizes(hidden=40, experts=1, top_k=1), (1, 3, 40, 20), (8, 4, 2)),
    "all of many": (Sizes(hidden=64, experts=9, top_k=9, bits=4), (9, 6, 64, 64), (3, 4, 4)),
    "halves": (Sizes(hidden=64, experts=9, bits=4, kept=torch.float16), (9, 6, 64, 64), (3, 4, 4)),
    "codes": (Sizes(hidden=64, experts=9, bits=4, kept=CODES), (9, 6, 64, 64), (3, 4, 4)),
    "16 bit": (Sizes(hidden=96, experts=4, top_k=3, normed="head"), (4, 5, 96, 32), (16, 16, 16)),
}
RULES = [
    *(Rule(), Rule(drop=0.8, major=0.8, weighed=True), Rule(drop=99.0, weighed=True)),
    *(Rule(major=0.97), Rule(drop=0.6, major=0.97, weighed=True)),
]


def expected(
    dense: list[NativeStep], experts: list[ExpertLayer], x: Tensor, rope: Tensor, kv: list[Tensor], position: int
) -> tuple[Tensor, list[list[int]], list[list[int]]]:
    """The stream behind the last layer, the experts of each, and counts of what was computed, call by call."""
    added: Tensor | None = None
    chosen, counts = list[list[int]](), list[list[int]]()
    for step, layer, store in zip(dense, experts, kv, strict=True):
        x, hidden, (index, weights), _ = step(x, added, rope, store, position)
        work = reference.select(index, weights, layer.limits, layer.rule)
        work = work.part(work.thresholds != torch.inf)
        added, found = native.moe_step(hidden, layer.signal, layer.rows, work.calls, work.thresholds, work.products)
        chosen.append(index[0].tolist())
        counts += found.tolist()
    assert added is not None
    return x + added, chosen, counts


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_layer_after_layer(
    shape: tuple[Sizes, tuple[int, int, int, int], tuple[int, int, int]], rule: Rule
) -> None:
    sizes, (experts, neurons, hidden, group), widths = shape
    parts, layers = rule.parts, 3
    dense = [NativeStep(replace(make_layer(sizes), eps=1e-5 * (1 + i))) for i in range(layers)]
    stored = [make_experts((parts * experts, neurons, hidden, group), widths, seed=i) for i in range(layers)]
    limits = torch.rand(2, parts * experts, generator=torch.Generator().manual_seed(7)) / 4
    chosen = [
        ExpertLayer(one.stored, one.rows, Limits(limits[0], limits[1] if i else None), rule)
        for i, one in enumerate(stored)
    ]
    for position in (0, 5, 200):
        x, _, rope, store = make_input(sizes, position)
        kv = [store.nan_to_num(0.1 * i) for i in range(layers)]
        wanted, index, counts = expected(dense, chosen, x, rope, [part.clone() for part in kv], position)
        found = NativeToken(dense, chosen)(x, [Place(rope, kv, position)], (22, 22), Stop())
        assert found is not None and torch.equal(found.stream, wanted) and found.chosen[:, 0].tolist() == index
        computed = [pair for pair in found.counts.view(-1, 2).tolist() if pair[0] >= 0]
        assert computed == counts and (rule.drop < 99 or not counts)
        assert (found.counts[..., 1, :] == -1).all() or parts == 2


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_texts_together_are_each_alone(
    shape: tuple[Sizes, tuple[int, int, int, int], tuple[int, int, int]], rule: Rule
) -> None:
    sizes, (experts, neurons, hidden, group), widths = shape
    dense = [NativeStep(replace(make_layer(sizes), eps=1e-5 * (1 + i))) for i in range(2)]
    stored = [make_experts((rule.parts * experts, neurons, hidden, group), widths, seed=i) for i in range(2)]
    limits = Limits(torch.full((rule.parts * experts,), 0.1))
    token = NativeToken(dense, [ExpertLayer(one.stored, one.rows, limits, rule) for one in stored])
    inputs = [(*make_input(sizes, position), position) for position in (200, 0, 5, 64)]
    places = [Place(rope, [kv.nan_to_num(0.1 * i) for i in range(2)], at) for _, _, rope, kv, at in inputs]
    copies = [place._replace(kv=[part.clone() for part in place.kv]) for place in places]
    x = torch.cat([given[0] for given in inputs])
    found = token(x, places, (22, 22), Stop())
    assert found is not None
    for row, place in enumerate(copies):
        alone = token(x[row : row + 1], [place], (22, 22), Stop())
        assert alone is not None and torch.equal(found.stream[row], alone.stream[0]), "to the last bit"
        assert torch.equal(found.chosen[:, row], alone.chosen[:, 0])
        assert torch.equal(found.counts[:, row], alone.counts[:, 0])
        for mine, own in zip(places[row].kv, place.kv, strict=True):
            assert torch.equal(mine, own)


def test_what_is_not_a_number_reaches_the_result() -> None:
    sizes, shape, widths = SHAPES["small"]
    dense, one = [NativeStep(make_layer(sizes))], make_experts(shape, widths)
    layer = ExpertLayer(one.stored, one.rows, Limits(torch.ones(5), torch.ones(5)), Rule(drop=0.3, weighed=True))
    x, _, rope, kv = make_input(sizes, 2)
    x[0, 3] = NAN
    found = NativeToken(dense, [layer])(x, [Place(rope, [kv.nan_to_num(0.1)], 2)], (22, 22), Stop())
    assert found is not None and found.stream.isnan().all()
    assert found.counts[0, 0, :, 0].tolist() == [[7, 7], [7, 7]]


VOCABULARY = 30
GREEDY, WARM, LIKELY = Filters(0.0), Filters(1.5, 9, 0.9, 0.01, 1.3), Filters(2.0, 0, 1.0, 0.3)


def make_ends(hidden: int, bits: int = 32, kind: Literal["rms", "layer"] = "rms") -> ModelEnds:
    drawn = torch.Generator().manual_seed(bits + hidden)
    embedding = torch.randn(VOCABULARY, hidden, generator=drawn)
    weight: Tensor | LinearWeights = torch.randn(VOCABULARY, hidden, generator=drawn)
    if bits < 32:
        codes = torch.randint(1 << bits, (VOCABULARY, hidden), generator=drawn, dtype=torch.uint8)
        layout = VectorLayout(hidden, bits, group_size(hidden))
        spread = torch.rand(2, VOCABULARY, layout.groups, generator=drawn).half()
        weight = LinearWeights(layout, pack_codes(codes, bits), 0.1 * spread[0], 2**bits * spread[1])
    bias = torch.randn(VOCABULARY, generator=drawn)
    norm = Norm(torch.rand(hidden, generator=drawn), torch.randn(hidden, generator=drawn), kind)
    return ModelEnds(embedding, norm, 1e-5, Projection(weight, bias), scale=1.5)


@dataclass
class Model:
    """Two small layers, their ends, and room for keys and values with a beginning in it."""

    token: NativeToken
    ends: NativeEnds
    embedding: Tensor
    rope: Tensor
    kv: list[Tensor]

    def several(
        self,
        most: int,
        filters: Filters,
        seen: Tensor | None = None,
        last: Sequence[int] = (),
        guessed: Sequence[int] = (),
        **how: float,
    ):
        uniforms = torch.rand(most, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tolist()
        stop = Stop()
        stop.set(bool(how.get("stop", 0)))
        return self.token.decode(
            *(self.ends, 7, Place(self.rope[:most], self.kv, POSITION), (22, 15), stop),
            *(Draw(filters, uniforms, seen, last, guessed), how.get("seconds", 1e9)),
        )


POSITION = 4


def make_model(bits: int = 32) -> Model:
    """Its head in two planes if it has 8 bits."""
    sizes, shape, widths = SHAPES["small"]
    dense = [NativeStep(replace(make_layer(sizes), eps=1e-5 * (1 + i))) for i in range(2)]
    stored = [make_experts((2 * shape[0], *shape[1:]), widths, seed=i) for i in range(2)]
    limits, rule = torch.full((2 * shape[0],), 0.1), Rule(drop=0.6, major=0.97, weighed=True)
    experts = [ExpertLayer(one.stored, one.rows, Limits(limits, limits), rule) for one in stored]
    _, _, _, store = make_input(sizes, POSITION)
    rope = torch.stack([make_input(sizes, POSITION + i)[2] for i in range(20)])
    ends = make_ends(shape[2], bits)
    if bits == 8:
        assert isinstance(ends.head.weight, LinearWeights)
        planes = Planes.of(ends.head.weight)
        assert planes is not None
        ends = replace(ends, head=Projection(planes, ends.head.bias))
    kv = [store.nan_to_num(0.1 * i).contiguous() for i in range(2)]
    return Model(NativeToken(dense, experts), NativeEnds(ends), ends.scale * ends.embedding, rope, kv)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("bits", [32, 8, 3])
def test_ends_are_norm_and_head(bits: int, kind: Literal["rms", "layer"]) -> None:
    ends = make_ends(128, bits, kind)
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    native_ends = NativeEnds(ends)
    wanted = ends.logits(x)
    assert relative_rms(native_ends.logits(x), wanted) < 1e-5
    assert 0 < relative_rms(native_ends.logits(x, 8), native_ends.logits(x)) < 0.05 or bits == 32
    for wrong in (x[:, 1:], x.double(), torch.randn(128, 2)[:, 0]):
        with pytest.raises(ValueError):
            native_ends.logits(wrong)
    for broken in (
        replace(ends, norm=replace(ends.norm, weight=ends.norm.weight[1:])),
        replace(ends, norm=replace(ends.norm, bias=torch.ones(127))),
        replace(ends, embedding=ends.embedding[1:]),
        replace(ends, embedding=ends.embedding.bfloat16()),
        replace(ends, embedding=ends.embedding[:, :64].contiguous()),
    ):
        with pytest.raises(ValueError):
            NativeEnds(broken)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("filters", [GREEDY, WARM, LIKELY], ids=["greedy", "warm", "likely"])
def test_tokens_of_one_call_are_those_of_several(filters: Filters, bits: int) -> None:
    most, seen = 12, torch.zeros(VOCABULARY, dtype=torch.uint8)
    seen[[7, 9]] = 1
    model, other = make_model(bits), make_model(bits)
    there = seen.clone() if filters.penalty != 1 else None
    found = model.several(most, filters, there)
    assert isinstance(found, Drawn) and len(found.tokens) == most
    uniforms = torch.rand(most, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).tolist()
    token = 7
    for i, uniform in enumerate(uniforms):
        place = POSITION + i
        through = other.token(other.embedding[token, None], [Place(other.rope[i], other.kv, place)], (22, 15), Stop())
        assert through is not None
        assert torch.equal(found.chosen[i], through.chosen[:, 0]) and torch.equal(found.counts[i], through.counts[:, 0])
        token = draw(other.ends.logits(through.stream, 15)[0], filters, uniform, seen if there is not None else None)
        assert found.tokens[i] == token
        seen[token] = 1
    for mine, theirs in zip(model.kv, other.kv, strict=True):
        assert torch.equal(mine, theirs)
    assert there is None or torch.equal(there, seen)
    assert found.at[0] > 0 and found.at == sorted(found.at)


@pytest.mark.parametrize("filters", [GREEDY, WARM], ids=["greedy", "warm"])
def test_guesses_change_nothing(filters: Filters) -> None:
    seen = torch.zeros(VOCABULARY, dtype=torch.uint8)
    alone = make_model().several(4, filters, seen.clone())
    assert alone is not None
    for right in range(4):
        guessed = [*alone.tokens[:right], *(1 - token % 2 for token in alone.tokens[right:3])]
        found = make_model().several(4, filters, there := seen.clone(), guessed=guessed)
        assert found is not None and found.tokens == alone.tokens[: right + 1]
        assert there.nonzero().flatten().tolist() == sorted(set(found.tokens))
        assert torch.equal(found.chosen[: right + 1], alone.chosen[: right + 1]) and len(found.chosen) == 4
        assert torch.equal(found.counts[: right + 1], alone.counts[: right + 1])
    ends = make_model().several(4, filters, seen.clone(), alone.tokens[1:2], alone.tokens[:3])
    assert tokens_of(ends) == alone.tokens[: alone.tokens.index(alone.tokens[1]) + 1]
    for most, guessed, why in (
        (4, [1, 2], "2 guesses for 4 tokens"),
        (2, [VOCABULARY], "token"),
        (6, [1] * 5, "size|shape|fit"),
    ):
        with pytest.raises(ValueError, match=why):
            make_model().several(most, filters, None, guessed=guessed)


def tokens_of(drawn: Drawn | None) -> list[int]:
    assert drawn is not None
    return drawn.tokens


def test_a_call_ends_where_it_is_told_to() -> None:
    free = tokens_of(make_model().several(12, WARM))
    last = next(token for token in free[2:] if token not in free[:2])
    until = tokens_of(make_model().several(12, WARM, None, (99, last)))
    assert until == free[: free.index(last) + 1]
    assert tokens_of(make_model().several(12, WARM, seconds=0)) == free[:1]
    assert tokens_of(make_model().several(3, WARM)) == free[:3]
    assert make_model().several(12, WARM, stop=1) is None


def test_several_tokens_that_do_not_fit_are_refused() -> None:
    model = make_model()
    how = Draw(GREEDY, [0.5] * 3, None, ())

    def decode(token: int = 7, rope: Tensor = model.rope[:3], place: int = POSITION, how: Draw = how, **with_: object):
        kv, ends = with_.get("kv", model.kv), with_.get("ends", model.ends)
        return model.token.decode(ends, token, Place(rope, kv, place), (22, 22), Stop(), how, 1.0)  # pyright: ignore[reportArgumentType]

    assert len(tokens_of(decode())) == len(tokens_of(decode(kv=model.kv[:1]))) == 3
    capacity = len(model.kv[0])
    assert len(tokens_of(decode(place=capacity - 3))) == 3
    for wrong in (
        {"token": VOCABULARY},
        {"token": -1},
        {"rope": model.rope[:2]},
        {"place": capacity - 2},
        {"place": -1},
        {"kv": []},
        {"ends": NativeEnds(make_ends(64))},
        {"how": how._replace(uniforms=[])},
        {"how": how._replace(seen=torch.zeros(3, dtype=torch.uint8))},
    ):
        with pytest.raises(ValueError):
            decode(**wrong)  # pyright: ignore[reportArgumentType]
