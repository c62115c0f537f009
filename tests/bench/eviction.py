"""Which policy keeps the right rows: hit rates of `RowPool` on what a model really asks for while it decodes.

The traces are a preset's active neurons and the router's scores, token by token, on three texts: the two halves of the
demo's manual, read as if they were written, and greedy answers to held-out questions. The constants of "score" were
tuned on the first; the other two were not looked at. Beside the policies stands the bound that knows the future
(Belady: the row needed last goes first; rows that are missing are always brought). "chosen" is "score" where only the
experts that the router chose are heard, as in a prompt; "shares" where scores are heard divided by their sum, which
changes nothing for routers of probabilities. The pool is the engine's, and so are its calls. The first tokens fill the
pool and are not counted. Then the three texts as layers of one model: a step needs a smaller part of its pool, as in a
large model. Then the first tokens of the last text, by what had filled the pool before: the experts' popularity, as for
a model that was never used, or chance (Fiddler, appendix C). Last, what the bookkeeping of one layer costs at Mixtral's
sizes.

Run: .venv/bin/python tests/bench/eviction.py [PACK] [--preset Balanced] [--tokens 500], of any family that knows the
demo's texts; --hits leaves out what depends on the machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from floe_chat.assets.demo.make.facts import read_heldout
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.eviction import Policy
from floe_chat.engine.offload.row_pool import Keys, RowPool
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.offload.placing import Found
from floe_chat.kernels.offload.sharing import Lanes
from floe_chat.kernels.types import Active, Calls
from floe_chat.models.catalog import asset
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.pack.usage_file import Heat, from_popularity
from floe_chat.models.tokenizer.chat_format import ChatFormat
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

Heard = Literal["all", "chosen", "shares"]  # the experts whose scores are heard; shares: of the sum of all scores
POLICIES: dict[str, tuple[Policy, Heard]] = {
    "fifo": ("fifo", "all"),
    "lru": ("lru", "all"),
    "chosen": ("score", "chosen"),
    "score": ("score", "all"),
    "shares": ("score", "shares"),
}
LINK = Lanes(cpu_start=0.0, cpu_row=np.inf, copy_start=0.0, copy_row=1.0)  # all absent rows are copied
SHARES = (0.05, 0.1, 0.25, 0.5)
FILL_TOKENS, CONTEXT, ANSWER, FIRST = 80, 400, 120, 20


@dataclass
class Trace:
    """Step by step, layer after layer: the router's scores (E,) and choice (K,), the active neurons' keys (N,)."""

    scores: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    chosen: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    keys: list[Keys] = field(default_factory=list[Keys])


class Recorder:
    """Writes down what the layers of a model ask for while it is entered."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.trace, self._inner, self._until = Trace(), kernels.moe_step, ExitStack()
        family = FAMILIES[loaded.model.config.model_type]
        self._blocks = family.blocks(loaded.model)
        self._routers = [family.router(block) for block in self._blocks]
        self._score = torch.sigmoid if family.routing.kind == "sigmoid" else partial(torch.softmax, dim=-1)

    def __enter__(self) -> Recorder:
        for router, block in zip(self._routers, self._blocks, strict=True):
            self._until.callback(router.register_forward_hook(self._heard).remove)
            self._until.callback(block.experts.register_forward_pre_hook(self._chosen).remove)
        self._until.enter_context(mock.patch.object(kernels, "moe_step", self._asked))
        return self

    def __exit__(self, *_error: object) -> None:
        self._until.close()

    def _heard(self, _module: object, _inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self.trace.scores.append(self._score(outputs[0].float())[-1].numpy())

    def _chosen(self, _module: object, inputs: tuple[Tensor, ...]) -> None:
        self.trace.chosen.append(inputs[1][-1].numpy())

    def _asked(
        self, x: Tensor, signal: Any, rows: Any, calls: Calls, thresholds: Tensor, *rest: Any, **named: Any
    ) -> Any:
        active = kernels.signal_gemv(x, signal, calls, thresholds)
        # Halves of experts are numbered so that their keys are those of whole ones.
        keys = calls.experts.repeat_interleave(active.offsets.diff()) * signal.q.shape[1] + active.neurons
        self.trace.keys.append(keys.numpy())
        return self._inner(x, signal, rows, calls, thresholds, *rest, **named)


def read_as_written(loaded: LoadedModel, ids: list[int]) -> Trace:
    """One decode step for each token of a text, in contexts of CONTEXT tokens."""
    with Recorder(loaded) as recorder, torch.inference_mode():
        for start in range(0, len(ids), CONTEXT):
            cache = None
            for token in ids[start : start + CONTEXT]:
                found = loaded.model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = found.past_key_values
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
        trace.chosen += recorder.trace.chosen
        trace.keys += recorder.trace.keys
        if len(trace.keys) >= tokens * loaded.packed.manifest.architecture.layers:
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


def step_of(shape: Shape, layer: int, keys: Keys, scores: NDArray[np.float32], chosen: NDArray[np.int64]) -> Found:
    """A step with these active neurons, as the engine describes it.

    keys: ascending. scores: (E,) of the router. chosen: (K,) by it.
    """
    experts, offsets = np.unique(keys // shape.neurons, return_index=True)
    ends = torch.from_numpy(np.append(offsets, keys.size))
    active = Active(ends, torch.from_numpy((keys % shape.neurons).astype(np.int32)), torch.zeros(0))
    calls = torch.from_numpy(experts), torch.ones(experts.size)
    heard, index = torch.from_numpy(scores)[None], torch.from_numpy(chosen)[None]
    weights = heard.gather(1, index)
    return Found(layer, shape.neurons, active, *calls, index, weights / weights.sum(), None, heard)


def one(pool: RowPool, found: Found) -> int:
    """A step of the engine in which all rows arrive at once; returns how many were there."""
    placed = pool.place(found, LINK)
    pool.note(found)
    slots, keys = placed.slots, placed.keys.astype(np.int64)
    while slots.size:  # what finds no room comes in other loads
        pool.filled(pool.keep(found.layer, keys[: slots.size], slots))
        keys = keys[slots.size :]
        pool.release()
        slots = pool.visit(keys.size)
    pool.release()
    return placed.ready.at.size


def hit_rate(
    trace: Trace, shape: Shape, pool: RowPool, first: int, last: int | None = None, *, hears: Heard = "all"
) -> float:
    """Share of the active neurons of tokens first..last - 1 that were in the pool."""
    hits = total = 0
    for step, (scores, chosen, keys) in enumerate(zip(trace.scores, trace.chosen, trace.keys, strict=True)):
        token, layer = divmod(step, shape.layers)
        if token == last:
            break
        scores = scores / scores.sum() if hears == "shares" else scores
        found = step_of(shape, layer, np.sort(keys), scores, chosen)
        ready = one(pool, replace(found, heard=None) if hears == "chosen" else found)
        if token >= first:
            hits, total = hits + ready, total + keys.size
    return hits / total


def filled(shape: Shape, capacity: int, heat: Heat) -> RowPool:
    """A pool that was filled before its first step."""
    pool = RowPool(shape.layers, shape.experts, shape.neurons, capacity)
    layers, keys = pool.warm(heat)
    for layer in range(shape.layers):
        pool.filled(pool.reserve(layer, keys[layers == layer], urgent=False))
    return pool


def starts(packed: PackedModel, shape: Shape) -> dict[str, Heat]:
    """Ways to fill a pool before its first answer."""
    popular = from_popularity(packed.profile()["popularity"].numpy(), shape.neurons)
    chance = np.random.default_rng(0).random(popular.uses.shape, dtype=np.float32)
    return {"popularity": popular, "chance": Heat(np.full_like(popular.scores, 1 / shape.experts), chance)}


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
    """Seconds of single layers: 14,000 neurons at most, of which 5,600 are brought."""
    shape, rng = Shape(32, 8, 14336), np.random.default_rng(0)
    pool = RowPool(shape.layers, shape.experts, shape.neurons, 500_000, policy)
    for layer in range(shape.layers):
        keys = rng.permutation(shape.experts * shape.neurons)[: pool.capacity // shape.layers]
        pool.filled(pool.reserve(layer, keys, urgent=True))
        pool.release()
    seconds: list[float] = []
    for step in range(steps):
        layer = step % shape.layers
        there, absent = (
            rng.permutation(np.flatnonzero((pool.slots[layer].reshape(-1) < 0) == gone)) for gone in (0, 1)
        )
        keys = np.concatenate([there[:8400], absent[:5600]])
        found = step_of(shape, layer, np.sort(keys), np.full(8, 0.125, np.float32), np.arange(2))
        begun = time.perf_counter()
        one(pool, found)
        seconds.append(time.perf_counter() - begun)
    return seconds


def stacked(traces: list[Trace], layers: int) -> Trace:
    """As if each was of layers of its own in one model, for as many tokens as all have."""
    whole = Trace()
    for token in range(min(len(trace.keys) for trace in traces) // layers):
        for trace in traces:
            part = slice(token * layers, (token + 1) * layers)
            whole.scores += trace.scores[part]
            whole.chosen += trace.chosen[part]
            whole.keys += trace.keys[part]
    return whole


def table(name: str, trace: Trace, shape: Shape) -> dict[str, list[float]]:
    """Hit rates by policy, printed."""
    active = statistics.mean(keys.size for keys in trace.keys)
    print(f"{name}: {len(trace.keys) // shape.layers} tokens, {active:.0f} active neurons a layer")
    print(f"  {'pool':>6}" + "".join(f"{name:>8}" for name in (*POLICIES, "bound")))
    rates = {name: list[float]() for name in (*POLICIES, "bound")}
    for share in SHARES:
        capacity = int(shape.rows * share)
        for name, (policy, hears) in POLICIES.items():
            pool = RowPool(shape.layers, shape.experts, shape.neurons, capacity, policy)
            rates[name].append(round(hit_rate(trace, shape, pool, FILL_TOKENS, hears=hears), 4))
        rates["bound"].append(round(bound(trace, shape, capacity), 4))
        print(f"  {share:6.0%}" + "".join(f"{found[-1]:8.1%}" for found in rates.values()), flush=True)
    return rates


def main() -> None:
    """Print a table per text and the cost, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path, nargs="?", default=asset("demo", "packed"))
    parser.add_argument("--preset", default="Balanced")
    parser.add_argument("--tokens", type=int, default=500, help="of each text")
    parser.add_argument("--hits", action="store_true", help="do not measure the bookkeeping's time")
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
    traces = {text: record() for text, record in texts.items()}
    rates = {text: table(text, trace, shape) for text, trace in traces.items()}
    whole = replace(shape, layers=len(traces) * shape.layers)
    rates["stacked"] = table("the three as one model", stacked([*traces.values()], shape.layers), whole)
    trace = traces["answers"]
    begun = {
        name: [
            round(hit_rate(trace, shape, filled(shape, int(shape.rows * share), heat), 0, FIRST), 4) for share in SHARES
        ]
        for name, heat in starts(loaded.packed, shape).items()
    }
    for name, found in begun.items():
        print(f"the first {FIRST} tokens, filled by {name}: {' / '.join(f'{rate:.1%}' for rate in found)}")
    cost: dict[str, float] = {}
    for policy in () if options.hits else ("fifo", "lru", "score"):
        seconds = bookkeeping(policy)
        cost[policy] = round(statistics.median(seconds) * 1e3, 3)
        print(
            f"bookkeeping of a layer at Mixtral's sizes, {policy}: {cost[policy]} ms (least {min(seconds) * 1e3:.3f})"
        )
    result = {"bench": "eviction", "shares": SHARES, "hit_rates": rates, "first_tokens": begun, "bookkeeping_ms": cost}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
