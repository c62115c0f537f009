"""Which policy keeps the right rows: hit rates of `RowPool` on what a model really asks for while it decodes.

The traces are a preset's active neurons and the router's scores, token by token, on three texts: the two halves of the
demo's manual, read as if they were written, and greedy answers to held-out questions. The constants of "score" were
tuned on the first; the other two were not looked at. Beside the policies stands the bound that knows the future
(Belady: the row needed last goes first; rows that are missing are always brought). The first tokens fill the pool and
are not counted. Last, what the bookkeeping of one layer costs at Mixtral's sizes.

Run: .venv/bin/python tests/bench/eviction.py [PACK] [--preset Balanced] [--tokens 500]. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.types import Calls
from floe_chat.models.catalog import asset
from floe_chat.models.demo.facts import read_heldout
from floe_chat.models.tokenizer.chat_format import ChatFormat
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

POLICIES: tuple[Policy, ...] = ("fifo", "lru", "score")
SHARES = (0.05, 0.1, 0.25, 0.5)
FILL_TOKENS, CONTEXT, ANSWER = 80, 400, 120


@dataclass
class Trace:
    """Step by step, layer after layer: the router's scores (E,), the active neurons' keys (N,)."""

    scores: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    keys: list[Keys] = field(default_factory=list[Keys])


class Recorder:
    """Writes down what the layers of a model ask for while it is entered."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.trace, self._inner, self._until = Trace(), kernels.moe_step, ExitStack()
        self._routers = [layer.mlp.gate for layer in loaded.model.model.layers]

    def __enter__(self) -> Recorder:
        for router in self._routers:
            self._until.callback(router.register_forward_hook(self._heard).remove)
        self._until.enter_context(mock.patch.object(kernels, "moe_step", self._asked))
        return self

    def __exit__(self, *_error: object) -> None:
        self._until.close()

    def _heard(self, _module: object, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self.trace.scores.append(outputs[0].float().softmax(-1)[-1].numpy())

    def _asked(self, x: Tensor, up: Any, rows: Any, calls: Calls, thresholds: Tensor, *rest: Any, **named: Any) -> Any:
        active = kernels.up_gemv(x, up, calls, thresholds)
        # Halves of experts are numbered so that their keys are those of whole ones.
        keys = calls.experts.repeat_interleave(active.offsets.diff()) * up.q.shape[1] + active.neurons
        self.trace.keys.append(keys.numpy())
        return self._inner(x, up, rows, calls, thresholds, *rest, **named)


def read_as_written(loaded: LoadedModel, ids: list[int]) -> Trace:
    """One decode step for each token of a text, in contexts of CONTEXT tokens."""
    with Recorder(loaded) as recorder, torch.inference_mode():
        for start in range(0, len(ids), CONTEXT):
            kv = KVCache()
            for token in ids[start : start + CONTEXT]:
                loaded.model(input_ids=torch.tensor([[token]]), past_key_values=kv.cache, use_cache=True)
    return recorder.trace


def answers(loaded: LoadedModel, chat: ChatFormat, tokens: int) -> Trace:
    """Decode steps of greedy answers to held-out questions; reading the questions is left out."""
    trace = Trace()
    questions = [check.get("question", "") for check in read_heldout()]
    for question in questions[:: max(1, len(questions) * 20 // tokens)]:
        steps = generate(
            loaded.model,
            KVCache(),
            chat.encode([{"role": "user", "content": question}]),
            Sampling(temperature=0),
            max_new_tokens=ANSWER,
            stop_ids=chat.stop_ids,
            window=loaded.window,
            control=loaded.control,
            telemetry=loaded.telemetry,
        )
        with Recorder(loaded) as recorder:
            for step in steps:
                if step.token is None:
                    recorder.trace = Trace()
        trace.scores += recorder.trace.scores
        trace.keys += recorder.trace.keys
        if len(trace.keys) >= tokens * len(loaded.model.model.layers):
            break
    return trace


@dataclass(frozen=True)
class Shape:
    """L layers of E experts of F neurons."""

    layers: int
    experts: int
    neurons: int

    @property
    def rows(self) -> int:
        return self.layers * self.experts * self.neurons


def find(pool: RowPool, layer: int, keys: Keys) -> NDArray[np.bool_]:
    """(N,) which of these neurons' rows are in the pool; notes their use."""
    neurons = pool.slots.shape[2]
    given = layer, keys // neurons, np.arange(keys.size + 1), keys % neurons, neurons
    located = pool.table.locate(*given)
    pool.table.count(*given)
    ready = np.zeros(keys.size, np.bool_)
    ready[located.ready.at] = True
    return ready


def hit_rate(trace: Trace, shape: Shape, capacity: int, policy: Policy) -> float:
    """Share of the active neurons that were in the pool when they were asked for."""
    pool = RowPool(shape.layers, shape.experts, shape.neurons, capacity, policy)
    hits = total = 0
    for step, (scores, keys) in enumerate(zip(trace.scores, trace.keys, strict=True)):
        layer = step % shape.layers
        pool.table.hear(layer, scores.astype(np.float64))
        ready = find(pool, layer, keys)
        if step >= FILL_TOKENS * shape.layers:
            hits, total = hits + int(ready.sum()), total + keys.size
        pool.filled(pool.reserve(layer, keys[~ready], urgent=True))
        pool.release()
    return hits / total


def bound(trace: Trace, shape: Shape, capacity: int) -> float:
    """The same for a pool that knows the future."""
    next_use, never = [np.zeros(0)] * len(trace.keys), float(len(trace.keys) + 1)
    flat = [keys + step % shape.layers * shape.experts * shape.neurons for step, keys in enumerate(trace.keys)]
    soonest = np.full(shape.rows, never)
    for step in reversed(range(len(flat))):
        next_use[step] = soonest[flat[step]]
        soonest[flat[step]] = step
    present, until = np.zeros(shape.rows, np.bool_), np.zeros(shape.rows)
    hits = total = 0
    for step, keys in enumerate(flat):
        ready = present[keys]
        if step >= FILL_TOKENS * shape.layers:
            hits, total = hits + int(ready.sum()), total + keys.size
        present[keys] = True
        until[keys] = -1
        if (over := int(present.sum()) - capacity) > 0:
            there = np.flatnonzero(present)
            present[there[np.argpartition(-until[there], over - 1)[:over]]] = False
        until[keys] = next_use[step]
    return hits / total


def bookkeeping(policy: Policy, steps: int = 300) -> list[float]:
    """Seconds of find, reserve, filled and release of single layers: 14,000 neurons, 60 % there, 3,000 brought."""
    shape, rng = Shape(32, 8, 14336), np.random.default_rng(0)
    pool = RowPool(shape.layers, shape.experts, shape.neurons, 500_000, policy)
    for layer in range(shape.layers):
        keys = rng.permutation(shape.experts * shape.neurons)[: pool.capacity // shape.layers]
        pool.filled(pool.reserve(layer, keys, urgent=True))
    seconds: list[float] = []
    for step in range(steps):
        layer = step % shape.layers
        there = pool.slots[layer].reshape(-1) >= 0
        keys = np.concatenate(
            [rng.choice(np.flatnonzero(there), 8400, False), rng.choice(np.flatnonzero(~there), 5600, False)]
        )
        keys.sort()
        pool.release()
        begun = time.perf_counter()
        ready = find(pool, layer, keys)
        pool.filled(pool.reserve(layer, keys[~ready][:3000], urgent=True))
        pool.release()
        seconds.append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Print a table per text and the cost, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path, nargs="?", default=asset("demo", "packed"))
    parser.add_argument("--preset", default="Balanced")
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    options = parser.parse_args()
    loaded, _ = load(options.pack, options.preset, "cpu", lambda _step, _share: None, library=True)
    architecture = loaded.packed.manifest.architecture
    shape = Shape(architecture.layers, architecture.experts, architecture.intermediate)
    ids = (
        Tokenizer.from_file(str(options.pack / "tokenizer.json"))
        .encode(asset("demo", "manual.md").read_text(encoding="utf-8"), add_special_tokens=False)
        .ids
    )
    half = len(ids) // 2
    texts: dict[str, Callable[[], Trace]] = {
        "manual, first half (tuned on)": lambda: read_as_written(loaded, ids[: min(half, options.tokens)]),
        "manual, second half": lambda: read_as_written(loaded, ids[half : half + options.tokens]),
        "answers": lambda: answers(loaded, ChatFormat(options.pack), options.tokens),
    }
    rates: dict[str, dict[str, list[float]]] = {}
    for text, record in texts.items():
        trace = record()
        active = statistics.mean(keys.size for keys in trace.keys)
        print(f"{text}: {len(trace.keys) // shape.layers} tokens, {active:.0f} active neurons a layer")
        print(f"  {'pool':>6}" + "".join(f"{name:>8}" for name in (*POLICIES, "bound")))
        rates[text] = {name: [] for name in (*POLICIES, "bound")}
        for share in SHARES:
            capacity = int(shape.rows * share)
            for policy in POLICIES:
                rates[text][policy].append(round(hit_rate(trace, shape, capacity, policy), 4))
            rates[text]["bound"].append(round(bound(trace, shape, capacity), 4))
            print(f"  {share:6.0%}" + "".join(f"{found[-1]:8.1%}" for found in rates[text].values()), flush=True)
    cost: dict[str, float] = {}
    for policy in POLICIES:
        seconds = bookkeeping(policy)
        cost[policy] = round(statistics.median(seconds) * 1e3, 3)
        print(
            f"bookkeeping of a layer at Mixtral's sizes, {policy}: {cost[policy]} ms (least {min(seconds) * 1e3:.3f})"
        )
    print(json.dumps({"bench": "eviction", "shares": SHARES, "hit_rates": rates, "bookkeeping_ms": cost}))


if __name__ == "__main__":
    main()
