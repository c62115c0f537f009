"""Every operation on the card against its definition (`reference.py`) on the same card, at the sizes of real models.

Inputs are drawn afresh in each run, and the seed is told. Results are compared by relative RMS error, x in float32, so
that only the order of sums differs; copies have to be equal.
"""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from floe_chat.engine.bench.kernels.gpu_expert import Expert, make_expert
from floe_chat.engine.machine.random_weights import Shapes, make_linear
from floe_chat.kernels import reference
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Active, Calls, Limits
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from torch import Tensor

from .stages import Context

TOLERANCE = 1e-4  # of sums of 14,336 float32 products in another order
_SPARSITY = 0.6
_WIDTHS = ((3, 4), (2, 4), (4, 8), (2, 2), (3, 3), (16, 16))


@dataclass(frozen=True, slots=True)
class _Case:
    """A layer on the card, some tokens and their calls."""

    x: Tensor
    made: Expert
    calls: Calls
    limits: Tensor
    products: Tensor


def run(context: Context) -> None:
    """Compare everything; a row for each operation, shape and width."""
    device = "cuda" if context.real else "cpu"
    if not context.real:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    kernels: Any = importlib.import_module("floe_chat.kernels.triton")
    seed = random.SystemRandom().randrange(1 << 30)
    torch.manual_seed(seed)
    context.notes.append(f"Seed {seed}; error is the relative RMS.")
    shapes = [("mixtral", Shapes(4096, 14336, experts=8)), ("qwen3-30b-a3b", Shapes(2048, 768, experts=32))]
    if not context.real:
        shapes = [("tiny", Shapes(128, 19, group=32, experts=3))]
    for name, shape in shapes:
        for up, rows in _WIDTHS if context.real else _WIDTHS[1:2]:
            if context.left() < 15:
                context.unfinished = "no time was left for all widths"
                return
            for dtype in (torch.float16, torch.bfloat16)[: 2 if up == 3 else 1]:
                made = make_expert(shape, up, rows, dtype, device)
                for tokens in (1, 5):
                    case = _case(made, tokens, shape.experts)
                    widths = f"{up}/{rows} bit {str(dtype).removeprefix('torch.')}, {tokens} token{'s' * (tokens > 1)}"
                    for operation, error in _errors(kernels, case):
                        _note(context, name, operation, error, widths)
                del made
        for operation, error in _dense_errors(kernels, shape, device):
            _note(context, name, operation, error, "")


def _note(context: Context, model: str, operation: str, error: float, where: str) -> None:
    """One row for each operation: how many cases there were, and the worst."""
    for row in context.rows:
        if (row["model"], row["operation"]) == (model, operation):
            break
    else:
        context.row(model=model, operation=operation, cases=0, worst_error=-1.0, where="", ok=True)
        row = context.rows[-1]
    row["cases"] = int(row["cases"] or 0) + 1
    if not error <= float(row["worst error"] or 0):
        row |= {"worst error": error, "where": where, "ok": error <= TOLERANCE}


def _case(made: Expert, tokens: int, experts: int) -> _Case:
    device = made.x.device
    x = torch.randn(tokens, made.x.shape[1], device=device)
    index = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)]).flatten()
    calls = Calls(torch.arange(tokens).repeat_interleave(2), index, torch.rand(2 * tokens) + 0.1)
    limits = torch.cat([made.limits[_SPARSITY][expert] for expert in index.tolist()])
    calls = Calls(*(part.to(device) for part in (calls.tokens, calls.experts, calls.weights)))
    # Of products: between small ones, none of which is that close to it.
    return _Case(x, made, calls, limits, torch.full_like(limits, 1e-3))


def _errors(fast: Any, case: _Case) -> Iterator[tuple[str, float]]:
    """Operation by operation: how far its result is from its definition's."""
    x, up, rows, calls = case.x, case.made.up, case.made.rows, case.calls
    truth = reference.signal_gemv(x, up, calls, case.limits)
    found = fast.signal_gemv(x, up, calls, case.limits)
    # Where the order of sums decides, either is right.
    yield "signal_gemv: neurons that differ", max(0, _differing(found, truth) - _near(x, up, calls, case.limits))
    ends, neurons, values = fast.up_list(x, up, calls, case.limits)
    total = int(ends[-1])
    listed = Active(torch.cat([ends.new_zeros(1), ends]).cpu().long(), neurons[:total].long(), values[:total])
    yield "up_list: neurons that differ", float(_differing(listed, found))
    got, want = _spread(found, calls, rows.neurons), _spread(truth, calls, rows.neurons)
    yield "signal_gemv: values", _error(got[(got != 0) & (want != 0)], want[(got != 0) & (want != 0)])
    for name, products in (("", None), (", product", case.products)):
        y, reached = fast.sparse_swiglu(x, rows, calls, found, products)
        want, counted = reference.sparse_swiglu(x, rows, calls, found, products)
        yield f"sparse_swiglu{name}", _error(y, want)
        # One neuron may be at its limit to the last bit.
        yield f"sparse_swiglu{name}: counts that differ", float(((reached.cpu() - counted.cpu()).abs() > 1).sum())
        y, counts = fast.moe_step(x, up, rows, calls, case.limits, products)
        yield f"moe_step{name}", _error(y, want)
        yield f"moe_step{name}: counts that differ", float((counts[:, 0].cpu() != found.offsets.diff()).sum())
    yield from _moves(fast, rows)
    yield from _chosen(fast, x.shape[0], rows)


