"""Families without a record of their own: what a record says is read from transformers' modules, and tried out.

A model of such a family has in each layer with experts a block whose `experts` are called with (hidden, top_k_index,
top_k_weights) and hold gate above up, or up alone, and down, of all experts. Everything else in a layer, its router
too, stays the library's own module. What experts compute between their matrices is found by calling them with random
numbers.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

from .. import config_limits
from ..catalog_entry import Counted, Sizes
from .family import LATENT, LINEARS, Family, Routing
from .own_calls import adapted
from .storage import Joined

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor, nn

    from ...kernels.activation import Activation

# What linear layers are called that a pack may store at low width, besides those of most families.
_MORE_LINEARS = (
    *(".qkv_proj", ".in_proj", ".out_proj", ".input_linear", ".output_linear", ".q_a_proj", ".kv_a_proj"),
    *(".q_lora_proj", ".dense", ".gate_up_proj", ".in_proj_qkv", ".in_proj_z", ".g_proj", ".fc1", ".fc2"),
    *(".fc1_latent_proj", ".fc2_latent_proj"),
)
_NORMS = (  # what the norm before a layer's experts is called, the likeliest first
    *("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "pre_ff_layernorm", "ffn_norm"),
    *("post_attention_norm", "input_layernorm", "norm"),
)
_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"  # in config.json
_COUNTS = "num_experts", "n_routed_experts", "num_local_experts"
# Models that the library has only as a part of one that also sees, whose head is a matrix: tried by a test.
HEADLESS = (
    *("qwen3_vl_moe_text", "glm4v_moe_text", "glm5_next_text", "mistral4", "mistral_large4_text", "muse_spark_text"),
    *("ernie4_5_vl_moe_text", "qwen3_omni_moe_text", "step3p5", "deepseek_ocr2_text"),
)
_CALLED_WITH = ["hidden_states", "top_k_index", "top_k_weights"]
_TRIED = 2, 6, 4  # experts, their neurons and hidden size of those that are called to find out what they compute
_LARGE = 40.0  # of what is tried, so that limits are reached
_FAR = 10  # of a text beyond most windows, the logarithm of its length


class UnfitError(ValueError):
    """A model of transformers that cannot be run; the text names the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Family):
    """One of them."""

    @property
    def plain(self) -> bool:
        """Nothing is known of its layers."""
        return False

    def experts(self, config: Any) -> int:
        """See `Family`."""
        return _experts(config).down_proj.shape[0]

    def neurons(self, config: Any) -> int:
        """See `Family`."""
        return _neurons(_experts(config))

    def expert_hidden(self, config: Any) -> int:
        """See `Family`."""
        return _shapes(_experts(config))[1][1]

    def top_k(self, config: Any) -> int:
        """See `Family`."""
        return top_k(config)

    def expert_layers(self, config: Any) -> list[int]:
        """See `Family`."""
        return [index for index, layer in enumerate(tree(config).model.layers) if _block(layer) is not None]

    def block_of(self, layer: Any) -> Any:
        """See `Family`."""
        return _block(layer)

    def router(self, block: Any) -> Any:
        """See `Family`."""
        return next(getattr(block, name) for name in ("gate", "router") if hasattr(block, name))

    def scores_by(self, layer: Any) -> Tensor:
        """See `Family`; zeros where the router is more than a matrix, so that predictors begin with nothing."""
        import torch

        router, norm = self.router(_block(layer)), self.norm_weight(layer)
        weight = getattr(router, "weight", None)
        count = next(value for name in _COUNTS if type(value := getattr(router, name, None)) is int)
        if isinstance(weight, torch.Tensor) and tuple(weight.shape) == (count, len(norm)):
            return weight
        return torch.zeros(count, len(norm), device=norm.device, dtype=norm.dtype)

    def norm_weight(self, layer: Any) -> Tensor:
        """See `Family`; guessed by its name, for predictors alone; ones where there is none."""
        import torch

        norms = [module for name in _NORMS if (module := getattr(layer, name, None)) is not None]
        found = next((part for module in norms for part in module.parameters() if part.dim() == 1), None)
        if found is not None:
            return found
        router = next(part for part in self.router(_block(layer)).parameters() if part.dim() == 2)
        return torch.ones(router.shape[1], dtype=router.dtype, device=router.device)

    def normalizes(self, router: Any) -> bool:
        """Nobody has looked."""
        return False

    def sizes(self, config: Any) -> Sizes:
        """Its architecture: what is not experts is counted, tensor by tensor."""
        whole = tree(config)
        experts, every = _experts(config), len(whole.model.layers)
        with_experts, hidden = len(self.expert_layers(config)), config.hidden_size
        heads = _stated(config, "num_attention_heads") or 1
        return Sizes(
            model_type=self.model_type,
            layers=with_experts,
            hidden=hidden,
            intermediate=_neurons(experts),
            experts=experts.down_proj.shape[0],
            top_k=top_k(config),
            heads=heads,
            kv_heads=_stated(config, "num_key_value_heads") or heads,
            head_dim=_stated(config, "qk_head_dim") or _stated(config, "head_dim") or hidden // heads,
            vocab=config.vocab_size,
            window=_stated(config, "max_position_embeddings") or 4096,
            tied=bool(_stated(config, "tie_word_embeddings")),
            dense_layers=every - with_experts,
            counted=_counted(whole),
            gated=getattr(experts, "has_gate", True),
            latent_experts=self.expert_hidden(config) if self.expert_hidden(config) != hidden else 0,
        )


