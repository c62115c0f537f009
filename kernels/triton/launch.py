"""Checks before a launch, and how large its programs are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import torch
import triton
from torch import Tensor
from triton import knobs

from .. import maker
from ..codes import CHUNK
from ..rule import Rule
from ..types import digits_of
from ..weights import Norm
from .codes import spread_kernel, spread_normed_kernel, spread_pairs_kernel
from .vectors import Vector

# Rows of one program: see gemv.py, swiglu.py and moving.py for the reasons.
DOWN_ROWS, COPY_ROWS, UNPACK_ROWS = 8, 4, 8
AMDS_ROWS = 8  # without an instruction for four codes, 16 rows take more than the 256 registers of gfx1100
GEMV_ROWS = PRODUCT_ROWS = AMDS_ROWS if maker.is_amd() else 16
WORDS = 64  # of a row at a time: 16 threads of 16 bytes each
COMPACT = 512  # neurons per program of the compaction
COPY_WORDS = 1024
UNPACK_COLUMNS = 256
SPREAD_WORDS, SPREAD_CHUNKS = 32, 2
NORMED_CHUNKS, SQUARES = 8, 4096  # of a program that normalizes, and numbers whose squares it adds up at a time
# Plain numbers of a program at a time, 32 for each thread, all on their way at once; its rows, one where there are few.
PLAIN, PLAIN_ROWS, MANY_ROWS, ACROSS_ROWS = 4096, 4, 1024, 64
CHUNKS = 16  # of a row at a time, one for each of 16 threads
COMBINE_ROWS, COMBINE_COLUMNS = 64, 64
PRODUCT_PROGRAMS = 256  # per call; beyond that a program takes several tiles
WAVES = 16  # programs per SM that `down_kernel` aims at, of one warp each: as many as one of 8.6 can have
MAX_SLICES = 64


def block_of(words: int, widest: int = WORDS) -> int:
    """A power of two of at most `widest`, no larger than `words` need."""
    return min(widest, triton.next_power_of_2(words))


@cache
def cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton multiplies numbers of 16 bits by tensor cores: from compute capability 8.0 on. Its interpreter
    knows no such product of bfloat16, and on AMD's cards it lacks registers for ours.
    """
    if device.type == "cuda":
        return dtype.itemsize == 2 and maker.reaches(device, (8, 0))
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not knobs.runtime.interpret)


@cache
def magic(device: torch.device) -> Tensor:
    """The bits of 2**23 as float32, in device memory; see `codes.field`."""
    return torch.tensor([0x4B000000], dtype=torch.int32, device=device)


@cache
def every(device: torch.device) -> Tensor:
    """Where the sorted calls of an only expert begin and end, however many there are, in device memory."""
    return torch.tensor([0, 2**31 - 1], dtype=torch.int32, device=device)


@cache
def least(device: torch.device, rule: Rule) -> Tensor:
    """The weights, relative to their mean, below which each part of an expert is left out, in device memory."""
    return torch.tensor(rule.least(), dtype=torch.float64, device=device)


def slices_of(device: torch.device, programs: int) -> int:
    """Into how many slices the neurons of a call are cut when each slice takes `programs` programs: a power of two."""
    return min(MAX_SLICES, triton.next_power_of_2(-(-WAVES * maker.processors(device) // max(1, programs))))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to this device and its current stream."""
    return torch.accelerator.device_index(device.index)


def spread(
    x: Tensor, vector: Vector, x_bits: int, ready: Tensor | None = None, norm: tuple[Norm, float] | None = None
) -> tuple[Tensor, Vector, int]:
    """x (B, n) as a kernel wants it for one kind of vector, that vector with how it is, and how many of the vector's
    words, or chunks, a program takes at a time.

    Args:
        ready: the same of the same x for other vectors in chunks, whatever their bits. norm: with its eps, which x goes
            through before.
    """
    if norm is not None and (not vector.chunked or norm[0].kind != "rms" or norm[0].bias is not None):
        x, norm = norm[0](x, norm[1]), None
    x = x.contiguous()
    if vector.chunked:
        vector = vector.reading(digits_of(x, x_bits))
        width = block_of(vector.n // CHUNK, CHUNKS)
        if ready is not None:
            return ready, vector, width
        out = torch.empty(x.shape[0], vector.x_words, dtype=torch.int32, device=x.device)
        given = vector.n, vector.digits, vector.x_words
        if norm is not None:
            grid = (x.shape[0], triton.cdiv(vector.n // CHUNK, NORMED_CHUNKS))
            weight = norm[0].weight.contiguous()
            spread_normed_kernel[grid](x, weight, out, norm[1], *given, NORMED_CHUNKS, block_of(vector.n, SQUARES))
            return out, vector, width
        grid = (x.shape[0], triton.cdiv(vector.n // CHUNK, SPREAD_CHUNKS))
        spread_kernel[grid](x, out, *given, SPREAD_CHUNKS, num_warps=1)
        return out, vector, width
    if not vector.fast or vector.bits < 16:  # code by code
        return x.float(), vector._replace(fast=False, words=vector.n), block_of(vector.n)
    out = torch.empty(x.shape[0], len(vector.shifts), vector.words, dtype=torch.float32, device=x.device)
    block = block_of(vector.words, SPREAD_WORDS)
    spread_pairs_kernel[(x.shape[0], triton.cdiv(vector.words, block))](x, out, vector, block, num_warps=1)
    return out, vector, block_of(vector.words)


def check_device(device: torch.device) -> None:
    """Refuse tensors that kernels cannot run on.

    Raises:
        ValueError: the CPU, unless Triton interprets.
    """
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(
            f"the Triton kernels got a tensor on {device}; they run on CUDA devices only "
            "(or on the CPU with TRITON_INTERPRET=1, for tests): move it to the GPU or use the CPU kernels"
        )


def check_weights(device: torch.device, name: str, weights: Tensor) -> None:
    """Refuse weights that a kernel on `device` cannot read in place.

    Raises:
        ValueError: not contiguous uint8, another GPU, or host memory that is not pinned.
    """
    if weights.dtype != torch.uint8 or not weights.is_contiguous():
        raise ValueError(f"{name} must be contiguous uint8, not {weights.dtype} with strides {weights.stride()}")
    check_reachable(device, name, weights)


def check_reachable(device: torch.device, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that a kernel on `device` cannot address.

    Raises:
        ValueError: another GPU, or host memory that is not pinned.
    """
    if tensor.device == device:
        return
    if tensor.device.type == "cpu" and device.type == "cuda":
        if tensor.is_pinned():
            return
        raise ValueError(
            f"{name} is in pageable host memory, which kernels on {device} cannot read; "
            "pin it (pin_memory) to have it read in place, or copy it to the GPU"
        )
    raise ValueError(f"{name} is on {tensor.device} but x is on {device}; move one of them")
