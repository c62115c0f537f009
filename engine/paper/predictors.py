"""How well the next layer's experts and neurons are predicted, layer by layer, and what a prediction costs.

Experts are predicted by the next router on this layer's input, as it is ("raw") or carried over the norms ("gate"); by
the predictor that packing learned ("learned"), the best K or K + 1; by the next layer's attention and
router on what this layer has without its experts ("alone"), or with its resident ones, the more popular half
("partial", importance-driven scheduling section 5.2). A shared expert, which needs no choice, is part of "alone".
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.activation import applied
from ...kernels.types import Calls
from ...models.errors import UsageError
from ...models.families import family_of
from ...models.pack.packed_model import PackedModel
from ...models.packing.calibration import threshold_at
from .. import quality_presets
from ..decoder.blocks import read_beside
from ..offload import predictor
from ..quality.references import NO_SPARSITY, use
from .papers import Cells, Grid, Made
from .study import Study

RESIDENT = 0.5  # of a layer's experts, for "partial"
SPARSITY = 0.8  # of the neurons that are predicted, FloE's, where the default preset has none
CORM_SPARSITY = 0.55
ALPHA = 0.3  # importance-driven scheduling's: scores above (1 + alpha) times the best rejected one are high

Rope = tuple[Tensor, Tensor] | Tensor  # cosines and sines, or both as complex numbers (DeepSeek-V2)


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
    """A decoder layer with experts: its modules, (E, H) by which it scores experts, and what corrects the choice."""

    module: Any
    block: Any
    scores_by: Tensor
    correction: Tensor | None
    shared: Any

    def ranked(self, hidden: Tensor) -> Tensor:
        """hidden (B, H) -> (B, E), by which experts are chosen; of groups all."""
        logits = F.linear(hidden, self.scores_by)
        return logits if self.correction is None else logits.float().sigmoid() + self.correction

    def without_experts(self, seen: Seen) -> Tensor:
        """What the layer adds to the stream, and the stream, before its experts are known: (N, T, H)."""
        if self.shared is None:
            return seen.residual
        return seen.residual + self.shared(seen.hidden.view_as(seen.residual))


def layers_of(model: Any) -> list[Layer]:
    """Those with experts, in order."""
    family = family_of(model.config.model_type)
    correction = family.routing.correction
    found: list[Layer] = []
    for place, block in zip(family.expert_layers(model.config), family.blocks(model), strict=True):
        module = model.model.layers[place]
        corrected = attrgetter(correction)(block).flatten() if correction else None
        shared = None if family.shared is None else read_beside(family, block, has_experts=True)
        found.append(Layer(module, block, family.scores_by(module), corrected, shared))
    return found


def attends(model: Any) -> bool:
    """Whether the next layer's attention can be passed through ahead: all layers with experts are neighbours, and have
    the modules that most families have.
    """
    places = family_of(model.config.model_type).expert_layers(model.config)
    needed = ("input_layernorm", "self_attn", "post_attention_layernorm")
    neighbours = places == list(range(places[0], places[-1] + 1))
    return neighbours and all(hasattr(model.model.layers[place], name) for place in places for name in needed)


def watch(model: Any, ids: Tensor) -> tuple[list[Seen], Rope]:
    """What every layer sees of ids (N, T), and the rope tables."""
    layers, norm_name = layers_of(model), family_of(model.config.model_type).norm
    seen: list[dict[str, Tensor]] = [{} for _ in layers]
    rope: list[Rope] = []
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
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [Seen(**parts) for parts in seen], rope[0]


def resident_output(packed: PackedModel, layer: int, seen: Seen, share: float) -> Tensor:
    """What the resident experts, the most popular `share` of them, add to the stream: (N, T, H)."""
    popularity = packed.profile()["popularity"][layer]
    resident = popularity.topk(round(share * len(popularity))).indices
    token, slot = torch.isin(seen.chosen, resident).nonzero(as_tuple=True)
    chosen, own = seen.chosen[token, slot], packed.layer(layer)
    calls = Calls(token, chosen, seen.weights[token, slot])
    y, _ = kernels.moe_step(seen.hidden, own.signal, own.rows, calls, torch.zeros(len(chosen)))
    return y.view_as(seen.residual)


def through_attention(layer: Any, true: Tensor, guess: Tensor, rope: Rope) -> Tensor:
    """What a layer's MoE block is given, (N * T, H), for a guess of what enters the layer (N, T, H).

    Both streams go through the layer's attention as one sequence of 2T, of which the guess of token t sees the true
    tokens before t and itself.
    """
    length = true.shape[1]
    past = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.cat(
        [torch.cat([past, ~past & past], 1), torch.cat([past.tril(-1), torch.eye(length, dtype=torch.bool)], 1)]
    )
    tables = (
        torch.cat([rope] * 2, dim=1) if isinstance(rope, Tensor) else tuple(torch.cat([one, one], 1) for one in rope)
    )
    both = layer.input_layernorm(torch.cat([true, guess], dim=1))
    attended, _ = layer.self_attn(
        hidden_states=both, position_embeddings=tables, attention_mask=mask[None, None].expand(len(true), 1, -1, -1)
    )
    return layer.post_attention_layernorm(guess + attended[:, length:]).flatten(0, 1)


def recall(scores: Tensor, chosen: Tensor, count: int) -> float:
    """Share of the chosen experts (B, K) among the `count` of the highest scores (B, E)."""
    named = scores.topk(min(count, scores.shape[1]), dim=1).indices
    return float((named[:, :, None] == chosen[:, None, :]).any(dim=1).float().mean())


def neurons(packed: PackedModel, layer: int, then: Seen, guess: Tensor, named: Tensor, sparsity: float) -> Cells:
    """Recall and precision of a layer's neurons, when it is taken to be given `guess` and to choose experts `named`."""
    own = packed.layer(layer)
    limits = threshold_at(own.thresholds, sparsity)
    hits = predicted = actual = 0
    for expert in range(len(limits)):
        matrix = own.signal.dense(expert, torch.float32)

        def active(hidden: Tensor, matrix: Tensor = matrix, limit: Tensor = limits[expert]) -> Tensor:
            return ~(applied(own.signal.layout.function, F.linear(hidden, matrix)).abs() < limit)

        true, meant = ((index == expert).any(1) for index in (then.chosen, named))
        wanted, expected, both = active(then.hidden[true]), active(guess[meant]), true & meant
        actual, predicted = actual + int(wanted.sum()), predicted + int(expected.sum())
        hits += int((wanted[both[true]] & expected[both[meant]]).sum())
    return hits / max(1, actual), hits / max(1, predicted)


