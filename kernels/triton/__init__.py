"""The operations on NVIDIA GPUs, written in Triton: compute capability 7.5 and newer, float16, bfloat16 and float32.

Decoding one token reads every weight it needs once and does two operations per code, so memory is the bound and the
arithmetic has to stay out of its way (`codes.py` counts instructions, `gemv.py` and `swiglu.py` programs and loads).
Sizes are fixed rather than tuned at run time: the first token would pay for tuning, and results would depend on it.

`vectors.py` says where bytes lie, `codes.py` reads them in a kernel, `gemv.py`, `swiglu.py`, `attention.py`,
`latent.py`, `recurrent.py`, `routing.py`, `grouped.py`, `selection.py` and `moving.py` are the kernels, `sparse.py`,
`operations.py`, `listed.py`, `dense.py`, `attend.py` and `recur.py` launch them. Without a GPU they run under
TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

import os

# Products are fused with sums, as the kernels count on; Triton 3.10 changes its default and warns before that.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from .attend import attend_one, latent_one
from .dense import expert_at_once, expert_swiglu, experts_swiglu, linear, linear_joined, plain
from .listed import add_listed, list_active
from .operations import (
    experts_step,
    gather_rows,
    land,
    moe_step,
    pool_scatter,
    route,
    select,
    signal_gemv,
    sparse_swiglu,
    up_list,
)
from .recur import convolve_one, delta_one

__all__ = [
    "add_listed",
    "attend_one",
    "convolve_one",
    "delta_one",
    "expert_at_once",
    "expert_swiglu",
    "experts_step",
    "experts_swiglu",
    "gather_rows",
    "land",
    "latent_one",
    "linear",
    "linear_joined",
    "list_active",
    "moe_step",
    "plain",
    "pool_scatter",
    "route",
    "select",
    "signal_gemv",
    "sparse_swiglu",
    "up_list",
]
