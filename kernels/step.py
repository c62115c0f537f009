"""One token's way through a layer. Everything before its experts is one operation: norm, attention, norm, router.

`dense_step` defines that in plain torch; `cpu/native_step.py` is the compiled one, and `cpu/native_token.py` goes
through all layers, experts included, in one call, and on to the next tokens. Shapes: H hidden size, D width of a head,
K experts per token, V tokens of the vocabulary, C tokens that a store of keys and values has room for.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .entries import entry_of, stored, values
from .rule import Rule
from .types import Limits
from .weights import ExpertRows, LinearWeights, Planes, SignalWeights


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x · Wᵀ + bias.

    Attributes:
        weight: (rows, columns) floating point, or codes; of the head, these may be in two planes. bias: (rows,).
    """

    weight: Tensor | LinearWeights | Planes
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight if isinstance(self.weight, Tensor) else self.weight.dense(x.dtype)
        return F.linear(x, weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """What a vector goes through before a part of the model.

    Attributes:
        weight: (H,). bias: (H,), added behind it. kind: "rms": x / rms(x) * weight; "layer": the same of x - mean(x).
    """

    weight: Tensor
    bias: Tensor | None = None
    kind: Literal["rms", "layer"] = "rms"

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """x (..., H) -> (..., H)."""
        if self.kind == "layer":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)
        normed = F.rms_norm(x, self.weight.shape, self.weight, eps)
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer attends.

    Attributes:
        num_heads: of queries. num_kv_heads: of keys, and of values; each serves num_heads / num_kv_heads of queries.
        head_dim: D, even. scale: of the products of queries and keys. clip: limit of all three.
        window: how many tokens a query sees, itself included. cache_dtype: in which form keys and values are stored,
            see entries.py.
        q_norm, k_norm: weights of RMS norms before rope, (D,) of each head, or (heads * D,) of all heads together.
        sinks: (heads,) scores of a token that has no value, which every query sees besides; None where there is none.
        inside: how many of a key's first numbers are its value; None where values are stored behind keys.
        gated: whether the first projection has a gate of each number of a head's output, behind the queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    clip: float | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    cache_dtype: torch.dtype = torch.float32
    sinks: Tensor | None = None
    inside: int | None = None
    gated: bool = False

    @property
    def rows(self) -> int:
        """Rows of what a layer caches of a token: its keys, then its values if they are not inside."""
        return self.num_kv_heads * (1 if self.inside else 2)

    @property
    def entry(self) -> tuple[int, ...]:
        """The shape of what a layer caches of a token."""
        return entry_of(self.rows, self.head_dim, self.cache_dtype)

    def values(self, entries: Tensor, dtype: torch.dtype) -> Tensor:
        """Entries (N, *entry) -> their keys and values (N, rows, D)."""
        return values(entries, self.rows, self.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class Latent:
    """Keys and values of all heads are made of one vector per token, R numbers (DeepSeek-V2, section 2.1).

    That alone is cached, and behind it a key that all heads share. The layer's heads are those that meet what is
    cached: one head of keys, R + `turned` wide, with the value inside.

    Attributes:
        still, turned: how many numbers of a head's query and key rope leaves alone, and turns. value: those of its
            value. norm: (R,) weights of the vector's RMS norm, with its eps. made: to each head's key, without what is
            turned, and value. asked: to queries, where these are made of a vector too, behind a norm of that.
    """

    still: int
    turned: int
    value: int
    norm: Tensor
    eps: float
    made: Projection
    asked: Projection | None = None
    asked_norm: Tensor | None = None

    @property
    def rank(self) -> int:
        """R."""
        return self.norm.numel()


@dataclass(frozen=True, slots=True)
class Delta:
    """A gated delta rule in place of attention (Gated DeltaNet, arXiv 2412.06464, equation 10).

    Each of the layer's heads, D wide, keeps a state (K, D) instead of keys and values, and belongs to one of its heads
    of queries and keys, K wide. The first projection gives what a causal convolution takes, queries, keys and values of
    all heads, and behind these the gates of the output, heads * D.

    Attributes:
        key_dim: K. conv: (taps, channels), the oldest token's factors first. decay: (heads,) how fast a state fades;
            bias: (heads,) of the step that this is for. norm: (D,) of the output before its gate, with its eps. gates:
            (2 * heads, H), of beta, then of the step. turned: what rope turns of other layers' heads.
    """

    key_dim: int
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    gates: Projection
    turned: int

    def state(self, heads: Heads) -> int:
        """Numbers of a text's state: the tokens before the convolution, then what the heads keep."""
        taps, channels = self.conv.shape
        return (taps - 1) * channels + heads.num_heads * self.key_dim * heads.head_dim


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Where keys and values of the tokens so far are, in the device's memory: no launch depends on their number.

    Attributes:
        addresses: (L,) int64, of each layer's entries (C, *entry). position: (1,) int64, of the new token.
    """

    addresses: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class Router:
    """How a layer chooses its experts.

    Attributes:
        weight: (E, H). norm_topk_prob: whether the weights of the chosen are made to sum to 1. dtype: of those.
        scores: (T, E) float32, where scores are left for what decides about rows, of T tokens at most; None if nobody
            asks.
        kind: what a score is: a logit's softmax, or its sigmoid. With "sparsemixer" scores are the softmax, but the
            choice is made from logits, see `_mixed`. precise: whether logits are computed in float32 whatever hidden
            states are. jitter: how far below the best a logit may be for SparseMixer.
        bias: (E,) of the logits. correction: (E,) float32, added to scores for the choice, and not for the weights.
        groups, top_groups: experts are chosen from so many of the groups that they are divided into: those with the
            best expert, or, with a correction, the best pair. scale: of the weights.
        down_bias: (E, H) float32 of the experts' last matrices, which depends on the choice alone and joins the
            residual stream with what is beside the experts.
    """

    weight: Tensor
    top_k: int
    norm_topk_prob: bool
    dtype: torch.dtype = torch.float32
    scores: Tensor | None = None
    kind: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    precise: bool = False
    bias: Tensor | None = None
    correction: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    down_bias: Tensor | None = None
    jitter: float = 0.0

    def bias_of(self, index: Tensor, weights: Tensor) -> Tensor | None:
        """What `down_bias` adds for a choice, index and weights (B, K): (B, H)."""
        if (bias := self.down_bias) is None:
            return None
        shares = bias.new_zeros(len(index), len(bias)).scatter_add(1, index, weights.to(bias.dtype))
        return shares @ bias

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (B, H) -> experts (B, K) int64 and their weights (B, K); of equally likely ones, any may be chosen."""
        if self.precise:
            logits = F.linear(hidden.float(), self.weight.float(), self.bias)
        else:
            logits = F.linear(hidden, self.weight, self.bias)
        scores = logits.float().sigmoid() if self.kind == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        if self.scores is not None and len(hidden) <= len(self.scores):
            self.scores[: len(hidden)].copy_(scores)
        weights, index = self._mixed(logits) if self.kind == "sparsemixer" else self._best(scores)
        if self.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        if self.scale != 1:
            weights *= self.scale
        return index, weights.to(self.dtype)

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores (B, K) of the chosen, and their numbers."""
        if self.correction is None and self.groups == 1:
            weights, index = scores.topk(self.top_k, -1)
            return weights, index
        ranked = scores if self.correction is None else scores + self.correction
        if self.groups > 1:
            each = ranked.unflatten(-1, (self.groups, -1))
            best = each.amax(-1) if self.correction is None else each.topk(2, -1).values.sum(-1)
            good = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(self.top_groups, -1).indices, True)
            ranked = each.masked_fill(~good[..., None], -torch.inf).flatten(-2)
        index = ranked.topk(self.top_k, -1).indices
        return scores.gather(-1, index), index

    def _mixed(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """SparseMixer (arXiv 2409.12136) as it infers: each expert is the best of those that are left. It weighs its
        softmax among the left ones that are not more than twice the jitter below it, as a share of the larger size.
        """
        left, found = logits, list[tuple[Tensor, Tensor]]()
        for _ in range(self.top_k):
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * self.jitter
            found.append((left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index), index))
            left = left.scatter(-1, index, -torch.inf)
        weights, index = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
        return weights, index


@dataclass(frozen=True, slots=True)
class Swiglu:
    """y = down · (silu(gate · x) * (up · x)) for every token: a shared expert, or a layer without experts.

    Attributes:
        both: gate and up, (2 S, H). down: (H, S). scale: (1, H) of a gate whose sigmoid scales y; None if there is
            none.
    """

    both: Projection
    down: Projection
    scale: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (B, H) -> (B, H)."""
        gate, up = self.both(hidden).chunk(2, -1)
        y = self.down(F.silu(gate) * up)
        return y if self.scale is None else y * torch.sigmoid(F.linear(hidden, self.scale))


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of a layer without its experts.

    Attributes:
        input_layernorm, post_attention_layernorm: the norms. eps: of all norms. qkv: to queries, keys and values of all
            heads. out: back to H. router: None where there are no experts. beside: what every token is given besides
            experts. latent: where keys and values are made of a vector; qkv then goes to queries, or their vector, and
            what is cached. delta: where the layer does not attend.
    """

    input_layernorm: Norm
    post_attention_layernorm: Norm
    eps: float
    heads: Heads
    qkv: Projection
    out: Projection
    router: Router | None
    beside: Swiglu | None = None
    latent: Latent | None = None
    delta: Delta | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer's experts, and what a token may skip of them.

    Attributes:
        signal, rows: of E experts, or of their halves where the rule divides them. limits: of as many, at its shares.
    """

    signal: SignalWeights
    rows: ExpertRows
    limits: Limits
    rule: Rule


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """The parts before the first layer and after the last.

    Attributes:
        embedding: (V, H). norm: after the layers. eps: of that. head: to V logits. scale: of the embedding.
    """

    embedding: Tensor
    norm: Norm
    eps: float
    head: Projection
    scale: float = 1.0

    def logits(self, x: Tensor) -> Tensor:
        """x (T, H), the residual stream behind the last layer -> (T, V)."""
        return self.head(self.norm(x, self.eps))


class Stepped(NamedTuple):
    """The result of a step.

    Attributes:
        stream: (1, H) the residual after attention and what is beside the experts. hidden: (1, H) the block's input.
            routed: with a router, the experts (1, K) int64 and their weights (1, K) float32; else nothing.
    """

    stream: Tensor
    hidden: Tensor
    routed: tuple[Tensor, ...]


def dense_step(layer: DenseLayer, x: Tensor, added: Tensor | None, rope: Tensor, kv: Tensor, position: int) -> Stepped:
    """One token before a layer's experts.

    Args:
        x: (1, H) the residual stream after the attention before. added: (1, H) the block's output since then, or None.
        rope: (2, D) cosines and sines of the position, the first half of the sines negated; of what is turned alone
            where heads are made of a vector.
        kv: (C, *heads.entry) keys, then values, of the tokens before; the token's own are written to its place. Of a
            layer with a state, (2, numbers): the one before a token is at its position modulo 2, the one after it at
            the other place.
        position: of the token.
    """
    stream = x if added is None else x + added
    hidden = layer.input_layernorm(stream, layer.eps)
    qkv = layer.qkv(hidden)
    if layer.delta is not None:
        before, after = kv[position % 2], kv[1 - position % 2]
        out = delta_rule(qkv, layer.delta.gates(hidden), before, layer.heads, layer.delta, after)
    elif layer.latent is None:
        out = attend(qkv, rope, kv, position, layer.heads, layer.eps)
    else:
        out = attend_latent(qkv, rope, kv, position, layer.heads, layer.latent)
    stream = stream + layer.out(out)
    hidden = layer.post_attention_layernorm(stream, layer.eps)
    if layer.beside is not None:
        stream = stream + layer.beside(hidden)
    routed = layer.router(hidden) if layer.router else ()
    if layer.router and (bias := layer.router.bias_of(*routed)) is not None:
        stream = stream + bias.to(stream.dtype)
    return Stepped(stream, hidden, routed)


def attend(qkv: Tensor, rope: Tensor, kv: Tensor, position: int, heads: Heads, eps: float) -> Tensor:
    """Attention of one token: qkv (1, all heads * D), as projected -> (1, heads * D). The rest as in `dense_step`."""
    qkv = qkv.view(-1, heads.head_dim)
    gating = heads.num_heads if heads.gated else 0
    queries, gates, keys, own = qkv.split([heads.num_heads, gating, heads.num_kv_heads, heads.num_kv_heads])
    if heads.q_norm is not None and heads.k_norm is not None:
        queries, keys = (_norm(part, weight, eps) for part, weight in ((queries, heads.q_norm), (keys, heads.k_norm)))
    if heads.clip is not None:
        queries, keys, own = (part.clamp(-heads.clip, heads.clip) for part in (queries, keys, own))
    queries, keys = (turned(part, rope[0], rope[1]) for part in (queries, keys))
    kv[position] = stored(torch.cat([keys, own]), kv.dtype)
    first = 0 if heads.window is None else max(0, position + 1 - heads.window)
    seen = heads.values(kv[first : position + 1], qkv.dtype)
    keys, others = seen.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1).chunk(2, 1)
    scores = torch.einsum("hd,thd->ht", queries, keys) * heads.scale
    if heads.sinks is not None:
        scores = torch.cat([scores, heads.sinks[:, None].to(scores.dtype)], -1)
    out = torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(others)], others)
    return (out * gates.sigmoid() if heads.gated else out).reshape(1, -1)


