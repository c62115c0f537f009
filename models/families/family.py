"""What floe-chat knows about a family of models, besides transformers' own code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from ..catalog_entry import CatalogEntry, Wide
from .storage import Apart, Storage

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor

    from ...kernels.activation import Activation, Projection

_ATTENTION = (".q_proj", ".k_proj", ".v_proj", ".o_proj")
_MLP = (".gate_proj", ".up_proj", ".down_proj")  # of shared experts, and of layers without experts
LATENT = (".q_a_proj", ".q_b_proj", ".kv_a_proj_with_mqa", ".kv_b_proj")  # of attention through a latent vector (MLA)

EMBEDDING = "model.embed_tokens.weight"  # in transformers' module
LINEARS = (*_ATTENTION, *_MLP, "lm_head")


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Attention in which each head of keys and values serves as many heads of queries; all of them are cached.

    Attributes:
        normalized: configuration -> whether queries and keys are normalized before rope.
        per_head: whether each head is normalized by itself, and not all together.
        biased: configuration -> whether queries, keys and values have biases, and whether the projection back has one.
        angles_once: whether the library's tables of rope hold each angle once, and not for both of its dimensions.
        sinks: whether each head has one more score, of a token without a value.
        interleaved: whether rope turns neighbouring dimensions together, and not those half a head apart.
        window: configuration and layer -> how many tokens attention looks back, including the current one; None for
            all.
        gated: whether a gate scales each number of a head's output; the query projection gives it behind each query.
        norms: what the norms of queries and keys are called. gate: what the projection of those gates is called, where
            the queries' does not give them. turned: configuration and layer -> whether rope turns its
            queries and keys.
    """

    normalized: Callable[[Any], bool] = lambda _config: False
    per_head: bool = False
    biased: Callable[[Any], tuple[bool, bool]] = lambda _config: (False, False)
    angles_once: bool = False
    sinks: bool = False
    interleaved: bool = False
    window: Callable[[Any, int], int | None] = lambda _config, _layer: None
    gated: bool = False
    norms: tuple[str, str] = "q_norm", "k_norm"
    gate: str = ""
    turned: Callable[[Any, int], bool] = lambda _config, _layer: True


@dataclass(frozen=True, slots=True)
class ThroughLatent:
    """Attention through a latent vector, of which keys and values of all heads are made (DeepSeek-V2, section 2.1).

    Attributes:
        interleaved: configuration -> whether rope turns neighbouring dimensions together.
        angles_once: as in `GroupedQuery`.
    """

    interleaved: Callable[[Any], bool]
    angles_once: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's router chooses.

    Attributes:
        module: its name in the block.
        kind: "softmax": the top-k by their probabilities, which weigh them; "sigmoid", or probabilities whose choice a
            bias corrects; "sparsemixer": one by one, each weighed among those near it. "scaled", whose weights are
            probabilities times a factor of each expert, is computed by transformers' router. "own": however
            transformers' module does it.
        normalized: whether the weights of a token's experts sum to 1; None where config.json says it (norm_topk_prob).
        precise: whether logits are computed in float32 whatever the rest is.
        correction: name in the block of the bias that is added to scores for the choice alone, if it has it; "" where
            none does.
        scores_by: router and weights (H,) of the experts' norm -> (E, H), by which the experts' input gives its scores.
        top_k, groups, scale: see `kernels.step.Router`; None where the router's module has them.
    """

    module: str = "gate"
    kind: Literal["softmax", "sigmoid", "sparsemixer", "scaled", "own"] = "softmax"
    normalized: bool | None = None
    precise: bool = False
    correction: str = ""
    scores_by: Callable[[Any, Tensor], Tensor] = lambda router, _norm: router.weight
    top_k: int | None = None
    groups: tuple[int, int] | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token of a layer uses besides its own experts.

    Attributes:
        module: its name in the block. gate: the name of the linear layer whose sigmoid scales it; None if there is
            none. width: the field that says how many neurons it has; "" where `count` experts' widths add up to it.
        count: the field that says how many experts it stands for.
    """

    module: str
    gate: str | None = None
    width: str = ""
    count: str = "n_shared_experts"

    def neurons(self, config: Any) -> int:
        """How many it has."""
        return int(
            getattr(config, self.width) if self.width else config.moe_intermediate_size * getattr(config, self.count)
        )


