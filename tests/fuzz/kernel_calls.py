"""Hostile calls of every kernel: wrong types, shapes, strides, devices, sizes, indices and values, and shared memory.

A call is refused with a ValueError (or MemoryError), and nothing was written; or both the compiled kernels and their
plain definition take it, and agree. What crashes or reads memory of others ends the process: that is a finding, most of
all on a build with sanitizers (`tests/kernels/test_sanitizer.py`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from floe_chat.kernels import backend
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu import native
from floe_chat.kernels.types import Active
from torch import Tensor

from . import _kernel_operations, _kernel_steps, _kernel_tables
from . import _operands as made
from ._operands import Case

KINDS = (*_kernel_operations.KINDS, *_kernel_operations.KINDS, *_kernel_steps.KINDS, *_kernel_tables.KINDS)


@dataclass(frozen=True)
class Refused:
    """The call was refused, and why; `memory`: for want of it, or of range, of which each path may need less."""

    why: str
    memory: bool = False


def attempt(seed: int, scratch: Path) -> str:
    """One call; see the driver."""
    rng = Random(seed)
    torch.set_num_threads(rng.choice((1, 2)))
    native.select_isa(rng.choice(instruction_sets()))
    if rng.random() < 0.1:
        return _kernel_tables.tables(rng)
    case = rng.choice(KINDS)(rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        _spoil(rng, case)
    before = {name: _copy(case.operands[name]) for name in case.written}
    compiled = _outcome(case, rng.choice((native, kernels)))
    after = {name: _copy(case.operands[name]) for name in case.written}
    for name in case.written if isinstance(compiled, Refused) else ():
        assert _same(before[name], after[name]), f"{name} was written to by a call that was refused: {compiled}"
    if isinstance(compiled, Refused) and (compiled.memory or not case.checked):
        return "no memory" if compiled.memory else "refused"
    for name, value in before.items():
        _restore(case.operands[name], value)
    plain = _outcome(case, None)
    if isinstance(plain, Refused) and plain.memory:
        return "no memory"
    assert isinstance(compiled, Refused) == isinstance(plain, Refused), f"compiled: {compiled}; plain: {plain}"
    if isinstance(compiled, Refused):
        return "refused"
    x = case.operands.get("x")
    single = not isinstance(x, Tensor) or x.dtype == torch.float32  # one operand may have become another type
    exact = case.operands.get("x_bits", 22) == 22 and case.tolerance is not None and single
    if all(map(_is_moderate, case.operands.values())):
        _agree(
            compiled,
            plain,
            case.tolerance if exact else None,
            [_outcome(_shaken(case, turn), None) for turn in range(3 * exact)],
        )
    return "computed"


@cache
def instruction_sets() -> tuple[str, ...]:
    found: list[str] = []
    for name in native.ISAS:
        try:
            found.append(native.select_isa(name).name)
        except native.NativeUnavailableError:
            continue
    return tuple(found)


@cache
def plain_backend() -> kernels.Backend:
    return backend._reference("cpu", "to compare with")  # pyright: ignore[reportPrivateUsage]


def _plain_for(device: torch.device | str) -> kernels.Backend:
    backend.choose(device)  # refuses devices that there are not
    return plain_backend()


def _outcome(case: Case, module: Any) -> Any:
    """What the functions of a module return, or if it is None the definitions; or that they refuse."""
    patched = nullcontext() if module else mock.patch.object(kernels, "choose", _plain_for)
    try:
        with torch.no_grad(), patched:
            if module is None and case.plain is not None:
                return case.plain(case.operands)
            return case.run(module or kernels, case.operands)
    except ValueError as error:
        return Refused(str(error))
    except MemoryError as error:
        return Refused(str(error), memory=True)
    except RuntimeError as error:  # how torch says that there is no memory for a copy
        if "allocate" not in str(error) and "overflow" not in str(error):
            raise
        return Refused(str(error), memory=True)


def _spoil(rng: Random, case: Case) -> None:
    """Make one operand hostile; weights are taken apart for it and put together again."""
    name = rng.choice(sorted(case.operands))
    given = case.operands[name]
    if isinstance(given, Tensor):
        case.operands[name] = made.hostile(rng, given)
    elif isinstance(given, np.ndarray):
        case.operands[name] = made.hostile_array(rng, given)
    elif isinstance(given, bool):
        case.operands[name] = not given
    elif isinstance(given, int):
        case.operands[name] = rng.choice((*made.NUMBERS, 0, given + 1, given - 1))
    elif isinstance(given, float):
        case.operands[name] = rng.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0, 1e300))
    elif hasattr(given, "whole"):
        parts = [f.name for f in fields(given) if isinstance(getattr(given, f.name), Tensor)]
        part = rng.choice(parts)
        try:
            case.operands[name] = replace(given, **{part: made.hostile(rng, getattr(given, part))})
        except ValueError:
            return  # refused as it is put together: nothing can be called with it


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not value.is_meta and value.numel() < 1 << 24 else value


def _restore(value: Any, kept: Any) -> None:
    if isinstance(value, Tensor) and value is not kept:
        with torch.no_grad():
            value.copy_(kept)


def _same(one: Any, two: Any) -> bool:
    if one is two or not isinstance(one, Tensor):
        return True
    return bool(torch.equal(one.nan_to_num(7), two.nan_to_num(7)) if one.is_floating_point() else torch.equal(one, two))


def _is_moderate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if not value.is_floating_point() or not value.numel():
            return True
        if value.is_meta:
            return False
        return value.numel() < 1 << 24 and float(value.double().nan_to_num(0, math.inf, -math.inf).abs().max()) < 1e4
    if isinstance(value, float):
        return math.isnan(value) or abs(value) < 1e4
    if hasattr(value, "whole"):
        return all(_is_moderate(getattr(value, f.name)) for f in fields(value))
    return True


def _shaken(case: Case, seed: int) -> Case:
    """The same call with another x within what the kernels' digits leave of it."""
    x = case.operands.get("x")
    if not isinstance(x, Tensor) or not x.numel():
        return case
    step = 2.0**-20 * x.abs().nan_to_num(0).amax()
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    return replace(case, operands=case.operands | {"x": (x + step * noise).to(x.dtype)})


