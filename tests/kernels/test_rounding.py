"""`round_rows`: grids by least squares, and errors that are passed on, compiled and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels import reference
from floe_chat.kernels.cpu.native_rounding import round_rows
from floe_chat.kernels.layouts import VectorLayout
from torch import Tensor

from ..covering import covering

SHAPES = [(64, 64), (64, 200), (20, 1), (1, 40), (13, 97), (64, 26), (5, 130)]  # rows, columns
Rounded = tuple[Tensor, Tensor, Tensor]


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a factor and weights that add up to 1."""
    drawn = torch.Generator().manual_seed(seed + 1000 * rows + columns)
    left = torch.randn(rows, columns, generator=drawn) * torch.rand(columns, generator=drawn).add(0.01)
    factor = (
        torch.randn(rows, rows, generator=drawn).mul(0.2).triu(1) + torch.rand(rows, generator=drawn).add(0.5).diag()
    )
    weight = torch.rand(rows, generator=drawn) + 0.01
    return left, factor, weight / weight.sum()


def grid_arguments(columns: int, weight: Tensor, kind: str) -> tuple[Tensor | None, int | None]:
    """Grids of columns, or of the largest groups of a few columns."""
    return (weight, None) if kind == "columns" else (None, next(g for g in (64, 26, 10, 1) if columns % g == 0))


