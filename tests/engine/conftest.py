"""Fixtures that tests of links (moving.py), of the decoder's pass (step_models.py) and of the pool (pools.py) share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from floe_chat.engine.offload import row_pool
from floe_chat.kernels.offload.placing import StepTable
from torch import Tensor

from .moving import NBYTES, ROWS, SENTINEL, SLOTS, Gated, GatedLink
from .ram_link import RamLink


@pytest.fixture
def source() -> Tensor:
    return torch.randint(0, 256, (ROWS, NBYTES), dtype=torch.uint8)


@pytest.fixture
def target() -> Tensor:
    return torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)


@pytest.fixture(params=[GatedLink, RamLink], ids=["compiled", "Python"])
def gated(request: pytest.FixtureRequest) -> Iterator[Callable[..., Gated]]:
    made: list[Gated] = []

    def make(chunk: int = 10, fail_at: int = -1) -> Gated:
        made.append(request.param(NBYTES, chunk, fail_at))
        return made[-1]

    yield make
    for link in made:
        link.open()
        link.close()


@pytest.fixture(params=["native", "numpy"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of a pool's tables."""
    if request.param == "numpy":

        def make(*given: Any) -> tuple[StepTable, str]:
            return StepTable(*given), "the test's choice"

        monkeypatch.setattr(row_pool, "make", make)
    elif row_pool.RowPool(1, 1, 1, 1).reason != "compiled":
        pytest.skip("the compiled kernels are not there")
