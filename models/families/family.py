"""What floe-chat knows about a family of models, besides transformers' own code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..catalog_entry import CatalogEntry


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Attention in which each head of keys and values serves as many heads of queries; all of them are cached.

    Attributes:
        normalized: whether queries and keys are normalized before rope.
        window: configuration and layer -> how many tokens attention looks back, including the current one; None for
            all.
    """

    normalized: bool = False
    window: Callable[[Any, int], int | None] = lambda _config, _layer: None


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's router chooses.

    Attributes:
        kind: "softmax": the top-k by their probabilities, which weigh them.
        normalized: whether the weights of a token's experts sum to 1; None where config.json says it (norm_topk_prob).
    """

    kind: Literal["softmax"] = "softmax"
    normalized: bool | None = None


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token of a layer uses besides its own experts.

    Attributes:
        module: its name in the block. gate: the name of the linear layer whose sigmoid scales it; None if there is
            none.
    """

    module: str
    gate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. Names are those of its published checkpoints and of transformers' configuration.

    Attributes:
        model_type: in config.json. called: what people call it.
        expert: published name of one expert matrix, with fields {layer}, {expert} and {part}.
        gate, up, down: what {part} is for each. renames: published fragment -> fragment of the module's name.
        linears: name endings of the linear layers that a pack may store at low width, on disk and in memory.
        width: the field that says how many neurons an expert has. activation: of its gate, as config.json names it.
        dense_layers: configuration -> the layers that have no experts. shared: the expert of all tokens.
        defaults: of transformers' configuration, for fields that a config.json leaves out. A field that the family does
            not
            have is None or False.
        published: models to set up, in no order.
    """

    model_type: str
    called: str
    expert: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renames: tuple[tuple[str, str], ...] = ()
    linears: tuple[str, ...] = (".q_proj", ".k_proj", ".v_proj", ".o_proj", "lm_head")
    width: str = "intermediate_size"
    activation: str = "silu"
    dense_layers: Callable[[Any], Collection[int]] = lambda _config: ()
    shared: SharedExpert | None = None
    routing: Routing = Routing()
    attention: GroupedQuery = GroupedQuery()
    defaults: Mapping[str, Any]
    published: tuple[CatalogEntry, ...] = ()

    def experts(self, config: Any) -> int:
        """How many experts a layer has; ours and some of transformers' configurations share one name for it."""
        return int(getattr(config, "num_local_experts", None) or config.num_experts)

    def neurons(self, config: Any) -> int:
        """How many neurons an expert has."""
        return int(getattr(config, self.width))

    def module_name(self, published: str) -> str:
        """The name in transformers' module of a dense tensor's published name; the only place that renames."""
        for old, new in self.renames:
            published = published.replace(old, new)
        return published

    def is_linear(self, layer: str) -> bool:
        """Whether a layer's name, on disk or in memory, is that of an attention projection or the head."""
        return layer.endswith(self.linears)

    def expert_names(self, layer: int, expert: int) -> list[str]:
        """Published names of an expert's gate, up and down."""
        return [self.expert.format(layer=layer, expert=expert, part=part) for part in (self.gate, self.up, self.down)]
