"""`round_matrix`: grids by least squares, and errors that are passed on, compiled and in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels import reference
from floe_chat.kernels.cpu import native_rounding
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.types import Feedback, Rounded
from torch import Tensor

from ..covering import covering

SHAPES = [(64, 128), (200, 64), (1, 20), (40, 1), (97, 26), (130, 90), (5, 640)]  # rows, columns
Problem = tuple[Tensor, Feedback, Tensor | None, int]


def moments(n: int, drawn: torch.Generator) -> Tensor:
    """How n numbers move together: some of them strongly."""
    x = torch.randn(max(8, n), n, generator=drawn) @ (torch.eye(n) + torch.randn(n, n, generator=drawn) / n**0.5)
    return x.T @ x / len(x) + 0.05 * torch.eye(n)


def problem(rows: int, columns: int, kind: str, seed: int = 0) -> Problem:
    """A matrix, by how much errors change numbers, weights of a group that add up to 1, and the size of groups."""
    drawn = torch.Generator().manual_seed(seed + 1000 * rows + columns)
    matrix = torch.randn(rows, columns, generator=drawn) * torch.rand(rows, 1, generator=drawn).add(0.01)
    group = next(g for g in (64, 26, 10, 1) if columns % g == 0)
    upper = torch.linalg.cholesky(moments(rows if kind == "down" else columns, drawn).flip(0, 1)).flip(0, 1)
    lower = (upper / upper.diagonal()).T.contiguous()
    weight = torch.rand(columns // group, group, generator=drawn) + 0.01
    weight = (weight / weight.sum(1, keepdim=True)).flatten()
    return matrix, Feedback(lower), None if kind == "down" else weight, group


def each(grid: Tensor, shape: torch.Size) -> Tensor:
    """A grid's number for each value."""
    return grid.repeat_interleave(shape[1] // grid.shape[1], dim=1)


def lost(matrix: Tensor, made: Rounded, feedback: Feedback, *, down: bool) -> float:
    """The energy that outputs lose, where errors feed back as it says (LDLQ's: |e M|², with D of ones)."""
    wrong = matrix.double() - (made.codes - each(made.zero, matrix.shape)) * each(made.scale, matrix.shape)
    lower = feedback.lower.double()
    return float((lower @ wrong if down else wrong @ lower.T).square().sum())


@covering(
    {"isa": ["avx512", "avx2", "portable"], "bits": [2, 3, 4], "short": [False, True], "half": [False, True]},
    {"shape": SHAPES, "kind": ["along", "down"]},
)
def test_numbers_are_rounded_as_defined(
    isa: str,
    bits: int,
    shape: tuple[int, int],
    kind: str,
    *,
    short: bool,
    half: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not half:
        monkeypatch.setattr(native_rounding, "by_bfloat16", lambda: False)
    matrix, feedback, weight, group = problem(*shape, kind)
    arguments = matrix, feedback, bits, group, weight, torch.float32
    made = native_rounding.round_matrix(*arguments, short=short)
    codes, scale, zero, values = made
    assert codes.max() <= 2**bits - 1
    for grid in (scale, zero):
        assert torch.equal(grid, grid.half().float()) and bool(grid.isfinite().all())
    if short:
        VectorLayout(1, bits, 1, short=True).stored(scale.half(), zero.half())  # refuses what bytes cannot hold
    scales, zeros = (each(grid, matrix.shape) for grid in (scale, zero))
    assert values is not None and torch.equal(values, (codes - zeros) * scales)
    # Each code is the nearest to its number and what the errors before it add.
    wrong, lower = (matrix - values).double(), feedback.lower.double().tril(-1)
    aim = matrix.double() + (lower @ wrong if kind == "down" else wrong @ lower.T)
    place = (aim / scales + zeros).clamp(0, 2**bits - 1)
    slack = 0.05 if half and native_rounding.by_bfloat16() else 2e-3
    assert float((codes - place).abs().max()) <= 0.5 + slack
    # And as little is lost as by the definition.
    theirs = reference.round_matrix(*arguments, short=short)
    mine, theirs = (lost(matrix, one, feedback, down=kind == "down") for one in (made, theirs))
    assert mine <= 1.03 * theirs + 1e-9


@pytest.mark.usefixtures("on_backend")
@covering({"dtype": [torch.float32, torch.float16, torch.bfloat16], "kind": ["along", "down"], "bits": [2, 3, 4]})
def test_values_on_a_grid_stay_as_they_are(dtype: torch.dtype, kind: str, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (128, 128), generator=torch.Generator().manual_seed(bits))
    codes[:, ::64], codes[:, 1::64] = 0, 2**bits - 1
    values = (codes - 2.5) * 0.125
    _, feedback, weight, _ = problem(128, 128, kind)
    made = kernels.round_matrix(values.to(dtype), feedback, bits, 64, weight=weight, values=torch.float32)
    assert made.values is not None
    torch.testing.assert_close(made.values, values, rtol=0, atol=1e-4)


@covering({"bits": [2, 3, 4], "kind": ["along", "down"]})
def test_scales_of_a_byte_cost_next_to_nothing(bits: int, kind: str) -> None:
    matrix, feedback, weight, group = problem(128, 128, kind)
    long, short = (
        lost(
            matrix,
            kernels.round_matrix(matrix, feedback, bits, group, weight=weight, short=short),
            feedback,
            down=weight is None,
        )
        for short in (False, True)
    )
    assert short <= 1.05 * long


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("kind", ["along", "down"])
def test_bfloat16_values_are_those_numbers_rounded(kind: str) -> None:
    matrix, feedback, weight, group = problem(40, 128, kind)
    wide, narrow = (
        kernels.round_matrix(matrix, feedback, 3, group, weight=weight, values=kind).values
        for kind in (torch.float32, torch.bfloat16)
    )
    assert wide is not None and narrow is not None and torch.equal(wide.bfloat16(), narrow)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("middle", [0.5, -0.5, 3.0, -3.0])
def test_grids_of_bytes_reach_values_far_from_zero(middle: float) -> None:
    """Their zeros are among the codes: what is all above 0, or below, takes a wider grid from there."""
    values = (torch.rand(8, 64, generator=torch.Generator().manual_seed(1)) - 0.5) * 0.4 + middle
    even = torch.full((64,), 1 / 64)
    made = kernels.round_matrix(values, Feedback(torch.eye(64)), 4, 64, weight=even, short=True, values=torch.float32)
    assert made.values is not None
    assert float((made.values - values).square().mean().sqrt()) <= 0.4 * (abs(middle) + 0.2) / 15


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e3])
def test_what_a_byte_cannot_hold_shows(value: float) -> None:
    values, feedback, weight, _ = problem(32, 16, "along")
    values[5, 3] = value
    made = kernels.round_matrix(values, feedback, 4, 16, weight=torch.full((16,), 1 / 16), short=True)
    assert (made.scale.isfinite() & made.zero.isfinite()).sum() == 31
    with pytest.raises(ValueError, match="no scales of one byte"):
        kernels.round_matrix(values, feedback, 8, 16, weight=weight, short=True)


