"""One token's way through a layer. Everything before its experts is one operation: norm, mixer, norm, router.

`dense_step` defines that in plain torch; `cpu/native_step.py` is the compiled one, and `cpu/native_token.py` goes
through all layers, experts included, in one call, and on to the next tokens. Shapes: H hidden size, D width of a head,
K experts per token, V tokens of the vocabulary, C tokens that a store of keys and values has room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mixers.convolution import Convolution, convolution
from .mixers.delta import Delta, delta_rule
from .mixers.grouped import Heads, attend
from .mixers.latent import Latent, attend_latent
from .rule import Rule
from .types import Limits
from .weights import ExpertRows, Projection, SignalWeights

Mixer = Heads | Latent | Delta | Convolution


@dataclass(frozen=True, slots=True)
class Router:
    """How a layer chooses its experts.

    Attributes:
        weight: (E, H). norm_topk_prob: whether the weights of the chosen are made to sum to 1. dtype: of those.
        scores: (T, E) float32, where scores are left for what decides about rows, of T tokens at most; None if nobody
            asks.
        sigmoid: whether a score is a sigmoid of its logit, and not its softmax. precise: whether logits are computed in
            float32 whatever hidden states are.
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
    sigmoid: bool = False
    precise: bool = False
    bias: Tensor | None = None
    correction: Tensor | None = None
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    down_bias: Tensor | None = None

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
        scores = logits.float().sigmoid() if self.sigmoid else torch.softmax(logits, -1, dtype=torch.float32)
        if self.scores is not None and len(hidden) <= len(self.scores):
            self.scores[: len(hidden)].copy_(scores)
        weights, index = self._best(scores)
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
        input_layernorm, post_attention_layernorm: (H,) of the RMS norms. eps: of all norms. first: to what the mixer is
            given. out: back to H. router: None where there are no experts. beside: what every token is given besides
            experts.
    """

    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    eps: float
    mixer: Mixer
    first: Projection
    out: Projection
    router: Router | None
    beside: Swiglu | None = None


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
        embedding: (V, H). norm: (H,) of the RMS norm after the layers. eps: of that. head: to V logits. scale: of the
            embedding.
    """

    embedding: Tensor
    norm: Tensor
    eps: float
    head: Projection
    scale: float = 1.0

    def logits(self, x: Tensor) -> Tensor:
        """x (T, H), the residual stream behind the last layer -> (T, V)."""
        return self.head(F.rms_norm(x, self.norm.shape, self.norm, self.eps))


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
        rope: (2, `mixer.turned`) cosines and sines of the position, the first half of the sines negated.
        kv: (C, *entry) keys, then values, of the tokens before; the token's own are written to its place. Of a layer
            with a state, (2, numbers): the one before a token is at its position modulo 2, the one after it at the
            other place.
        position: of the token.
    """
    width = x.shape[-1]
    stream = x if added is None else x + added
    hidden = F.rms_norm(stream, (width,), layer.input_layernorm, layer.eps)
    given, mixer = layer.first(hidden), layer.mixer
    if isinstance(mixer, Heads):
        out = attend(given, rope, kv, position, mixer, layer.eps)
    elif isinstance(mixer, Latent):
        out = attend_latent(given, rope, kv, position, mixer)
    else:
        before, after = kv[position % 2], kv[1 - position % 2]
        if isinstance(mixer, Delta):
            out = delta_rule(given, mixer.gates(hidden), before, mixer, after)
        else:
            out = convolution(given, before, mixer, after)
    stream = stream + layer.out(out)
    hidden = F.rms_norm(stream, (width,), layer.post_attention_layernorm, layer.eps)
    if layer.beside is not None:
        stream = stream + layer.beside(hidden)
    routed = layer.router(hidden) if layer.router else ()
    if layer.router and (bias := layer.router.bias_of(*routed)) is not None:
        stream = stream + bias.to(stream.dtype)
    return Stepped(stream, hidden, routed)
