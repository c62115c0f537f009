"""The gated delta rule, of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.cpu import native_delta
from ....kernels.mixers.delta import Delta, convolved, delta_rule, gated, steps_of
from ....kernels.weights import Projection
from ..blocks import in_order
from ..kv_stores import GrowingStore
from ..state_store import EVERY, StatefulStore


def read_delta(mixer: Any) -> tuple[nn.Module, Delta]:
    """The first projection of a layer, and its mixer.

    Raises:
        Unsupported: projections that cannot be joined.
    """
    shared, heads, key, width = mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    device = mixer.A_log.device
    if hasattr(mixer, "in_proj_qkvz"):  # Qwen3-Next's, in which each head of keys comes with its heads of values
        own = heads // shared
        parts = [key, key, own * width, own * width]
        rows = _by_part(shared, parts, device)
        whole = in_order(mixer, ("in_proj_qkvz",), rows, "query, key, value and gate")
        gates = mixer.in_proj_ba.weight[_by_part(shared, [own, own], device)]
    else:
        whole = in_order(mixer, ("in_proj_qkv", "in_proj_z"), None, "query, key, value and gate")
        gates = torch.cat([mixer.in_proj_b.weight, mixer.in_proj_a.weight])
    delta = Delta(
        heads,
        shared,
        key,
        width,
        mixer.conv1d.weight[:, 0].T.contiguous(),
        mixer.A_log.float().exp(),
        mixer.dt_bias.float(),
        mixer.norm.weight,
        mixer.norm.variance_epsilon,
        Projection(gates.contiguous()),
    )
    return whole, delta


def _by_part(groups: int, parts: list[int], device: torch.device) -> Tensor:
    """The rows of groups that have each of these parts, sorted by part."""
    rows = torch.arange(groups * sum(parts), device=device).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, 1)])


class DeltaRule:
    """The rule in all its layers of one pass. Args: as for `GroupedAttention`."""

    def __init__(self, mixers: Sequence[object], _eps: float, store: GrowingStore, rope: Tensor, _start: int) -> None:
        assert isinstance(store, StatefulStore)
        self._of, self._store, self.tokens = mixers, store, len(rope)

    def __call__(self, index: int, projected: Tensor) -> Tensor:
        """What heads give, (T, heads * D), by layer `index`'s first projection and gates; the store's next state is the
        one behind these tokens.
        """
        delta, before = self._of[index], self._store.state(index)
        assert isinstance(delta, Delta)
        qkv, gates = projected.split([projected.shape[1] - 2 * delta.heads, 2 * delta.heads], 1)
        after = torch.empty_like(before)
        if len(qkv) == 1:  # the definition is shortest
            out = delta_rule(qkv, gates, before, delta, after)
        else:
            rule = native_delta.delta_rule if native_delta.computes(qkv) else chunked_rule
            out = rule(qkv, gates, before, delta, after, self._store.along(index))
        self._store.next_state(index, after)
        return out


def chunked_rule(
    qkv: Tensor,
    gates: Tensor,
    before: Tensor,
    delta: Delta,
    after: Tensor,
    along: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:
    """`delta_rule` of many tokens, as products of matrices, `EVERY` tokens at once (arXiv 2412.06464,
    section 3.3). along: where the states behind so many of them go, as after; whole chunks.
    """
    parts, window, state = convolved(qkv, before, delta)
    beta, decay = steps_of(gates, delta)
    queries, keys, values = (part.transpose(0, 1) for part in parts)
    found: list[Tensor] = []
    for first in range(0, len(qkv), EVERY):
        if (copy := along.get(first)) is not None:
            seen = qkv[first - len(delta.conv) + 1 : first, : delta.conv.shape[1]]
            copy[: seen.numel()], copy[seen.numel() :] = seen.flatten(), state.flatten()
        part = slice(first, first + EVERY)
        q, k, v, b = queries[:, part], keys[:, part], values[:, part], beta.T[:, part, None]
        faded = decay.T[:, part].cumsum(1)[..., None]
        between = (faded - faded.mT).tril().exp().tril()
        # Of each token's change those before it in the chunk are taken: a triangular system.
        system = torch.eye(k.shape[1], device=k.device, dtype=k.dtype) + ((b * k) @ k.mT * between).tril(-1)
        changes = b * (v - (k * faded.exp()) @ state)
        changes = torch.linalg.solve_triangular(system, changes, upper=False, unitriangular=True)
        found.append((q * faded.exp()) @ state + ((q @ k.mT) * between) @ changes)
        last = faded[:, -1:]
        state = state * last.exp() + (k * (last - faded).exp()).mT @ changes
    after.copy_(torch.cat([window.flatten(), state.flatten()]))
    return gated(torch.cat(found, 1).transpose(0, 1), qkv, delta)
