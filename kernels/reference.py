"""The definition of every operation, in plain torch. Fast paths are tested against these; they run everywhere.

Shapes: B tokens, P (token, expert) calls, H hidden size, F neurons of an expert, N active neurons over all calls.
s is the function of the signal's projection and o the other one's (activation.py): for an expert's gate and up in
SwiGLU, silu of the gate and nothing of up, whichever of the two is the signal. Biases are added before.
Of x in float16, sums and products are float32 until the result: what a weight makes small again may be out of
float16's range on the way. `x_bits` lets other implementations keep less of x's precision, as `rounded` defines;
operations here read all of it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import side
from .codes import CHUNK, LARGEST_SCALE, byte_below, scale_of_byte, zero_in_steps
from .rule import MOST_EASE, Rule
from .types import Active, Calls, Feedback, Limits, Rounded, Work
from .weights import ExpertRows, LinearWeights, SignalWeights

ROUND_STEP = 64  # places of a column whose grids `round_matrix` fits before it rounds them


def rounded(x: Tensor, x_bits: int) -> Tensor:
    """The precision of x (B, H) that operations with `x_bits` must keep: 15 or 8 bits, relative to the largest of 64
    neighbours.

    Multiples of a step that each chunk of 64 values has for itself, a 127 · 128th (15 bits) or a 127th (8 bits) of its
    largest magnitude. On Gaussian x 8 bits cost a relative RMS of 0.6 % (that largest magnitude is 2.7 standard
    deviations, and 2.7 / 127 / √12 = 0.006), on any x at most 3.2 % of a chunk. A chunk with NaN or infinity is NaN.
    """
    if x_bits == 22:
        return x
    most = 127.0 * 128.0 if x_bits == 15 else 127.0
    chunks = F.pad(x, (0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    largest = chunks.abs().amax(2, keepdim=True)
    multiples = (chunks * (most / largest)).round() * (largest / most)
    return torch.where(largest == 0, 0, multiples).flatten(1)[:, : x.shape[1]]


def select(index: Tensor, weights: Tensor, limits: Limits, rule: Rule) -> Work:
    """Apply a rule to a router's choice, index and weights (B, K): P = B · K · rule.parts calls.

    With w a choice's weight and m the mean of its token's, a first or only part is left out where w < drop · m, a
    second one where w < max(drop, major) · m (DualSparse-MoE sections 4.1 and 4.2: the paper's normalized score times
    K, so that one limit suits any K), unless the expert's limit is negative (`rule.NEVER`). A weighed rule multiplies
    the limits of what stays by m / w. No weight changes.
    A NaN weight stays, so that it reaches the result and is noticed.
    """
    (tokens, among), parts = index.shape, rule.parts
    shares = weights.double()
    mean = shares.mean(-1, keepdim=True)
    least = limits.least
    if least is None:
        least = torch.tensor(rule.least(), dtype=torch.float64, device=index.device)
    left_out = (shares[..., None] < mean[..., None] * least).flatten()
    numbers = parts * index[..., None] + torch.arange(parts, device=index.device)
    each = torch.arange(tokens, device=index.device).repeat_interleave(among * parts)
    calls = Calls(each, numbers.flatten(), weights[..., None].expand(-1, -1, parts).flatten())
    ease = torch.where(shares == 0, MOST_EASE, (mean / shares).clamp(max=MOST_EASE)) if rule.weighed else None

    def own(table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        found = table.index_select(0, calls.experts)
        return found if ease is None else (found * ease[..., None].expand(-1, -1, parts).flatten()).float()

    signal = own(limits.signal)
    assert signal is not None
    left_out &= signal >= 0
    return Work(calls, signal.masked_fill(left_out, torch.inf), own(limits.product), own(limits.late))


def signal_gemv(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int = 22) -> Active:
    """v = s(signal_e · x) for every call, keeping the neurons with |v| >= thresholds[call].

    FloE Algorithm 1, lines 2-3, where the signal is up. A v that is not a number is kept, so that it reaches the
    result and is noticed. A call with an infinite threshold is left out: it keeps nothing.
    """
    wide, offsets = _wide(x), [0]
    neurons: list[Tensor] = []
    values: list[Tensor] = []
    for token, expert, threshold in zip(
        calls.tokens.tolist(), calls.experts.tolist(), thresholds.tolist(), strict=True
    ):
        v = _signal(wide[token], signal, expert)
        kept = (~(v.abs() < threshold) & (threshold != math.inf)).nonzero().squeeze(1)
        neurons.append(kept)
        values.append(v[kept].to(x.dtype))
        offsets.append(offsets[-1] + kept.numel())
    return Active(
        torch.tensor(offsets),
        torch.cat(neurons) if neurons else torch.empty(0, dtype=torch.long, device=x.device),
        torch.cat(values) if values else x.new_empty(0),
    )


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """y[token] += sum_n weight · o(other_n · x) v_n · down_n over the active neurons n of every call.

    With down_thresholds (P,), neurons with |o(other_n · x) v_n| below the call's are left out. Beside y (B, H), how
    many neurons of every call were not, (P,) int64.
    """
    wide = _wide(x)
    y = torch.zeros_like(wide)
    reached = active.offsets.diff()
    offsets = active.offsets.tolist()
    for call, (token, expert) in enumerate(zip(calls.tokens.tolist(), calls.experts.tolist(), strict=True)):
        chosen = slice(offsets[call], offsets[call + 1])
        neurons = active.neurons[chosen]
        if not neurons.numel():
            continue  # adds nothing, whatever its weight
        other, down = _other(wide[token], rows, rows.data[expert].index_select(0, neurons))
        h = other * active.values[chosen].to(wide.dtype)
        if down_thresholds is not None:
            small = h.abs() < down_thresholds[call]  # NaN is not, and so reaches the result
            h = h.masked_fill(small, 0)
            reached[call] -= small.sum().cpu()
        y[token] += (calls.weights[call].to(wide.dtype) * h) @ down
    return y.to(x.dtype), reached


def moe_step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`signal_gemv`, then `sparse_swiglu` of what it found: y (B, H) and counts (P, 2) int64.

    counts: how many neurons of every call were active, and how many of those reached the second threshold.
    """
    wide = _wide(x)
    active = signal_gemv(wide, signal, calls, thresholds, x_bits)
    y, reached = sparse_swiglu(wide, rows, calls, active, down_thresholds)
    return y.to(x.dtype), torch.stack([active.offsets.diff(), reached], dim=1)