def derived(model_type: str, experts_by: Activation = "silu") -> Derived:
    """A family by its model_type. experts_by: what its experts compute, as `fit` finds it."""
    gated = experts_by != "relu2"  # `activation.UNGATED`, before torch is needed
    return Derived(
        model_type=model_type,
        called=model_type,
        stored=(Joined(gated),),
        linears=(*LINEARS, *LATENT, *_MORE_LINEARS),
        precise=("e_score_correction_bias", "expert_bias", "A_log", "dt_bias"),
        routing=Routing(kind="own"),
        experts_by=experts_by,
        signals=("up", "gate") if gated else ("up",),
        wide=not gated,  # what enters down is a square
    )


def configured(fields: Mapping[str, Any]) -> Any:
    """transformers' configuration of these fields of a config.json.

    Raises:
        UnfitError: they are out of all bounds, or describe no model.
    """
    from ..transformers_import import import_library

    experts = next((fields[name] for name in _EXPERTS if type(fields.get(name)) is int), None)
    given = {name: config_limits.largest(value) for name, value in fields.items() if value is not None}
    given = {name: value for name, value in given.items() if value != 0 or name not in ("head_dim", "qk_rope_head_dim")}
    given |= {} if experts is None else {"num_local_experts": experts}
    if cause := config_limits.problem(given) or config_limits.beyond(fields):
        raise UnfitError(cause.removesuffix("."))
    import_library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {name: _decoded(value) for name, value in fields.items() if name != "quantization_config"}
    try:
        return CONFIG_MAPPING[str(fields["model_type"])].from_dict(given)
    # transformers' configurations raise all kinds of errors, down to ZeroDivisionError.
    except Exception as error:
        raise UnfitError(f"transformers cannot read its config.json: {str(error)[:200]}") from error


def _decoded(value: Any) -> Any:
    """With infinities as numbers, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, Mapping):
        tagged = value.get("__float__") if len(value) == 1 else None
        named = {"Infinity": math.inf, "-Infinity": -math.inf}
        return named[tagged] if tagged in named else {name: _decoded(each) for name, each in value.items()}
    return value


def tree(config: Any) -> Any:
    """transformers' model of a configuration, on the meta device; to be read, not changed.

    Raises:
        UnfitError: the library cannot build it.
    """
    try:
        fields = config.to_json_string(use_diff=False)
    except Exception as error:
        raise UnfitError(f"transformers cannot write its configuration: {type(error).__name__}") from error
    return _tree(config.model_type, fields, _Kept(config))


class _Kept:
    """A configuration that a cache does not look at."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=4)
def _tree(_kind: str, _fields: str, kept: _Kept) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return writing(copy.deepcopy(kept.config), torch.float32)
    # transformers looks configuration values up in its tables and passes on whatever that raises.
    except Exception as error:
        raise UnfitError(f"transformers cannot build it: {type(error).__name__}: {str(error)[:200]}") from error


def writing(config: Any, dtype: Any) -> Any:
    """transformers' model of a configuration that writes text.

    Raises:
        ValueError: it has none.
    """
    from ..transformers_import import import_model_code

    import_model_code()
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type in HEADLESS:
        return adapted(_headed(config, dtype))
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError("it has no model of this type that writes")
    return adapted(AutoModelForCausalLM.from_config(config, dtype=dtype))


