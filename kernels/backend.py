"""Which implementation of the operations a device gets, and why. Chosen once per device, never silently."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from . import listed, maker, reference
from .cpu import native, native_rounding
from .mixers import convolution, delta, grouped, latent
from .mixers.convolution import Convolution
from .mixers.delta import Delta
from .mixers.grouped import Heads, KeptTokens
from .mixers.latent import Latent
from .rule import Rule
from .step import Router
from .types import Active, Calls, Limits, Rounded, Work
from .weights import ExpertRows, LinearWeights, SignalWeights

# Compute capabilities: what Triton itself supports, and from where tensor cores multiply bfloat16.
TRITON_FROM, BFLOAT16_FROM = (7, 5), (8, 0)


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of every operation.

    Attributes:
        name: "native ..." (our C++ on the CPU), "triton" (on a GPU) or "reference" (plain torch).
        device: the device it was chosen for, "cpu" or "cuda:N". reason: why this one, for the panel and `doctor`.
        up_list: `signal_gemv` without waiting: where each call's neurons end (P,), and buffers for all neurons and
            values, valid up to the last end. None if not available.
        experts_step: `select` and `moe_step` in fewer launches. None if there is no such thing.
        linear_joined: `linear` with what is before and behind it, in its own launches. None if there is no such thing.
        experts_swiglu: `moe_step` for many tokens, where that is faster than `expert_swiglu` of each. None if not
            available. grouped: whether it serves any number of calls for each expert, and the host waits for nothing.
        expert_at_once: `expert_swiglu` of an only expert, uncounted, without a wait. None if not available.
        checks: whether its operations check their arguments themselves; if not, the functions of `kernels` do. Those
            of `route`, `plain`, `attend_one`, `latent_one`, `delta_one`, `convolve_one`, `round_matrix` and of the
            operations of `listed.py` are always checked there.
        matrix_type: bfloat16 where it multiplies matrices of it much faster than of float32.
    """

    name: str
    device: str
    reason: str
    checks: bool
    route: Callable[[Tensor, Router], tuple[Tensor, Tensor]]
    select: Callable[[Tensor, Tensor, Limits, Rule], Work]
    signal_gemv: Callable[[Tensor, SignalWeights, Calls, Tensor, int], Active]
    sparse_swiglu: Callable[[Tensor, ExpertRows, Calls, Active, Tensor | None, int], tuple[Tensor, Tensor]]
    moe_step: Callable[[Tensor, SignalWeights, ExpertRows, Calls, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
    expert_swiglu: Callable[
        [Tensor, SignalWeights, ExpertRows, int, Tensor, Tensor | None, int], tuple[Tensor, int, int]
    ]
    linear: Callable[[Tensor, LinearWeights, int], Tensor]
    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gather_rows: Callable[[ExpertRows, int, Tensor, Tensor], None]
    pool_scatter: Callable[[Tensor, Tensor, Tensor], None]
    attend_one: Callable[[Tensor, Tensor, KeptTokens, int, Heads, float], Tensor]
    latent_one: Callable[[Tensor, Tensor, Tensor, KeptTokens, int, Latent], Tensor]
    delta_one: Callable[[Tensor, Tensor, KeptTokens, int, Delta], Tensor]
    convolve_one: Callable[[Tensor, KeptTokens, int, Convolution], Tensor]
    round_matrix: Callable[..., Rounded]
    list_active: Callable[..., None]
    add_listed: Callable[..., None]
    experts_step: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    linear_joined: Callable[..., Tensor] | None = None
    experts_swiglu: Callable[..., tuple[Tensor, Tensor]] | None = None
    expert_at_once: Callable[..., Tensor] | None = None
    grouped: bool = False
    up_list: Callable[[Tensor, SignalWeights, Calls, Tensor, int], tuple[Tensor, Tensor, Tensor]] | None = None
    matrix_type: torch.dtype = torch.float32


@cache
def choose(device: torch.device | str) -> Backend:
    """The backend for a device: "cpu", or one GPU ("cuda:1"; "cuda" is the first). Each GPU gets what it can run.

    Raises:
        ValueError: torch cannot compute on that device here.
    """
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return _cpu()
    if kind != "cuda":
        raise ValueError(f"no kernels for device {str(device)!r}; valid are cpu, cuda and cuda:N")
    cards = torch.get_device_module(kind)
    if not cards.is_available():
        raise ValueError("torch sees no CUDA device")
    there = cards.device_count()
    if number and not (number.isdecimal() and int(number) < there):
        raise ValueError(f"no CUDA device {number!r}; torch sees {there}, from cuda:0 on")
    return _cuda(int(number or 0))


def foreseen(index: int) -> tuple[str, str]:
    """Name and reason of the backend that a GPU gets if its first kernel runs; the GPU itself is not touched."""
    of = maker.architecture(index)
    if not maker.is_amd() and not maker.reaches(index, TRITON_FROM):
        needed = ".".join(map(str, TRITON_FROM))
        return "reference", f"plain torch, because the Triton kernels need {needed} or newer and this GPU has {of}"
    try:
        importlib.import_module(".triton", __package__)  # here, since it is slow and absent if no GPU can use it
    except ImportError as error:
        return "reference", f"plain torch, because Triton cannot be imported: {error}"
    if maker.is_amd():
        return "triton", f"Triton kernels for {of}, untested: no card of AMD has run them"
    wide = maker.reaches(index, BFLOAT16_FROM)
    return "triton", f"Triton kernels for {of}{'' if wide else ', in float16, since it multiplies bfloat16 slowly'}"


def failure(device: str) -> str:
    """Why Triton's kernels do not run on a device, "" where a small one does.

    Triton compiles a part of itself when a first kernel runs, and needs a C compiler and Python's headers for that.

    Raises:
        torch.OutOfMemoryError: which says nothing about Triton.
    """
    from . import triton

    records = torch.arange(48, dtype=torch.uint8, device=device).view(3, 16)
    pool, slots = torch.zeros_like(records), torch.tensor([2, 0, 1], device=device)
    try:
        triton.pool_scatter(pool, slots, records)
        right = pool[slots].equal(records)
    except torch.OutOfMemoryError:
        raise
    # Compilers and drivers raise anything; what it was becomes the reason of the fallback.
    except Exception as error:  # noqa: BLE001
        return str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return "" if right else "a small kernel gave a wrong result"


@cache
def _cuda(index: int) -> Backend:
    device, (name, reason) = f"cuda:{index}", foreseen(index)
    if name == "reference":
        return _reference(device, reason)
    if failed := failure(device):
        return _reference(device, f"plain torch, because Triton's kernels do not run here: {failed}")
    from . import triton

    # Older cards, and those of AMD, multiply whole experts by their libraries, one after another.
    grouped = maker.reaches(index, BFLOAT16_FROM)
    return Backend(
        name=name,
        device=device,
        reason=reason,
        checks=False,
        route=triton.route,
        select=triton.select,
        signal_gemv=triton.signal_gemv,
        up_list=triton.up_list,
        sparse_swiglu=triton.sparse_swiglu,
        moe_step=triton.moe_step,
        experts_step=triton.experts_step,
        expert_swiglu=triton.expert_swiglu,
        experts_swiglu=triton.experts_swiglu if grouped else None,
        expert_at_once=triton.expert_at_once if grouped else None,
        grouped=grouped,
        linear=triton.linear,
        plain=triton.plain,
        linear_joined=triton.linear_joined,
        gather_rows=triton.gather_rows,
        pool_scatter=triton.pool_scatter,
        attend_one=triton.attend_one,
        latent_one=triton.latent_one,
        delta_one=triton.delta_one,
        convolve_one=triton.convolve_one,
        round_matrix=reference.round_matrix,
        list_active=triton.list_active,
        add_listed=triton.add_listed,
    )


def _cpu() -> Backend:
    try:
        isa = native.isa()
    except native.NativeUnavailableError as error:
        if native.isa_is_forced():
            raise
        return _reference("cpu", f"plain torch, because {error}")
    return Backend(
        name=f"native {isa.name}",
        device="cpu",
        reason=isa.reason,
        checks=True,
        route=_routed,
        select=native.select,
        signal_gemv=native.signal_gemv,
        sparse_swiglu=native.sparse_swiglu,
        moe_step=native.moe_step,
        expert_swiglu=native.expert_swiglu,
        experts_swiglu=native.experts_swiglu,
        linear=native.linear,
        plain=reference.plain,
        gather_rows=native.gather_rows,
        pool_scatter=native.pool_scatter,
        attend_one=grouped.attend_one,
        latent_one=latent.latent_one,
        delta_one=delta.delta_one,
        convolve_one=convolution.convolve_one,
        round_matrix=native_rounding.round_matrix,
        matrix_type=torch.bfloat16 if native_rounding.by_bfloat16() else torch.float32,
        list_active=partial(listed.list_active, native.signal_gemv),
        add_listed=partial(listed.add_listed, native.sparse_swiglu),
    )


def _reference(device: str, reason: str) -> Backend:
    return Backend(
        name="reference",
        device=device,
        reason=reason,
        checks=False,
        route=_routed,
        select=reference.select,
        signal_gemv=reference.signal_gemv,
        sparse_swiglu=reference.sparse_swiglu,
        moe_step=reference.moe_step,
        expert_swiglu=reference.expert_swiglu,
        linear=reference.linear,
        plain=reference.plain,
        gather_rows=reference.gather_rows,
        pool_scatter=reference.pool_scatter,
        attend_one=grouped.attend_one,
        latent_one=latent.latent_one,
        delta_one=delta.delta_one,
        convolve_one=convolution.convolve_one,
        round_matrix=reference.round_matrix,
        list_active=partial(listed.list_active, reference.signal_gemv),
        add_listed=partial(listed.add_listed, reference.sparse_swiglu),
    )


def _routed(hidden: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    return router(hidden)
