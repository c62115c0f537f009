"""Rounding for the inputs that calibration text gives: what reaches the output suffers less than by grids alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from floe_chat.models.pack.quantize import Codes, quantize
from floe_chat.models.packing.rounding import DAMPING, felt, round_down, round_for
from torch import Tensor

Rounding = Callable[[Tensor, int, int], Codes]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def related(tokens: int, inputs: int) -> Tensor:
    """Inputs that move together, some more than others, as a layer's do."""
    return drawn(tokens, inputs // 4) @ drawn(inputs // 4, inputs, seed=1) + 0.3 * drawn(tokens, inputs, seed=2)


def share(wrong: Tensor, right: Tensor) -> float:
    return float((wrong - right).norm() / right.norm())


@pytest.mark.parametrize(("inputs", "group"), [(256, 64), (130, 26), (37, 37)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_a_matrix_gives_suffers_less_than_by_grids_alone(bits: int, inputs: int, group: int) -> None:
    x, matrix = related(600, inputs), drawn(90, inputs, seed=3)
    fresh = related(900, inputs)[600:]  # of the same kind, but not seen
    ours, theirs = (
        share(fresh @ by(matrix, bits, group).dense().T, fresh @ matrix.T)
        for by in (partial(round_for, felt(x)), quantize)
    )
    assert ours <= 0.8 * theirs


@pytest.mark.parametrize(("neurons", "hidden", "group"), [(96, 64, 64), (70, 130, 26), (2500, 8, 8)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_what_down_gives_suffers_less_than_by_grids_alone(bits: int, neurons: int, hidden: int, group: int) -> None:
    # 2,500 neurons do not all take up each other's errors.
    tokens, down = 700, drawn(neurons, hidden, seed=3)
    h = torch.nn.functional.silu(related(tokens + 200, neurons))
    seen, fresh = h[:tokens], h[tokens:]
    ours, theirs = (
        share(fresh @ by(down, bits, group).dense(), fresh @ down) for by in (partial(round_down, seen), quantize)
    )
    assert ours <= 0.95 * theirs


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_hardly_harm_the_rest(tokens: int) -> None:
    """What was seen must not be bought with what was not."""
    x, matrix = related(tokens, 128), drawn(60, 128, seed=3)
    others = drawn(500, 128, seed=9)
    ours, theirs = (
        share(others @ by(matrix, 4, 64).dense().T, others @ matrix.T) for by in (partial(round_for, felt(x)), quantize)
    )
    assert ours <= 1.6 * theirs


@pytest.mark.parametrize("x", [torch.zeros(4, 64), torch.eye(64)[:1] * 1e-20], ids=["nothing", "next-to-nothing"])
def test_inputs_that_say_nothing_are_borne(x: Tensor) -> None:
    matrix = drawn(20, 64, seed=3)
    assert share(round_for(felt(x), matrix, 4, 64).dense(), matrix) <= 0.1
    assert share(round_down(torch.zeros(4, 20), matrix, 4, 64).dense(), matrix) <= 0.1


def test_an_input_that_dwarfs_all_others_is_borne() -> None:
    x = drawn(200, 64)
    x[:, 5] *= 1e4
    matrix = drawn(20, 64, seed=3)
    got = round_for(felt(x), matrix, 4, 64).dense()
    assert share(x @ got.T, x @ matrix.T) <= 0.02 and share(got, matrix) <= 0.3


def test_errors_flow_as_the_moments_factor_says() -> None:
    x = related(500, 40)
    moments = (x.T @ x).double()
    moments /= moments.diagonal().mean()
    found = felt(x)
    lower = found.flow.lower.double()
    assert torch.equal(lower, lower.tril()) and torch.equal(lower.diagonal(), torch.ones(40).double())
    inverse = torch.linalg.inv(lower)
    between = inverse.T @ (moments + DAMPING * torch.eye(40)) @ inverse
    rest = between - between.diagonal().diag()
    assert float(rest.abs().max()) <= 1e-4 * float(between.diagonal().max())
    torch.testing.assert_close(found.weight.double(), moments.diagonal(), rtol=1e-4, atol=0)


def test_eight_bits_are_by_grids_alone() -> None:
    matrix, x = drawn(30, 64), related(50, 64)
    for by in (partial(round_for, felt(x)), partial(round_down, related(50, 30))):
        assert all(torch.equal(a, b) for a, b in zip(by(matrix, 8, 64)[:3], quantize(matrix, 8, 64)[:3], strict=True))


@pytest.mark.parametrize("by", [partial(round_for, felt(related(90, 64))), partial(round_down, related(90, 64))])
def test_weights_that_cannot_be_rounded_are_refused(by: Rounding) -> None:
    matrix = drawn(64, 64)
    for value in (float("nan"), float("inf")):
        broken = matrix.clone()
        broken[3, 5] = value
        with pytest.raises(ValueError, match="not finite"):
            by(broken, 4, 64)
    with pytest.raises(ValueError, match="too large"):
        by(1e7 * matrix, 4, 64)


def test_inputs_that_are_not_finite_are_refused() -> None:
    x = related(90, 64)
    x[5, 3] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        felt(x)


def test_what_is_given_stays_as_it_is() -> None:
    matrix, x = drawn(64, 64), related(90, 64)
    kept, seen = matrix.clone(), x.clone()
    round_for(felt(x), matrix, 4, 64)
    round_down(x, matrix, 4, 64)
    assert torch.equal(matrix, kept) and torch.equal(x, seen)