def expert_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens (prefill): x (B, H), thresholds (B,) of each token -> y (B, H).

    Also, over all tokens, how many neurons were active and how many of those reached the second threshold.

    Dequantizes the whole expert once and lets the library multiply; what misses a threshold is masked per token, so
    the result is what `signal_gemv` and `sparse_swiglu` give token by token.
    """
    wide = _wide(x)
    v = _signal(wide, signal, expert)
    other, down = _other(wide, rows, rows.data[expert])
    h = other * v
    active = ~(v.abs() < thresholds[:, None])
    kept = active if down_thresholds is None else active & ~(h.abs() < down_thresholds[:, None])
    return (h.masked_fill(~kept, 0) @ down).to(x.dtype), int(active.sum()), int(kept.sum())


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


def _signal(x: Tensor, signal: SignalWeights, expert: int) -> Tensor:
    """v of x (..., H): (..., F)."""
    bias = None if signal.bias is None else signal.bias[expert]
    return side(signal.layout.function, x, signal.dense(expert, x.dtype), bias)


def _other(x: Tensor, rows: ExpertRows, records: Tensor) -> tuple[Tensor, Tensor]:
    """What v is multiplied with for x (..., H) and records (N, nbytes): (..., N); and their down columns (N, H)."""
    other, down = rows.layout.read(records, x.dtype)
    return side(rows.layout.function, x, other, rows.layout.read_bias(records, x.dtype)), down


def linear(x: Tensor, weights: LinearWeights, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N)."""
    return F.linear(x, weights.dense(x.dtype))


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.plain`."""
    if weight.ndim == 3:
        return torch.bmm(weight.to(x.dtype), x[..., None])[..., 0]
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor) -> None:
    """Copy the records of `neurons` (N,) of one expert, in the order given, into out (N, layout.nbytes) uint8."""
    torch.index_select(rows.data[expert], 0, neurons, out=out)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor) -> None:
    """Copy records (N, nbytes) uint8 into pool[slots], pool (S, nbytes) uint8; the inverse of a gather."""
    pool.index_copy_(0, slots, records)


def round_matrix(
    matrix: Tensor,
    feedback: Feedback,
    bits: int,
    group: int,
    weight: Tensor | None,
    values: torch.dtype | None,
    *,
    short: bool = False,
) -> Rounded:
    """See `kernels.round_matrix`: step by step, in each a fit of the grids, and place after place."""
    down, lower = weight is None, feedback.lower
    given = (matrix if down else matrix.T).float()  # (places, lines)
    step = ROUND_STEP if down else group
    codes, errors = torch.empty_like(given, dtype=torch.uint8), torch.empty_like(given)
    grids: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(given), step):
        places = slice(first, first + step)
        aim = given[places] + lower[places, :first] @ errors[:first]
        if weight is None:
            spread = aim.reshape(-1, group).T
            found = _fitted(spread, torch.full_like(spread[:, :1], 1 / group), bits, short=short)
            grid = found[0].view(len(aim), -1), found[1].view(len(aim), -1)
            scale, zero = (part.repeat_interleave(group, dim=1) for part in grid)
        else:
            grid = _fitted(aim, weight[places, None], bits, short=short)
            scale, zero = (part.expand(aim.shape) for part in grid)
        grids.append(grid)
        for place in range(len(aim)):
            at = first + place
            codes[at] = _codes(aim[place], scale[place], zero[place], bits)
            errors[at] = given[at] - (codes[at] - zero[place]) * scale[place]
            aim[place + 1 :].addr_(lower[at + 1 : first + len(aim), at], errors[at])
    if not down:
        codes = codes.T.contiguous()
    scale, zero = (torch.cat(part) if down else torch.stack(part, 1) for part in zip(*grids, strict=True))
    each = ((codes.view(*scale.shape, group) - zero[..., None]) * scale[..., None]).view(codes.shape)
    return Rounded(codes, scale, zero, None if values is None else each.to(values))


def _fitted(values: Tensor, weight: Tensor, bits: int, *, short: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero of groups (G, R), each (R,): the least squares of errors weighted by `weight` (G, 1).

    From grids over several shares of a group's range, the best one is taken.
    """
    top = 2**bits - 1
    low, high, mean = values.amin(0), values.amax(0), (values * weight).sum(0)
    tried: list[tuple[Tensor, Tensor, Tensor]] = []
    for clip in (1.0, 0.85, 0.7):
        scale = ((high - low) * (clip / top)).clamp_min(1e-12)
        offset = (low + high) / 2 - scale * (top / 2)
        for _ in range(6):
            codes = _codes(values, scale, -offset / scale, bits)
            code = (codes * weight).sum(0)
            spread = (codes * codes * weight).sum(0) - code * code
            along = (codes * values * weight).sum(0) - code * mean
            fits = (spread > 1e-9) & (along > 0)  # else there is nothing to fit
            scale = torch.where(fits, along / spread, scale)
            offset = torch.where(fits, mean - scale * code, offset)
        for grid in _held_short(scale, offset, mean, bits) if short else [_held(scale, offset, mean)]:
            error = ((_codes(values, *grid, bits) - grid[1]) * grid[0] - values).square()
            tried.append(((error * weight).sum(0), *grid))
    best = torch.stack([error for error, _, _ in tried]).argmin(0, keepdim=True)
    scale, zero = (torch.stack([one[part] for one in tried]).gather(0, best)[0] for part in (1, 2))
    return scale, zero


def _held(scale: Tensor, offset: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """As float16 can hold it; a group that is nearly constant, and far from 0, keeps its mean."""
    scale = scale.half().float()
    zero = (-offset / scale).half().float()
    lost = (scale == 0) | ~zero.isfinite()
    return torch.where(lost & scale.isfinite(), 1.0, scale), torch.where(lost, -mean.half().float(), zero)


def _held_short(scale: Tensor, offset: Tensor, mean: Tensor, bits: int) -> list[tuple[Tensor, Tensor]]:
    """As bytes can hold it (`codes.scale_of_byte`), about the same middle: by the scale below it, and the one above."""
    top = 2**bits - 1
    end = offset + scale * top
    # A grid that begins above 0, or ends below it, is drawn out to there.
    scale = torch.where(offset > 0, end / top, torch.where(end < 0, -offset / top, scale))
    offset = torch.where(offset > 0, 0.0, torch.where(end < 0, -scale * top, offset))
    middle = offset + scale * (top / 2)
    # What is not finite, or too large, becomes no number.
    none = torch.where(scale <= LARGEST_SCALE, mean - mean, torch.nan)
    found: list[tuple[Tensor, Tensor]] = []
    for above in (0, 1):
        kept = scale_of_byte(byte_below(scale) + above) + none
        found.append((kept, zero_in_steps(top / 2 - middle / kept, bits)))
    return found


def _codes(values: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    return (values / scale + zero).clamp(0, 2**bits - 1).round()
