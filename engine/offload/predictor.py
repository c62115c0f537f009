"""Predicts what the next layer will need, one layer ahead, so that it can be fetched meanwhile.

A predictor returns two things: the input of the next MoE block, and how likely each of its experts is. Neurons follow
from that input by the next layer's own signal (FloE section 3.3.2). A wrong guess costs time, never correctness.

`layer` is always the one whose MoE input is known; predictions are for layer + 1. `hidden` is the input of that layer's
MoE block, after its norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ...kernels import operations as kernels
from ...models.errors import UsageError
from ...models.families import family_of
from ...models.pack.learned_predictor import Lookahead, carry
from ...models.pack.packed_model import PackedModel
from ..ranges import PREDICTORS

PartialPass = Callable[[int, Tensor | None], Tensor]


class Predictor(Protocol):
    """Predicts the next layer's input and scores its experts.

    Attributes:
        attends: whether a prediction takes a pass through the next layer's attention.
    """

    name: str
    attends: bool

    def guess(self, layer: int, hidden: Tensor, output: Tensor | None) -> Tensor:
        """The predicted input of layer + 1's MoE block, (B, H).

        Args:
            output: (B, H) the part of this layer's own output known so far; None for nothing.
        """
        ...

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor, guess: Tensor) -> Tensor:
        """chosen (B, K) this layer's experts, guess as above -> (B, E) scores of layer + 1's, higher is likelier."""
        ...


class GatePredictor:
    """The next layer's own router on this layer's input: no training, no memory (CORM section 4.2).

    Args:
        routers: (E, H) of every layer. carries: (H,) of every layer but the last, see `carries`.
    """

    name, attends = "gate", False

    def __init__(self, routers: Sequence[Tensor], carries: Sequence[Tensor]) -> None:
        self._routers, self._carries = routers, carries

    def guess(self, layer: int, hidden: Tensor, output: Tensor | None) -> Tensor:
        """This layer's input, reweighted by the next layer's norm."""
        return hidden * self._carries[layer].to(hidden.dtype)

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor, guess: Tensor) -> Tensor:
        """(B, E); ignores this layer's choice."""
        router = self._routers[layer + 1]
        return kernels.plain(guess.to(router.device), router)


class LearnedPredictor(GatePredictor):
    """A predictor that packing trained on the calibration text (FloE section 3.3.1); reads this layer's experts too.

    Args:
        layers: of every layer but the last; None where the next router does it.
    """

    name = "learned"

    def __init__(
        self, routers: Sequence[Tensor], carries: Sequence[Tensor], layers: Sequence[Lookahead | None]
    ) -> None:
        super().__init__(routers, carries)
        self._layers = layers

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor, guess: Tensor) -> Tensor:
        """(B, E) from this layer's own input."""
        learned = self._layers[layer]
        return super().experts(layer, hidden, chosen, guess) if learned is None else learned.scores(hidden, chosen)


class PartialPredictor(LearnedPredictor):
    """The next layer's attention and router on this layer's partial output: nothing, or that of its resident experts
    (importance-driven scheduling section 5.2).

    Predicts far more of the needed experts and neurons than the others, at the cost of a second pass through attention.

    Where neighbours have so little in common that even half the experts are seldom known, as at the first layer, the
    learned predictor names the experts: what is missing from the output is most of what the next layer reads.

    Args:
        ahead: of the decoder, which has the residual stream and the keys and values: layer and its output, (B, H) or
            None for nothing -> (B, H), the input of layer + 1's MoE block.
        layers: as `LearnedPredictor`'s, of the layers with little in common; none if the pack has none.
    """

    name, attends = "partial", True

    def __init__(self, routers: Sequence[Tensor], ahead: PartialPass, layers: Sequence[Lookahead | None] = ()) -> None:
        super().__init__(routers, (), layers or [None] * len(routers))
        self._ahead = ahead

    def guess(self, layer: int, hidden: Tensor, output: Tensor | None) -> Tensor:
        """By the next layer's own attention."""
        return self._ahead(layer, output)


def make(name: str, model: Any, packed: PackedModel, ahead: PartialPass | None = None) -> Predictor:
    """The predictor `name` for a loaded model, not "none".

    "auto" is the learned one in those layers in which it named more of the experts than the next router did, on
    calibration text that it had not learned from; the next router in the others, or if the pack has none.

    Args:
        ahead: of the decoder, for "partial"; None if it has none.

    Raises:
        UsageError: there is no such predictor, or it does not work with this model. PackError: its weights are damaged.
    """
    if name not in PREDICTORS:
        raise UsageError(f"There is no predictor {name!r}", "", f"Choose one of {', '.join(PREDICTORS)}.")
    family, hidden = family_of(model.config.model_type), packed.manifest.architecture.hidden
    layers = [model.model.layers[index] for index in family.expert_layers(model.config)]
    routers, norms = zip(*(family.foresight(layer, hidden) for layer in layers), strict=True)
    if name == "partial" and ahead is not None:
        return PartialPredictor(routers, ahead, _learned(packed, routers, packed.lookahead_far()))
    if name == "partial":
        raise UsageError(
            'The predictor "partial" does not work with this model',
            "It needs floe-chat's own pass through the dense layers; here transformers' modules run.",
            "Set advanced.predictor to learned or gate.",
        )
    if name == "learned" or (name == "auto" and packed.has_lookahead()):
        useful = packed.lookahead_gains() if name == "auto" else [True] * (len(routers) - 1)
        return LearnedPredictor(routers, carries(norms), _learned(packed, routers, useful))
    return GatePredictor(routers, carries(norms))


def candidates(name: str, model: Any, packed: PackedModel, ahead: PartialPass | None = None) -> list[Predictor]:
    """Among which "auto" chooses layer by layer, where that is measured: of no cost, and through attention where that
    works; else what `make` makes. The arguments and errors are `make`'s.
    """
    found = [make(name, model, packed, ahead)]
    if name == "auto" and ahead is not None:
        found.append(make("partial", model, packed, ahead))
    return found


def _learned(packed: PackedModel, routers: Sequence[Tensor], useful: Sequence[bool]) -> list[Lookahead | None]:
    """Of the layers where it is useful, the learned predictors next to the routers."""
    if not useful:
        return []
    each = zip(packed.lookahead(), useful, routers, strict=False)
    return [layer.to(router.device, router.dtype) if used else None for layer, used, router in each]


def carries(norms: Sequence[Tensor]) -> list[Tensor]:
    """The factors of each layer's MoE input (B, H) that predict the next layer's: (H,) float32, none for the last.

    norms: (H,) weights of the norm before each layer's experts.
    """
    return [carry(norm, following.to(norm.device)) for norm, following in itertools.pairwise(norms)]
