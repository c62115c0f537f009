"""A training that was broken off goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floe_chat.assets.demo.make.progress import TrainingProgress
from torch import nn

PLAN = "steps 6, seed 0"


def made() -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), fused=True)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def test_the_rest_gives_what_the_whole_gives(tmp_path: Path) -> None:
    whole, optimizer = made()
    train(whole, optimizer, range(6))
    half, optimizer = made()
    train(half, optimizer, range(3))
    TrainingProgress(tmp_path / "new" / "state.safetensors", half, optimizer, PLAN).keep(3)
    rest, optimizer = made()
    kept = TrainingProgress(tmp_path / "new" / "state.safetensors", rest, optimizer, PLAN)
    assert kept.restore() == 3
    train(rest, optimizer, range(3, 6))
    for ours, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    kept.remove()
    assert kept.restore() == 0 and not [*(tmp_path / "new").iterdir()]


@pytest.mark.parametrize("damage", ["plan", "cut", "none"])
def test_another_state_is_not_gone_on_with(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "state.safetensors"
    model, optimizer = made()
    train(model, optimizer, range(2))
    if damage != "none":
        TrainingProgress(file, model, optimizer, "another" if damage == "plan" else PLAN).keep(2)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    fresh, optimizer = made()
    before = [parameter.clone() for parameter in fresh.parameters()]
    assert TrainingProgress(file, fresh, optimizer, PLAN).restore() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.parameters(), strict=True))
