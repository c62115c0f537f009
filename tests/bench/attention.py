"""What one layer's attention takes for a token behind a long conversation: `python tests/bench/attention.py`.

A layer with Mixtral's heads, keys and values in float32 and in float16; the time at position 0 is taken off.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from floe_chat.kernels.cpu.native_step import NativeStep
from floe_chat.kernels.mixers.grouped import Heads
from floe_chat.kernels.step import DenseLayer
from floe_chat.kernels.weights import Norm, Projection
from torch import Tensor

HIDDEN, HEADS, KEY_HEADS, DIM = 64, 32, 8, 128
BEHIND = (1024, 4096, 16384)  # tokens
LAYERS, RUNS = 3, 15  # more than a cache holds


def layer(kept: torch.dtype) -> DenseLayer:
    """Next to nothing but attention."""
    heads = Heads(HEADS, KEY_HEADS, DIM, DIM**-0.5, cache_dtype=kept)
    qkv, out = torch.randn((HEADS + 2 * KEY_HEADS) * DIM, HIDDEN), torch.randn(HIDDEN, HEADS * DIM)
    norm = Norm(torch.ones(HIDDEN))
    return DenseLayer(norm, norm, 1e-5, heads, Projection(qkv), Projection(out), None)


def milliseconds(step: NativeStep, stores: list[Tensor], position: int) -> float:
    """Of one call, in the median."""
    x, rope = torch.randn(1, HIDDEN), torch.stack([torch.ones(DIM), torch.zeros(DIM)])
    runs: list[float] = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for kv in stores:
            step(x, None, rope, kv, position)
        runs.append((time.perf_counter() - began) / len(stores) * 1e3)
    return statistics.median(runs)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for kept in (torch.float32, torch.float16):
            step = NativeStep(layer(kept))
            stores = [torch.randn(max(BEHIND), 2 * KEY_HEADS, DIM).to(kept) for _ in range(LAYERS)]
            none = milliseconds(step, stores, 0)
            for tokens in BEHIND:
                took = milliseconds(step, stores, tokens - 1) - none
                rate = tokens * stores[0][0].nbytes / took / 1e6
                print(f"{threads} threads, {kept}, {tokens:6,} tokens: {took:6.2f} ms, {rate:5.1f} GB/s")


if __name__ == "__main__":
    main()
