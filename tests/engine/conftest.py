"""Fixtures that the tests of links share, see moving.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels import reference
from torch import Tensor

from .moving import NBYTES, ROWS, SENTINEL, SLOTS, Gated, compute_with


@pytest.fixture(params=["native", "reference"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> kernels.Backend:
    """Which code packs and places: the machine's own choice, or plain torch."""
    chosen = kernels.choose("cpu")
    if request.param == "reference":
        chosen = replace(chosen, gather_rows=reference.gather_rows, pool_scatter=reference.pool_scatter)
    compute_with(chosen, monkeypatch)
    return chosen


@pytest.fixture
def source() -> Tensor:
    return torch.randint(0, 256, (ROWS, NBYTES), dtype=torch.uint8)


@pytest.fixture
def target() -> Tensor:
    return torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)


@pytest.fixture
def gated() -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(chunk: int = 10, fail_at: int = -1) -> Gated:
        made.append(Gated(chunk, fail_at))
        return made[-1]

    yield make
    for link in made:
        link.open()
        link.close()
