"""The numerical operations, one function each, computed by the device's backend.

`reference.py` defines what each computes. Tensors of another type, shape or device and indices out of range raise a
ValueError before any memory is touched: weights when they are put together (`layouts.py`), changing arguments by
`arguments.py`. The compiled kernels run those checks themselves, for callers that have them from `choose`.
Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons per expert, N active neurons.

`x_bits` says how much of x's precision must be kept if weights are codes: 22 bits (float32's), or what
`reference.rounded` leaves, 15 (relative errors of about 5e-5) or 8 (of 0.6 to 0.9 %, still far below those of low-bit
weights). The fewer bits, the faster the CPU's kernels; implementations may keep more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import arguments, checks
from .backend import Backend, choose, foreseen
from .listed import Listing, Portion, Total
from .mixers.convolution import Convolution
from .mixers.delta import Delta
from .mixers.grouped import Heads, KeptTokens
from .mixers.latent import Latent
from .rule import Rule
from .step import ExpertLayer, Router
from .types import X_BITS, Active, Calls, Feedback, Limits, Rounded, Work
from .weights import ExpertRows, LinearWeights, SignalWeights

__all__ = [
    "X_BITS",
    "Active",
    "Backend",
    "Calls",
    "Feedback",
    "Limits",
    "Listing",
    "Portion",
    "Rounded",
    "Rule",
    "Total",
    "Work",
    "add_listed",
    "attend_one",
    "choose",
    "convolve_one",
    "delta_one",
    "expert_swiglu",
    "experts_step",
    "fast_type",
    "foreseen",
    "gather_rows",
    "latent_one",
    "linear",
    "list_active",
    "moe_step",
    "plain",
    "pool_scatter",
    "round_matrix",
    "route",
    "select",
    "signal_gemv",
    "sparse_swiglu",
]


def route(hidden: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """What a router chooses by hidden (B, H): experts (B, K) int64 and their weights (B, K), as `Router` computes it.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.route(hidden, router)
    return choose(hidden.device).route(hidden, router)


def select(index: Tensor, weights: Tensor, limits: Limits, rule: Rule) -> Work:
    """Apply a rule to a router's choice: the calls, and the thresholds of each.

    Args:
        index, weights: (B, K) the router's choice. limits: of the layer's experts, or of their halves if the rule
            divides them, at the rule's shares.

    Returns:
        P = B · K · rule.parts calls; those that are left out have an infinite threshold. On a GPU nothing waits, so an
        expert out of range is detected only by the operation that reads it.

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) an expert out of range.
    """
    backend = choose(index.device)
    if not backend.checks:
        arguments.select(index, weights, limits, rule)
        if index.is_cpu:
            checks.indices("expert", index.flatten(), limits.signal.numel() // rule.parts)
    return backend.select(index, weights, limits, rule)


def signal_gemv(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, *, x_bits: int = 22) -> Active:
    """The active neurons of every call: v = s(signal_e · x), kept where |v| >= threshold (FloE Algorithm 1, lines 2-3).

    Args:
        x: (B, H) floating point. signal: the layer's signal projections. thresholds: (P,) one per call, 0 keeps all. A
            v that is not a number is kept, so that it reaches the result. A call with an infinite threshold is left
            out.

    Raises:
        ValueError: shapes that do not fit, or a token or expert out of range.
    """
    backend = choose(x.device)
    if not backend.checks:
        arguments.signal_gemv(x, signal, calls, thresholds, x_bits)
        arguments.calls_in_range(x.shape[0], calls, signal.q.shape[0])
    return backend.signal_gemv(x, signal, calls, thresholds, x_bits)


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """The MoE output from the active neurons alone: y[token] += weight · sum_n o(other_n · x) v_n down_n.

    Args:
        x: (B, H). rows: the layer's neuron records. active: what `signal_gemv` found for the same
            calls. down_thresholds: (P,) leaves out neurons with |o(other_n · x) v_n| below the call's; their down
            halves are not read.

    Returns:
        y (B, H) of x's dtype, zero for tokens without a call; and (P,) int64 how many neurons of each call reached the
        second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, an index out of range, or a neuron twice within one call.
    """
    backend = choose(x.device)
    if not backend.checks:
        arguments.sparse_swiglu(x, rows, calls, active, down_thresholds, x_bits)
        arguments.calls_in_range(x.shape[0], calls, rows.experts)
        arguments.active_in_range(rows, active)
    return backend.sparse_swiglu(x, rows, calls, active, down_thresholds, x_bits)


def moe_step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`signal_gemv`, then `sparse_swiglu` of the neurons it found: one layer's experts for a few tokens.

    On a GPU the list of active neurons stays there and the host waits for nothing; so tokens and experts on the GPU,
    which come from the model's own router, are not checked before the kernels use them.

    Args:
        x: (B, H). thresholds, down_thresholds: (P,) as in those operations.

    Returns:
        y (B, H) of x's dtype, and counts (P, 2) int64 on the device of x: how many neurons of each call were active,
        and for how many of those |o(other_n · x) v_n| reached the second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) an index out of range.
    """
    backend = choose(x.device)
    if not backend.checks:
        arguments.moe_step(x, signal, rows, calls, thresholds, down_thresholds, x_bits)
        if calls.experts.is_cpu:
            arguments.calls_in_range(x.shape[0], calls, signal.q.shape[0])
    return backend.moe_step(x, signal, rows, calls, thresholds, down_thresholds, x_bits)


def experts_step(
    x: Tensor, layer: ExpertLayer, index: Tensor, weights: Tensor, stream: Tensor | None = None, *, x_bits: int = 22
) -> tuple[Tensor, Tensor, Tensor]:
    """`select`, then `moe_step`: one layer's experts for a few tokens.

    Args:
        x: (B, H). index, weights: (B, K) the router's choice. stream: (B, H) to which the sum is added.

    Returns:
        y (B, H), of the stream's dtype if there is one, counts (P, 2) as of `moe_step`, and the thresholds (P,),
        infinite for what is left out.

    Raises:
        ValueError: as these two.
    """
    backend = choose(x.device)
    if backend.experts_step is not None:
        return backend.experts_step(x, layer, index, weights, stream, x_bits)
    work = select(index, weights, layer.limits, layer.rule)
    y, counts = moe_step(x, layer.signal, layer.rows, work.calls, work.thresholds, work.products, x_bits=x_bits)
    return y if stream is None else stream + y, counts, work.thresholds


def expert_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    *,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens, as prefill needs it: the same result as `signal_gemv` and `sparse_swiglu`.

    Args:
        x: (B, H). expert: its index in 0..E-1. thresholds: (B,) neurons with |v_n| below the token's are left
            out. down_thresholds: (B,) likewise those with |o(other_n · x) v_n| below it.

    Returns:
        y (B, H), not yet weighted by the router; over all tokens, how many neurons were active, and how many of those
        reached the second threshold (all, if there is none).

    Raises:
        ValueError: shapes that do not fit, or no such expert.
    """
    backend = choose(x.device)
    if not backend.checks:
        arguments.expert_swiglu(x, signal, rows, expert, thresholds, down_thresholds, x_bits)
    return backend.expert_swiglu(x, signal, rows, expert, thresholds, down_thresholds, x_bits)


