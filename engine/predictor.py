"""What the next layer will want, named one layer ahead so that it can be fetched meanwhile (DESIGN section 5, step 6).

Experts come from a predictor; neurons from the next layer's own up projection, reused on this layer's input (FloE
section 3.3.2). A wrong guess costs time, never correctness.

`layer` is always the one whose MoE input is at hand; what is named belongs to layer + 1. `hidden` is what that layer's
MoE block was given, after its norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..kernels.layouts import UpWeights
from ..kernels.types import Active, Calls
from ..models.errors import UsageError
from ..models.foresight import Lookahead, carry
from ..models.packed import PackedModel

PREDICTORS = ("auto", "gate", "learned", "partial")
Ahead = Callable[[int, Tensor | None], Tensor]


class Predictor(Protocol):
    """Scores the next layer's experts."""

    name: str

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor) -> Tensor:
        """hidden (B, H), chosen (B, K) this layer's experts -> (B, E) scores of layer + 1's, higher is likelier."""
        ...


class GatePredictor:
    """The next layer's own router on this layer's input: no training, no memory (CORM section 4.2).

    Args:
        routers: (E, H) of every layer. carries: (H,) of every layer but the last, see `carries`.
    """

    name = "gate"

    def __init__(self, routers: Sequence[Tensor], carries: Sequence[Tensor]) -> None:
        self._routers = [(router * ratio).to(router.dtype) for router, ratio in zip(routers[1:], carries, strict=True)]

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor) -> Tensor:
        """hidden (B, H) -> (B, E); what this layer chose is not looked at."""
        return F.linear(hidden, self._routers[layer])


class LearnedPredictor:
    """What packing learned from the calibration text (FloE section 3.3.1): reads this layer's experts too."""

    name = "learned"

    def __init__(self, layers: Sequence[Lookahead]) -> None:
        self._layers = layers

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor) -> Tensor:
        """hidden (B, H), chosen (B, K) -> (B, E)."""
        return self._layers[layer].scores(hidden, chosen)


class PartialPredictor:
    """The next layer's router on what that layer would be given by its own attention, if this layer added only what is
    known so far: nothing at first, then what its resident experts compute (importance-driven scheduling section 5.2).

    Names far more experts and neurons than the others, for a second pass through attention.

    Args:
        routers: (E, H) of every layer.
        ahead: of the decoder, which has the residual stream and the keys and values: layer and what it adds, (B, H) or
            None for nothing -> (B, H), what the MoE block of layer + 1 would be given.
    """

    name = "partial"

    def __init__(self, routers: Sequence[Tensor], ahead: Ahead) -> None:
        self._routers, self._ahead = routers, ahead

    def guess(self, layer: int, output: Tensor | None) -> Tensor:
        """What layer + 1's MoE block will be given, (B, H): for `score` and `neurons`. output: (B, H) known so far."""
        return self._ahead(layer, output)

    def score(self, layer: int, guess: Tensor) -> Tensor:
        """(B, H) -> (B, E)."""
        return F.linear(guess, self._routers[layer + 1])

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Before any expert has computed: (B, E). Neither argument is looked at, the stream behind them is."""
        return self.score(layer, self.guess(layer, None))


def make(name: str, model: Any, packed: PackedModel, ahead: Ahead | None = None) -> Predictor:
    """The predictor `name` for a loaded model; "auto" is the learned one where the pack has it.

    Args:
        ahead: of the decoder, for "partial"; None where it has none.

    Raises:
        UsageError: there is no such predictor, or it cannot be had here. PackError: its weights are damaged.
    """
    if name not in PREDICTORS:
        raise UsageError(f"There is no predictor {name!r}", "", f"Choose one of {', '.join(PREDICTORS)}.")
    routers = [block.mlp.gate.weight for block in model.model.layers]
    if name == "partial":
        if ahead is None:
            raise UsageError(
                'The predictor "partial" does not work with this model',
                "It needs floe-chat's own pass through the dense layers; here transformers' modules run.",
                'Choose "learned" or "gate".',
            )
        return PartialPredictor(routers, ahead)
    if name == "learned" or (name == "auto" and packed.has_lookahead()):
        device, dtype = routers[0].device, routers[0].dtype
        return LearnedPredictor([layer.to(device, dtype) for layer in packed.lookahead()])
    return GatePredictor(routers, carries(model))


def carries(model: Any) -> list[Tensor]:
    """What each layer's MoE input (B, H) is multiplied by to guess the next one's: (H,) float32, none for the last."""
    norms = [block.post_attention_layernorm.weight for block in model.model.layers]
    return [carry(norm, following) for norm, following in itertools.pairwise(norms)]


def neurons(
    guess: Tensor, up: UpWeights, experts: Tensor, thresholds: Tensor, *, exact: bool = False
) -> tuple[Calls, Active]:
    """The neurons that the next layer's experts will find active, by its own up projection.

    Args:
        guess: (B, H) of what its MoE block will be given: this layer's times `carries`, or PartialPredictor's.
        up: of the next layer, whole or in halves. experts: (B, P) that are likely there.
        thresholds: (E,) of the next layer, as it will use them itself.

    Returns:
        P calls of each token, token after token, and the active neurons of each call.
    """
    tokens = torch.arange(len(experts), device=experts.device).repeat_interleave(experts.shape[1])
    flat = experts.flatten()
    calls = Calls(tokens, flat, torch.ones(len(flat), device=guess.device))
    return calls, kernels.up_gemv(guess, up, calls, thresholds[flat], exact=exact)


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