def each(grid: Tensor, shape: torch.Size) -> Tensor:
    """A grid's number for each value."""
    return grid.repeat_interleave(shape[1] // grid.shape[1], dim=1).expand(shape)


def error_of(values: Tensor, scale: Tensor, zero: Tensor, bits: int, weight: Tensor) -> Tensor:
    """What each value's nearest code leaves over, squared."""
    code = (values / each(scale, values.shape) + each(zero, values.shape)).round().clamp(0, 2**bits - 1)
    wrong = (code - each(zero, values.shape)) * each(scale, values.shape) - values
    return wrong.square() * weight[:, None]


@covering(
    {"isa": ["avx512", "avx2", "portable"], "bits": [2, 3, 4], "short": [False, True]},
    {"shape": SHAPES, "kind": ["columns", "groups"]},
)
def test_rows_are_rounded_as_defined(isa: str, bits: int, shape: tuple[int, int], kind: str, *, short: bool) -> None:
    given, factor, weight = problem(*shape)
    by = grid_arguments(shape[1], weight, kind)
    left = given.clone()
    codes, scale, zero = round_rows(left, factor, bits, *by, short=short)
    assert codes.max() <= 2**bits - 1
    for grid in (scale, zero):
        assert torch.equal(grid, grid.half().float()) and bool(grid.isfinite().all())
    if short:
        VectorLayout(1, bits, 1, short=True).stored(scale.half(), zero.half())  # refuses what bytes cannot hold
    # From row to row: what is left of each, its code the nearest, the rest passed on.
    rest, scales, zeros = given.double(), each(scale, given.shape).double(), each(zero, given.shape).double()
    for row in range(shape[0]):
        place = (rest[row] / scales[row] + zeros[row]).clamp(0, 2**bits - 1)
        assert float((codes[row] - place).abs().max()) <= 0.5 + 1e-3
        error = (rest[row] - (codes[row] - zeros[row]) * scales[row]) / factor[row, row]
        torch.testing.assert_close(left[row].double(), error, rtol=1e-3, atol=1e-4)
        rest[row + 1 :] -= factor[row, row + 1 :, None] * error
    # The grids leave as little over as those of the definition.
    _, scale, zero = reference.round_rows(given.clone(), factor, bits, *by, short=short)
    mine, theirs = (
        error_of(given, *grid, bits, weight if kind == "columns" else torch.ones_like(weight)).sum()
        for grid in (round_rows(given.clone(), factor, bits, *by, short=short)[1:], (scale, zero))
    )
    assert float(mine) <= 1.01 * float(theirs) + 1e-7


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("kind", ["columns", "groups"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_on_a_grid_stay_as_they_are(bits: int, kind: str) -> None:
    codes = torch.randint(0, 2**bits, (64, 128), generator=torch.Generator().manual_seed(bits))
    codes[::32], codes[1::32], codes[:, ::64], codes[:, 1::64] = 0, 2**bits - 1, 0, 2**bits - 1
    values = (codes - 2.5) * 0.125
    _, factor, weight = problem(64, 128)
    left = values.clone()
    found, scale, zero = kernels.round_rows(
        left, factor, bits, weight=weight if kind == "columns" else None, group=64 if kind == "groups" else None
    )
    back = (found - each(zero, values.shape)) * each(scale, values.shape)
    torch.testing.assert_close(back, values, rtol=0, atol=1e-4)
    assert float(left.abs().max()) <= 1e-3


@covering({"bits": [2, 3, 4], "kind": ["columns", "groups"]})
def test_scales_of_a_byte_cost_next_to_nothing(bits: int, kind: str) -> None:
    given, factor, weight = problem(64, 128)
    lost = [
        kernels.round_rows(
            left := given.clone(),
            factor,
            bits,
            weight=weight if kind == "columns" else None,
            group=64 if kind == "groups" else None,
            short=short,
        )
        and float((left * factor.diag()[:, None]).square().sum())
        for short in (False, True)
    ]
    assert lost[1] <= 1.05 * lost[0]


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("middle", [0.5, -0.5, 3.0, -3.0])
def test_grids_of_bytes_reach_values_far_from_zero(middle: float) -> None:
    """Their zeros are among the codes: what is all above 0, or below, takes a wider grid from there."""
    values = (torch.rand(64, 8, generator=torch.Generator().manual_seed(1)) - 0.5) * 0.4 + middle
    even = torch.full((64,), 1 / 64)
    codes, scale, zero = kernels.round_rows(values.clone(), torch.eye(64), 4, weight=even, short=True)
    wrong = (codes - each(zero, values.shape)) * each(scale, values.shape) - values
    assert float(wrong.square().mean().sqrt()) <= 0.4 * (abs(middle) + 0.2) / 15


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e3])
def test_what_a_byte_cannot_hold_shows(value: float) -> None:
    values, factor, weight = problem(16, 32)
    values[3, 5] = value
    _, scale, zero = kernels.round_rows(values, factor, 4, weight=weight, short=True)
    assert (scale.isfinite() & zero.isfinite()).sum() == 31
    with pytest.raises(ValueError, match="no scales of one byte"):
        kernels.round_rows(values, factor, 8, weight=weight, short=True)


@pytest.mark.usefixtures("on_backend")
def test_constant_values_keep_their_mean() -> None:
    values = torch.tensor([0.0, 0.3, -2.0, 40.0]).expand(16, 4).contiguous()
    values[:, 3] += torch.linspace(0, 1e-5, 16)
    codes, scale, zero = kernels.round_rows(values.clone(), torch.eye(16), 4, weight=torch.full((16,), 1 / 16))
    assert relative(codes, scale, zero, values) <= 1e-3


def relative(codes: Tensor, scale: Tensor, zero: Tensor, values: Tensor) -> float:
    back = (codes - each(zero, values.shape)) * each(scale, values.shape)
    return float((back - values).norm() / values.norm())


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_float16_cannot_hold_shows(value: float) -> None:
    values, factor, weight = problem(16, 32)
    values[3, 5] = value
    _, scale, zero = kernels.round_rows(values, factor, 4, weight=weight)
    assert not bool((scale.isfinite() & zero.isfinite()).all())


@pytest.mark.usefixtures("on_backend")
def test_what_does_not_fit_is_refused() -> None:
    values, factor, weight = problem(16, 32)
    for wrong in (
        {"factor": factor[:8]},
        {"factor": factor.double()},
        {"bits": 0},
        {"bits": 9},
        {"weight": weight[:8]},
        {"weight": None},
        {"group": 8},
        {"weight": None, "group": 7},
        {"weight": None, "group": 0},
        {"left": values[0]},
        {"left": values.T},
        {"left": values.double()},
        {"left": values[:0]},
    ):
        arguments: dict[str, Any] = {"left": values, "factor": factor, "bits": 4, "weight": weight} | wrong
        with pytest.raises(ValueError):
            kernels.round_rows(**arguments)


def test_threads_change_nothing(two_threads: None) -> None:
    values, factor, weight = problem(64, 1000)
    first, second = values.clone(), values.clone()
    by_two = round_rows(first, factor, 3, weight, None)
    torch.set_num_threads(1)
    by_one = round_rows(second, factor, 3, weight, None)
    assert all(torch.equal(a, b) for a, b in zip((*by_two, first), (*by_one, second), strict=True))
