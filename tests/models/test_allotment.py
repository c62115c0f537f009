"""What each expert of a layer leaves out: what loses least, and as much as the layer is asked for."""

from __future__ import annotations

import pytest
import torch
from floe_chat.models.packing.allotment import (
    LEAST,
    STEPS,
    LayerTables,
    directions,
    lost_below,
    read_at,
    shares_of,
)
from floe_chat.models.packing.calibration import QUANTILES, quantile_table, threshold_at
from torch import Tensor


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_lost_is_the_outputs_own_error() -> None:
    values, h, down = drawn(0, 40, 60), drawn(1, 40, 60), drawn(2, 60, 48)
    table = quantile_table(values)
    found = lost_below(values, table, h, directions(down))  # 48 columns are seen whole
    for step in (1, 7, 13, STEPS):
        limit = threshold_at(table[None], step / STEPS)[0]
        wanted = (h.masked_fill(values.abs() >= limit, 0) @ down).square().sum() / len(h)
        assert abs(float(found[step]) - float(wanted)) <= 1e-4 * float(wanted), step
    assert float(found[0]) == 0


def test_few_directions_tell_lengths() -> None:
    down, h = drawn(3, 200, 1024), drawn(4, 100, 200)
    seen = directions(down)
    assert seen.shape[1] < 100
    assert abs(float((h @ seen).square().sum() / (h @ down).square().sum()) - 1) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_shares_make_up_the_layers_and_cost_less(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(LEAST, 400, (6,), generator=random).double()
    scale = 10 ** (2 * torch.rand(6, 1, generator=random, dtype=torch.float64))
    even = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
    power = 1 + 3 * torch.rand(6, 1, generator=random, dtype=torch.float64)
    lost = scale * even**power
    shares = shares_of(lost, tokens)
    assert shares.shape == (6, QUANTILES)
    assert bool((shares.diff(dim=1) >= -1e-12).all()) and bool((shares[:, 0] == 0).all())
    asked = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    assert torch.allclose((shares * tokens[:, None]).sum(0) / tokens.sum(), asked, atol=1e-9)
    for place in (20, 50, 80):
        cost, usual = (
            float((read_at(lost, part[:, None].expand(6, 1)) * tokens[:, None]).sum())
            for part in (shares[:, place], asked[place].expand(6))
        )
        assert cost < usual


def test_alike_experts_leave_out_alike() -> None:
    lost = (torch.linspace(0, 1, STEPS + 1, dtype=torch.float64) ** 2).repeat(3, 1)
    shares = shares_of(lost, torch.tensor([100.0, 20.0, 57.0]))
    assert float((shares - torch.linspace(0, 1, QUANTILES, dtype=torch.float64)).abs().max()) <= 1 / STEPS


def test_experts_that_are_exempt_or_hardly_heard_keep_their_tables() -> None:
    tables = LayerTables(4)
    for expert, (count, loud) in enumerate(((50, 1.0), (LEAST - 1, 1.0), (50, 8.0), (60, 3.0))):
        v, h = (loud * drawn(10 * expert + part, count, 32) for part in range(2))
        tables.measure(expert, v, h, drawn(expert, 32, 16), torch.ones(count, 1), torch.ones(count, 1))
    found = tables.allotted(exempt=[2])
    for name, own in tables.own.items():
        assert torch.equal(found[name][1:3], own[1:3])
        assert not torch.equal(found[name][0], own[0]) and not torch.equal(found[name][3], own[3])
        assert bool((found[name].diff(dim=1) >= 0).all())


def test_a_layer_of_one_expert_is_as_it_was() -> None:
    tables = LayerTables(1)
    v, h = drawn(0, 50, 32), drawn(1, 50, 32)
    tables.measure(0, v, h, drawn(2, 32, 16), torch.ones(50, 1), torch.ones(50, 1))
    for name, own in tables.own.items():
        assert torch.allclose(tables.allotted()[name], own, rtol=1e-5)