class _Ahead:
    """Every predictor's guess of the input and the experts of layer + 1, and the seconds that it took."""

    def __init__(self, study: Study) -> None:
        loaded = study.loaded
        use(loaded, NO_SPARSITY)
        windows, _ = study.windows
        self.packed, self._model, self.top_k = loaded.packed, loaded.model, study.top_k
        self.layers = layers_of(self._model)
        self.seen, self._rope = watch(self._model, windows)
        # Gemma 4 gives its experts' norm tokens one by one, next to another branch.
        self.attends = attends(self._model) and self.seen[0].residual.ndim == self.seen[0].stream.ndim
        names = ("gate", "learned") if self.packed.has_lookahead() else ("gate",)
        self._made = {name: predictor.make(name, self._model, self.packed) for name in names}
        self.seconds: dict[str, float] = {}

    def guesses(self, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
        """By predictor: the input (B, H) and the scores (B, E) of layer + 1."""
        now, then, following = self.seen[layer], self.seen[layer + 1], self.layers[layer + 1]
        known = self.layers[layer].without_experts(now)
        output = resident_output(self.packed, layer, now, RESIDENT) if self.attends else 0.0

        def by(name: str) -> tuple[Tensor, Tensor]:
            own = self._made[name]
            guess = own.guess(layer, now.hidden, None)
            return guess, own.experts(layer, now.hidden, now.chosen, guess)

        def ahead(stream: Tensor) -> tuple[Tensor, Tensor]:
            guess = through_attention(following.module, then.stream, stream, self._rope)
            return guess, following.ranked(guess)

        makers: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "raw": lambda: (now.hidden, following.ranked(now.hidden)),
            **{name: lambda name=name: by(name) for name in self._made},
        }
        if self.attends:
            makers |= {"alone": lambda: ahead(known), "partial": lambda: ahead(known + output)}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, make in makers.items():
            began = time.thread_time()
            found[name] = make()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began
        return found

    def pairs(self) -> Sequence[tuple[int, Seen, Seen]]:
        """Each layer but the last with what it and the next one saw.

        Raises:
            UsageError: there is one layer.
        """
        if len(self.seen) < 2:
            raise UsageError("There is no next layer to predict", "The model has one layer with experts.", "")
        return [(layer, *both) for layer, both in enumerate(itertools.pairwise(self.seen))]