def _headed(config: Any, dtype: Any) -> Any:
    """The part that reads of a model that also sees, with a head: the library has the whole alone."""
    from torch import nn

    inner: Any = _reading(config)._from_config(config, dtype=dtype)
    parent: Any = type(inner).__mro__[1]

    class Headed(parent):
        base_model_prefix = "model"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = inner
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

        def forward(self, logits_to_keep: int = 0, **named: Any) -> Any:
            found = self.model(**named)
            found.logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
            if cap := getattr(self.config, "final_logit_softcapping", None):
                found.logits = cap * (found.logits / cap).tanh()
            return found

        def get_input_embeddings(self) -> Any:
            return self.model.get_input_embeddings()

    Headed.__module__ = parent.__module__  # the library reads there what its models can do
    return Headed(config)


def _reading(config: Any) -> Any:
    """The class of that part."""
    from transformers import AutoModel

    named: Any = AutoModel
    if type(config) in named._model_mapping:
        return named._model_mapping[type(config)]
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    kinds = [kind for name, kind in vars(module).items() if name.endswith("TextModel")]
    return next(kind for kind in kinds if kind.config_class is type(config))


def outer(fields: Mapping[str, Any], config: Any) -> tuple[Any, str]:
    """The library's model by whose names the tensors of a config.json are published, and what it calls the part that
    reads, with a full stop: the model that also sees, or that of `config` itself and "".

    Raises:
        UnfitError: the library cannot build it.
    """
    if fields.get("model_type") == config.model_type:
        return tree(config), ""
    import torch
    from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

    whole, reads = configured(fields), type(tree(config).model)
    autos: list[Any] = [AutoModelForImageTextToText, AutoModelForMultimodalLM]
    for auto in autos:
        if type(whole) in auto._model_mapping:
            try:
                with torch.device("meta"):
                    model = adapted(auto.from_config(whole, dtype=torch.float32))
            except Exception as error:
                raise UnfitError(f"transformers cannot build it: {str(error)[:200]}") from error
            found = next((name for name, part in model.named_modules() if type(part) is reads), None)
            if found is not None:
                return model, f"{found}."
    raise UnfitError(f"transformers has no model of type {fields.get('model_type')} that reads with a part of its own")


def top_k(config: Any) -> int:
    """How many experts a token uses.

    Raises:
        UnfitError: it does not say.
    """
    names = "num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_top_k"
    given = (getattr(config, name, None) for name in names)
    found = next((each if isinstance(each, list) else [each] for each in given if each is not None), list[Any]())
    if not found or any(type(each) is not int or each != found[0] for each in found):
        raise UnfitError("its config.json does not say how many experts a token uses, the same in all layers")
    return found[0]


def tables(whole: Any) -> dict[str, tuple[int, int]]:
    """Rows and columns of a model's embeddings besides the vocabulary's, by their modules' names (pack/table.py)."""
    from torch import nn

    found = {name: module.weight for name, module in whole.named_modules() if type(module) is nn.Embedding}
    vocabulary = whole.get_input_embeddings().weight
    return {name: (len(each), each.shape[1]) for name, each in found.items() if each is not vocabulary}


def _stated(config: Any, name: str) -> int | None:
    """A field of a configuration; None if it has none, or one for each kind of layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - the library has an error of its own for this
        return None


def fit(config: Any) -> Activation:
    """What the experts of a configuration compute, if this model can be run.

    Raises:
        UnfitError: it cannot; the message names the part.
    """
    whole = tree(config)
    layers = getattr(getattr(whole, "model", None), "layers", None)
    if layers is None:
        raise UnfitError("its layers are not where most models have theirs")
    blocks = [block for layer in layers if (block := _block(layer)) is not None]
    if not blocks:
        raise UnfitError("none of its layers has experts that are called with a router's choice")
    found = {_shapes(block.experts) for block in blocks}
    if len(found) > 1:
        raise UnfitError("its layers have experts of several sizes")
    top_k(config)
    computed: set[Activation] = {activation_of(block.experts) for block in blocks}
    if len(computed) > 1:
        raise UnfitError(f"its layers have experts of several kinds: {', '.join(sorted(computed))}")
    return computed.pop()


def _block(layer: Any) -> Any | None:
    """The module of a decoder layer whose `experts` these are; None if it has none."""
    return next((module for module in layer.modules() if "experts" in module._modules), None)


def _experts(config: Any) -> Any:
    """The experts of the first layer that has some."""
    found = next((block for layer in tree(config).model.layers if (block := _block(layer)) is not None), None)
    if found is None:
        raise UnfitError("none of its layers has experts")
    return found.experts


def _shapes(experts: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(E, 2 F, H), or (E, F, H) without a gate, and (E, H, F).

    Raises:
        UnfitError: they are otherwise.
    """
    names = [name for name in inspect.signature(type(experts).forward).parameters if name != "self"]
    if names != _CALLED_WITH:
        raise UnfitError(f"its experts are called with {', '.join(names)}")
    if unknown := [name for name, _ in experts.named_children() if name != "act_fn"]:
        raise UnfitError(f"its experts have a part {unknown[0]}")
    tensors = {name: tuple(tensor.shape) for name, tensor in experts.named_parameters(recurse=False)}
    first, sides = _first(experts)
    if tensors.keys() != {first, "down_proj"}:
        raise UnfitError(f"its experts consist of {', '.join(sorted(tensors)) or 'modules'}")
    both, down = tensors[first], tensors["down_proj"]
    if getattr(experts, "is_transposed", False):
        both, down = (both[0], both[2], both[1]), (down[0], down[2], down[1])
    if both != (down[0], sides * down[2], down[1]) or 0 in down:
        raise UnfitError(f"its experts are of {both} and {down}")
    return both, down


