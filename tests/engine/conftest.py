"""Fixtures that tests of links (moving.py), of the decoder's pass (step_models.py) and of the pool (pools.py) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from .moving import NBYTES, ROWS, SENTINEL, SLOTS, GatedLink


@pytest.fixture
def source() -> Tensor:
    return torch.randint(0, 256, (ROWS, NBYTES), dtype=torch.uint8)


@pytest.fixture
def target() -> Tensor:
    return torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)


@pytest.fixture
def gated() -> Iterator[Callable[..., GatedLink]]:
    made: list[GatedLink] = []

    def make(chunk: int = 10, fail_at: int = -1) -> GatedLink:
        made.append(GatedLink(NBYTES, chunk, fail_at))
        return made[-1]

    yield make
    for link in made:
        link.open()
        link.close()
