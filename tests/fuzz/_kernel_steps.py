"""A call of each operation that goes through whole layers: the dense step, the token pass, logits, drawing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from floe_chat.kernels import sampling
from floe_chat.kernels.cpu import native, native_ends
from floe_chat.kernels.cpu.binding import Stop
from floe_chat.kernels.cpu.native_ends import NativeEnds
from floe_chat.kernels.cpu.native_step import NativeStep, Place
from floe_chat.kernels.cpu.native_token import Draw, NativeToken
from floe_chat.kernels.entries import CODES, stored, values
from floe_chat.kernels.mixers.grouped import Heads
from floe_chat.kernels.mixers.latent import Latent
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.sampling import Filters
from floe_chat.kernels.step import DenseLayer, ExpertLayer, ModelEnds, Router, dense_step
from floe_chat.kernels.types import Limits
from floe_chat.kernels.weights import LinearWeights, Norm, Planes, Projection
from torch import Tensor

from . import _operands as made
from ._operands import Case

CAPACITY = 12


def _weight(rng: Random, rows: int, columns: int) -> Tensor | LinearWeights:
    if rng.random() < 0.5:
        return made.linear_weights(rng, rows, columns)
    return made.uniform(rng, rows, columns)


def _dense(rng: Random, hidden: int, keys: int, dim: int) -> dict[str, Any]:
    """The operands of a `DenseLayer`."""
    queries, experts = keys * rng.choice((1, 2, 3)), rng.randrange(1, 5)
    given: dict[str, Any] = {
        "before": made.uniform(rng, hidden),
        "after": made.uniform(rng, hidden),
        "eps": 1e-5,
        "queries": queries,
        "keys": keys,
        "dim": dim,
        "scale": 0.3,
        "qkv": _weight(rng, (queries + 2 * keys) * dim, hidden),
        "out": _weight(rng, hidden, queries * dim),
        "router": made.uniform(rng, experts, hidden),
        "top_k": rng.randrange(1, experts + 1),
        "shares": True,
        "kind": rng.choice(("softmax", "sigmoid", "sparsemixer")),
        "norm_kind": rng.choice(("rms", "layer")),
    }
    if rng.random() < 0.3:
        given["norm_bias"] = made.uniform(rng, hidden)
    if rng.random() < 0.3:
        given["window"] = rng.randrange(1, 9)
    if rng.random() < 0.3:
        given["clip"] = 0.5
    if rng.random() < 0.3:
        given["bias"] = made.uniform(rng, (queries + 2 * keys) * dim)
    if rng.random() < 0.3:
        each = rng.random() < 0.5
        given["q_norm"], given["k_norm"] = (
            made.uniform(rng, dim if each else heads * dim) for heads in (queries, keys)
        )
    return given


def _layer(g: dict[str, Any], kept: torch.dtype) -> DenseLayer:
    heads = Heads(
        *(g["queries"], g["keys"], g["dim"], g["scale"], g.get("window"), g.get("clip")),
        *(g.get("q_norm"), g.get("k_norm"), kept),
    )
    router = Router(g["router"], g["top_k"], g["shares"], kind=g["kind"], jitter=0.2)
    qkv, out = Projection(g["qkv"], g.get("bias")), Projection(g["out"])
    before, after = (Norm(g[name], g.get("norm_bias"), g["norm_kind"]) for name in ("before", "after"))
    return DenseLayer(before, after, g["eps"], heads, qkv, out, router)


def _sizes(rng: Random) -> tuple[int, int, int]:
    """Hidden size, heads of keys, width of a head."""
    return rng.choice((8, 40, 64)), rng.randrange(1, 3), rng.choice((2, 6, 16))


def _state(rng: Random, hidden: int, keys: int, dim: int, kept: torch.dtype) -> dict[str, Any]:
    return {
        "x": made.uniform(rng, 1, hidden),
        "rope": made.uniform(rng, 2, dim),
        "kv": stored(made.uniform(rng, CAPACITY, 2 * keys, dim), kept),
        "position": rng.randrange(CAPACITY),
    }


def step(rng: Random) -> Case:
    sizes, kept = _sizes(rng), rng.choice((torch.float32, torch.float16, CODES))
    given = {**_dense(rng, *sizes), **_state(rng, *sizes, kept)}
    if rng.random() < 0.5:
        given["added"] = made.uniform(rng, 1, sizes[0])

    def kept_of(g: dict[str, Any]) -> Tensor:  # what is no number has more than one form as bytes
        return values(g["kv"][g["position"]], 2 * sizes[1], sizes[2], torch.float32).clone()  # the other writes there

    def run(_m: Any, g: dict[str, Any]) -> Any:
        made_step = NativeStep(_layer(g, kept))
        found = made_step(g["x"], g.get("added"), g["rope"], g["kv"], g["position"])
        return found.stream, found.hidden, found.routed[1], kept_of(g)

    def plain(g: dict[str, Any]) -> Any:
        found = dense_step(_layer(g, kept), g["x"], g.get("added"), g["rope"], g["kv"], g["position"])
        return found.stream, found.hidden, found.routed[1], kept_of(g)

    tolerance = 1e-3 if kept == torch.float32 else 1e-2
    return Case(given, run, ("kv",), tolerance, plain, checked=False)


def latent_step(rng: Random) -> Case:
    """A step whose keys and values are made of one vector per token."""
    kept = rng.choice((torch.float32, torch.float16))
    hidden, rank, turned = rng.choice((8, 40, 64)), rng.choice((1, 20, 64)), rng.choice((2, 6))
    heads, still, value = rng.randrange(1, 4), rng.randrange(1, 9), rng.randrange(1, 9)
    asked, experts, dim = rng.choice((0, 0, 17, 64)), rng.randrange(1, 5), rank + turned
    queries = heads * (still + turned)
    given: dict[str, Any] = {
        "before": made.uniform(rng, hidden),
        "after": made.uniform(rng, hidden),
        "norm": made.uniform(rng, rank),
        "made": _weight(rng, heads * (still + value), rank),
        "qkv": _weight(rng, (asked or queries) + dim, hidden),
        "out": _weight(rng, hidden, heads * value),
        "router": made.uniform(rng, experts, hidden),
        "x": made.uniform(rng, 1, hidden),
        "rope": made.uniform(rng, 2, turned),
        "kv": made.uniform(rng, CAPACITY, 1, dim).to(kept),
        "position": rng.randrange(CAPACITY),
    }
    if asked:
        given |= {"asked": _weight(rng, queries, asked), "asked_norm": made.uniform(rng, asked)}

    def layer(g: dict[str, Any]) -> DenseLayer:
        of_queries = Projection(g["asked"]) if "asked" in g else None
        of_heads = Heads(heads, 1, dim, 0.4, cache_dtype=kept, inside=rank)
        own = Latent(
            of_heads, still, turned, value, g["norm"], 1e-4, Projection(g["made"]), of_queries, g.get("asked_norm")
        )
        qkv, out, router = Projection(g["qkv"]), Projection(g["out"]), Router(g["router"], 1, norm_topk_prob=True)
        return DenseLayer(Norm(g["before"]), Norm(g["after"]), 1e-5, own, qkv, out, router)

    def found(step: Callable[..., Any], g: dict[str, Any]) -> Any:
        done = step(g["x"], None, g["rope"], g["kv"], g["position"])
        return done.stream, done.hidden, g["kv"][g["position"]].clone()

    return Case(
        given,
        lambda _m, g: found(NativeStep(layer(g)), g),
        ("kv",),
        1e-3 if kept == torch.float32 else 1e-2,
        lambda g: found(partial(dense_step, layer(g)), g),
        checked=False,
    )


def _ends(rng: Random, hidden: int, vocabulary: int) -> dict[str, Any]:
    head = _weight(rng, vocabulary, hidden)
    if isinstance(head, LinearWeights) and head.vector.bits == 8:
        head = Planes.of(head) or head
    given: dict[str, Any] = {
        "embedding": made.uniform(rng, vocabulary, hidden),
        "norm": made.uniform(rng, hidden),
        "norm_kind": rng.choice(("rms", "layer")),
        "norm_eps": 1e-5,
        "head": head,
    }
    if rng.random() < 0.3:
        given["head_bias"] = made.uniform(rng, vocabulary)
    return given


def _ends_of(g: dict[str, Any]) -> ModelEnds:
    return ModelEnds(
        g["embedding"],
        Norm(g["norm"], kind=g["norm_kind"]),
        g["norm_eps"],
        Projection(g["head"], g.get("head_bias")),
        0.7,
    )


def logits(rng: Random) -> Case:
    hidden = rng.choice((8, 40, 64))
    given = {**_ends(rng, hidden, rng.choice((1, 5, 70))), "x": made.uniform(rng, 1, hidden)}
    return Case(
        given,
        lambda _m, g: NativeEnds(_ends_of(g)).logits(g["x"]),
        (),
        1e-3,
        lambda g: _ends_of(g).logits(g["x"]),
        checked=False,
    )


def token(rng: Random) -> Case:
    """All layers, by themselves or with tokens drawn behind them. Beside the layers one by one."""
    sizes, layers, parts = _sizes(rng), rng.randrange(1, 3), rng.randrange(1, 3)
    first = _dense(rng, *sizes)
    first["top_k"] = 1  # each other layer has another number of experts
    stack = [NativeStep(_layer(first, torch.float32))]
    experts = first["router"].shape[0]
    given = _state(rng, *sizes, torch.float32)
    given |= {"up": made.up_weights(rng, parts * experts, 5, sizes[0]), "bits": rng.choice((22, 15, 8))}
    given |= {"rows": made.expert_rows(rng, parts * experts, 5, sizes[0]), "first": rng.randrange(5)}
    given |= {"thresholds": torch.zeros(parts * experts)}
    rule = Rule(drop=0.1, major=0.2 if parts == 2 else 0.0, weighed=rng.random() < 0.5)
    if rng.random() < 0.5:
        given["products"] = torch.zeros(parts * experts)
    several = rng.random() < 0.5
    if several:
        given |= _ends(rng, sizes[0], 5)
        given |= {"rope": made.uniform(rng, 3, 2, sizes[2]), "uniform": 0.5, "seconds": 1e9, "stop_id": 99}
        given |= {"temperature": rng.choice((0.0, 0.7)), "seen": torch.zeros(5, dtype=torch.uint8)}

    def run(_m: Any, g: dict[str, Any]) -> Any:
        kept = ExpertLayer(g["up"], g["rows"], Limits(g["thresholds"], g.get("products")), rule)
        whole = NativeToken(stack * layers, [kept] * layers)
        place, bits, stop = Place(g["rope"], [g["kv"]] * layers, g["position"]), (22, g["bits"]), Stop()
        if not several:
            found = whole(g["x"], [place], bits, stop)
            assert found is not None
            assert int(found.chosen.min()) >= 0 and int(found.chosen.max()) < experts
            return found.stream.shape
        how = Draw(Filters(g["temperature"]), [g["uniform"]] * 3, g["seen"], [g["stop_id"]])
        ends = NativeEnds(_ends_of(g))
        drawn = whole.decode(ends, g["first"], place, bits, stop, how, g["seconds"])
        assert drawn is not None and 1 <= len(drawn.tokens) <= 3
        assert all(0 <= one < ends.vocabulary for one in drawn.tokens)
        return None

    return Case(given, run, (), plain=lambda g: run(None, g), checked=False)


def draw(rng: Random) -> Case:
    count = rng.choice((1, 2, 7, 300))
    given: dict[str, Any] = {
        "logits": made.uniform(rng, count, low=-9, high=9),
        "temperature": rng.choice((0.0, 0.5, 1.3)),
        "top_k": rng.choice((0, 0, 1, 5, 400)),
        "top_p": rng.choice((1.0, 0.7, 0.1)),
        "min_p": rng.choice((0.0, 0.05, 1.0)),
        "penalty": rng.choice((1.0, 1.3, 0.7)),
        "uniform": rng.random(),
    }
    if rng.random() < 0.5:
        given["seen"] = torch.randint(2, (count,), generator=made.generator(rng), dtype=torch.uint8)
        # A step back, so that either may draw it: a penalty of 1 leaves every number as it is.
        given["penalty"] = rng.choice((1.0, 1.3))

    def filters(g: dict[str, Any]) -> Filters:
        return Filters(*(g[name] for name in ("temperature", "top_k", "top_p", "min_p", "penalty")))

    def plain(g: dict[str, Any]) -> Any:
        if not native_takes(g["logits"]) or ("seen" in g and not g["seen"].is_contiguous()):
            raise ValueError("the compiled one takes contiguous float32 alone")
        return sampling.draw(g["logits"], filters(g), g["uniform"], g.get("seen"))

    def native_takes(given: Tensor) -> bool:
        return given.dtype == torch.float32 and given.is_contiguous() and given.is_cpu

    return Case(
        given, lambda _m, g: native_ends.draw(g["logits"], filters(g), g["uniform"], g.get("seen")), plain=plain
    )


def read_rows(rng: Random) -> Case:
    count = rng.choice((0, 1, 9))
    given = {
        "rows": made.codes(rng, count, rng.choice((1, 64, 200))),
        "index": torch.tensor([rng.randrange(count) for _ in range(4)] if count else [], dtype=torch.int64),
    }

    def run(_m: Any, g: dict[str, Any]) -> Any:
        return native.read_rows(g["rows"], g["index"])

    return Case(given, run, plain=lambda g: run(None, g), checked=False)


KINDS: tuple[Callable[[Random], Case], ...] = (step, latent_step, logits, token, draw, read_rows)