def _first(experts: Any) -> tuple[str, int]:
    """What its first tensor is called, and how many projections that holds."""
    return ("gate_up_proj", 2) if getattr(experts, "has_gate", True) else ("up_proj", 1)


def _neurons(experts: Any) -> int:
    return _shapes(experts)[1][2]


def activation_of(experts: Any) -> Activation:
    """What such a module computes between its matrices, found by calling a small copy.

    Raises:
        UnfitError: nothing that the kernels know.
    """
    import torch

    from ...kernels.activation import Activation, applied, function_of, gated

    (count, neurons, hidden), (first, sides) = _TRIED, _first(experts)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    both, down, x = drawn(count, sides * neurons, hidden) * _LARGE, drawn(count, hidden, neurons), drawn(64, hidden)
    small = _small(experts, first, both, down)
    chosen = torch.tensor([[0], [1]] * 32)
    try:
        with torch.no_grad():
            found = small(x, chosen, torch.ones(len(x), 1, dtype=torch.float64))
    except Exception as error:
        raise UnfitError(f"its experts cannot be called alone: {type(error).__name__}") from error
    products = torch.einsum("bh,bnh->bn", x, both[chosen[:, 0]])
    gate, up = products[:, :neurons], products[:, -neurons:]
    for activation in get_args(Activation):
        if gated(activation) != (sides == 2):
            continue
        h = applied(function_of("gate", activation), gate) * applied(function_of("up", activation), up)
        wanted = torch.einsum("bn,bhn->bh", h, down[chosen[:, 0]])
        if torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):  # some compute it in float32
            return activation
    raise UnfitError(f"its experts ({type(experts).__name__}) compute something that floe-chat does not know yet")


def _small(experts: nn.Module, first: str, both: Tensor, down: Tensor) -> Any:
    """A copy of the module with these matrices, the one above called `first`, computed expert by expert."""
    from torch import nn

    small: Any = copy.copy(experts)
    small.__dict__ = dict(experts.__dict__)
    if not getattr(small, "is_concatenated", True):
        both = both.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    if getattr(small, "is_transposed", False):
        both, down = both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    small._parameters = {
        first: nn.Parameter(both, requires_grad=False),
        "down_proj": nn.Parameter(down, requires_grad=False),
    }
    if hasattr(small, "config"):
        small.config = copy.copy(small.config)
        small.config._experts_implementation = "eager"
    small.num_experts = len(down)
    for name in ("hidden_dim", "hidden_size"):
        if hasattr(small, name):
            setattr(small, name, _TRIED[2])
    for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
        if hasattr(small, name):
            setattr(small, name, _TRIED[1])
    return small


