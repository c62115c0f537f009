"""The compiled step of the dense part against its definition in float64: odd sizes, every instruction set, codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from floe_chat.kernels.codes import group_size, pack_codes
from floe_chat.kernels.cpu import native
from floe_chat.kernels.cpu.native_step import NativeStep
from floe_chat.kernels.entries import CODES, stored
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.mixers.grouped import Heads
from floe_chat.kernels.mixers.latent import Latent
from floe_chat.kernels.step import DenseLayer, Router, Sandwich, Stepped, Swiglu, dense_step
from floe_chat.kernels.weights import LinearWeights, Norm, Projection
from torch import Tensor

from ..helpers import relative_rms

# A number near the middle of two float16 values, or codes, may become the other one.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-4, CODES: 2e-3}
CAPACITY = 300
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Sizes:
    """bits: of the projections, 32 for plain ones. normed: what queries and keys are normalized over. kept: the form of
    keys and values. routing: fields of the router. biased: its biases, "b" of logits and "c" for the choice. beside:
    neurons beside the experts, gated or not. sinks: of each head. down: whether the experts' last matrices have biases.
    gates: whether heads' outputs have gates. centred: whether norms subtract the mean and have biases. sandwich: norms
    behind the parts, and gelu beside. own: what the router has of its own, "f" for factors, "n" for a norm. alone,
    v_normed, rope_at: as in `Heads`.
    """

    hidden: int = 48
    queries: int = 4
    keys: int = 2
    dim: int = 12
    experts: int = 5
    top_k: int = 2
    bits: int = 32
    bias: bool = False
    normed: str = ""
    clip: float | None = None
    window: int | None = None
    shares: bool = True
    kept: torch.dtype = torch.float32
    routing: frozenset[tuple[str, Any]] = frozenset()
    biased: str = ""
    beside: int = 0
    gated: bool = False
    sinks: bool = False
    down: bool = False
    gates: bool = False
    centred: bool = False
    sandwich: bool = False
    own: str = ""
    alone: bool = False
    v_normed: bool = False
    rope_at: int = 0


def routed(**fields: Any) -> frozenset[tuple[str, Any]]:
    return frozenset(fields.items())


SIZES = {
    "small": Sizes(),
    "least": Sizes(1, 1, 1, 2, 1, 1),
    "odd": Sizes(35, 6, 3, 14, 7, 7, shares=False),
    "five-of-one": Sizes(50, 5, 1, 66, 3, 1, bias=True),
    "wide": Sizes(260, 16, 2, 64, 128, 8, normed="head"),
    "all-keys": Sizes(130, 4, 4, 32, normed="all", clip=0.7),
    "no-router": Sizes(experts=0),
    "sigmoids": Sizes(experts=7, top_k=3, routing=routed(kind="sigmoid", precise=True), biased="c"),
    "scaled-sigmoids": Sizes(experts=64, top_k=8, routing=routed(kind="sigmoid", scale=1.8), biased="c", shares=False),
    "groups": Sizes(experts=12, top_k=4, routing=routed(groups=4, top_groups=2, scale=16.0), shares=False),
    "groups-of-sigmoids": Sizes(
        experts=32, top_k=5, routing=routed(kind="sigmoid", groups=8, top_groups=3, precise=True), biased="c"
    ),
    "corrected": Sizes(experts=9, top_k=3, routing=routed(precise=True), biased="bc"),
    "biased-logits": Sizes(experts=9, top_k=4, biased="b"),
    "sparsemixer": Sizes(experts=16, routing=routed(kind="sparsemixer", jitter=0.3), shares=False),
    "sparsemixer-of-all": Sizes(35, 6, 3, 14, 7, 7, routing=routed(kind="sparsemixer", jitter=0.2), shares=False),
    "sparsemixer-of-near": Sizes(experts=9, top_k=3, routing=routed(kind="sparsemixer", jitter=9.0), biased="b"),
    "layer-norms": Sizes(centred=True),
    "layer-norms-odd": Sizes(35, 6, 3, 14, 7, 2, bits=4, bias=True, centred=True),
    "sinks": Sizes(sinks=True),
    "sinks-of-a-window": Sizes(64, 8, 2, 16, window=150, sinks=True, kept=torch.float16),
    "down-biases": Sizes(experts=9, top_k=4, biased="b", down=True, bias=True, sinks=True),
    "beside": Sizes(beside=29),
    "beside-gated": Sizes(35, 6, 3, 14, 7, 7, beside=31, gated=True),
    "beside-alone": Sizes(64, experts=0, beside=70, bits=8),
    "beside-4-bit": Sizes(128, 4, 2, 32, bits=4, beside=64, gated=True),
    "gates": Sizes(gates=True),
    "gates-4-bit": Sizes(128, 4, 2, 32, bits=4, gates=True, normed="head", kept=torch.float16, window=150),
    "gates-codes": Sizes(35, 6, 3, 14, 7, 7, gates=True, sinks=True, kept=CODES),
    "sandwich": Sizes(experts=9, beside=29, sandwich=True),
    "sandwich-odd": Sizes(35, 6, 3, 14, 7, 7, beside=31, sandwich=True, bias=True),
    "factors": Sizes(experts=9, top_k=3, own="f"),
    "router-norm": Sizes(experts=9, top_k=3, own="n", centred=True),
    "factors-of-sigmoids": Sizes(
        experts=12, top_k=4, routing=routed(kind="sigmoid", scale=1.8), biased="c", shares=False, own="fn"
    ),
    "alone": Sizes(alone=True),
    "alone-of-one": Sizes(50, 5, 1, 66, 3, 1, bias=True, alone=True, clip=0.7),
    "normed-values": Sizes(35, 6, 3, 14, 7, 7, v_normed=True),
    "turned-apart": Sizes(rope_at=5),
    "gemma": Sizes(
        *(128, 8, 2, 64, 16, 4),
        beside=70,
        sandwich=True,
        own="fn",
        alone=True,
        v_normed=True,
        rope_at=32,
        normed="head",
    ),
    "gemma-4-bit": Sizes(
        *(128, 4, 2, 32, 16, 4, 4, False, "head"),
        window=150,
        kept=torch.float16,
        beside=64,
        sandwich=True,
        v_normed=True,
    ),
    "gemma-codes": Sizes(
        *(50, 5, 1, 14, 7, 2), normed="all", alone=True, v_normed=True, rope_at=1, kept=CODES, sandwich=True, beside=33
    ),
    "sandwich-of-two": Sizes(experts=9, beside=29, sandwich=True, gated=True),
    "sandwich-of-two-alone": Sizes(experts=9, sandwich=True, gated=True),
    "sandwich-without-experts": Sizes(beside=29, sandwich=True, gated=True),
    "window": Sizes(window=9),
    "window-of-one": Sizes(window=1),
    "window-of-spans": Sizes(64, 8, 2, 16, window=150),
    "4-bit": Sizes(128, 4, 2, 32, bits=4),
    "8-bit": Sizes(192, 6, 2, 32, bits=8, bias=True, normed="head"),
    "3-bit-odd": Sizes(50, 5, 1, 14, bits=3),
    "2-bit-wide": Sizes(640, 4, 2, 64, bits=2),
    "half": Sizes(kept=torch.float16),
    "half-odd": Sizes(35, 6, 3, 14, 7, 7, kept=torch.float16),
    "half-five-of-one": Sizes(50, 5, 1, 66, 3, 1, kept=torch.float16),
    "half-wide": Sizes(260, 16, 2, 64, 128, 8, normed="head", kept=torch.float16),
    "half-window": Sizes(64, 8, 2, 16, window=150, kept=torch.float16),
    "half-4-bit": Sizes(128, 4, 2, 48, bits=4, kept=torch.float16),
    "codes": Sizes(kept=CODES),
    "codes-least": Sizes(1, 1, 1, 2, 1, 1, kept=CODES),
    "codes-odd": Sizes(35, 6, 3, 14, 7, 7, kept=CODES),
    "codes-five-of-one": Sizes(50, 5, 1, 66, 3, 1, kept=CODES),
    "codes-wide": Sizes(260, 16, 2, 64, 128, 8, normed="head", kept=CODES),
    "codes-window": Sizes(64, 8, 2, 16, window=150, kept=CODES),
    "codes-4-bit": Sizes(128, 4, 2, 48, bits=4, kept=CODES),
}
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.fixture(autouse=True)
def compiled() -> None:
    try:
        native.isa()
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))


def make_projection(rows: int, columns: int, bits: int, bias: bool) -> Projection:
    own = torch.randn(rows) if bias else None
    if bits == 32:
        return Projection(torch.randn(rows, columns) / columns**0.5, own)
    vector = VectorLayout(columns, bits, group_size(columns))
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    scale = (torch.rand(rows, vector.groups) + 0.5) / (1 << bits) / columns**0.5
    zero = torch.rand(rows, vector.groups) * (1 << bits)
    return Projection(LinearWeights(vector, pack_codes(codes, bits), scale.half(), zero.half()), own)


def make_layer(sizes: Sizes) -> DenseLayer:
    """Random weights."""
    torch.manual_seed(sizes.hidden)
    s, width = sizes, sizes.queries * sizes.dim
    over = {"": None, "head": (s.dim, s.dim), "all": (width, s.keys * s.dim)}[s.normed]
    q_norm, k_norm = (1 + 0.3 * torch.randn(count) for count in over) if over else (None, None)
    sinks = torch.randn(s.queries) * 3 if s.sinks else None
    heads = Heads(s.queries, s.keys, s.dim, s.dim**-0.5, s.window, s.clip, q_norm, k_norm, s.kept, sinks, gated=s.gates)
    heads = replace(heads, keys_alone=s.alone, v_normed=s.v_normed, rope_at=s.rope_at)
    return DenseLayer(
        input_layernorm=make_norm(s),
        post_attention_layernorm=make_norm(s),
        eps=1e-5,
        mixer=heads,
        first=make_projection(heads.sizes[0], s.hidden, s.bits, s.bias),
        out=make_projection(s.hidden, width, s.bits, s.bias),
        router=make_router(s) if s.experts else None,
        beside=make_beside(s) if s.beside else None,
        sandwich=make_sandwich(s) if s.sandwich else None,
    )


def make_norm(s: Sizes) -> Norm:
    weight = 1 + 0.3 * torch.randn(s.hidden)
    return Norm(weight, torch.randn(s.hidden), "layer") if s.centred else Norm(weight)


def make_sandwich(s: Sizes) -> Sandwich:
    mixed, before, beside, experts, both = (Norm(1 + 0.3 * torch.randn(s.hidden)) for _ in range(5))
    if s.gated:  # the norms that Gemma has and others do not
        return Sandwich(mixed, None, None, None, both, 0.7)
    return Sandwich(mixed, before, beside, experts, both, 0.7)


def make_router(s: Sizes) -> Router:
    scores, weight = torch.full((2, s.experts), NAN), torch.randn(s.experts, s.hidden)
    down = torch.randn(s.experts, s.hidden) if s.down else None
    bias, correction = (torch.randn(s.experts) * 0.3 if kind in s.biased else None for kind in "bc")
    factors = 0.5 + torch.rand(s.experts) if "f" in s.own else None
    norm = Norm(1 + 0.3 * torch.randn(s.hidden)) if "n" in s.own else None
    parts = {"bias": bias, "correction": correction, "down_bias": down, "factors": factors, "norm": norm}
    return Router(weight, s.top_k, s.shares, scores=scores, **parts, **dict(s.routing))


def make_beside(s: Sizes) -> Swiglu:
    both = make_projection(2 * s.beside, s.hidden, s.bits, bias=False)
    down = make_projection(s.hidden, s.beside, s.bits, bias=False)
    return Swiglu(both, down, torch.randn(1, s.hidden) if s.gated else None, "gelu" if s.sandwich else "silu")


def heads_of(layer: DenseLayer) -> Heads:
    """Its mixer."""
    assert isinstance(layer.mixer, Heads)
    return layer.mixer


def widened(layer: DenseLayer) -> DenseLayer:
    """The same in float64."""

    def wide(part: Any) -> Any:
        if isinstance(part, Projection):
            weight = part.weight if isinstance(part.weight, Tensor) else part.weight.dense(torch.float64)
            return Projection(weight.double(), wide(part.bias))
        if isinstance(part, Norm):
            return replace(part, weight=wide(part.weight), bias=wide(part.bias))
        return part.double() if isinstance(part, Tensor) else part

    names = {Heads: ("q_norm", "k_norm", "sinks"), Latent: ("norm", "made", "asked", "asked_norm")}
    mixer: Any = layer.mixer
    mixer = replace(mixer, **{name: wide(getattr(mixer, name)) for name in names.get(type(mixer), ())})
    router = layer.router
    if router is not None:
        own = "weight", "scores", "bias", "correction", "down_bias", "factors", "norm"
        parts = {name: wide(getattr(router, name)) for name in own}
        router = replace(router, precise=False, **parts)  # which would compute logits in float32
    beside = layer.beside
    beside = beside and Swiglu(wide(beside.both), wide(beside.down), wide(beside.scale), beside.function)
    parts = {
        name: wide(getattr(layer, name)) for name in ("input_layernorm", "post_attention_layernorm", "first", "out")
    }
    sandwich = layer.sandwich
    if sandwich is not None:
        norms = {name: wide(getattr(sandwich, name)) for name in ("mixed", "before", "beside", "experts", "both")}
        sandwich = replace(sandwich, **norms)
    return replace(layer, mixer=mixer, router=router, beside=beside, sandwich=sandwich, **parts)


def make_input(sizes: Sizes, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, added, rope, and a store, that are NaN wherever nobody may look."""
    torch.manual_seed(position)
    x, added = torch.randn(1, sizes.hidden), torch.randn(1, sizes.hidden)
    angles = torch.rand(sizes.dim // 2).mul(6).repeat(2)
    rope = torch.stack([angles.cos(), angles.sin()])
    rope[1, : sizes.dim // 2].neg_()
    rope = torch.cat([torch.full((sizes.rope_at,), NAN), rope.flatten()]) if sizes.rope_at else rope
    kv = torch.full((CAPACITY, 2 * sizes.keys, sizes.dim), NAN)
    first = 0 if sizes.window is None else max(0, position + 1 - sizes.window)
    kv[first:position] = torch.randn(position - first, *kv.shape[1:])
    return x, added, rope, stored(kv, sizes.kept)


def compare(
    layer: DenseLayer,
    sizes: Sizes,
    position: int,
    *,
    added: bool = True,
    made: tuple[NativeStep, DenseLayer] | None = None,
) -> Stepped:
    """One step, which must be its definition in float64; returns it.

    Args:
        made: the compiled step of the layer, and the layer in float64, where several are compared.
    """
    step, other = made or (NativeStep(layer), widened(layer))
    x, more, rope, kv = make_input(sizes, position)
    before, given = kv.clone(), more if added else None
    ours = step(x, given, rope, kv, position)
    wide, limit = before.clone(), LIMITS[sizes.kept]
    wide = wide.double() if sizes.kept == torch.float32 else wide
    turn = rope.flatten()[sizes.rope_at :].view(2, -1).double()
    truth = dense_step(other, x.double(), more.double() if added else None, turn, wide, position)
    if truth.parallel is not None:
        assert ours.parallel is not None and relative_rms(ours.parallel, truth.parallel) <= limit
    assert (ours.parallel is None) == (truth.parallel is None)
    assert relative_rms(ours.stream, truth.stream) <= limit and relative_rms(ours.hidden, truth.hidden) <= limit
    heads = layer.mixer.attending
    assert heads is not None
    assert relative_rms(heads.values(kv[position], torch.float64), heads.values(wide[position], torch.float64)) <= limit
    before[position] = kv[position]
    assert torch.equal(kv.nan_to_num(99), before.nan_to_num(99)), "more was written than this token's place"
    assert len(ours.routed) == len(truth.routed)
    if truth.routed:
        assert torch.equal(ours.routed[0], truth.routed[0]) and ours.routed[1].dtype == torch.float32
        assert relative_rms(ours.routed[1], truth.routed[1]) <= limit
    if layer.router is not None and layer.router.scores is not None:
        assert other.router is not None and other.router.scores is not None
        assert relative_rms(layer.router.scores[:1], other.router.scores[:1]) <= limit
        assert layer.router.scores[1:].isnan().all(), "more was written than this token's scores"
    return ours


@pytest.mark.parametrize("name", ["least", "five-of-one", "gemma-4-bit", "half-window", "codes-wide", "sinks"])
@pytest.mark.usefixtures("isa")
def test_queries_alone_see_what_another_layer_has_stored(name: str) -> None:
    """Of the tokens before them; nothing is stored."""
    s = SIZES[name]
    layer, width = make_layer(s), s.queries * s.dim
    mixer = replace(heads_of(layer), queries_alone=True, k_norm=None, v_normed=False)
    layer = replace(layer, mixer=mixer, first=make_projection(width, s.hidden, s.bits, s.bias))
    step, other = NativeStep(layer), widened(layer)
    for position in (1, 63, 64, 65, 200):
        x, added, rope, kv = make_input(s, position)
        before, wide = kv.clone(), kv.double() if s.kept == torch.float32 else kv.clone()
        ours = step(x, added, rope, kv, position)
        turn = rope.flatten()[s.rope_at :].view(2, -1).double()
        truth = dense_step(other, x.double(), added.double(), turn, wide, position)
        assert relative_rms(ours.stream, truth.stream) <= LIMITS[s.kept]
        assert torch.equal(kv.nan_to_num(99), before.nan_to_num(99))
    x, added, rope, kv = make_input(s, 0)
    with pytest.raises(ValueError, match="index"):
        step(x, added, rope, kv, 0)
    for more in ({"keys_alone": True}, {"v_normed": True}):
        with pytest.raises(ValueError, match="sizes that"):
            NativeStep(replace(layer, mixer=replace(mixer, **more)))


@every_size
@pytest.mark.usefixtures("isa")
def test_it_is_the_definition(sizes: Sizes) -> None:
    layer = make_layer(sizes)
    made = NativeStep(layer), widened(layer)
    for position in (0, 1, 63, 64, 200, CAPACITY - 1):
        compare(layer, sizes, position, made=made)
    compare(layer, sizes, 5, added=False, made=made)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("stored_as", [torch.float16, CODES])
@pytest.mark.parametrize("dim", [2, 6, 16, 24, 46])
def test_what_is_stored_is_the_nearest(dim: int, stored_as: torch.dtype) -> None:
    spread = torch.cat([torch.logspace(-9, 5.5, 400), torch.tensor([65519.0, 65520.0, 2**-25, 2**-25 * 1.0001])])
    spread = torch.cat([spread, -spread, 2048 + torch.arange(0, 4, 0.25), torch.tensor([0.0, NAN, INF, -INF])])
    spread = spread[: len(spread) // dim * dim].view(-1, dim)
    weight = Projection(torch.zeros(3 * dim, 4), torch.zeros(3 * dim))
    heads = Heads(1, 1, dim, 1.0, cache_dtype=stored_as)
    norm, out = Norm(torch.ones(4)), Projection(torch.zeros(4, dim))
    layer = DenseLayer(norm, norm, 1e-5, heads, weight, out, None)
    for values in spread:
        weight.bias[2 * dim :] = values  # pyright: ignore[reportOptionalSubscript]
        kv = stored(torch.full((1, 2, dim), 7.0), stored_as)
        NativeStep(layer)(torch.ones(1, 4), None, torch.stack([torch.ones(dim), torch.zeros(dim)]), kv, 0)
        entry = stored(torch.stack([torch.zeros(dim), values])[None], stored_as)
        finite = values.isfinite().all() or stored_as == torch.float16  # otherwise all of the row is no number
        found, wanted = (each if finite else heads.values(each, torch.float32).nan_to_num(9) for each in (kv, entry))
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), values


def test_threads_change_no_bit(two_threads: None) -> None:
    sizes = Sizes(512, 16, 8, 32, 8, 2)  # large enough to be shared
    layer = make_layer(sizes)
    both = compare(layer, sizes, CAPACITY - 1)
    torch.set_num_threads(1)
    alone = compare(layer, sizes, CAPACITY - 1)
    assert torch.equal(both.stream, alone.stream) and torch.equal(both.hidden, alone.hidden)


def test_scores_of_any_size_are_weighed() -> None:
    sizes = Sizes()
    layer = make_layer(sizes)
    for scale in (1e-3, 30.0, 1e3):  # all alike; one outweighs the others by more than float32 holds
        compare(replace(layer, mixer=replace(heads_of(layer), scale=scale)), sizes, 150)


@pytest.mark.parametrize("where", ["x", "added", "kept key", "kept value"])
def test_what_is_not_a_number_reaches_the_result(where: str) -> None:
    sizes = Sizes()
    x, added, rope, kv = make_input(sizes, 100)
    target = {"x": x[0], "added": added[0], "kept key": kv[70, 0], "kept value": kv[70, -1]}[where]
    target[3] = NAN
    stepped = NativeStep(make_layer(sizes))(x, added, rope, kv, 100)
    assert bool(stepped.stream.isnan().any()) and bool(stepped.hidden.isnan().all())
    index, weights = stepped.routed
    assert bool(weights.isnan().all()) and index.unique().numel() == sizes.top_k
    assert all(0 <= expert < sizes.experts for expert in index[0].tolist())


def test_of_equal_experts_the_first_are_chosen() -> None:
    layer = make_layer(SIZES["small"])
    router = Router(torch.ones(5, 48), 3, norm_topk_prob=True)
    x, added, rope, kv = make_input(SIZES["small"], 4)
    index, weights = NativeStep(replace(layer, router=router))(x, added, rope, kv, 4).routed
    assert index.tolist() == [[0, 1, 2]] and weights.allclose(torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize(("x_bits", "limit"), [(22, 1e-5), (15, 1e-3), (8, 3e-2)])
def test_x_is_read_as_finely_as_asked(x_bits: int, limit: float) -> None:
    sizes = SIZES["4-bit"]
    layer = make_layer(sizes)
    x, added, rope, kv = make_input(sizes, 20)
    ours = NativeStep(layer)(x, added, rope, kv.clone(), 20, x_bits)
    truth = dense_step(layer, x, added, rope, kv, 20)
    assert relative_rms(ours.hidden, truth.hidden) <= limit


LAYER = make_layer(SIZES["small"])
GEMMA = make_layer(SIZES["gemma"])
FOUR_BITS = make_layer(SIZES["4-bit"])


def changed_heads(**changes: Any) -> DenseLayer:
    return replace(LAYER, mixer=replace(heads_of(LAYER), **changes))


def a_router(*shape: int, top_k: int) -> Router:
    return Router(torch.zeros(shape), top_k, norm_topk_prob=True)


def changed_sandwich(**changes: Any) -> DenseLayer:
    assert GEMMA.sandwich is not None
    return replace(GEMMA, sandwich=replace(GEMMA.sandwich, **changes))


def changed_router(**changes: Any) -> DenseLayer:
    assert LAYER.router is not None
    return replace(LAYER, router=replace(LAYER.router, **changes))


MIXING = replace(a_router(5, 48, top_k=2), kind="sparsemixer")


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(replace(LAYER, input_layernorm=Norm(torch.ones(47))), id="narrow-norm"),
        pytest.param(replace(LAYER, post_attention_layernorm=Norm(torch.ones(48).bfloat16())), id="norm-of-16-bit"),
        pytest.param(replace(LAYER, first=Projection(torch.zeros(95, 48))), id="fewer-rows"),
        pytest.param(replace(LAYER, first=Projection(torch.zeros(96, 47))), id="narrow-projection"),
        pytest.param(replace(LAYER, first=Projection(torch.zeros(48, 96).T)), id="not-in-one-piece"),
        pytest.param(replace(LAYER, first=Projection(torch.zeros(96, 48), torch.zeros(95))), id="short-bias"),
        pytest.param(replace(LAYER, out=Projection(torch.zeros(48, 47))), id="narrow-output"),
        pytest.param(changed_heads(num_heads=5), id="heads-that-share-unevenly"),
        pytest.param(changed_heads(head_dim=13), id="odd-heads"),
        pytest.param(changed_heads(num_kv_heads=0), id="no-key-heads"),
        pytest.param(changed_heads(window=-1), id="negative-window"),
        pytest.param(changed_heads(window=0), id="no-window"),
        pytest.param(changed_heads(clip=NAN), id="clipped-to-nan"),
        pytest.param(changed_heads(clip=-1.0), id="clipped-below-zero"),
        pytest.param(changed_heads(window=1 << 64), id="window-beyond-64-bit"),
        pytest.param(changed_heads(num_heads=1 << 62, num_kv_heads=1 << 62), id="more-heads-than-numbers"),
        pytest.param(changed_heads(q_norm=torch.ones(12)), id="one-norm"),
        pytest.param(changed_heads(q_norm=torch.ones(12), k_norm=torch.ones(24)), id="norms-of-two-kinds"),
        pytest.param(replace(LAYER, router=a_router(5, 47, top_k=2)), id="narrow-router"),
        pytest.param(replace(LAYER, router=a_router(5, 48, top_k=6)), id="more-than-all-experts"),
        pytest.param(replace(LAYER, router=a_router(5, 48, top_k=0)), id="no-expert"),
        pytest.param(
            replace(LAYER, router=replace(a_router(5, 48, top_k=2), scores=torch.ones(2, 4))), id="few-scores"
        ),
        pytest.param(replace(LAYER, input_layernorm=Norm(torch.ones(48), torch.ones(47))), id="short-bias-of-a-norm"),
        pytest.param(replace(LAYER, router=replace(MIXING, correction=torch.ones(5))), id="sparsemixer-corrected"),
        pytest.param(replace(LAYER, router=replace(MIXING, jitter=-0.1)), id="sparsemixer-without-room"),
        pytest.param(changed_heads(cache_dtype=torch.bfloat16), id="store-of-bfloat16"),
        pytest.param(changed_heads(keys_alone=True), id="more-rows-than-keys-alone"),
        pytest.param(changed_heads(rope_at=-1), id="rope-before-the-first-number"),
        pytest.param(
            replace(changed_heads(keys_alone=True, gated=True), first=Projection(torch.zeros(120, 48))), id="keys-gated"
        ),
        pytest.param(changed_router(factors=torch.ones(4)), id="few-factors"),
        pytest.param(changed_router(factors=torch.ones(5).double()), id="factors-of-64-bit"),
        pytest.param(changed_router(norm=Norm(torch.ones(47))), id="narrow-norm-of-a-router"),
        pytest.param(changed_router(norm=Norm(torch.ones(48), torch.ones(48))), id="biased-norm-of-a-router"),
        pytest.param(replace(GEMMA, beside=None, router=None), id="sandwich-of-nothing"),
        pytest.param(changed_sandwich(both=Norm(torch.ones(127))), id="narrow-norm-of-a-sandwich"),
        pytest.param(changed_sandwich(mixed=Norm(torch.ones(128), None, "layer")), id="sandwich-that-is-centred"),
    ],
)
def test_weights_that_do_not_fit_are_refused(layer: DenseLayer) -> None:
    with pytest.raises(ValueError):
        NativeStep(layer)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"x": torch.ones(1, 47)}, id="narrow-x"),
        pytest.param({"x": torch.ones(1, 48).double()}, id="x-of-64-bit"),
        pytest.param({"x": torch.ones(1, 96)[:, ::2]}, id="x-in-pieces"),
        pytest.param({"added": torch.ones(2, 48)}, id="added-to-two-tokens"),
        pytest.param({"rope": torch.ones(2, 11)}, id="narrow-rope"),
        pytest.param({"kv": torch.zeros(CAPACITY, 12, 4).transpose(1, 2)}, id="store-in-pieces"),
        pytest.param({"kv": torch.zeros(CAPACITY, 4, 12).bfloat16()}, id="store-of-bfloat16"),
        pytest.param({"kv": torch.zeros(CAPACITY, 4, 12).half()}, id="store-of-16-bit"),
        pytest.param({"kv": torch.zeros(0, 4, 12), "position": 0}, id="no-store"),
        pytest.param({"position": -1}, id="position-negative"),
        pytest.param({"position": CAPACITY}, id="position-too-large"),
        pytest.param({"position": 1 << 40}, id="position-far-too-large"),
        pytest.param({"position": 1 << 64}, id="position-beyond-64-bit"),
        pytest.param({"x": torch.ones(1, 48, device="meta")}, id="x-elsewhere"),
        pytest.param({"rope": torch.ones(2, 12, device="meta")}, id="rope-elsewhere"),
        pytest.param({"rope": torch.ones(25)}, id="flat-rope"),
        pytest.param({"rope": torch.ones(24)}, id="flat-rope-of-as-many"),
        pytest.param({"rope": torch.ones(1, 24)}, id="rope-in-one-row"),
        pytest.param({"rope": torch.ones(12, 2)}, id="rope-turned"),
        pytest.param({"kv": torch.zeros(CAPACITY, 4, 12, device="meta")}, id="store-elsewhere"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_nothing_is_written(changes: dict[str, Any]) -> None:
    x, added, rope, kv = make_input(SIZES["small"], 20)
    arguments: dict[str, Any] = {"x": x, "added": added, "rope": rope, "kv": kv, "position": 20, **changes}
    before = arguments["kv"].clone()
    with pytest.raises(ValueError):
        NativeStep(LAYER)(**arguments)
    assert before.is_meta or torch.equal(arguments["kv"].nan_to_num(99), before.nan_to_num(99))


def test_digits_that_do_not_exist_are_refused_and_nothing_is_written() -> None:
    x, added, rope, kv = make_input(SIZES["4-bit"], 20)
    for x_bits in (0, 32):
        with pytest.raises(ValueError):
            NativeStep(FOUR_BITS)(x, added, rope, kv, 20, x_bits)
    assert bool(kv[20].isnan().all())
