"""Transfers of rows some of which are shorter: each lies at the beginning of its slot, and only its bytes travel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from floe_chat.engine.cards import named as card
from floe_chat.engine.links import ThrottledLink
from floe_chat.engine.transfer import Link, Transfer
from floe_chat.engine.virtual import Clock, VirtualLink
from torch import Tensor

from .moving import FAST, NBYTES, ROWS, SENTINEL, SLOTS

SHORT, SHORT_ROWS = 64, 200


def throttled(chunk: int) -> ThrottledLink:
    return ThrottledLink(NBYTES, rate=FAST, chunk=chunk)


def virtual(chunk: int) -> VirtualLink:
    return VirtualLink(card("sim:rtx3060-12gb"), Clock(), NBYTES, chunk)


@pytest.fixture
def narrow() -> Tensor:
    return torch.randint(0, 256, (SHORT_ROWS, SHORT), dtype=torch.uint8)


def mixed(source: Tensor, narrow: Tensor, target: Tensor, index: list[int], *, urgent: bool = True) -> Transfer:
    slots = np.random.default_rng(len(index)).permutation(SLOTS)[: len(index)].astype(np.int32)
    return Transfer(source, np.array(index, np.int64), target, slots, urgent, 0.0, 0, narrow=narrow)


INDICES = {
    "none": [],
    "long": [5, 599, 0],
    "short": [600, 799, 700],
    "in-turns": [n for pair in zip(range(40), range(620, 660), strict=True) for n in pair],
    "short-first": [*range(640, 670), *range(30, 3, -1)],
    "named-twice": [3, 700, 3, 700],
}


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("make", [throttled, virtual])
@pytest.mark.usefixtures("cpu")
def test_each_row_lies_in_its_slot_and_the_rest_is_untouched(
    make: Callable[[int], Link], index: list[int], chunk: int, source: Tensor, narrow: Tensor, target: Tensor
) -> None:
    transfer = mixed(source, narrow, target, index)
    given, link = (transfer.index.copy(), transfer.slots.copy()), make(chunk)
    link.submit(transfer)
    link.wait(transfer)
    expected = torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8)
    for row, slot in zip(index, transfer.slots.tolist(), strict=True):
        expected[slot, : NBYTES if row < ROWS else SHORT] = source[row] if row < ROWS else narrow[row - ROWS]
    assert torch.equal(target, expected)
    assert link.queued_bytes() == 0 and link.finished() == [transfer]
    assert link.bytes_moved == sum(NBYTES if row < ROWS else SHORT for row in index)
    assert (transfer.index == given[0]).all() and (transfer.slots == given[1]).all()
    link.close()


@pytest.mark.parametrize("make", [throttled, virtual])
@pytest.mark.parametrize("index", [[800], [-1], [0, 800]], ids=str)
def test_rows_that_neither_source_has_are_refused(
    make: Callable[[int], Link], index: list[int], source: Tensor, narrow: Tensor, target: Tensor
) -> None:
    link = make(10)
    with pytest.raises(ValueError, match="row"):
        link.submit(mixed(source, narrow, target, index))
    assert bool((target == SENTINEL).all())
    link.close()


@pytest.mark.parametrize("shape", [(5, 192), (5, 60), (5,)], ids=["longer-than-slots", "no-multiple-of-64", "no-rows"])
def test_short_rows_that_do_not_fit_are_refused(shape: tuple[int, ...], source: Tensor, target: Tensor) -> None:
    link = throttled(10)
    with pytest.raises(ValueError, match="narrow rows"):
        link.submit(mixed(source, torch.zeros(shape, dtype=torch.uint8), target, [0]))
    link.close()


def test_shorter_rows_take_less_virtual_time(source: Tensor, narrow: Tensor, target: Tensor) -> None:
    seconds: list[float] = []
    for first in (0, ROWS):
        link = virtual(100)
        transfer = mixed(source, narrow, target, list(range(first, first + 100)))
        link.submit(transfer)
        link.wait(transfer)
        seconds.append(link.busy_s)
    assert seconds[1] < seconds[0]
