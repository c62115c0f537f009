"""Experts that stream through a ring: each is whole when its turn comes, whatever is in the pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload.expert_ring import Piece
from floe_chat.engine.offload.offload import Offload

from .driver import open_model
from .offloading import EVERYTHING, offloaded

RANDOM = random.Random(7)


@dataclass
class Streamed:
    shared: Offload
    loaded: LoadedModel

    def rows(self, piece: Piece) -> torch.Tensor:
        layer = self.shared.ring.layers[piece.layer]
        return layer.rows[piece.expert * piece.neurons : (piece.expert + 1) * piece.neurons]

    def take(self, count: int, parts: int = 1) -> list[Piece]:
        """The next pieces, each compared with what is in RAM and overwritten."""
        found: list[Piece] = []
        for _ in range(count):
            piece, up, rows = self.shared.ring.arrived()
            assert torch.equal(rows, self.rows(piece))
            if up is not None:
                own = self.loaded.packed.layer(piece.layer).signal
                assert torch.equal(up.q[0], own.q.view(-1, piece.neurons, own.q.shape[2])[piece.expert])
            rows.fill_(255)
            found.append(piece)
            self.shared.ring.used()
        return found


@pytest.fixture(scope="module")
def loaded(shape: Callable[[str], Path]) -> LoadedModel:
    return open_model(shape("mixtral"))


@pytest.fixture(params=["throttled", "virtual"])
def streamed(loaded: LoadedModel, request: pytest.FixtureRequest) -> Generator[Streamed]:
    with offloaded(loaded, EVERYTHING, 0.4, kind=request.param) as shared:
        for layer in range(2):
            keys = np.sort(RANDOM.sample(range(5 * 98), 90)).astype(np.int64)
            shared.scheduler.fetch(layer, keys, urgent=True)
        shared.settle()
        shared.ring.register(2, loaded.packed.layer(2))  # its up projections are in RAM
        yield Streamed(shared, loaded)


@pytest.mark.parametrize("neurons", [98, 49])
def test_every_piece_is_whole_and_in_order(streamed: Streamed, neurons: int) -> None:
    ring = streamed.shared.ring
    pieces = [Piece(RANDOM.randrange(3), RANDOM.randrange(490 // neurons), neurons) for _ in range(40)]
    wanted, found = iter(pieces), list[Piece]()
    ring.begin(0, neurons, ())
    while len(found) < len(pieces):
        ring.fill(wanted)
        assert 0 < len(ring.coming) <= ring.most
        found += streamed.take(RANDOM.randint(1, len(ring.coming)))
    assert found == pieces and not ring.coming


def test_what_a_layer_does_not_need_gives_its_place_back(streamed: Streamed) -> None:
    ring = streamed.shared.ring
    for _ in range(10):
        ring.begin(1, 98, ())
        assert not ring.coming
        ring.fill(iter([Piece(1, 2, 98), Piece(1, 0, 98), Piece(1, 4, 98)]))
        sent = len(ring.coming)
        ring.begin(1, 98, {0, 3})
        assert [one.piece.expert for one in ring.coming] == [0] and sent == ring.most == 2
        ring.fill(iter([Piece(1, 3, 98)]))
        assert streamed.take(2) == [Piece(1, 0, 98), Piece(1, 3, 98)]
        ring.begin(1, 49, ())  # experts in halves from here on
        ring.fill(iter([Piece(1, half, 49) for half in (9, 0, 3)]))
        assert [piece.expert for piece in streamed.take(3)] == [9, 0, 3]


def test_nothing_is_on_its_way_once_it_is_cleared(streamed: Streamed) -> None:
    ring = streamed.shared.ring
    ring.begin(2, 98, ())
    ring.fill(Piece(2, expert, 98) for expert in range(5))
    transfers = [one.transfer for one in ring.coming]
    ring.clear()
    assert transfers and all(one.done for one in transfers) and not ring.coming
    ring.fill(iter([Piece(2, 4, 98)]))
    assert streamed.take(1) == [Piece(2, 4, 98)]