@dataclass(frozen=True, slots=True)
class Between:
    """What the norms of `kernels.step.Sandwich` are called in a layer; "" for none."""

    mixed: str
    both: str
    before: str = ""
    beside: str = ""
    experts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """A layer behind a model's last one that guesses a further token (multi-token prediction, DeepSeek-V3 section 2.2).

    It reads joined · [embedding_norm(the next token's embedding), hidden_norm(what the model's last norm gives)]; its
    norm and the model's head follow. Names are published ones, in which {layer} is how many layers the model has. Of
    several such layers, these are the first one's.

    Attributes:
        layer: the beginning of its decoder layer's names. joined: of the matrix (H, 2 H).
        norm: of the last norm; the model's own where it has none.
        stored: how its experts may be stored; empty where it has none.
        alone: what differs in the configuration of a model whose only layer it is.
        count: configuration -> how many heads it states.
    """

    layer: str
    joined: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    stored: tuple[Storage, ...] = (Apart(),)
    alone: Mapping[str, Any] = field(default_factory=dict[str, Any])
    count: Callable[[Any], int] = lambda config: getattr(config, "num_nextn_predict_layers", None) or 0

    def begins(self, config: Any) -> tuple[str, ...]:
        """How the published names of all its tensors begin."""
        each = (self.layer, self.joined, self.embedding_norm, self.hidden_norm, self.norm)
        return tuple(name.format(layer=config.num_hidden_layers).removesuffix("weight") for name in each)

    def config(self, config: Any) -> Any:
        """transformers' configuration of a model whose only layer it is."""
        own = copy.deepcopy(config)
        for name, value in {"num_hidden_layers": 1, **self.alone}.items():
            setattr(own, name, value)
        return own