def _agree(got: Any, wanted: Any, tolerance: float | None, shaken: list[Any]) -> None:
    """Equal, numbers to a tolerance; a row that is not of numbers must be so on both sides.

    Args:
        tolerance: of the largest; None where numbers may differ. shaken: what was wanted with another last place of x:
            numbers may be as far from it as these are, many times over.
    """
    if isinstance(got, Tensor):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, f"{got.shape} {wanted.shape}"
        if not got.is_floating_point():
            assert torch.equal(got, wanted), f"{got} {wanted}"
            return
        if not got.numel():
            return
        got, wanted = (part.double().reshape(len(part) if part.ndim > 1 else 1, -1) for part in (got, wanted))
        fine = wanted.isfinite().all(1)
        assert torch.equal(got.isfinite().all(1), fine), f"{got} {wanted}"
        if fine.any() and tolerance is not None:
            others = [part.double().reshape(wanted.shape)[fine] for part in shaken]
            got, wanted = got[fine], wanted[fine]
            error, scale = float((got - wanted).abs().max()), float(wanted.abs().max()) + 1e-3
            sway = max((float((other - wanted).abs().max()) for other in others), default=0.0)
            assert error <= tolerance * scale + 20 * sway, f"apart by {error} of {scale}, swaying by {sway}"
    elif isinstance(got, Active):
        for name in ("offsets", "neurons", "values"):
            _agree(getattr(got, name), getattr(wanted, name), tolerance, [getattr(one, name) for one in shaken])
    elif isinstance(got, tuple | list):
        assert len(got) == len(wanted)
        for index, (one, two) in enumerate(zip(got, wanted, strict=True)):
            _agree(one, two, tolerance, [other[index] for other in shaken])
    else:
        assert got == wanted, f"{got} {wanted}"
