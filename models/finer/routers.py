"""How a router has to be changed so that all parts of a chosen expert are chosen, and weighed as the expert was.

Each row of the router is repeated P times, so the P parts of an expert have exactly its score, and the best P K of P E
parts are the parts of the best K of E experts. Only where two experts tie to the last bit may parts of both be chosen
in place of all of one. With p the probability of an expert and w its weight, a part's weight is

- softmax over all experts: p / P. Without normalization that is w / P; with it, p / P over the sum of P K of these,
  which is the sum of p, so w / P again.
- softmax over the chosen (gpt-oss, Granite): P times as many terms below, so w / P.
- p / P plus a bias for the choice (ERNIE): the bias has to be divided by P as well; then as above.
- p, normalized, times a factor of the expert (Gemma 4): the factor is repeated, so w / P.
- sigmoids, with a bias for the choice: the score of a part is the expert's. Normalized, w / P, except for the 1e-20 or,
  in LFM2, 1e-6 that is added to the sum; not normalized, w.
- groups, of which the best few are looked into. If a group is as good as its best expert (DeepSeek-V2), repetition
  changes nothing. If it is as good as its best two (DeepSeek-V3, GLM), its best one would count twice: refused.
- SparseMixer chooses one expert, then one other: never two parts of the same. Refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from ..families.family import Family


@dataclass(frozen=True, slots=True)
class FinerRouter:
    """What becomes of a layer beside the cut of its experts.

    Attributes:
        down: what down is multiplied by; each part's weight is the expert's divided by it.
        correction: what the bias that corrects the choice is multiplied by.
    """

    down: int
    correction: float


def finer_router(family: Family, config: Any, parts: int) -> FinerRouter:
    """How a family's router becomes one of `parts` times as many experts.

    Args:
        config: transformers' configuration of the language model.

    Raises:
        CheckpointError: there is no such router with the same outputs.
    """
    routing = family.routing
    match routing.kind:
        case "sparsemixer":
            raise _refused(
                family,
                "Its router (SparseMixer) chooses one expert and then one other, so it would not choose all parts of an"
                " expert.",
            )
        case "sigmoid":
            groups = getattr(config, "n_group", None) or 1
            if groups > (getattr(config, "topk_group", None) or groups):
                raise _refused(
                    family,
                    f"Its router looks into the best of {groups} groups by each group's best two experts, which would"
                    " then be two parts of one.",
                )
            normalized = config.norm_topk_prob if routing.normalized is None else routing.normalized
            return FinerRouter(parts if normalized else 1, 1.0)
        case "softmax" | "scaled":
            return FinerRouter(parts, 1 / parts)
        case "own":
            raise _refused(family, "Its router is transformers' own, of which nothing is known.")


def repeated_names(family: Family, layer: int) -> dict[str, bool]:
    """Names in transformers' module of a decoder layer's tensors with an entry or row for each expert, and whether that
    is the bias that corrects the choice. No family has all of them.
    """
    start, routing = f"model.layers.{layer}.", family.routing
    start += f"{family.block}." if family.block else ""
    router = f"{start}{routing.module}."
    names = {f"{router}{name}": False for name in ("weight", "bias", "proj.weight", "per_expert_scale")}
    return names | ({f"{start}{routing.correction}": True} if routing.correction else {})


def _refused(family: Family, cause: str) -> CheckpointError:
    return CheckpointError(
        f"{family.called} cannot be given finer experts", cause, "Skip neurons instead: floe-chat pack SOURCE FOLDER"
    )