def _here(study: Study) -> str:
    windows, _ = study.windows
    return f"{study.name} reading {windows.numel()} tokens of {study.called}, nothing left out, each layer's true input"


def _with_mean(rows: dict[str, Cells]) -> dict[str, Cells]:
    columns = zip(*rows.values(), strict=True)
    return rows | {"mean": tuple(sum(value or 0.0 for value in column) / len(rows) for column in columns)}


def floe_f4(study: Study) -> Made:
    """Cosine by hop, recall of experts and neurons by predictor, what each costs, and which the engine uses."""
    ahead, preset = _Ahead(study), quality_presets.get(quality_presets.DEFAULT, study.loaded.packed.manifest)
    sparsity = preset.rule.sparsity or SPARSITY
    cosine: dict[str, Cells] = {}
    experts: dict[str, Cells] = {}
    shares: dict[str, Cells] = {}
    precise: dict[str, Cells] = {}
    names: list[str] = []
    hops = ahead.pairs()
    for layer, _, then in hops:
        study.told.step(f"Predicting layer {layer + 2}")
        guesses, at = ahead.guesses(layer), f"to layer {layer + 2}"
        names = list(guesses)
        cosine[at] = tuple(
            float(F.cosine_similarity(guess, then.hidden).mean())
            for name, (guess, _) in guesses.items()
            if name != "learned"
        )
        found = [recall(scores, then.chosen, ahead.top_k) for _, scores in guesses.values()]
        more = [name for name in ("learned", "partial") if name in guesses]
        found += [recall(guesses[name][1], then.chosen, ahead.top_k + 1) for name in more]
        experts[at] = tuple(found)
        true = [
            neurons(ahead.packed, layer + 1, then, guesses[name][0], then.chosen, sparsity)
            for name in ("gate", "partial")
            if name in guesses
        ]
        each = [
            neurons(ahead.packed, layer + 1, then, guess, scores.topk(ahead.top_k).indices, sparsity)
            for guess, scores in guesses.values()
        ]
        shares[at], precise[at] = (tuple(one[of] for one in (*true, *each)) for of in (0, 1))
    tokens = len(hops[0][1].hidden) * len(hops)
    cost = {name: (1e6 * seconds / tokens, _bytes(study, name)) for name, seconds in ahead.seconds.items()}
    more = tuple(f"{name}, K + 1" for name in ("learned", "partial") if name in names)
    columns = (*(f"{name}, true" for name in ("gate", "partial") if name in names), *names)
    grids = (
        Grid("cosine of the predicted input", tuple(name for name in names if name != "learned"), _with_mean(cosine)),
        Grid("experts: share of the chosen named", (*names, *more), _with_mean(experts)),
        Grid(f"neurons at {sparsity:.0%}: recall", columns, _with_mean(shares)),
        Grid(f"neurons at {sparsity:.0%}: precision", columns, _with_mean(precise)),
        Grid("cost of a prediction", ("us of a token", "bytes a layer"), cost),
    )
    plot = {
        name: [(float(place + 2), row[at] or 0.0) for place, row in enumerate(experts.values())]
        for at, name in enumerate((*names, *more))
    }
    notes = _uses(study), "Neurons: by the experts named, or (true) by those that are chosen.", _TIMES
    return Made(_here(study), grids, plot, ("layer", "experts named"), notes=notes)


_TIMES = "Times are of this machine's processor, many tokens at once; a single token takes longer for each."


def _bytes(study: Study, name: str) -> float:
    if name != "learned":
        return 0.0
    layers = study.loaded.packed.lookahead()
    parts = [part for layer in layers for part in (layer.linear, layer.inner, layer.outer) if part is not None]
    return sum(part.nbytes for part in parts) / len(layers)


