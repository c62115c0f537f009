"""Fixtures that tests of links (moving.py) and of offloading (offloading.py) share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from ..kernels.conftest import isa as isa
from .moving import NBYTES, ROWS, SENTINEL, SLOTS, GatedLink

if TYPE_CHECKING:
    from floe_chat.engine.loader import LoadedModel
    from floe_chat.engine.offload.lane_rates import Rates
    from floe_chat.kernels.layouts import RowLayout


@pytest.fixture(scope="session", autouse=True)
def measured_once() -> Iterator[None]:
    """A home without files knows no rates: the CPU's for a layout are measured once, not by each test that opens it."""
    from floe_chat.engine.planning import device_choice

    measure = device_choice.measured_rates
    measured: dict[object, Rates] = {}

    def once(layout: RowLayout, neurons: int, guess: Rates, place: str = "cpu") -> Rates:
        key = layout, neurons, place
        if key not in measured:
            measured[key] = measure(layout, neurons, guess, place)
        return dataclasses.replace(measured[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_choice, "measured_rates", once)
        yield


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


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A pack of one of SHAPES, made when it is first asked for."""
    from floe_chat.models.packing.pack import PackSpec

    from ..helpers import make_checkpoint, make_pack
    from .offloading import SHAPES

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        make_pack(make_checkpoint(folder / "source", family=name, **SHAPES[name]), folder / "pack", PackSpec(up=3))
        return folder / "pack"

    return made


@pytest.fixture(scope="module", params=["mixtral", "olmoe"])
def loaded(request: pytest.FixtureRequest, shape: Callable[[str], Path]) -> LoadedModel:
    """One of SHAPES, with its rows where they are: `offloaded` changes that for a while."""
    from .driver import open_model

    return open_model(shape(request.param))
