"""The gated delta rule: heads keep a state instead of keys and values (Gated DeltaNet, arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import Projection
from . import Stateful
from .grouped import KeptTokens

CHUNK = 64
"""Tokens of a prompt that are computed together."""


@dataclass(frozen=True, slots=True)
class Delta(Stateful):
    """A gated delta rule in place of attention (equation 10).

    Each head, D wide, keeps a state (K, D), and belongs to one of the shared heads of queries and keys, K wide. The
    first projection gives what a causal convolution takes, queries, keys and values of all heads, and behind these the
    gates of the output, heads * D.

    Attributes:
        heads: of values. shared: heads of queries and keys. key_dim: K. value_dim: D. conv: (taps, channels), the
            oldest token's factors first. decay: (heads,) how fast a state fades; bias: (heads,) of the step that this
            is for. norm: (D,) of the output before its gate, with its eps. gates: (2 * heads, H), of beta, then of the
            step.
    """

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    gates: Projection

    @property
    def state(self) -> int:
        """Numbers of a text's state: the tokens before the convolution, then what the heads keep."""
        taps, channels = self.conv.shape
        return (taps - 1) * channels + self.heads * self.key_dim * self.value_dim

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the layer's first projection, and columns of the one back."""
        out = self.heads * self.value_dim
        return self.conv.shape[-1] + out, out


def delta_rule(qkv: Tensor, gates: Tensor, before: Tensor, delta: Delta, after: Tensor) -> Tensor:
    """The gated delta rule token by token: qkv (T, channels + heads * D), as projected, and gates (T, 2 * heads) ->
    (T, heads * D). before: (numbers,) the state before these tokens. after: where the one behind them goes.
    """
    mixed, window, state = convolved(qkv, before, delta)
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


def delta_one(qkv: Tensor, gates: Tensor, kept: KeptTokens, layer: int, delta: Delta) -> Tensor:
    """`delta_rule` with position and address read from memory, on the CPU; see `kernels.delta_one`."""
    before, after = kept.states(layer, delta.state)
    return delta_rule(qkv, gates, before, delta, after)


def convolved(qkv: Tensor, before: Tensor, delta: Delta) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Queries and keys (T, heads, K), of length one but for the scale, and values (T, heads, D); what the convolution
    of the next token sees, (taps - 1, channels); and the state (heads, K, D) of `before`.
    """
    taps, channels = delta.conv.shape
    kept, kind = (taps - 1) * channels, torch.promote_types(qkv.dtype, torch.float32)
    given = torch.cat([before[:kept].view(taps - 1, channels).to(qkv.dtype), qkv[:, :channels]])
    mixed = F.silu(F.conv1d(given.T[None], delta.conv.T[:, None].to(qkv.dtype), groups=channels)[0].T).to(kind)
    wide = delta.shared * delta.key_dim
    queries, keys, values = mixed.split([wide, wide, channels - 2 * wide], 1)
    queries, keys = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
            delta.heads // delta.shared, 1
        )
        for part in (queries.unflatten(1, (-1, delta.key_dim)), keys.unflatten(1, (-1, delta.key_dim)))
    )
    parts = queries * delta.key_dim**-0.5, keys, values.unflatten(1, (-1, delta.value_dim))
    state = before[kept:].view(delta.heads, delta.key_dim, delta.value_dim).to(kind)
    return parts, given[-(taps - 1) :], state


def steps_of(gates: Tensor, delta: Delta) -> tuple[Tensor, Tensor]:
    """How much of a state each token changes, and the logarithm of what is left of it before, (T, heads) each."""
    beta, step = gates.to(torch.promote_types(gates.dtype, torch.float32)).chunk(2, 1)
    return beta.sigmoid(), -delta.decay * F.softplus(step + delta.bias)


def gated(out: Tensor, qkv: Tensor, delta: Delta) -> Tensor:
    """The heads' outputs (T, heads, D) behind their norm and gates, (T, heads * D)."""
    normed = F.rms_norm(out, delta.norm.shape, delta.norm.to(out.dtype), delta.eps).flatten(1)
    return (normed * F.silu(qkv[:, delta.conv.shape[1] :].to(out.dtype))).to(qkv.dtype)