def linear(x: Tensor, weights: LinearWeights, *, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ from low-bit weights, for any number of tokens.

    Args:
        x: (B, K) floating point. weights: of N rows.

    Returns:
        y (B, N) of x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    backend = choose(x.device)
    if not backend.checks:
        arguments.linear(x, weights, x_bits)
    return backend.linear(x, weights, x_bits)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x · Wᵀ + bias from weights that are numbers, for any number of tokens; of few on a GPU without its library,
    which a captured graph would have to give memory.

    Args:
        x: (B, K) floating point. weight: (N, K), or (B, N, K), each token's own; as any view. bias: (N,), only of the
            first kind.

    Returns:
        y (B, N) of x's dtype, summed in it or more precisely.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.plain(x, weight, bias)
    return choose(x.device).plain(x, weight, bias)


def attend_one(qkv: Tensor, rope: Tensor, kept: KeptTokens, layer: int, heads: Heads, eps: float) -> Tensor:
    """Attention of one token in one layer: norms of queries and keys, clip and rope, then over itself and the tokens
    before it that its window holds. Sets its keys and values.

    The position and the address of the layer's entries are values on the device, which are not checked there: a call
    that was captured in a graph serves every token and any memory.

    Args:
        qkv: (1, (heads + 2 * key heads) * D), as projected, without values where keys are alone. rope: (2, D) cosines
            and sines of the position, the first half of the sines negated; or (numbers,), among which those of the
            layer begin at `heads.rope_at`. kept: where the entries are, of `heads.cache_dtype`; those of `layer` have
            room for the new token. eps: of the norms.

    Returns:
        (1, heads * D) of qkv's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.attend_one(qkv, rope, kept, layer, heads)
    return choose(qkv.device).attend_one(qkv, rope, kept, layer, heads, eps)


def delta_one(qkv: Tensor, gates: Tensor, kept: KeptTokens, layer: int, delta: Delta) -> Tensor:
    """The gated delta rule for one token in one layer, whose state becomes the one behind the token.

    As for `attend_one`, position and address are values on the device.

    Args:
        qkv: (1, channels + heads * D), as projected. gates: (1, 2 * heads), too. kept: where the states are,
            at multiples of 16 bytes: the one before a token at its position modulo `kept.ring`, which stays as it is.

    Returns:
        (1, heads * D) of qkv's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.delta_one(qkv, gates, kept, layer, delta)
    return choose(qkv.device).delta_one(qkv, gates, kept, layer, delta)


def convolve_one(given: Tensor, kept: KeptTokens, layer: int, mixer: Convolution) -> Tensor:
    """A short convolution for one token in one layer.

    Args:
        given: (1, 3 H), as projected. kept: as for `delta_one`.

    Returns:
        (1, H) of given's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.convolve_one(given, kept, layer, mixer)
    return choose(given.device).convolve_one(given, kept, layer, mixer)


def latent_one(asked: Tensor, given: Tensor, rope: Tensor, kept: KeptTokens, layer: int, latent: Latent) -> Tensor:
    """Attention of one token through a latent vector in one layer: the vector's norm, rope, then over itself and the
    tokens before it. Sets its entry.

    As for `attend_one`, position and address are values on the device.

    Args:
        asked: (1, heads * (still + turned)) queries, as projected: what `latent.asked` gives where there is one.
            given: (1, R + turned) the vector and the key of all heads, as projected. rope: (2, turned), as there.

    Returns:
        (1, heads * value) of asked's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.latent_one(asked, given, rope, kept, layer, latent)
    return choose(asked.device).latent_one(asked, given, rope, kept, layer, latent)


def list_active(
    x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, listing: Listing, *, x_bits: int = 22
) -> None:
    """`signal_gemv` into memory of the caller's, of which the host's part holds once the device has done this.

    On a GPU nobody waits, so that this can be captured; tokens, experts and thresholds are on the device then.

    Args:
        listing: with room for all neurons of all calls.

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) an index out of range.
    """
    backend = choose(x.device)
    arguments.list_active(x, signal, calls, thresholds, listing, x_bits)
    if not backend.checks and x.is_cpu:
        arguments.calls_in_range(x.shape[0], calls, signal.q.shape[0])
    backend.list_active(x, signal, calls, thresholds, listing, x_bits)


def add_listed(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    values: Tensor,
    portion: Portion,
    limits: Tensor | None,
    total: Total,
    *,
    first: bool,
    x_bits: int = 22,
) -> None:
    """`sparse_swiglu` of some listed neurons, into memory of the caller's.

    On a GPU nobody waits, so that this can be captured: the portion is read when the device comes to it.

    Args:
        rows: those that portion.places number, as one expert's. calls: their experts are ignored. values: those of the
            listing. limits: (P,) the second thresholds. total: what is added to; `first` sets its y instead.

    Raises:
        ValueError: shapes that do not fit, or (on the CPU) an index out of range.
    """
    backend = choose(x.device)
    arguments.add_listed(x, rows, calls, values, portion, limits, total, x_bits)
    if x.is_cpu and backend.name != "triton":
        arguments.portion_in_range(rows.neurons, values.numel(), portion)
    backend.add_listed(x, rows, calls, values, portion, limits, total, x_bits, first=first)


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in that order, into out (N, layout.nbytes) uint8.

    Raises:
        ValueError: an index out of range, or a buffer that does not fit.
    """
    # Pinned rows are read by the device that needs them.
    device = rows.data.device if out.is_cpu else out.device
    backend = choose(device)
    if not backend.checks:
        arguments.gather_rows(rows, expert, neurons, out, device)
        checks.indices("neuron", neurons, rows.neurons)
    backend.gather_rows(rows, expert, neurons, out)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) into pool[slots], pool (S, nbytes), both uint8.

    Raises:
        ValueError: a slot out of range or given twice, or records that do not fit the pool.
    """
    backend = choose(pool.device)
    if not backend.checks:
        arguments.pool_scatter(pool, slots, records, pool.device)
        arguments.slots_in_range(slots, pool.shape[0])
    backend.pool_scatter(pool, slots, records)


def round_matrix(
    matrix: Tensor,
    feedback: Feedback,
    bits: int,
    group: int,
    *,
    weight: Tensor | None = None,
    values: torch.dtype | None = None,
    short: bool = False,
) -> Rounded:
    """Codes of a matrix, one number of a line after the other; what one leaves over goes to those after it (LDLQ of
    QuIP, arXiv 2307.13304, section 3; GPTQ, arXiv 2210.17323, gives the same).

    Lines are rows where `weight` is given, else columns. Grids are fitted by least squares when their turn comes: of
    each group in a row, to what the numbers before it pass on to it.

    Args:
        matrix: (N, n). feedback: for lines of that length. bits: 1 to 8. group: consecutive numbers of a row that share
            a grid, 256 at most. weight: (n,) of errors; those of a group add up to 1. values: the type of what the
            codes stand for, float32 or bfloat16, if that is wanted. short: whether scales and zeros will be bytes, of
            4 bits at most.

    Returns:
        Scales and zeros that float16 can hold, or bytes. Where they cannot, or a number is none, they are not finite.

    Raises:
        ValueError: shapes that do not fit.
    """
    arguments.round_matrix(matrix, feedback, bits, group, weight, values, short=short)
    return choose(matrix.device).round_matrix(matrix, feedback, bits, group, weight, values, short=short)


def fast_type(device: torch.device) -> torch.dtype:
    """bfloat16 where a device multiplies matrices of it much faster than of float32, else float32."""
    return choose(device).matrix_type