@dataclass(frozen=True, slots=True)
class Assistant:
    """A small model that is published by itself for each model of a family, and guesses its further tokens.

    Its layers have queries alone: they see the keys and values of the model's last layer of the same kind. It reads a
    matrix · [the next token's embedding, what the model's last norm gives], both the model's; another matrix leads from
    its own last norm to what stands for the model's in the guess after that.

    Attributes:
        model_type: of its configuration, whose text_config describes its layers. layers: how these are read.
    """

    model_type: str
    layers: Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. Names are those of its published checkpoints and of transformers' configuration.

    Attributes:
        model_type: in config.json. called: what people call it.
        within: the model_type of a config.json that holds this family's in its `text_config`, beside what the model
            sees or hears with; "" where there is none.
        stored: how published checkpoints store experts; one of these. renames: published fragment -> fragment of the
            module's name.
        modules: transformers' name of a part of the decoder -> what most families call it, and so do we.
        unused: configuration -> beginnings of published names that the language model does not use, such as those of
            layers that only training needs.
        linears: name endings of the linear layers that a pack may store at low width, on disk and in memory.
        precise: name endings of tensors that are never rounded: a choice hangs on their last digits.
        block: a decoder layer's module with its experts; "" where that is the layer itself. norm: the one before them.
            first_norm: the one before the layer's mixer. eps: the field with that of norms.
        width: the field that says how many neurons an expert has. activation: of its gate, as config.json names it.
        dense_layers: configuration -> the decoder layers that have no experts. shared: the expert of all tokens.
        experts_by: the functions between an expert's matrices. biased: whether these have biases. signals: the
            projections by which neurons may be skipped.
        scaled, added, divided: the fields by which the model multiplies its embedding, and what layers add to the
            residual stream, and by which it divides logits; "" where none does. scaled may be a number, too.
        biases: configuration -> how many numbers the biases of all layers are, where `attention` does not say it, with
            what else they have beside matrices and what most families have.
        gated_heads: whether a gate scales each head's output. normed_heads: whether heads are normalized one by one,
            where `attention` does not say it. centred: whether norms' weights are stored less one.
        sandwich: the norms behind a layer's parts, where it has them; what is not experts then joins these.
        parts: configuration -> that of most layers, and what those are that attend otherwise.
        states: whether some layers keep a state instead of keys and values.
        wide: whether what its layers pass on may exceed float16's range.
        attention: of the layers that attend. head: that guesses further tokens, where published models have one.
            assistant: the model that does so instead.
        defaults: of transformers' configuration, for fields that a config.json leaves out. A field that the family does
            not have is None or False. Empty: transformers reads its config.json.
        refused: fields of a config.json -> why such a model cannot be run, as a sentence; "" if it can.
        register: makes transformers know a family that it lacks, or mends what it has; called before it reads a
            config.json.
        published: models to set up, in no order.
    """

    model_type: str
    called: str
    within: str = ""
    stored: tuple[Storage, ...] = (Apart(),)
    renames: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    unused: Callable[[Any], tuple[str, ...]] = lambda _config: ()
    linears: tuple[str, ...] = LINEARS
    precise: tuple[str, ...] = ()
    block: str = "mlp"
    norm: str = "post_attention_layernorm"
    first_norm: str = "input_layernorm"
    eps: str = "rms_norm_eps"
    width: str = "intermediate_size"
    activation: str = "silu"
    dense_layers: Callable[[Any], Collection[int]] = lambda _config: ()
    shared: SharedExpert | None = None
    routing: Routing = Routing()
    experts_by: Activation = "silu"
    biased: bool = False
    signals: tuple[Projection, ...] = ("up", "gate")
    scaled: str | float = ""
    added: str = ""
    divided: str = ""
    biases: Callable[[Any], int] = lambda _config: 0
    gated_heads: bool = False
    normed_heads: bool = False
    centred: bool = False
    states: bool = False
    wide: bool = False
    sandwich: Between | None = None
    parts: Callable[[Any], tuple[Any, Wide | None]] = lambda config: (config, None)
    attention: GroupedQuery | ThroughLatent = GroupedQuery()
    head: DraftHead | None = None
    assistant: Assistant | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refused: Callable[[Mapping[str, Any]], str] = lambda _fields: ""
    register: Callable[[], None] = lambda: None
    published: tuple[CatalogEntry, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether a layer is grouped-query attention and experts chosen by probabilities, and nothing else."""
        usual = isinstance(self.attention, GroupedQuery) and self.routing.kind == "softmax"
        return usual and self.shared is None and not self.biased and not self.added

    @property
    def drafter(self) -> str:
        """What guesses further tokens of its models, in words."""
        return "own drafting head" if self.assistant is None else "assistant"

    def experts(self, config: Any) -> int:
        """How many experts a layer has; ours and some of transformers' configurations share one name for it."""
        return int(getattr(config, "num_local_experts", None) or config.num_experts)

    def neurons(self, config: Any) -> int:
        """How many neurons an expert has."""
        return int(getattr(config, self.width))

    def expert_hidden(self, config: Any) -> int:
        """How many numbers of a token its experts see: the hidden size, unless they are in a latent space."""
        return int(config.hidden_size)

    def top_k(self, config: Any) -> int:
        """How many experts a token uses."""
        return int(config.num_experts_per_tok)

    def expert_layers(self, config: Any) -> list[int]:
        """The decoder layers that have experts. A pack counts these alone: its layer n is the n-th of them."""
        without = self.dense_layers(config)
        return [layer for layer in range(config.num_hidden_layers) if layer not in without]

    def blocks(self, model: Any) -> list[Any]:
        """A model's modules with experts, in order."""
        layers = model.model.layers
        return [self.block_of(layers[index]) for index in self.expert_layers(model.config) if index < len(layers)]

    def block_of(self, layer: Any) -> Any:
        """The module with experts of a decoder layer that has some."""
        return getattr(layer, self.block) if self.block else layer

    def scores_by(self, layer: Any) -> Tensor:
        """(E, H) by which the input of a decoder layer's experts gives their scores."""
        return self.routing.scores_by(self.router(self.block_of(layer)), self.norm_weight(layer))

    def norm_weight(self, layer: Any) -> Tensor:
        """(H,) of the norm before a decoder layer's experts."""
        return getattr(layer, self.norm).weight

    def foresight(self, layer: Any, hidden: int) -> tuple[Tensor, Tensor]:
        """`scores_by` and `norm_weight` of a decoder layer whose experts see so many numbers; zeros and ones if its
        router sees others, so that predictors begin with nothing.
        """
        scores_by, norm = self.scores_by(layer), self.norm_weight(layer)
        if scores_by.shape[1] != hidden:
            return scores_by.new_zeros(len(scores_by), hidden), norm.new_ones(hidden)
        return scores_by, norm

    def router(self, block: Any) -> Any:
        """The router of a module with experts."""
        return attrgetter(self.routing.module)(block)

    def normalizes(self, router: Any) -> bool:
        """Whether the weights of a token's experts add up to a constant, or are the router's scores, perhaps scaled.

        Not guessed from the weights: in bfloat16 they differ from the float32 probabilities either way.
        """
        stated = self.routing.normalized
        return bool(router.norm_topk_prob) if stated is None else stated

    def module_name(self, published: str) -> str:
        """The name in transformers' module of a dense tensor's published name; the only place that renames."""
        for old, new in self.renames:
            published = published.replace(old, new)
        return published

    def factor(self, config: Any, name: str | float) -> float:
        """What one of the fields above says; 1 where none does."""
        if isinstance(name, str):
            return float(getattr(config, name)) if name else 1.0
        return name

    def is_embedding(self, published: str) -> bool:
        """Whether this is the published name of the embedding's weight."""
        return self.module_name(published) == EMBEDDING

    def is_linear(self, layer: str) -> bool:
        """Whether a layer's name, on disk or in memory, is one of those that may have few bits."""
        return layer.endswith(self.linears)
