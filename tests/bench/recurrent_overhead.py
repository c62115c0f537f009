"""What a token takes in a layer of gated delta rules besides its projections: Qwen3.5-35B-A3B's sizes, compiled.

    .venv/bin/python tests/bench/recurrent_overhead.py [--tokens 200]

The stream is narrow, so that projections cost next to nothing, and layers take turns, so that no state is in a cache.
Next to it, the rate at which as many bytes are read. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

import torch
from floe_chat.kernels.cpu.native_step import NativeStep, Place, placed
from floe_chat.kernels.mixers.delta import Delta
from floe_chat.kernels.step import DenseLayer, Swiglu
from floe_chat.kernels.weights import Norm, Projection

HIDDEN, HEADS, SHARED, WIDTH, TAPS, LAYERS, WARM = 16, 32, 16, 128, 4, 30, 5


def layer() -> DenseLayer:
    """One of the model's, between a stream of few numbers."""
    channels = 2 * SHARED * WIDTH + HEADS * WIDTH
    delta = Delta(
        HEADS,
        SHARED,
        WIDTH,
        WIDTH,
        torch.randn(TAPS, channels),
        torch.rand(HEADS),
        torch.randn(HEADS),
        torch.ones(WIDTH),
        1e-6,
        Projection(torch.randn(2 * HEADS, HIDDEN)),
    )
    first, out = torch.randn(channels + HEADS * WIDTH, HIDDEN), torch.randn(HIDDEN, HEADS * WIDTH)
    beside = Swiglu(Projection(torch.randn(2, HIDDEN)), Projection(torch.randn(HIDDEN, 1)))
    norm = Norm(torch.ones(HIDDEN))
    return DenseLayer(norm, norm, 1e-6, delta, Projection(first), Projection(out), None, beside)


def token_ms(tokens: int) -> tuple[float, float]:
    """Of one layer, and the milliseconds in which its state's bytes are read."""
    layers = [layer() for _ in range(LAYERS)]
    steps = [NativeStep(one) for one in layers]
    states = [torch.zeros(2, layers[0].mixer.state) for _ in layers]
    took, rope, x = list[float](), torch.zeros(2, WIDTH), torch.randn(1, HIDDEN)
    for position in range(WARM + tokens):
        where = placed(steps, [Place(rope, states, position)])
        begun = time.perf_counter()
        for number, step in enumerate(steps):
            step.together(number, x, None, where)
        took.append((time.perf_counter() - begun) / LAYERS)
    begun = time.perf_counter()
    for state in states:
        state.sum()
    read = (time.perf_counter() - begun) / 2 / LAYERS
    return 1e3 * median(took[WARM:]), 1e3 * read


def main() -> None:
    """Measure, and print a table and JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200)
    given = parser.parse_args()
    own, read = token_ms(given.tokens)
    print(f"a layer and token {own:.3f} ms, of which reading its state once {read:.3f} ms")
    print(
        json.dumps({"recurrent_ms": own, "read_ms": read, "tokens": given.tokens, "threads": torch.get_num_threads()})
    )


if __name__ == "__main__":
    main()
