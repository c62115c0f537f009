"""How well the next layer's experts and neurons are predicted, layer by layer, on text that calibration did not read.

cosine: between the MoE inputs of neighbouring layers (FloE figure 4). Experts, the share of the K chosen ones that is
named by: the next router on this layer's input, as it is ("raw") or carried over the norms ("gate"); the learned
predictor, naming K ("learned") or K + 1 ("+1"), or with the correction that some routers add for the choice ("bias"),
which "raw" has and the engine's own predictions leave out; the next layer's attention and router on what this layer
has without its experts ("alone"), or with those that are resident, the more popular half ("partial", importance-driven
scheduling section 5.2). A shared expert, which needs no choice, is part of what "alone" has. Neurons,
recall/precision: of the experts that are truly chosen, by this layer's input ("true"); of those that a predictor
names, by the input that it goes by.

Run: .venv/bin/python tests/bench/recall.py [PACK] [--text FILE] [--preset Balanced], of any family without layers that
have no experts between those that have. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from floe_chat.engine import quality_presets
from floe_chat.engine.decoder.blocks import read_beside, read_router
from floe_chat.engine.loader import load
from floe_chat.engine.offload import predictor
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.step import Router
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import SignalWeights
from floe_chat.models.catalog import asset
from floe_chat.models.families import FAMILIES
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.calibration import threshold_at
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

WINDOW = 256
COLUMNS = ("cosine", "raw", "gate", "learned", "+1", "bias", "alone", "partial")
NEURONS = tuple(f"n.{name}" for name in ("true", "gate", "learned", "alone", "partial"))


@dataclass
class Seen:
    """What one layer saw of N windows of T tokens.

    Attributes:
        stream: (N, T, H) entering the layer. residual: (N, T, H) before its MoE block. hidden: (N * T, H) given to the
            block. chosen, weights: (N * T, K).
    """

    stream: Tensor
    residual: Tensor
    hidden: Tensor
    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Layer:
    """A decoder layer with experts: its modules, and its router as the engine's own pass has it."""

    module: Any
    block: Any
    router: Router
    shared: Any

    def ranked(self, hidden: Tensor) -> Tensor:
        """hidden (B, H) -> (B, E), by which experts are chosen; of groups all."""
        return ranked(self.router, F.linear(hidden, self.router.weight))

    def without_experts(self, seen: Seen) -> Tensor:
        """What the layer adds to the stream, and the stream, before its experts are known: (N, T, H)."""
        if self.shared is None:
            return seen.residual
        return seen.residual + self.shared(seen.hidden.view_as(seen.residual))


def ranked(router: Router, logits: Tensor) -> Tensor:
    """Logits (B, E) with the router's correction, where it has one."""
    return logits if router.correction is None else logits.float().sigmoid() + router.correction


def layers_of(model: Any) -> list[Layer]:
    """Those with experts, in order; next to each other, as attention is looked ahead through one layer."""
    family = FAMILIES[model.config.model_type]
    places = family.expert_layers(model.config)
    if places != list(range(places[0], places[-1] + 1)):
        raise SystemExit(f"{family.called} has layers without experts in between")
    return [
        Layer(
            model.model.layers[place],
            block,
            read_router(family, block),
            None if family.shared is None else read_beside(family, block, has_experts=True),
        )
        for place, block in zip(places, family.blocks(model), strict=True)
    ]


