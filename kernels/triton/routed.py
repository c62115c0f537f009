"""Launches a router's choice."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..step import Router
from . import launch
from .dense import FEW, plain
from .routing import choose_kernel


def route(hidden: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """See `kernels.route`. By torch's operations for many tokens; so is the choice in groups and by SparseMixer.

    Raises:
        ValueError: tensors that are not on the device.
    """
    tokens, experts, device = len(hidden), len(router.weight), hidden.device
    if tokens > FEW:
        return router(hidden)
    logits = plain(hidden, router.weight, router.bias, torch.float32 if router.precise else None)
    if router.groups > 1 or router.kind == "sparsemixer":
        return router.chosen(logits)
    index = torch.empty(tokens, router.top_k, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, router.top_k, dtype=router.dtype, device=device)
    scored = router.scores is not None and tokens <= len(router.scores)
    if not tokens:
        return index, weights
    with launch.on(device):
        choose_kernel[(tokens,)](
            *(logits, _or(router.correction, logits), _or(router.factors, logits), _or(router.scores, logits)),
            *(index, weights, router.scale, experts, router.top_k, router.kind == "sigmoid"),
            *(router.correction is not None, router.norm_topk_prob, router.factors is not None, scored),
            *(triton.next_power_of_2(experts), triton.next_power_of_2(router.top_k)),
            num_warps=1,
        )
    return index, weights


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A tensor that a kernel may be given where it reads none."""
    return other if tensor is None else tensor
