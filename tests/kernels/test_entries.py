"""Keys and values as codes: how near they are, what is exact, and what is not a number."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels.entries import CODES, element, entry_of, stored, values


@pytest.mark.parametrize(("rows", "dim"), [(2, 2), (2, 6), (6, 14), (16, 128)])
def test_codes_are_the_nearest_of_their_scale(rows: int, dim: int) -> None:
    given = torch.randn(3, 5, rows, dim) * torch.logspace(-3, 4, rows)[:, None]
    coded = stored(given, CODES)
    assert coded.shape == (3, 5, *entry_of(rows, dim, CODES)) and coded.dtype == CODES
    assert coded[0, 0].nbytes == rows * dim * element(CODES, dim)
    read = values(coded, rows, dim, torch.float32)
    step = given.abs().amax(-1, keepdim=True) / 127
    # Half a step, and what the scale's own rounding to float16 adds at the largest number.
    rounding = (step * 2**-11).clamp_min(2**-25)
    assert ((read - given).abs() <= 0.501 * (step + rounding) + 127 * rounding).all()


def test_what_was_read_is_stored_without_loss() -> None:
    once = stored(torch.randn(50, 4, 34) * torch.logspace(-2, 3, 50)[:, None, None], CODES)
    assert torch.equal(stored(values(once, 4, 34, torch.float32), CODES), once)
    assert torch.equal(stored(values(once, 4, 34, torch.float64), CODES), once)


def test_rows_of_nothing_and_of_no_numbers() -> None:
    given = torch.randn(6, 2, 10)
    given[0], given[1] = 0.0, 1e-9
    for row, wrong in ((2, torch.nan), (3, torch.inf), (4, -torch.inf)):
        given[row, 1, 7] = wrong
    read = values(stored(given, CODES), 2, 10, torch.float32)
    assert (read[:2] == 0).all() and read[2:5, 0].isfinite().all() and read[2:5, 1].isnan().all()
    assert read[5].isfinite().all()


def test_other_forms_are_the_numbers_themselves() -> None:
    given = torch.randn(3, 4, 6)
    assert entry_of(4, 6, torch.float16) == (4, 6) and element(torch.float16, 6) == 2
    assert torch.equal(values(stored(given, torch.float16), 4, 6, torch.float32), given.half().float())