def _uses(study: Study) -> str:
    packed = study.loaded.packed
    if not packed.has_lookahead():
        return 'The engine uses "gate" in all layers: this pack has no learned predictor.'
    gains = packed.lookahead_gains()
    better = ", ".join(str(layer + 2) for layer, gained in enumerate(gains) if gained) or "none"
    return (
        f'The engine\'s "auto" uses "learned" to predict layers {better}, where it named more experts than the next '
        'router on calibration text that it had not learned from, and "gate" for the others; with a card, in each '
        "layer these or `partial`, which takes a pass through the next layer's attention, or nothing, by what the "
        "first tokens gain."
    )


def corm_f5(study: Study) -> Made:
    """The next router on this layer's input, and the next signal on it."""
    ahead, rows = _Ahead(study), dict[str, Cells]()
    for layer, now, then in ahead.pairs():
        by_router = ahead.layers[layer + 1].ranked(now.hidden)
        found = neurons(ahead.packed, layer + 1, then, now.hidden, then.chosen, CORM_SPARSITY)
        rows[f"to layer {layer + 2}"] = (
            100 * recall(by_router, then.chosen, ahead.top_k),
            *(100 * (x or 0) for x in found),
        )
    columns = ("experts, %", "neurons found, %", "of the found right, %")
    note = f"{CORM_SPARSITY:.0%} of the neurons are inactive, as at CORM's threshold, by each layer's own signal."
    return Made(_here(study), (Grid("", columns, _with_mean(rows)),), notes=(note,))


def importance_f10(study: Study) -> Made:
    """How close predicted scores are to the true ones."""
    ahead, errors, ranks = _Ahead(study), dict[str, Cells](), dict[str, Cells]()
    names: list[str] = []
    for layer, _, then in ahead.pairs():
        true = ahead.layers[layer + 1].ranked(then.hidden)
        guesses = {name: scores for name, (_, scores) in ahead.guesses(layer).items() if name != "learned"}
        names, at = list(guesses), f"to layer {layer + 2}"
        chances = {name: scores.float().softmax(-1) for name, scores in guesses.items()}
        actual = true.float().softmax(-1)
        errors[at] = tuple(float((own - actual).abs().sum(1).mean()) / 2 for own in chances.values())
        ranks[at] = tuple(recall(scores, then.chosen, ahead.top_k) for scores in guesses.values())
    grids = (
        Grid("share of the scores that is elsewhere", tuple(names), _with_mean(errors)),
        Grid("share of the chosen experts that are named", tuple(names), _with_mean(ranks)),
    )
    note = (
        '"raw" and "gate" go by the residual alone, "alone" adds attention and shared experts, "partial" resident ones.'
    )
    return Made(_here(study), grids, notes=(note,))


def importance_f18(study: Study) -> Made:
    """Of the experts that would be prefetched, those of high score and the chosen ones.

    Raises:
        UsageError: attention cannot be passed through ahead in this family.
    """
    ahead, rows = _Ahead(study), dict[str, Cells]()
    if not ahead.attends:
        called = study.loaded.packed.manifest.family.called
        raise UsageError(f"Attention is not looked ahead through in {called}", "Its layers are of several kinds.", "")
    for layer, _, then in ahead.pairs():
        actual, guess = (
            scores.float().softmax(-1)
            for scores in (ahead.layers[layer + 1].ranked(then.hidden), ahead.guesses(layer)["partial"][1])
        )
        high, meant = _high(actual, study.top_k), _high(guess, study.top_k)
        chosen = torch.zeros_like(high).scatter(1, then.chosen, value=True)
        count = max(1, int(meant.sum()))
        rows[f"to layer {layer + 2}"] = (
            100 * int((meant & high).sum()) / count,
            100 * int((meant & chosen).sum()) / count,
        )
    note = f"High are scores above 1 + {ALPHA} times the best that is not chosen; half of the experts are resident."
    grid = Grid("% of the predicted", ("of high score", "chosen"), _with_mean(rows))
    return Made(_here(study), (grid,), notes=(note,))


def _high(scores: Tensor, top_k: int) -> Tensor:
    if top_k == scores.shape[1]:
        return torch.ones_like(scores, dtype=torch.bool)
    rejected = scores.topk(top_k + 1, 1).values[:, -1:]
    return scores > (1 + ALPHA) * rejected


MAKERS: dict[str, Callable[[Study], Made]] = {
    "floe-f4": floe_f4,
    "corm-f5": corm_f5,
    "importance-f10": importance_f10,
    "importance-f18": importance_f18,
}