@lru_cache(maxsize=4)
def _counted(whole: Any) -> Counted:
    """What a token reads besides experts."""
    from torch import nn

    family = derived(whole.config.model_type)
    names = {name for name, module in whole.named_modules() if type(module) is nn.Linear and family.is_linear(name)}
    linears = [whole.get_submodule(name).weight for name in sorted(names - {"lm_head"})]
    apart = tables(whole)
    known = {id(weight) for weight in (*linears, whole.lm_head.weight, whole.get_input_embeddings().weight)}
    known |= {id(whole.get_submodule(name).weight) for name in apart}
    small = sum(
        tensor.numel()
        for name, tensor in whole.state_dict(keep_vars=True).items()
        if id(tensor) not in known and ".experts." not in name
    )
    rows = tuple((*shape, _looked_up(whole, name)) for name, shape in apart.items())
    weights = tuple(sorted((weight.shape[0], weight.shape[1]) for weight in linears))
    return Counted(weights, small, *_kept(whole), tables=rows)


def _looked_up(whole: Any, table: str) -> int:
    """How many rows of a table a token looks up, by calling the module around it with one; 1 where that fails."""
    import torch

    owner, _, name = table.rpartition(".")
    module, found = copy.deepcopy(whole.get_submodule(owner)), [1]

    def note(_table: object, given: tuple[Tensor], _rows: object) -> None:
        found.append(given[0].numel())

    getattr(module, name).register_forward_hook(note)
    with suppress(Exception), torch.no_grad():
        module(torch.zeros(1, 1, dtype=torch.long, device="meta"), None)
    return found[-1]


def _kept(whole: Any) -> tuple[int, int, int, int]:
    """Numbers that the library's cache keeps: `Counted.cached`, `state`, `windowed` and `sees`, by passes over no
    numbers. As most models do it, where those cannot be made.
    """
    import torch
    from torch import nn
    from torch.fx.experimental import _config

    shapes: Any = _config  # which torch makes of its annotations

    class Nothing(nn.Module):
        def forward(self, hidden: Tensor, *_routed: Tensor) -> Tensor:
            return torch.zeros_like(hidden)

    model, config = copy.deepcopy(whole), whole.config
    for layer in model.model.layers:
        if (block := _block(layer)) is not None:
            block.experts = Nothing()

    def after(tokens: int) -> Any:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    try:
        # Indices of what is not zero have no size here: as many as there can be.
        with torch.no_grad(), shapes.patch(meta_nonzero_assume_all_nonzero=True):
            two, three = after(2), after(3)
            token, windows = _numbers(three) - _numbers(two), _windows(two, three)
            state, windowed = max(0, _numbers(two) - 2 * token), sum(added for added, _, _ in windows)
            if all(usual for _, _, usual in windows):
                sees = math.ceil(sum(added * kept for added, kept, _ in windows) / max(1, windowed))
                return token - windowed, state, windowed, sees
            # What such layers keep of a longer text, such as an entry for many tokens, is their own affair.
            far = 1 << max(_FAR, *(kept.bit_length() for _, kept, _ in windows))
            near, end = _numbers(after(far - 1)), _numbers(after(2 * far - 1))
            cached = -(-(end - near) // far)
            windowed = max(1, token - cached)
            return cached, state, windowed, math.ceil(max(0, near - state - cached * (far - 1)) / windowed)
    except Exception:  # noqa: BLE001 - whatever a model does with numbers that are not there
        heads = _stated(config, "num_attention_heads") or 1
        each = _stated(config, "head_dim") or config.hidden_size // heads
        return 2 * len(model.model.layers) * (_stated(config, "num_key_value_heads") or heads) * each, 0, 0, 0


def _windows(short: Any, longer: Any) -> list[tuple[int, int, bool]]:
    """Of each layer that sees a window: numbers that a token adds from one cache to the other, tokens that it keeps,
    and whether it is as the library's layers are.
    """
    from transformers import cache_utils

    return [
        (_numbers(after) - _numbers(before), int(sees) - 1, type(after).__module__ == cache_utils.__name__)
        for before, after in zip(short.layers, longer.layers, strict=True)
        if (sees := getattr(after, "sliding_window", None))
    ]


def _numbers(cache: Any) -> int:
    """Of 32 bits, as the model's are here; places are longer."""
    return sum(tensor.nbytes for tensor in tensors_of(cache)) // 4


def tensors_of(cache: Any) -> list[Tensor]:
    """All that one of transformers' caches holds, in layers of whatever kind."""
    import torch

    found: dict[int, Tensor] = {}
    waiting, seen = [cache], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            if one.dim():  # else a count, such as the length of a window
                found[id(one)] = one
        elif id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, Mapping):
                waiting += one.values()
            elif isinstance(one, list | tuple):
                waiting += one
            elif type(one).__module__.startswith("transformers.") and not hasattr(one, "model_type"):
                waiting += vars(one).values()
    return list(found.values())
