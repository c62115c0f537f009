"""A trained model's real demand, token by token: its router's choices, its neurons' values, and both as predicted one
layer ahead. Recorded from a pack while it reads a text, so that policies can be compared on real behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.activation import applied
from ....models.errors import UsageError
from ....models.families import family_of
from ....models.pack.packed_model import PackedLayer
from ....models.packing.calibration import quantile_table
from ...decoder.fused_pass import FusedDecoder
from ...decoder.kv_cache import KVCache
from ...experts.moe_layer import MoELayer
from ...loader import load
from ...offload import predictor

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trace:
    """T tokens of decode in L layers of E experts with F neurons.

    Attributes:
        index: (T, L, K) int64 chosen experts. weights: (T, L, K) of them.
        values: (T, L, E, F) float16 |signal| of every expert, chosen or not. ahead: likewise as the layer before
            guessed it; nothing at layer 0. scores: (T, L, E) of experts, likewise guessed.
        thresholds: L tables (E, Q) for weighed rules, as in the pack. plain: likewise for those that are not, of the
            values of chosen experts here. source: in words.
        heard: (T, L, E) the router's scores of all experts; None where the routing is not the trace's own.
        attends: whether guesses take a pass through the next layer's attention.
    """

    index: NDArray[np.int64]
    weights: Floats
    values: NDArray[np.float16]
    ahead: NDArray[np.float16]
    scores: Floats
    thresholds: Sequence[Tensor]
    plain: Sequence[Tensor]
    source: str
    heard: Floats | None = None
    attends: bool = False

    def known(self) -> Trace:
        """With guesses that are right: the most that any predictor could gain one layer ahead."""
        scores = np.zeros_like(self.scores)
        np.put_along_axis(scores, self.index, 1 + self.weights, axis=2)
        return replace(self, ahead=self.values, scores=scores, attends=False)

    def first(self, tokens: int) -> Trace:
        """Of the first tokens alone."""
        names = ("index", "weights", "values", "ahead", "scores")
        parts: dict[str, Any] = {name: getattr(self, name)[:tokens] for name in names}
        return replace(self, **parts, heard=None if self.heard is None else self.heard[:tokens])

    def widened(self, experts: int, top_k: int) -> Trace:
        """The same tokens in a layer of more experts. Each block of this trace's experts is routed as the trace was at
        another place of the text, and a token takes the `top_k` experts of the most weight among all blocks' choices.
        So routing is as skewed, and as alike from one token to the next, as in the trace; guesses err as there.

        Raises:
            UsageError: the trace has more experts, or chooses more.
        """
        tokens, _, own = self.scores.shape
        if experts < own or top_k < self.index.shape[2]:
            raise UsageError(
                f"The model has {own} experts, {self.index.shape[2]} for each token",
                f"Its routing cannot stand for that of {experts} experts, {top_k} for each token.",
                "Name another model.",
            )
        if (experts, top_k) == (own, self.index.shape[2]):
            return self
        blocks = -(-experts // own)

        def tiled(values: NDArray[Any]) -> NDArray[Any]:
            moved = [np.roll(values, -(block * tokens // blocks), axis=0) for block in range(blocks)]
            return np.concatenate(moved, axis=2)[:, :, :experts]

        weights = np.zeros(self.scores.shape, np.float32)
        np.put_along_axis(weights, self.index, self.weights, axis=2)
        weights = tiled(weights)
        index = np.argsort(-weights, axis=2, kind="stable")[:, :, :top_k]
        chosen = np.take_along_axis(weights, index, axis=2)
        heard = None if self.heard is None else tiled(self.heard) / blocks
        tables = [[table.repeat(blocks, 1)[:experts] for table in kind] for kind in (self.thresholds, self.plain)]
        return Trace(
            index,
            chosen / chosen.sum(2, keepdims=True),
            tiled(self.values),
            tiled(self.ahead),
            tiled(self.scores),
            *tables,
            source=f"{self.source}, spread over {experts} experts",
            heard=heard,
            attends=self.attends,
        )

    def skewed(self, skew: float, seed: int = 0) -> Trace:
        """The same neurons, other routing: token by token the experts of a layer are drawn without replacement with
        chances 1 / rank ** skew, from 0 (all alike); guesses are right as often as they are in the trace."""
        random = np.random.default_rng(seed)
        tokens, layers, chosen = self.index.shape
        experts = self.scores.shape[2]
        ranks = np.stack([random.permutation(experts) for _ in range(layers)])
        chances = 1.0 / (1 + np.arange(experts)) ** skew
        keys = random.exponential(size=(tokens, layers, experts)) / chances[np.argsort(ranks, axis=1)]
        index = np.argsort(keys, axis=2)[:, :, :chosen]
        guessed = np.argsort(-self.scores, axis=2)[:, :, :chosen]
        right = (guessed[..., None] == self.index[:, :, None]).any(2).mean()
        scores = random.random((tokens, layers, experts), dtype=np.float32)
        known = random.random(index.shape) < right
        np.put_along_axis(scores, index, np.where(known, 2.0, 0.5).astype(np.float32), axis=2)
        return replace(self, index=index, scores=scores, heard=None, source=f"{self.source}, routing of skew {skew:g}")


def record(pack: Path, ids: Sequence[int], name: str, guesses: str = "auto") -> Trace:
    """Let a pack read `ids` one by one, as decode does, and note what each token wants.

    Args:
        guesses: by which predictor; "partial" knows nothing of a layer's output here.
    """
    loaded, _ = load(pack, None, "cpu", lambda _step, _share: None)
    family = family_of(loaded.packed.manifest.architecture.model_type)
    blocks = family.blocks(loaded.model)
    routers = [family.scores_by(loaded.model.model.layers[at]) for at in family.expert_layers(loaded.model.config)]
    own = loaded.decoder.ahead if isinstance(loaded.decoder, FusedDecoder) else None
    ahead = predictor.make(guesses, loaded.model, loaded.packed, own)
    packed: list[PackedLayer] = [block.experts.packed for block in blocks]
    sizes, count, layers = loaded.packed.manifest.architecture, len(ids), len(blocks)
    experts, top_k = sizes.experts, sizes.top_k
    ups = [torch.stack([layer.signal.dense(expert, torch.float32) for expert in range(experts)]) for layer in packed]
    neurons = ups[0].shape[1]
    trace = Trace(
        index=np.zeros((count, layers, top_k), np.int64),
        weights=np.zeros((count, layers, top_k), np.float32),
        values=np.zeros((count, layers, experts, neurons), np.float16),
        ahead=np.zeros((count, layers, experts, neurons), np.float16),
        scores=np.zeros((count, layers, experts), np.float32),
        thresholds=[layer.thresholds for layer in packed],
        plain=[],
        source=f"{name} reading {count} tokens",
    )
    token, heard = 0, np.zeros((count, layers, experts), np.float32)
    trace = replace(trace, heard=heard, attends=ahead.attends)

    def signals(at: int, hidden: Tensor) -> NDArray[np.float16]:
        v = F.linear(hidden, ups[at].flatten(0, 1)).view(experts, neurons)
        return applied(packed[at].signal.layout.function, v).abs().half().numpy()

    def note(layer: MoELayer, given: tuple[Tensor, Tensor, Tensor]) -> None:
        hidden, index, weights = given
        at = layer.index
        trace.index[token, at], trace.weights[token, at] = index[0].numpy(), weights[0].float().numpy()
        trace.values[token, at] = signals(at, hidden)
        heard[token, at] = F.linear(hidden, routers[at])[0].float().softmax(-1).numpy()
        if at + 1 < layers:
            guess = ahead.guess(at, hidden, None)
            trace.scores[token, at + 1] = ahead.experts(at, hidden, index, guess)[0].float().numpy()
            trace.ahead[token, at + 1] = signals(at + 1, guess)

    handles = [block.experts.register_forward_pre_hook(note) for block in blocks]
    kv = KVCache()
    with torch.inference_mode():
        for token, one in enumerate(ids):  # noqa: B007 - `note` reads it
            loaded.decoder.forward([one], kv)
            kv.computed([one], loaded.control.preset)
    for handle in handles:
        handle.remove()
    return replace(trace, plain=[_quantiles(trace, layer) for layer in range(layers)])


def _quantiles(trace: Trace, layer: int) -> Tensor:
    """(E, Q) of the values of each expert for the tokens that chose it; for all tokens if none did."""
    tables: list[Tensor] = []
    for expert in range(trace.values.shape[2]):
        chose = (trace.index[:, layer] == expert).any(1)
        values = trace.values[chose if chose.any() else slice(None), layer, expert]
        tables.append(quantile_table(torch.from_numpy(values).float()))
    return torch.stack(tables)
