"""What tests of replays share: a recorded text, and a model of a size that it can play."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from floe_chat.engine.bench.cards.trace import Trace, record
from floe_chat.engine.bench.cards.width import Width
from floe_chat.engine.bench.synthetic import MODELS
from floe_chat.engine.offload.cards import named as card

from .driver import a_preset

MIXTRAL = Width(MODELS["mixtral-8x7b"])
WIDTH = Width(
    dataclasses.replace(
        MIXTRAL.sizes, hidden=256, intermediate=480, layers=2, experts=4, heads=8, kv_heads=2, head_dim=32, vocab=1000
    )
)
HALF, MORE = a_preset("half", 0.5), a_preset("more", 0.8)
WARM = 6


# So little memory that some rows fit, and not all.
SMALL = dataclasses.replace(card("sim:rtx3060-12gb", study=True), vram_bytes=WIDTH.fixed + 5 * WIDTH.expert_bytes)


def recorded(pack: Path) -> Trace:
    """20 tokens of no meaning."""
    ids = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    return record(pack, ids, "tiny")
