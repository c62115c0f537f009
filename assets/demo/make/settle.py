"""After training: weights learn to bear the rounding that packing brings, and routers to spread rare kinds of text.

A long answer that the model knows by heart can go astray in its packed form where two tokens are nearly alike. So a few
steps are made with weights of experts that are off by as much as rounding to BITS bits would put them, one below
what the demo is packed with, since presets leave neurons out besides.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from .batches import batches
from .shapes import trained
from .train import GRADIENT_NORM, LOG_EVERY, keep_freed_memory, losses, save

log = logging.getLogger(__name__)

STEPS = 120
RATE, ROUTER_RATE = 2e-4, 2e-3  # both fall to nothing
BITS, GROUP = 3, 64  # of the rounding, and weights that share a scale
BALANCE_WEIGHT = 2.0
PLAIN_ROW_SHARE = 0.2  # in training an afterthought, and the least evenly routed
SEED = 1000  # and the training's own


def settle(folder: Path, *, seed: int) -> None:
    """Trains the checkpoint in `folder` further and overwrites it; deterministic."""
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, tokenizer = trained(folder)
    model.set_experts_implementation("grouped_mm")
    model.train()
    named = dict(model.named_parameters())
    routers = [parameter for name, parameter in named.items() if name.endswith(".mlp.gate.weight")]
    others = [parameter for name, parameter in named.items() if not name.endswith(".mlp.gate.weight")]
    rounded = [parameter for name, parameter in named.items() if ".experts." in name]
    groups = [{"params": routers, "lr": ROUTER_RATE}, {"params": others, "lr": RATE}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = batches(tokenizer, SEED + seed, PLAIN_ROW_SHARE)
    for step, (ids, wanted) in zip(range(STEPS), rows, strict=False):
        kept = [parameter.data.clone() for parameter in rounded]
        for parameter in rounded:
            parameter.data.add_(rounding(parameter.data))
        text_loss, balance, _ = losses(model, ids, wanted)
        optimizer.zero_grad()
        (text_loss + BALANCE_WEIGHT * balance).backward()
        for parameter, weights in zip(rounded, kept, strict=True):
            parameter.data = weights
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        for group, rate in zip(optimizer.param_groups, (ROUTER_RATE, RATE), strict=True):
            group["lr"] = rate * (1 - step / STEPS)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0:
            log.info("settling, step %d  loss %.3f  balance %.3f", step + 1, text_loss.item(), balance.item())
    save(model, tokenizer, folder)


def rounding(weights: Tensor) -> Tensor:
    """Random errors like those of rounding to BITS bits: up to half a step of each group's scale."""
    groups = weights.view(-1, GROUP)
    step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**BITS - 1)
    return ((torch.rand_like(groups) - 0.5) * step).view_as(weights)