def _moves(kernels: Any, rows: ExpertRows) -> Iterator[tuple[str, float]]:
    neurons = torch.randperm(rows.neurons)[: max(1, rows.neurons // 5)].to(rows.data.device)
    out = torch.full((neurons.numel(), rows.layout.nbytes), 0x5A, dtype=torch.uint8, device=rows.data.device)
    kernels.gather_rows(rows, 1, neurons, out)
    yield "gather_rows: bytes that differ", float((out != rows.data[1][neurons]).sum())
    pool = torch.full((rows.neurons, rows.layout.nbytes), 0x5A, dtype=torch.uint8, device=rows.data.device)
    want = pool.clone().index_copy_(0, neurons, out)
    kernels.pool_scatter(pool, neurons, out)
    yield "pool_scatter: bytes that differ", float((pool != want).sum())


def _chosen(kernels: Any, tokens: int, rows: ExpertRows) -> Iterator[tuple[str, float]]:
    """`select` under a rule with halves, weights and dropping."""
    device = rows.data.device
    index = torch.stack([torch.randperm(rows.experts)[:2] for _ in range(tokens)]).to(device)
    weights = torch.rand(tokens, 2, device=device)
    signal, product, late = torch.rand(3, 2 * rows.experts, device=device)
    rule = Rule(drop=0.4, major=0.8, weighed=True)
    limits = Limits(signal, product, late)
    got, want = kernels.select(index, weights, limits, rule), reference.select(index, weights, limits, rule)
    yield "select: calls that differ", float((got.calls.experts != want.calls.experts).sum())
    yield "select: left out differently", float((got.thresholds.isinf() != want.thresholds.isinf()).sum())
    kept = ~want.thresholds.isinf()
    yield "select: thresholds", _error(got.thresholds[kept], want.thresholds[kept]) if kept.any() else 0.0


def _dense_errors(fast: Any, shape: Shapes, device: str) -> Iterator[tuple[str, float]]:
    for bits in (4, 8):
        made = make_linear(shape, bits)
        made = replace(made, q=made.q.to(device), scale=made.scale.to(device), zero=made.zero.to(device))
        for tokens in (1, 3, 17):
            x = torch.randn(tokens, shape.hidden, device=device)
            yield (
                f"linear, {bits} bit, {tokens} token{'s' * (tokens > 1)}",
                _error(fast.linear(x, made), reference.linear(x, made)),
            )


def _near(x: Tensor, up: SignalWeights, calls: Calls, limits: Tensor) -> int:
    """How many neurons are so close to their threshold that the order of sums decides."""
    close = 0
    for token, expert, limit in zip(calls.tokens.tolist(), calls.experts.tolist(), limits.tolist(), strict=True):
        v = up.dense(expert, torch.float32) @ x[token]
        close += int(((v.abs() / limit - 1).abs() < 1e-5).sum())
    return close


def _differing(one: Active, other: Active) -> int:
    """Neurons that only one of the two has."""
    lists = [{(call, n) for call, part in enumerate(_parts(each)) for n in part.tolist()} for each in (one, other)]
    return len(lists[0] ^ lists[1])


def _parts(active: Active) -> list[Tensor]:
    return list(active.neurons.cpu().split(active.offsets.diff().tolist()))


def _spread(active: Active, calls: Calls, neurons: int) -> Tensor:
    """The values at their neurons, 0 elsewhere."""
    whole = torch.zeros(calls.experts.numel(), neurons, device=active.values.device)
    for call, (part, values) in enumerate(
        zip(_parts(active), active.values.split(active.offsets.diff().tolist()), strict=True)
    ):
        whole[call, part.to(values.device)] = values.float()
    return whole


def _error(got: Tensor, want: Tensor) -> float:
    return float(((got - want).double().pow(2).mean() / want.double().pow(2).mean().clamp_min(1e-60)).sqrt())
