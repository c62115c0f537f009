"""Other engines' policies on a virtual card, with the same trace and rates, for comparison.

Experts are whole here: each is its three matrices at the engine's own width. Time is charged, nothing is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...offload.cards import DENSE_LAUNCHES, Card
from ...offload.virtual.virtual_clock import Clock
from .replay import Played
from .trace import Trace
from .width import Width

EXPERT_LAUNCHES = 3
# Others' own code for one layer, seconds: what is left of their published speeds where link and kernels alone would
# be faster. Mixtral-offloading's authors give 2 to 3 tokens/s for cards such as an RTX 3060 (arXiv 2312.17238), which
# makes 10 here without it and 3 with it; Fiddler's over 3 for a Quadro RTX 6000, which makes 6 without and 3 with it.
MIXTRAL_OFFLOADING_S, FIDDLER_S = 9.0e-3, 5.2e-3


class Baseline:
    """A card, the widths of an engine, and room for so many whole experts of the trace's layers."""

    def __init__(self, card: Card, width: Width, trace: Trace) -> None:
        self.card, self.width, self.trace, self.clock = card, width, trace, Clock()
        self.layers, self.experts = trace.scores.shape[1:]
        self.nbytes = width.expert_bytes
        self.flops = 6.0 * width.hidden * width.neurons
        room = int((card.vram_bytes - width.fixed) * self.layers / width.layers // self.nbytes)
        self.room = max(0, min(room, self.layers * self.experts))
        self.moved = 0
        self.waited = self.copying = 0.0

    def copy(self) -> float:
        """Copy one expert, which is contiguous; returns when it arrives."""
        seconds = self.card.link_latency_s + self.nbytes / self.card.link_bytes_s
        self.moved += self.nbytes
        self.copying += seconds
        return self.clock.run("link", seconds)

    def on_gpu(self, after: float = 0.0) -> None:
        """Compute one expert on the GPU, starting no earlier than `after`."""
        self.waited += self.clock.wait("gpu", after)
        self.clock.run("gpu", self.card.gpu_s(self.nbytes, self.flops, EXPERT_LAUNCHES))

    def play(self, step: Callable[[int, int, list[int]], None], warm: int) -> Played:
        """Run a policy: step(token, layer, chosen experts) is called once the router has chosen."""
        tokens = len(self.trace.index)
        before = self.spent()
        share = self.layers / self.width.layers
        for token in range(tokens):
            if token == warm:
                before = self.spent()
            for layer in range(self.layers):
                self.clock.run("gpu", self.card.gpu_s(self.width.dense_bytes, 0.0, DENSE_LAUNCHES))
                self.clock.sync("gpu")
                step(token, layer, self.trace.index[token, layer].tolist())
            self.clock.run("gpu", share * self.card.gpu_s(self.width.head_bytes, 0.0, 2))
            self.clock.sync("gpu")
        each = (tokens - warm) * share
        return Played(*((later - earlier) / each for later, earlier in zip(self.spent(), before, strict=True)))

    def spent(self) -> tuple[float, int, float, float]:
        """So far: seconds, bytes, seconds waited for experts, and of the link."""
        return self.clock.now, self.moved, self.waited, self.copying

    def popular(self) -> NDArray[np.bool_]:
        """(layers, experts): which are on the card if those are that the trace uses most."""
        used = np.stack(
            [np.bincount(one.reshape(-1), minlength=self.experts) for one in self.trace.index.swapaxes(0, 1)]
        )
        resident = np.zeros(used.size, np.bool_)
        resident[np.argsort(-used.reshape(-1))[: self.room]] = True
        return resident.reshape(used.shape)


def naive(card: Card, width: Width, trace: Trace, warm: int, bits: int = 16) -> Played:
    """Every expert is fetched when needed, in 16 bit, and not cached."""
    engine = Baseline(card, width.at(bits, bits, bits), trace)

    def step(_token: int, _layer: int, chosen: list[int]) -> None:
        for end in [engine.copy() for _ in chosen]:
            engine.on_gpu(end)

    return engine.play(step, warm)


def mixtral_offloading(
    card: Card, width: Width, trace: Trace, warm: int, *, bits: int = 3, dense: int = 4, host: bool = False
) -> Played:
    """Whole quantized experts, with an LRU cache per layer and the next layer's likeliest loaded ahead (Eliseev and
    Mazur): experts of 3 bit, attention of 4, two speculative loads. host: with its own code's time.
    """
    engine = Baseline(card, width.at(bits, bits, dense), trace)
    each = engine.room // engine.layers
    kept = [OrderedDict[int, float]() for _ in range(engine.layers)]
    ahead: dict[int, float] = {}

    def step(token: int, layer: int, chosen: list[int]) -> None:
        nonlocal ahead
        engine.clock.run("host", MIXTRAL_OFFLOADING_S if host else 0.0)
        ends: list[float] = []
        for expert in chosen:
            end = kept[layer].pop(expert, None)
            if end is None:
                end = ahead[expert] if expert in ahead else engine.copy()
            kept[layer][expert] = end
            ends.append(end)
        while len(kept[layer]) > max(each, len(chosen)):
            kept[layer].popitem(last=False)
        for end in ends:
            engine.on_gpu(end)
        ahead = {}
        if layer + 1 < engine.layers:
            likely = np.argsort(-trace.scores[token, layer + 1])[: len(chosen)]
            ahead = {int(expert): engine.copy() for expert in likely if int(expert) not in kept[layer + 1]}

    return engine.play(step, warm)


def llama_cache(card: Card, width: Width, trace: Trace, warm: int, *, bits: int = 4) -> Played | None:
    """llama.cpp's --moe-cache-mib (src/llama-moe-cache.cpp, commit 4b060f27): whole experts of all layers share slots,
    those used last stay, and absent ones are copied before the GPU computes them. Its own code's time is not known.

    None where there is no room for the experts of one token.
    """
    engine = Baseline(card, width.at(bits, bits, bits), trace)
    if engine.room < trace.index.shape[2]:
        return None
    kept = OrderedDict[tuple[int, int], None]()

    def step(_token: int, layer: int, chosen: list[int]) -> None:
        keys = [(layer, expert) for expert in chosen]
        absent = [key for key in keys if key not in kept]
        kept.update(dict.fromkeys(keys))
        for key in keys:
            kept.move_to_end(key)
        while len(kept) > engine.room:
            kept.popitem(last=False)
        copied = max([engine.copy() for _ in absent], default=0.0)
        for _ in chosen:
            engine.on_gpu(copied)

    return engine.play(step, warm)


def fiddler(card: Card, width: Width, trace: Trace, warm: int, *, host: bool = False) -> Played:
    """The most popular experts stay on the GPU, in 16 bit; each of the others is computed by the CPU or copied,
    whichever ends the layer sooner (Fiddler section 3). host: with its own code's time.
    """
    engine = Baseline(card, width.at(16, 16, 16), trace)
    resident, cpu_s = engine.popular(), card.cpu_s(engine.nbytes, engine.flops)
    copy_s = card.link_latency_s + engine.nbytes / card.link_bytes_s

    def step(_token: int, layer: int, chosen: list[int]) -> None:
        engine.clock.run("host", FIDDLER_S if host else 0.0)
        absent = [expert for expert in chosen if not resident[layer, expert]]
        copied = min(range(len(absent) + 1), key=lambda n: max(n * copy_s, (len(absent) - n) * cpu_s))
        ends = [engine.copy() for _ in range(copied)]
        done = [engine.clock.run("cpu", cpu_s) for _ in range(len(absent) - copied)]
        for _ in range(len(chosen) - len(absent)):
            engine.on_gpu()
        for end in ends:
            engine.on_gpu(end)
        for end in done:
            engine.clock.wait("gpu", end)

    return engine.play(step, warm)


def gpu_int2(card: Card, width: Width, trace: Trace, warm: int) -> Played | None:
    """Everything on the GPU, in 2 bit; None if it does not fit."""
    engine = Baseline(card, width.at(2, 2, 4), trace)
    if engine.room < engine.layers * engine.experts:
        return None

    def step(_token: int, _layer: int, chosen: list[int]) -> None:
        for _ in chosen:
            engine.on_gpu()

    return engine.play(step, warm)