def delta_rule(qkv: Tensor, gates: Tensor, before: Tensor, heads: Heads, delta: Delta, after: Tensor) -> Tensor:
    """The gated delta rule token by token: qkv (T, channels + heads * D), as projected, and gates (T, 2 * heads) ->
    (T, heads * D). before: (numbers,) the state before these tokens. after: where the one behind them goes.
    """
    mixed, window, state = convolved(qkv, before, heads, delta)
    queries, keys, values = mixed
    beta, decay = steps_of(gates, delta)
    found: list[Tensor] = []
    for q, k, v, b, d in zip(queries, keys, values, beta, decay.exp(), strict=True):
        state = state * d[:, None, None]
        change = (v - torch.einsum("hk,hkd->hd", k, state)) * b[:, None]
        state = state + k[:, :, None] * change[:, None]
        found.append(torch.einsum("hk,hkd->hd", q, state))
    after.copy_(torch.cat([window.flatten(), state.flatten()]))
    return gated(torch.stack(found), qkv, delta)


def convolved(
    qkv: Tensor, before: Tensor, heads: Heads, delta: Delta
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Queries and keys (T, heads, K), of length one but for the scale, and values (T, heads, D); what the convolution
    of the next token sees, (taps - 1, channels); and the state (heads, K, D) of `before`.
    """
    taps, channels = delta.conv.shape
    kept, kind = (taps - 1) * channels, torch.promote_types(qkv.dtype, torch.float32)
    given = torch.cat([before[:kept].view(taps - 1, channels).to(qkv.dtype), qkv[:, :channels]])
    mixed = F.silu(F.conv1d(given.T[None], delta.conv.T[:, None].to(qkv.dtype), groups=channels)[0].T).to(kind)
    wide = heads.num_kv_heads * delta.key_dim
    queries, keys, values = mixed.split([wide, wide, channels - 2 * wide], 1)
    queries, keys = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            heads.num_heads // heads.num_kv_heads, 1
        )
        for part in (queries.unflatten(1, (-1, delta.key_dim)), keys.unflatten(1, (-1, delta.key_dim)))
    )
    parts = queries * heads.scale, keys, values.unflatten(1, (-1, heads.head_dim))
    state = before[kept:].view(heads.num_heads, delta.key_dim, heads.head_dim).to(kind)
    return parts, given[-(taps - 1) :], state


def steps_of(gates: Tensor, delta: Delta) -> tuple[Tensor, Tensor]:
    """How much of a state each token changes, and the logarithm of what is left of it before, (T, heads) each."""
    beta, step = gates.to(torch.promote_types(gates.dtype, torch.float32)).chunk(2, 1)
    return beta.sigmoid(), -delta.decay * F.softplus(step + delta.bias)


def gated(out: Tensor, qkv: Tensor, delta: Delta) -> Tensor:
    """The heads' outputs (T, heads, D) behind their norm and gates, (T, heads * D)."""
    normed = F.rms_norm(out, delta.norm.shape, delta.norm.to(out.dtype), delta.eps).flatten(1)
    return (normed * F.silu(qkv[:, delta.conv.shape[1] :].to(out.dtype))).to(qkv.dtype)


def attend_latent(qkv: Tensor, rope: Tensor, kv: Tensor, position: int, heads: Heads, latent: Latent) -> Tensor:
    """`attend` through a latent vector: (1, heads * value). Keys and values are made of all that is cached."""
    asked, vector, key = qkv.split([qkv.shape[1] - heads.head_dim, latent.rank, latent.turned], -1)
    if latent.asked is not None and latent.asked_norm is not None:
        asked = latent.asked(F.rms_norm(asked, latent.asked_norm.shape, latent.asked_norm, latent.eps))
    still, moved = asked.view(heads.num_heads, -1).split([latent.still, latent.turned], -1)
    vector = F.rms_norm(vector, latent.norm.shape, latent.norm, latent.eps)
    kv[position] = stored(torch.cat([vector, turned(key, *rope)], -1), kv.dtype)
    seen = heads.values(kv[: position + 1], qkv.dtype)[:, 0]
    made = latent.made(seen[:, : latent.rank]).unflatten(-1, (heads.num_heads, -1))
    keys, others = made.split([latent.still, latent.value], -1)
    scores = torch.einsum("hd,thd->ht", still, keys) + turned(moved, *rope) @ seen[:, latent.rank :].T
    return torch.einsum("ht,thd->hd", (scores * heads.scale).softmax(-1), others).reshape(1, -1)


def turned(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """part (..., D) by rope, (..., D) each, the first half of the sines negated."""
    return torch.addcmul(part * cos, part.roll(part.shape[-1] // 2, -1), sin)


def attend_one(qkv: Tensor, rope: Tensor, kept: KeptTokens, layer: int, heads: Heads, eps: float) -> Tensor:
    """`attend` with position and address read from memory, on the CPU; see `kernels.attend_one`."""
    position, address = int(kept.position), int(kept.addresses[layer])
    count = (position + 1) * math.prod(heads.entry)
    memory = (ctypes.c_uint8 * (count * heads.cache_dtype.itemsize)).from_address(address)
    kv = torch.frombuffer(memory, dtype=heads.cache_dtype).view(-1, *heads.entry)
    return attend(qkv, rope[position], kv, position, heads, eps)


def _norm(part: Tensor, weight: Tensor, eps: float) -> Tensor:
    """part (heads, D), normalized over each head or all of them, as many as weight is for."""
    return F.rms_norm(part.reshape(-1, weight.numel()), weight.shape, weight, eps).view(part.shape)
