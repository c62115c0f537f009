"""One token's way through a layer. Everything before its experts is one operation: norm, mixer, norm, router.

`dense_step` defines that in plain torch; `cpu/native_step.py` is the compiled one, and `cpu/native_token.py` goes
through all layers, experts included, in one call, and on to the next tokens. Shapes: H hidden size, D width of a head,
K experts per token, V tokens of the vocabulary, C tokens that a store of keys and values has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mixers.convolution import Convolution, convolution
from .mixers.delta import Delta, delta_rule
from .mixers.grouped import Heads, attend
from .mixers.latent import Latent, attend_latent
from .rule import Rule
from .types import Limits
from .weights import ExpertRows, Norm, Projection, SignalWeights

Mixer = Heads | Latent | Delta | Convolution


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
        factors: (E,) of the chosen weights. norm: of the residual stream, where the router is given that instead of
            what experts are given.
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
    factors: Tensor | None = None
    norm: Norm | None = None

    def bias_of(
        self, index: Tensor, weights: Tensor, *, product: Callable[[Tensor, Tensor], Tensor] = F.linear
    ) -> Tensor | None:
        """What `down_bias` adds for a choice, index and weights (B, K): (B, H)."""
        if (bias := self.down_bias) is None:
            return None
        shares = bias.new_zeros(len(index), len(bias)).scatter_add(1, index, weights.to(bias.dtype))
        return product(shares, bias.T)

    def given(self, hidden: Tensor, stream: Tensor, eps: float) -> Tensor:
        """What it chooses by: what experts are given, or the stream behind its own norm."""
        return hidden if self.norm is None else self.norm(stream, eps)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden (B, H) -> experts (B, K) int64 and their weights (B, K); of equally likely ones, any may be chosen."""
        if self.precise:
            return self.chosen(F.linear(hidden.float(), self.weight.float(), self.bias))
        return self.chosen(F.linear(hidden, self.weight, self.bias))

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The choice by logits (B, E)."""
        scores = logits.float().sigmoid() if self.kind == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        if self.scores is not None and len(logits) <= len(self.scores):
            self.scores[: len(logits)].copy_(scores)
        weights, index = self._mixed(logits) if self.kind == "sparsemixer" else self._best(scores)
        if self.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        if self.scale != 1:
            weights *= self.scale
        if self.factors is not None:
            weights = weights * self.factors[index]
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
        """SparseMixer (arXiv 2409.12136) as it infers: each expert is the best of the rest. It weighs its
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
            none. function: of the gate: silu, or gelu's approximation by tanh.
    """

    both: Projection
    down: Projection
    scale: Tensor | None = None
    function: Literal["silu", "gelu"] = "silu"

    def gate(self, gate: Tensor) -> Tensor:
        """What up is multiplied by."""
        return F.silu(gate) if self.function == "silu" else F.gelu(gate, approximate="tanh")

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (B, H) -> (B, H)."""
        gate, up = self.both(hidden).chunk(2, -1)
        y = self.down(self.gate(gate) * up)
        return y if self.scale is None else y * torch.sigmoid(F.linear(hidden, self.scale))


