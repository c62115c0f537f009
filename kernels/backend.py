"""Which implementation of the operations a device gets, and why. Chosen once per device, never silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import reference
from .cpu import native
from .layouts import ExpertRows, UpWeights
from .types import Active, Calls


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of every operation.

    Attributes:
        name: "native" (our C++ on the CPU) or "reference" (plain torch).
        device: the kind of device it was chosen for. reason: why this one, for the panel and `doctor`.
    """

    name: str
    device: str
    reason: str
    up_gemv: Callable[[Tensor, UpWeights, Calls, Tensor], Active]
    sparse_swiglu: Callable[[Tensor, ExpertRows, Calls, Active], Tensor]
    expert_swiglu: Callable[[Tensor, UpWeights, ExpertRows, int, float], tuple[Tensor, int]]
    gather_rows: Callable[[ExpertRows, int, Tensor, Tensor], None]
    pool_scatter: Callable[[Tensor, Tensor, Tensor], None]


@cache
def choose(device: str) -> Backend:
    """The backend for a kind of device ("cpu", "cuda").

    Raises:
        ValueError: torch cannot compute on that kind of device here.
    """
    if device == "cpu":
        return _cpu()
    if device != "cuda":
        raise ValueError(f"no kernels for device {device!r}; valid are cpu, cuda")
    if not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device")
    return _reference(device, "plain torch on CUDA, since this version has no Triton kernels")


def _cpu() -> Backend:
    try:
        isa = native.isa()
    except native.NativeUnavailableError as error:
        if native.isa_is_forced():
            raise
        return _reference("cpu", f"plain torch, since {error}")
    return Backend(
        name=f"native {isa.name}",
        device="cpu",
        reason=isa.reason,
        up_gemv=native.up_gemv,
        sparse_swiglu=native.sparse_swiglu,
        expert_swiglu=reference.expert_swiglu,
        gather_rows=native.gather_rows,
        pool_scatter=native.pool_scatter,
    )


def _reference(device: str, reason: str) -> Backend:
    return Backend(
        name="reference",
        device=device,
        reason=reason,
        up_gemv=reference.up_gemv,
        sparse_swiglu=reference.sparse_swiglu,
        expert_swiglu=reference.expert_swiglu,
        gather_rows=reference.gather_rows,
        pool_scatter=reference.pool_scatter,
    )