@pytest.mark.usefixtures("on_backend")
def test_constant_values_keep_their_mean() -> None:
    values = torch.tensor([[0.0], [0.3], [-2.0], [40.0]]).expand(4, 16).contiguous()
    values[3] += torch.linspace(0, 1e-5, 16)
    even = torch.full((16,), 1 / 16)
    made = kernels.round_matrix(values, Feedback(torch.eye(16)), 4, 16, weight=even, values=torch.float32)
    assert made.values is not None and float((made.values - values).norm() / values.norm()) <= 1e-3


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("kind", ["along", "down"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_float16_cannot_hold_shows(value: float, kind: str) -> None:
    values, feedback, weight, group = problem(16, 40, kind)
    values[3, 5] = value
    made = kernels.round_matrix(values, feedback, 4, group, weight=weight)
    assert not bool((made.scale.isfinite() & made.zero.isfinite()).all())


@pytest.mark.usefixtures("on_backend")
def test_what_does_not_fit_is_refused() -> None:
    matrix, feedback, weight, _ = problem(32, 64, "along")
    assert weight is not None
    for wrong in (
        {"feedback": Feedback(feedback.lower[:8])},
        {"feedback": Feedback(feedback.lower.double())},
        {"bits": 0},
        {"bits": 9},
        {"weight": weight[:8]},
        {"weight": None},
        {"group": 7},
        {"group": 0},
        {"group": 512},
        {"matrix": matrix[0]},
        {"matrix": matrix.T},
        {"matrix": matrix.double()},
        {"matrix": matrix[:0]},
        {"values": torch.float16},
    ):
        arguments: dict[str, Any] = {
            "matrix": matrix,
            "feedback": feedback,
            "bits": 4,
            "group": 64,
            "weight": weight,
        } | wrong
        with pytest.raises(ValueError):
            kernels.round_matrix(**arguments)


@pytest.mark.parametrize("kind", ["along", "down"])
def test_threads_change_nothing(kind: str, two_threads: None) -> None:
    matrix, feedback, weight, group = problem(1000, 192, kind)
    made = [native_rounding.round_matrix(matrix, feedback, 3, group, weight, torch.float32)]
    torch.set_num_threads(1)
    made.append(native_rounding.round_matrix(matrix, feedback, 3, group, weight, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True) if a is not None and b is not None)