def watch(model: Any, ids: Tensor) -> tuple[list[Seen], tuple[Tensor, Tensor]]:
    """What every layer sees of ids (N, T), and the rope tables."""
    layers, norm_name = layers_of(model), FAMILIES[model.config.model_type].norm
    seen: list[dict[str, Tensor]] = [{} for _ in layers]
    rope: list[tuple[Tensor, Tensor]] = []
    hooks: list[Any] = []
    for index, layer in enumerate(layers):

        def enter(_own: Any, given: Any, named: Any, index: int = index) -> None:
            seen[index]["stream"] = given[0]
            rope.append(named["position_embeddings"])

        def norm(_own: Any, given: Any, index: int = index) -> None:
            seen[index]["residual"] = given[0]

        def experts(_own: Any, given: Any, index: int = index) -> None:
            seen[index].update(zip(("hidden", "chosen", "weights"), given, strict=True))

        hooks.append(layer.module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(getattr(layer.module, norm_name).register_forward_pre_hook(norm))
        hooks.append(layer.block.experts.register_forward_pre_hook(experts))
    model.model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [Seen(**parts) for parts in seen], rope[0]


def resident_output(packed: PackedModel, layer: int, seen: Seen, sparsity: float, share: float) -> Tensor:
    """What the resident experts, the most popular `share` of them, add to the stream: (N, T, H)."""
    popularity = packed.profile()["popularity"][layer]
    resident = popularity.topk(round(share * len(popularity))).indices
    token, slot = torch.isin(seen.chosen, resident).nonzero(as_tuple=True)
    chosen = seen.chosen[token, slot]
    own = packed.layer(layer)
    calls = Calls(token, chosen, seen.weights[token, slot])
    y, _ = kernels.moe_step(seen.hidden, own.signal, own.rows, calls, threshold_at(own.thresholds, sparsity)[chosen])
    return y.view_as(seen.residual)


def through_attention(layer: Any, true: Tensor, guess: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """What a layer's MoE block is given, (N * T, H), for a guess of what enters the layer (N, T, H).

    Both streams go through the layer's attention as one sequence of 2T, of which the guess of token t sees the true
    tokens before t and itself.
    """
    length = true.shape[1]
    past = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat(
        [torch.cat([past, ~past & past], 1), torch.cat([past.tril(-1), torch.eye(length, dtype=torch.bool)], 1)]
    )
    tables = tuple(torch.cat([table, table], dim=1) for table in rope)
    both = layer.input_layernorm(torch.cat([true, guess], dim=1))
    attended, _ = layer.self_attn(
        hidden_states=both, position_embeddings=tables, attention_mask=mask[None, None].expand(len(true), 1, -1, -1)
    )
    return layer.post_attention_layernorm(guess + attended[:, length:]).flatten(0, 1)


def recall(scores: Tensor, chosen: Tensor, count: int) -> float:
    """Share of the chosen experts (B, K) among the `count` of the highest scores (B, E)."""
    named = scores.topk(count, dim=1).indices
    return float((named[:, :, None] == chosen[:, None, :]).any(dim=1).float().mean())


def neurons(packed: PackedModel, layer: int, then: Seen, guess: Tensor, named: Tensor, sparsity: float) -> list[float]:
    """Recall and precision of a layer's neurons, when it is taken to be given `guess` and to choose experts `named`."""
    own = packed.layer(layer)
    limits, size = threshold_at(own.thresholds, sparsity), own.signal.q.shape[1]
    counts = Recall(1, own.signal.q.shape[0] * size)
    sides: list[list[NDArray[np.int64]]] = []
    for given, experts in ((guess, named), (then.hidden, then.chosen)):
        calls, active = neurons_of(given, own.signal, experts, limits)
        ends = active.offsets[experts.shape[1] : -1 : experts.shape[1]].numpy()
        sides.append(np.split(keys(calls, active, size), ends))
    for predicted, actual in zip(*sides, strict=True):
        counts.seen(0, predicted, actual)
    return [round(share or 0.0, 4) for share in (counts.recall(), counts.precision())]


def neurons_of(
    guess: Tensor, signal: SignalWeights, experts: Tensor, thresholds: Tensor, *, x_bits: int = 8
) -> tuple[Calls, Active]:
    """The neurons that the next layer's experts will find active, by its own signal.

    Args:
        guess: (B, H) of what its MoE block will be given: this layer's times `carries`, or PartialPredictor's.
        signal: of the next layer, whole or in halves. experts: (B, P) that are likely there.
        thresholds: (E,) of the next layer, as it will use them itself.

    Returns:
        P calls of each token, token after token, and the active neurons of each call.
    """
    tokens = torch.arange(len(experts), device=experts.device).repeat_interleave(experts.shape[1])
    flat = experts.flatten()
    calls = Calls(tokens, flat, torch.ones(len(flat), device=guess.device))
    return calls, kernels.signal_gemv(guess, signal, calls, thresholds[flat], x_bits=x_bits)


def keys(calls: Calls, active: Active, neurons: int) -> NDArray[np.int64]:
    """Flat keys e * F + n of the active neurons, call after call; those that two tokens share come twice.

    Args:
        neurons: F of an expert, half of it where calls are of halves.
    """
    experts = calls.experts.cpu().repeat_interleave(active.offsets.diff())
    return (experts * neurons + active.neurons.cpu()).numpy()


class Recall:
    """How well predictions did, layer by layer: plain counts, for experts or for neurons.

    Args:
        size: keys are 0..size - 1: E for experts, E * F for neurons.
    """

    def __init__(self, layers: int, size: int) -> None:
        self.predicted, self.actual, self.hits = [0] * layers, [0] * layers, [0] * layers
        self._marks = np.zeros(size, dtype=np.bool_)

    def seen(self, layer: int, predicted: NDArray[np.int64], actual: NDArray[np.int64]) -> None:
        """Note what had been predicted for `layer` and what it wanted; neither holds a key twice."""
        self._marks[predicted] = True
        self.predicted[layer] += len(predicted)
        self.actual[layer] += len(actual)
        self.hits[layer] += int(np.count_nonzero(self._marks[actual]))
        self._marks[predicted] = False

    def recall(self, layer: int | None = None) -> float | None:
        """Share of what was wanted that had been predicted; None before anything was wanted."""
        return self._share(self.actual, layer)

    def precision(self, layer: int | None = None) -> float | None:
        """Share of what was predicted that was wanted; None before anything was predicted."""
        return self._share(self.predicted, layer)

    def _share(self, of: list[int], layer: int | None) -> float | None:
        hits, count = (sum(self.hits), sum(of)) if layer is None else (self.hits[layer], of[layer])
        return hits / count if count else None


def main() -> None:
    """Print a line per layer, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pack", type=Path, nargs="?", default=asset("demo", "packed"))
    parser.add_argument("--text", type=Path, default=asset("demo", "manual.md"))
    parser.add_argument("--preset", default=quality_presets.DEFAULT)
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens, at the most")
    options = parser.parse_args()
    loaded, _ = load(options.pack, options.preset, "cpu", lambda _step, _share: None, library=True)
    model, packed, sparsity = loaded.model, loaded.packed, loaded.control.preset.rule.sparsity
    text = options.text.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(options.pack / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    count = min(options.windows, len(ids) // WINDOW)
    tokens = torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)
    top_k, layers = packed.manifest.architecture.top_k, layers_of(model)
    gate, learned = (predictor.make(name, model, packed) for name in ("gate", "learned"))
    print("next ", *(f"{name:>7}" for name in COLUMNS), "|", *(f"{name:>11}" for name in NEURONS))
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        seen, rope = watch(model, tokens)
        for layer, (now, then) in enumerate(itertools.pairwise(seen)):
            following, known = layers[layer + 1], layers[layer].without_experts(now)
            chosen = then.chosen
            carried = gate.guess(layer, now.hidden, None)
            by_gate = gate.experts(layer, now.hidden, now.chosen, carried)
            by_learning = learned.experts(layer, now.hidden, now.chosen, carried)
            alone = through_attention(following.module, then.stream, known, rope)
            output = resident_output(packed, layer, now, sparsity, 0.5)
            partial = through_attention(following.module, then.stream, known + output, rope)
            by_alone, by_partial = following.ranked(alone), following.ranked(partial)
            found = (
                float(F.cosine_similarity(now.hidden, then.hidden).mean()),
                recall(following.ranked(now.hidden), chosen, top_k),
                recall(by_gate, chosen, top_k),
                recall(by_learning, chosen, top_k),
                recall(by_learning, chosen, top_k + 1),
                recall(ranked(following.router, by_learning), chosen, top_k),
                recall(by_alone, chosen, top_k),
                recall(by_partial, chosen, top_k),
            )
            guesses = ((carried, None), (carried, by_gate), (carried, by_learning), (alone, by_alone))
            shares = [
                neurons(packed, layer + 1, then, guess, chosen if s is None else s.topk(top_k).indices, sparsity)
                for guess, s in (*guesses, (partial, by_partial))
            ]
            texts = (f"{share[0]:.3f}/{share[1]:.3f}" for share in shares)
            print(f"{layer + 1:<5}", *(f"{value:7.3f}" for value in found), "|", *texts, flush=True)
            rows.append(dict(zip(COLUMNS, found, strict=True)) | dict(zip(NEURONS, shares, strict=True)))
    means = {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in COLUMNS}
    means |= {name: round(sum(row[name][0] for row in rows) / len(rows), 4) for name in NEURONS}
    print("mean ", *(f"{means[name]:7.3f}" for name in COLUMNS), "|", *(f"{means[name]:.3f}      " for name in NEURONS))
    bench = {"bench": "recall", "preset": loaded.control.preset.name, "tokens": tokens.numel(), "means": means}
    print(json.dumps(bench | {"widths": packed.manifest.widths.describe(), "layers": rows}))


if __name__ == "__main__":
    main()
