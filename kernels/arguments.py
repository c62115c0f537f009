"""The argument checks of every operation, shared by all backends.

One function per operation checks types, shapes, devices and strides without reading a tensor's values, so it costs a
few microseconds and never waits for a GPU. `calls_in_range`, `active_in_range` and `slots_in_range` read the values;
the compiled kernels check values themselves, and use these functions only to report what was wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import BYTES, FLOATS, INDICES, NEURONS, apart, described, index, indices, require
from .codes import SHORTEST
from .layouts import check_roles
from .listed import Listing, Portion, Total
from .mixers.convolution import Convolution
from .mixers.delta import Delta
from .mixers.grouped import Heads, KeptTokens
from .mixers.latent import Latent
from .rule import Rule
from .step import Router
from .types import X_BITS, Active, Calls, Feedback, Limits
from .weights import ExpertRows, LinearWeights, Projection, SignalWeights

MOST_GROUP = 256  # numbers that share a grid (kMostGroup)


def route(hidden: Tensor, router: Router) -> None:
    """See `kernels.route`."""
    if hidden.ndim != 2 or router.weight.ndim != 2 or not 0 < router.top_k <= len(router.weight):
        shapes = f"{described(hidden)} for {router.top_k} of {described(router.weight)}"
        raise ValueError(f"hidden must be (B, H) and a router's weight (E, H), of which it chooses some, not {shapes}")
    experts, hidden_size = router.weight.shape
    require("hidden", hidden, FLOATS, (len(hidden), hidden_size), router.weight.device, whole=False)
    require("weight", router.weight, FLOATS, (experts, hidden_size), whole=False)
    for name, part in (("bias", router.bias), ("factors", router.factors), ("correction", router.correction)):
        if part is not None:
            require(name, part, FLOATS, (experts,), hidden.device)
    if router.scores is not None:
        require("scores", router.scores, (torch.float32,), (len(router.scores), experts), hidden.device)


def select(index: Tensor, weights: Tensor, limits: Limits, rule: Rule) -> None:
    """See `kernels.select`."""
    if index.ndim != 2:
        raise ValueError(f"index must be int64 of shape (B, K), not {described(index)}")
    require("index", index, INDICES, tuple(index.shape), whole=False)
    require("weights", weights, FLOATS, tuple(index.shape), index.device, whole=False)
    experts = limits.signal.numel()
    if experts % rule.parts:
        raise ValueError(f"limits of {experts} parts do not divide into experts of {rule.parts} parts")
    for name, table in (("signal", limits.signal), ("product", limits.product), ("late", limits.late)):
        if table is not None:
            require(name, table, (torch.float32,), (experts,), index.device)
    if limits.least is not None:
        require("least", limits.least, (torch.float64,), (rule.parts,), index.device)


def attend_one(qkv: Tensor, rope: Tensor, kept: KeptTokens, layer: int, heads: Heads) -> None:
    """See `kernels.attend_one`."""
    dim, device = heads.head_dim, qkv.device
    if heads.num_heads % heads.num_kv_heads or dim % 2:
        raise ValueError(f"{heads.num_heads} heads of width {dim} over {heads.num_kv_heads} heads of keys")
    require("qkv", qkv, FLOATS, (1, heads.sizes[0]))
    require("rope", rope, FLOATS, (rope.numel(),) if rope.ndim == 1 else (2, dim), device)
    if not 0 <= heads.rope_at <= rope.numel() - 2 * dim:
        raise ValueError(f"rope of {rope.numel()} numbers has none of width {dim} from number {heads.rope_at} on")
    _kept(kept, layer, device)
    if (heads.q_norm is None) != (heads.k_norm is None):
        raise ValueError("queries and keys are normalized both or neither")
    norms = ("q_norm", heads.q_norm, heads.num_heads), ("k_norm", heads.k_norm, heads.num_kv_heads)
    for name, weight, count in norms:
        if weight is not None:
            require(name, weight, FLOATS, (dim if weight.numel() == dim else count * dim,), device)


def latent_one(asked: Tensor, given: Tensor, rope: Tensor, kept: KeptTokens, layer: int, latent: Latent) -> None:
    """See `kernels.latent_one`."""
    latent.check()
    heads, device = latent.heads, asked.device
    require("asked", asked, FLOATS, (1, heads.num_heads * (latent.still + latent.turned)))
    require("given", given, FLOATS, (1, heads.head_dim), device)
    require("rope", rope, FLOATS, (2, latent.turned), device)
    _kept(kept, layer, device)
    require("norm", latent.norm, FLOATS, (latent.rank,), device)
    _made(latent.made, (heads.num_heads * (latent.still + latent.value), latent.rank), device)


def delta_one(qkv: Tensor, gates: Tensor, kept: KeptTokens, layer: int, delta: Delta) -> None:
    """See `kernels.delta_one`."""
    device, heads, width = qkv.device, delta.heads, delta.value_dim
    channels = 2 * delta.shared * delta.key_dim + heads * width
    if min(heads, delta.shared, delta.key_dim, width) < 1 or heads % delta.shared:
        raise ValueError(
            f"{heads} heads of width {width} over {delta.shared} heads of queries and keys of width {delta.key_dim}"
        )
    require("qkv", qkv, FLOATS, (1, channels + heads * width))
    require("gates", gates, FLOATS, (1, 2 * heads), device)
    _kept(kept, layer, device)
    _convolution(delta.conv, channels, device)
    require("decay", delta.decay, (torch.float32,), (heads,), device)
    require("bias", delta.bias, (torch.float32,), (heads,), device)
    require("norm", delta.norm, FLOATS, (width,), device)


def convolve_one(given: Tensor, kept: KeptTokens, layer: int, mixer: Convolution) -> None:
    """See `kernels.convolve_one`."""
    channels, device = mixer.conv.shape[-1], given.device
    require("given", given, FLOATS, (1, 3 * channels))
    _kept(kept, layer, device)
    _convolution(mixer.conv, channels, device)
    if mixer.bias is not None:
        require("bias", mixer.bias, FLOATS, (channels,), device)


def signal_gemv(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> None:
    """See `kernels.signal_gemv`."""
    _x(x, signal.layout.vector.n, x_bits)
    signal.check(x.device)
    _calls(x, calls)
    _limits("thresholds", thresholds, calls.experts, x)


def sparse_swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: Active,
    down_thresholds: Tensor | None,
    x_bits: int,
) -> None:
    """See `kernels.sparse_swiglu`."""
    _x(x, rows.layout.other.n, x_bits)
    rows.check(x.device)
    _calls(x, calls)
    require("offsets", active.offsets, INDICES, (calls.experts.numel() + 1,), whole=False)
    count = active.neurons.numel()
    require("neurons", active.neurons, NEURONS, (count,), x.device, whole=False)
    require("values", active.values, (x.dtype,), (count,), x.device, whole=False)
    _limits("down_thresholds", down_thresholds, calls.experts, x)


def moe_step(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None,
    x_bits: int,
) -> None:
    """See `kernels.moe_step`."""
    _x(x, signal.layout.vector.n, x_bits)
    signal.check(x.device)
    rows.check(x.device)
    _same_experts(signal, rows)
    _calls(x, calls)
    _limits("thresholds", thresholds, calls.experts, x)
    _limits("down_thresholds", down_thresholds, calls.experts, x)


def list_active(
    x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, listing: Listing, x_bits: int
) -> None:
    """See `kernels.list_active`."""
    signal_gemv(x, signal, calls, thresholds, x_bits)
    count = calls.experts.numel()
    room = (count * signal.q.shape[1],)
    require("values", listing.values, (x.dtype,), room, x.device)
    require("offsets", listing.offsets, INDICES, (count + 1,), x.device)
    require("neurons", listing.neurons, (torch.int32,), room, x.device)
    require("copies", listing.copies, (x.dtype,), room, x.device)


def add_listed(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    values: Tensor,
    portion: Portion,
    limits: Tensor | None,
    total: Total,
    x_bits: int,
) -> None:
    """See `kernels.add_listed`."""
    _x(x, rows.layout.other.n, x_bits)
    rows.check(x.device)
    if rows.experts != 1:
        raise ValueError(f"rows must be of one expert, not of {rows.experts}")
    _calls(x, calls)
    count, room = calls.tokens.numel(), (portion.at.numel(),)
    require("values", values, (x.dtype,), (values.numel(),), x.device)
    require("offsets", portion.offsets, INDICES, (count + 1,), x.device)
    require("at", portion.at, (torch.int32,), room, x.device)
    require("places", portion.places, (torch.int32,), room, x.device)
    _limits("limits", limits, calls.tokens, x)
    require("y", total.y, (x.dtype,), tuple(x.shape), x.device)
    require("reached", total.reached, INDICES, (1,), x.device)


def expert_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None,
    x_bits: int,
) -> None:
    """See `kernels.expert_swiglu`."""
    _x(x, signal.layout.vector.n, x_bits)
    signal.check(x.device)
    rows.check(x.device)
    _same_experts(signal, rows)
    index("expert", expert, rows.data.shape[0])
    for name, limits in (("thresholds", thresholds), ("down_thresholds", down_thresholds)):
        if limits is not None:
            require(name, limits, FLOATS, (x.shape[0],), x.device, whole=False)


def linear(x: Tensor, weights: LinearWeights, x_bits: int) -> None:
    """See `kernels.linear`."""
    _x(x, weights.vector.n, x_bits)
    weights.check(x.device)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """See `kernels.plain`."""
    apart = weight.ndim == 3
    if x.ndim != 2 or weight.ndim not in (2, 3) or (apart and bias is not None):
        shapes = f"{described(x)} and {described(weight)}"
        raise ValueError(f"x must be (B, K) and weights (N, K), or (B, N, K) without a bias, not {shapes}")
    require("x", x, FLOATS, tuple(x.shape), x.device, whole=False)
    shape = (*([len(x)] if apart else []), weight.shape[-2], x.shape[1])
    require("weight", weight, FLOATS, shape, x.device, whole=False)
    if bias is not None:
        require("bias", bias, FLOATS, (len(weight),), x.device)


def gather_rows(rows: ExpertRows, expert: int, neurons: Tensor, out: Tensor, device: torch.device) -> None:
    """See `kernels.gather_rows`; `device` copies."""
    rows.check(device)
    index("expert", expert, rows.data.shape[0])
    require("neurons", neurons, INDICES, (neurons.numel(),), device, whole=False)
    require("out", out, BYTES, (neurons.numel(), rows.data.shape[2]), device)
    apart("out", out, "rows", rows.data)


def pool_scatter(pool: Tensor, slots: Tensor, records: Tensor, device: torch.device) -> None:
    """See `kernels.pool_scatter`; `device` copies."""
    if pool.ndim != 2 or not pool.shape[1]:
        raise ValueError(f"pool must be uint8 of shape (S, nbytes), not {described(pool)}")
    require("pool", pool, BYTES, tuple(pool.shape), device)
    require("slots", slots, INDICES, (slots.numel(),), device, whole=False)
    require("records", records, BYTES, (slots.numel(), pool.shape[1]), device)
    apart("pool", pool, "records", records)


def round_matrix(
    matrix: Tensor,
    feedback: Feedback,
    bits: int,
    group: int,
    weight: Tensor | None,
    values: torch.dtype | None,
    *,
    short: bool,
) -> None:
    """See `kernels.round_matrix`."""
    if matrix.ndim != 2 or not matrix.numel():
        raise ValueError(f"matrix must be floating point of shape (N, n), not {described(matrix)}")
    require("matrix", matrix, FLOATS[:3], tuple(matrix.shape), matrix.device)
    places = matrix.shape[0 if weight is None else 1]
    require("lower", feedback.lower, (torch.float32,), (places, places), matrix.device)
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, not {bits}")
    if short and bits > SHORTEST:
        raise ValueError(f"codes of {bits} bits have no scales of one byte")
    if weight is not None:
        require("weight", weight, (torch.float32,), (places,), matrix.device)
    if not 1 <= group <= MOST_GROUP or matrix.shape[1] % group:
        raise ValueError(f"a group of {group} does not divide {matrix.shape[1]} columns")
    if values not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"values must be float32 or bfloat16, not {values}")


def calls_in_range(tokens: int, calls: Calls, experts: int) -> None:
    """All tokens and experts of the calls exist.

    Raises:
        ValueError: an index out of range.
    """
    indices("token", calls.tokens, tokens)
    indices("expert", calls.experts, experts)


def active_in_range(rows: ExpertRows, active: Active) -> None:
    """Offsets rise from 0 to the number of neurons; each neuron exists and is named once in a call.

    Raises:
        ValueError: which of these does not hold.
    """
    offsets, count = active.offsets.tolist(), active.neurons.numel()
    if offsets[0] != 0 or offsets[-1] != count or sorted(offsets) != offsets:
        raise ValueError(f"offsets must rise from 0 to the number of neurons, {count}")
    neurons = rows.neurons
    indices("neuron", active.neurons, neurons)
    owner = torch.repeat_interleave(active.offsets.diff().to(active.neurons.device))
    if (owner * neurons + active.neurons).unique().numel() != count:
        raise ValueError("a neuron is listed twice in one call")


def portion_in_range(rows: int, values: int, portion: Portion) -> None:
    """Offsets rise from 0 to no more than there is room for, and what they name exists.

    Raises:
        ValueError: which of these does not hold.
    """
    offsets, room = portion.offsets.tolist(), portion.at.numel()
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > room:
        raise ValueError(f"offsets must rise from 0 to at most {room}, the room of the lists")
    for name, part, end in (("at", portion.at, values), ("places", portion.places, rows)):
        indices(name, part[: offsets[-1]], end)


def slots_in_range(slots: Tensor, capacity: int) -> None:
    """All slots (N,) exist and none is named twice.

    Raises:
        ValueError: which of these does not hold.
    """
    indices("slot", slots, capacity)
    if slots.unique().numel() != slots.numel():
        raise ValueError("a slot is written twice")


def _x(x: Tensor, hidden: int, x_bits: int) -> None:
    if x_bits not in X_BITS:
        raise ValueError(f"x_bits must be one of {', '.join(map(str, X_BITS))}, not {x_bits}")
    shape = x.shape
    if len(shape) != 2 or shape[1] != hidden or x.dtype not in FLOATS:
        raise ValueError(f"x must be float of shape (B, {hidden}), not {described(x)}")


def _kept(kept: KeptTokens, layer: int, device: torch.device) -> None:
    require("addresses", kept.addresses, INDICES, tuple(kept.addresses.shape), device)
    require("position", kept.position, INDICES, (1,), device)
    index("layer", layer, kept.addresses.numel())


def _made(made: Projection, shape: tuple[int, int], device: torch.device) -> None:
    weight = made.weight
    if isinstance(weight, LinearWeights):
        weight.check(device)
        found = weight.q.shape[0], weight.vector.n
        if found != shape:
            raise ValueError(f"made must be of shape {shape}, not {found}")
    else:
        require("made", weight, FLOATS, shape, device)
    if made.bias is not None:
        raise ValueError("keys and values have no bias")


def _convolution(conv: Tensor, channels: int, device: torch.device) -> None:
    require("conv", conv, FLOATS, (max(2, len(conv)), channels), device)


def _calls(x: Tensor, calls: Calls) -> None:
    shape, device = (calls.experts.numel(),), x.device
    require("experts", calls.experts, INDICES, shape, device, whole=False)
    require("tokens", calls.tokens, INDICES, shape, device, whole=False)
    require("weights", calls.weights, FLOATS, shape, device, whole=False)


def _limits(name: str, limits: Tensor | None, experts: Tensor, x: Tensor) -> None:
    if limits is not None:
        require(name, limits, FLOATS, tuple(experts.shape), x.device, whole=False)


def _same_experts(signal: SignalWeights, rows: ExpertRows) -> None:
    mine, theirs = (*signal.q.shape[:2], signal.layout.vector.n), (rows.experts, rows.neurons, rows.layout.other.n)
    if mine != theirs:
        raise ValueError(f"the signal has (experts, neurons, hidden) {tuple(mine)}, but rows have {theirs}")
    check_roles(signal.layout, rows.layout)
