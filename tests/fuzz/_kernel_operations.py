"""A call of each operation on experts, linear layers and rows: operands that fit, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Active, Calls, Limits
from torch import Tensor

from . import _operands as made
from ._operands import Case


def _x(rng: Random, tokens: int, hidden: int) -> tuple[Tensor, int, float | None]:
    """x, its precision, and how far results may be apart."""
    dtype, x_bits = rng.choice((torch.float32, torch.float32, *made.FLOATS)), rng.choice((22, 22, 22, 15, 8))
    x = made.uniform(rng, tokens, hidden).to(dtype)
    return x, x_bits, 1e-4 if dtype == torch.float32 and x_bits == 22 else None


def _which(given: dict[str, Any]) -> Calls:
    return Calls(given["tokens"], given["experts"], given["weights"])


def _called(calls: Calls) -> dict[str, Any]:
    return {"tokens": calls.tokens, "experts": calls.experts, "weights": calls.weights}


def _sizes(rng: Random) -> tuple[int, int, int, int]:
    """Tokens, experts, neurons, hidden."""
    return rng.randrange(4), rng.randrange(1, 4), rng.choice((0, 1, 5, 9, 19, 130)), rng.choice(made.HIDDEN)


def select(rng: Random) -> Case:
    tokens, among, experts = rng.randrange(4), rng.randrange(4), rng.randrange(1, 5)
    parts = rng.choice((1, 2))
    drop = rng.choice((0.0, 0.5, 2.0))
    given = {
        "index": torch.tensor([rng.randrange(experts) for _ in range(tokens * among)]).long().view(tokens, among),
        "weights": made.uniform(rng, tokens, among).abs().to(rng.choice(made.FLOATS)),
        "signal": made.uniform(rng, experts * parts).abs(),
        "product": rng.choice((None, made.uniform(rng, experts * parts).abs())),
        "late": rng.choice((None, made.uniform(rng, experts * parts).abs())),
    }
    rule = Rule(drop=drop, major=drop + parts - 1.5, weighed=rng.random() < 0.5)

    def run(m: Any, g: dict[str, Any]) -> Any:
        work = m.select(g["index"], g["weights"], Limits(g["signal"], g["product"], g["late"]), rule)
        calls = work.calls
        found = (calls.tokens, calls.experts, calls.weights, work.thresholds, work.products, work.late)
        return tuple(tensor for tensor in found if tensor is not None)

    return Case(given, run, tolerance=1e-5)


def signal_gemv(rng: Random) -> Case:
    tokens, experts, neurons, hidden = _sizes(rng)
    x, x_bits, tolerance = _x(rng, tokens, hidden)
    calls = made.calls(rng, tokens, experts)
    given = {"x": x, "up": made.up_weights(rng, experts, neurons, hidden), **_called(calls), "x_bits": x_bits}
    given["thresholds"] = made.limits(rng, calls.experts.numel())
    return Case(
        given,
        lambda m, g: m.signal_gemv(g["x"], g["up"], _which(g), g["thresholds"], x_bits=g["x_bits"]),
        tolerance=tolerance,
    )


def sparse_swiglu(rng: Random) -> Case:
    tokens, experts, neurons, hidden = _sizes(rng)
    x, x_bits, tolerance = _x(rng, tokens, hidden)
    calls, rows = made.calls(rng, tokens, experts), made.expert_rows(rng, experts, neurons, hidden)
    found = made.active(rng, calls, neurons, x.dtype)
    given = {
        "x": x,
        "rows": rows,
        **_called(calls),
        "offsets": found.offsets,
        "neurons": found.neurons,
        "values": found.values,
        "limits": made.limits(rng, calls.experts.numel()),
        "x_bits": x_bits,
    }

    def run(m: Any, g: dict[str, Any]) -> Any:
        listed = Active(g["offsets"], g["neurons"], g["values"])
        return m.sparse_swiglu(g["x"], g["rows"], _which(g), listed, g["limits"], x_bits=g["x_bits"])

    return Case(given, run, tolerance=tolerance)


def moe_step(rng: Random) -> Case:
    tokens, experts, neurons, hidden = _sizes(rng)
    x, x_bits, tolerance = _x(rng, tokens, hidden)
    calls, rows = made.calls(rng, tokens, experts), made.expert_rows(rng, experts, neurons, hidden)
    given = {
        "x": x,
        "up": made.up_weights(rng, experts, neurons, hidden),
        "rows": rows,
        **_called(calls),
        "thresholds": made.limits(rng, calls.experts.numel()),
        "x_bits": x_bits,
    }

    def run(m: Any, g: dict[str, Any]) -> Any:
        return m.moe_step(g["x"], g["up"], g["rows"], _which(g), g["thresholds"], x_bits=g["x_bits"])

    return Case(given, run, tolerance=tolerance)


def expert_swiglu(rng: Random) -> Case:
    _, experts, neurons, hidden = _sizes(rng)
    tokens = rng.choice((0, 1, 3, 9, 20))
    x, x_bits, tolerance = _x(rng, tokens, hidden)
    given = {
        "x": x,
        "up": made.up_weights(rng, experts, neurons, hidden),
        "rows": made.expert_rows(rng, experts, neurons, hidden),
        "expert": rng.randrange(experts),
        "thresholds": made.limits(rng, tokens),
        "limits": made.limits(rng, tokens),
        "x_bits": x_bits,
    }

    def run(m: Any, g: dict[str, Any]) -> Any:
        where = g["up"], g["rows"], g["expert"], g["thresholds"], g["limits"]
        return m.expert_swiglu(g["x"], *where, x_bits=g["x_bits"])

    return Case(given, run, tolerance=tolerance)


def linear(rng: Random) -> Case:
    hidden = rng.choice(made.HIDDEN)
    x, x_bits, tolerance = _x(rng, rng.choice((0, 1, 2, 9)), hidden)
    given = {"x": x, "linear": made.linear_weights(rng, rng.choice((0, 1, 7, 70)), hidden), "x_bits": x_bits}
    return Case(given, lambda m, g: m.linear(g["x"], g["linear"], x_bits=g["x_bits"]), tolerance=tolerance)


def gather_rows(rng: Random) -> Case:
    experts, neurons = rng.randrange(1, 4), rng.choice((0, 1, 9))
    rows, count = made.expert_rows(rng, experts, neurons, rng.choice((1, 40, 64))), rng.randrange(5) if neurons else 0
    out = torch.full((count + 2, rows.layout.nbytes), 0xA5, dtype=torch.uint8)
    if rng.random() < 0.2 and count < neurons:
        out = rows.data[0]  # onto itself
    given = {
        "rows": rows,
        "expert": rng.randrange(experts),
        "neurons": torch.tensor([rng.randrange(neurons) for _ in range(count)], dtype=torch.int64),
        "out": out[1:-1] if len(out) == count + 2 else out[:count],
        "around": out,
    }

    def run(m: Any, g: dict[str, Any]) -> Any:
        m.gather_rows(g["rows"], g["expert"], g["neurons"], g["out"])
        return g["out"].clone()

    return Case(given, run, ("out",))


def pool_scatter(rng: Random) -> Case:
    capacity, nbytes = rng.choice((0, 1, 7, 20)), rng.choice((1, 64, 100, 192))
    slots = rng.sample(range(capacity), rng.randrange(capacity + 1))
    around = torch.full((capacity + 2, nbytes), 0xA5, dtype=torch.uint8)
    records = around[: len(slots)] if rng.random() < 0.1 else made.codes(rng, len(slots), nbytes)
    given = {
        "pool": around[1:-1],
        "slots": torch.tensor(slots, dtype=torch.int64),
        "records": records,
        "around": around,
    }

    def run(m: Any, g: dict[str, Any]) -> Any:
        m.pool_scatter(g["pool"], g["slots"], g["records"])
        return g["pool"].clone()

    return Case(given, run, ("pool",))


KINDS: tuple[Callable[[Random], Case], ...] = (
    select,
    signal_gemv,
    sparse_swiglu,
    moe_step,
    expert_swiglu,
    linear,
    gather_rows,
    pool_scatter,
)
