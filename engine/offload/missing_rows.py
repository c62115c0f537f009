"""Where absent rows are computed: copied to the GPU, or by the CPU from RAM (Fiddler; FloE; CORM).

Every choice minimises the time at which the later of the two lanes ends, by the rates in `lane_rates.py`. A decode step
is split by rows (kernels/offload/sharing.py), a prompt by experts.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .lane_rates import Rates

EXACT = 16  # experts up to which every placement is tried: 65,536 placements take 1 to 3 milliseconds

_Seconds = npt.NDArray[np.float64]
_Chosen = npt.NDArray[np.bool_]


class Lane(enum.Enum):
    """Where an expert is computed, and how its absent rows get there."""

    GPU = "gpu"  # nothing is absent, or nothing to do
    COPY = "copy"  # absent rows are copied, the GPU computes
    CPU = "cpu"  # absent rows are computed from RAM


def prefill(
    tokens: Sequence[int],
    resident: Sequence[float],
    nbytes: Sequence[float],
    rates: Rates,
    link_queued_s: float = 0.0,
    cap: float = 1.0,
) -> list[Lane]:
    """Place each expert of a layer for a prompt (Fiddler section 3.2: argmin of the later lane's end).

    Copying an expert costs its absent bytes, whatever its tokens. The CPU computes all of it, and its time grows with
    tokens once that is more than reading the rows. An expert that is all resident costs neither lane anything, as in
    Fiddler's model.

    Args:
        tokens: (E,) how many tokens each expert gets. resident: (E,) share of its rows in device memory.
        nbytes: (E,) of all its rows. link_queued_s, cap: as for `share`.
    """
    lanes = [Lane.GPU] * len(tokens)
    undecided = [e for e in range(len(tokens)) if tokens[e] > 0 and resident[e] < 1]
    absent = np.array([(1 - resident[e]) * nbytes[e] for e in undecided])
    copy = rates.link_latency_s + absent / rates.link_bytes_s + absent / rates.gpu_bytes_s
    if cap <= 0:
        chosen = np.zeros(len(undecided), np.bool_)
    else:
        counts = np.array([tokens[e] for e in undecided])
        each = np.maximum(1 / rates.cpu_bytes_s, counts / rates.cpu_batch_bytes_s) / cap
        cpu = rates.cpu_latency_s + np.array([nbytes[e] for e in undecided]) * each
        chosen = (_every if len(undecided) <= EXACT else _balanced)(copy, cpu, link_queued_s)
    for e, on_cpu in zip(undecided, chosen, strict=True):
        lanes[e] = Lane.CPU if on_cpu else Lane.COPY
    return lanes


def prefill_alike(experts: int, tokens: int, resident: float, nbytes: float, rates: Rates) -> int:
    """How many experts go to the CPU where all are alike: of the best numbers as by `prefill`, the least."""
    absent = (1 - resident) * nbytes
    copy = rates.link_latency_s + absent / rates.link_bytes_s + absent / rates.gpu_bytes_s
    cpu = rates.cpu_latency_s + nbytes * max(1 / rates.cpu_bytes_s, tokens / rates.cpu_batch_bytes_s)
    below = int(experts * copy / (copy + cpu))  # the best number is next to where both lanes end together
    return min(below, min(below + 1, experts), key=lambda on_cpu: max(on_cpu * cpu, (experts - on_cpu) * copy))


def _every(copy: _Seconds, cpu: _Seconds, queued: float) -> _Chosen:
    """Try all 2**N placements; of equally fast ones take the one with the least work for the CPU.

    The queue counts even where nothing is copied: that changes no choice, since every copy would end after it.
    """
    cpu_end, copy_end = np.zeros(1), np.zeros(1)
    for on_cpu, copied in zip(cpu, copy, strict=True):  # bit n of a placement: expert n is on the CPU
        cpu_end = np.concatenate((cpu_end, cpu_end + on_cpu))
        copy_end = np.concatenate((copy_end + copied, copy_end))
    ends = np.maximum(cpu_end, queued + copy_end)
    equal = np.flatnonzero(ends <= ends.min() * (1 + 1e-12))
    best = int(equal[cpu_end[equal].argmin()])
    return (best >> np.arange(len(copy)) & 1).astype(np.bool_)


def _balanced(copy: _Seconds, cpu: _Seconds, queued: float) -> _Chosen:
    """The two-pointer balance (importance-driven scheduling, algorithm 2), the best meeting point found at once.

    Experts are ordered by the CPU's time per second of copying; the link takes from the front, the CPU from the back.
    All meeting points are compared, and if experts could be cut one of them would be best: so the end is later than the
    best possible by at most the shorter time, copied or on the CPU, of the expert there.
    """
    order = np.argsort(-cpu / copy, kind="stable")
    copy_end = queued + np.concatenate(([0.0], np.cumsum(copy[order])))
    cpu_end = np.concatenate((np.cumsum(cpu[order][::-1])[::-1], [0.0]))
    copied = int(np.maximum(copy_end, cpu_end).argmin())
    chosen = np.ones(len(copy), np.bool_)
    chosen[order[:copied]] = False
    return chosen