@dataclass(frozen=True, slots=True)
class Sandwich:
    """Norms behind a layer's parts, too (Gemma): a dense part next to the experts joins them, not the stream.

    Attributes:
        mixed: of what the mixer adds. before: of what the dense part is given; None where that is what experts are
            given. beside, experts: of what that part and the experts give; None for none. both: of their sum. scale: of
            the stream behind the layer.
    """

    mixed: Norm
    before: Norm | None
    beside: Norm | None
    experts: Norm | None
    both: Norm
    scale: float

    def parallel(self, dense: Callable[[Tensor], Tensor] | None, stream: Tensor, hidden: Tensor, eps: float) -> Tensor:
        """What the dense part gives, by the stream behind the mixer and what experts are given, (B, H) each."""
        if dense is None:
            return torch.zeros_like(hidden)
        found = dense(hidden if self.before is None else self.before(stream, eps))
        return found if self.beside is None else self.beside(found, eps)

    def close(self, stream: Tensor, parallel: Tensor, experts: Tensor | None, eps: float) -> Tensor:
        """The stream behind a layer, by what its dense part and its experts give, (B, H) each."""
        if experts is not None:
            parallel = parallel + (experts if self.experts is None else self.experts(experts, eps))
        return (stream + self.both(parallel, eps)) * self.scale


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of a layer without its experts.

    Attributes:
        input_layernorm, post_attention_layernorm: the norms. eps: of all norms. first: to what the mixer is given.
            out: back to H. router: None where there are no experts. beside: what every token is given besides experts.
            sandwich: where each part has a norm behind it.
    """

    input_layernorm: Norm
    post_attention_layernorm: Norm
    eps: float
    mixer: Mixer
    first: Projection
    out: Projection
    router: Router | None
    beside: Swiglu | None = None
    sandwich: Sandwich | None = None


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
        embedding: (V, H). norm: after the layers. eps: of that. head: to V logits. scale: of the embedding. cap: what
            logits come near and never reach; None for none.
    """

    embedding: Tensor
    norm: Norm
    eps: float
    head: Projection
    scale: float = 1.0
    cap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        """x (T, H), the residual stream behind the last layer -> (T, V)."""
        return capped(self.head(self.norm(x, self.eps)), self.cap)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits (T, V) between -cap and cap."""
    return logits if cap is None else (logits / cap).tanh() * cap


class Stepped(NamedTuple):
    """The result of a step.

    Attributes:
        stream: (1, H) the residual after the mixer and the dense part, if any. hidden: (1, H) the block's input.
            routed: with a router, the experts (1, K) int64 and their weights (1, K) float32; else nothing. parallel:
            (1, H) what the dense part gives where `Sandwich` joins it with the experts.
    """

    stream: Tensor
    hidden: Tensor
    routed: tuple[Tensor, ...]
    parallel: Tensor | None = None


def dense_step(layer: DenseLayer, x: Tensor, added: Tensor | None, rope: Tensor, kv: Tensor, position: int) -> Stepped:
    """One token before a layer's experts.

    Args:
        x: (1, H) the residual stream after the attention before. added: (1, H) the block's output since then, or None.
        rope: (2, `mixer.turned`) cosines and sines of the position, the first half of the sines negated.
        kv: (C, *entry) keys, then values, of the tokens before; the token's own are written to its place. Of a layer
            with a state, (N, numbers): the one before a token is at its position modulo N, the one after it at the
            next place.
        position: of the token.
    """
    stream = x if added is None else x + added
    hidden = layer.input_layernorm(stream, layer.eps)
    given, mixer = layer.first(hidden), layer.mixer
    if isinstance(mixer, Heads):
        out = attend(given, rope, kv, position, mixer, layer.eps)
    elif isinstance(mixer, Latent):
        out = attend_latent(given, rope, kv, position, mixer)
    else:
        before, after = kv[position % len(kv)], kv[(position + 1) % len(kv)]
        if isinstance(mixer, Delta):
            out = delta_rule(given, mixer.gates(hidden), before, mixer, after)
        else:
            out = convolution(given, before, mixer, after)
    out, sandwich, parallel = layer.out(out), layer.sandwich, None
    stream = stream + (out if sandwich is None else sandwich.mixed(out, layer.eps))
    hidden = layer.post_attention_layernorm(stream, layer.eps)
    if sandwich is not None:
        parallel = sandwich.parallel(layer.beside, stream, hidden, layer.eps)
        if layer.router is None:
            return Stepped(sandwich.close(stream, parallel, None, layer.eps), hidden, ())
    elif layer.beside is not None:
        stream = stream + layer.beside(hidden)
    routed = layer.router(layer.router.given(hidden, stream, layer.eps)) if layer.router else ()
    if layer.router and (bias := layer.router.bias_of(*routed)) is not None:
        stream = stream + bias.to(stream.dtype)
    return Stepped(stream, hidden, routed, parallel)
