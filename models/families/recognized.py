"""What of a model without a record is what models with one have: its attention, router and shared expert, read from
transformers' modules, so that the engine's fused pass computes them.

What a module computes is found by calling it, or a small copy of it, with random numbers; the rest is compared with
the library's own pass when the model is loaded (engine/decoder/decoders.py).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .derived import UnfitError, derived, top_k, tree
from .family import Between, Family, GroupedQuery, Routing, SharedExpert, ThroughLatent

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor

# Norms before a layer's attention and before its block, and behind these.
_BETWEEN = (
    ("input_layernorm", "post_attention_layernorm", "", ""),
    ("input_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
)
_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_THROUGH_LATENT = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}
_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")
_GATE = "gate_proj"  # of attention
_SHARED_GATE = "shared_expert_gate"
_TRIED, _SMALL = 64, (8, 12)  # tokens; hidden size and neurons of a small copy
_LARGE = 40.0  # of what is tried, so that limits are reached


def recognized(whole: Any) -> Family:
    """A record of a model of transformers, as `tree` makes it, for the fused pass.

    Raises:
        UnfitError: it has something that the fused pass does not know; the message names it.
    """
    import torch

    with torch.random.fork_rng([]):  # the same numbers each time
        torch.manual_seed(0)
        return _read(whole)


def _read(whole: Any) -> Family:
    config, decoder = whole.config, whole.model
    family = derived(config.model_type)
    _only(decoder, "the model", _MODEL)
    layers = list(decoder.layers)
    at = next(index for index, layer in enumerate(layers) if family.block_of(layer) is not None)
    block = family.block_of(layers[at])
    name = next((name for name, part in layers[at].named_children() if part is block), None)
    parts = layers[at]._modules.keys() - {"self_attn", name}
    norms = next((norms for norms in _BETWEEN if parts == {each for each in norms if each}), None)
    if name is None or norms is None:
        raise UnfitError(f"a layer consists of {', '.join(layers[at]._modules)}")
    for layer in layers:
        _only(layer, "a layer", {"self_attn", name, *parts})
    dense = {index for index, layer in enumerate(layers) if family.block_of(layer) is None}
    for index in sorted(dense)[:1]:
        _is_swiglu(getattr(layers[index], name))
    last = decoder.norm
    return Family(
        model_type=config.model_type,
        called=config.model_type,
        block=name,
        first_norm=norms[0],
        norm=norms[1],
        sandwich=Between(norms[2], norms[3]) if norms[2] else None,
        eps=_eps(config, last),
        centred=_centred(last),
        dense_layers=lambda _config: dense,
        attention=_attention([layer.self_attn for layer in layers], config),
        routing=_routing(block, config),
        shared=_shared(block),
        scaled=math.sqrt(config.hidden_size)
        if getattr(config, "mup_enabled", False)
        else _field(config, "embedding_multiplier"),
        added=_field(config, "residual_multiplier"),
        divided=_field(config, "logits_scaling"),
    )


def unrecognized(config: Any) -> str:
    """Why the fused pass does not compute a model of this configuration, after "because"; "" if it does."""
    try:
        recognized(tree(config))
    except UnfitError as unfit:
        return str(unfit)
    return ""


def _field(config: Any, name: str) -> str:
    """Its name, if the configuration has it."""
    return name if hasattr(config, name) else ""


def _only(module: Any, what: str, known: set[str]) -> None:
    """Refuse parts that are not known."""
    parts = [name for name, _ in module.named_children() if name not in known]
    tensors = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    if unknown := [*parts, *(name for name in tensors if name not in known)]:
        raise UnfitError(f"{what} has a part {unknown[0]}")


def _eps(config: Any, norm: Any) -> str:
    """The field of a norm's epsilon."""
    own = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    names = "rms_norm_eps", "layer_norm_eps", "norm_eps", "layernorm_epsilon", "norm_epsilon"
    found = next((name for name in names if own is not None and getattr(config, name, None) == own), None)
    if found is None:
        raise UnfitError("its config.json does not say the epsilon of its norms")
    return found


def _centred(norm: Any) -> bool:
    """Whether an RMS norm's weights are stored less one."""
    import torch
    from torch import nn

    if isinstance(norm, nn.LayerNorm):
        return False
    small, x = _random(copy.deepcopy(norm)), torch.randn(4, len(norm.weight))
    found = small(x)
    plain = torch.nn.functional.rms_norm(x, x.shape[1:], eps=getattr(norm, "variance_epsilon", 1e-6))
    for centred in (False, True):
        if torch.allclose(found, plain * (small.weight + centred), rtol=1e-4, atol=1e-5):
            return centred
    raise UnfitError(f"its norms ({type(norm).__name__}) compute something that floe-chat does not know")


def _attention(modules: list[Any], config: Any) -> GroupedQuery | ThroughLatent:
    """Of all layers."""
    first = modules[0]
    if hasattr(first, "kv_a_proj_with_mqa"):
        for module in modules:
            _only(module, "its attention", {*_THROUGH_LATENT, "q_proj", "o_proj"})
        if "position_ids" in inspect.signature(type(first).forward).parameters:  # Mistral 4 scales queries behind 8,192
            raise UnfitError("its attention uses a token's position for more than rope")
        interleaved = bool(getattr(config, "rope_interleave", True))
        return ThroughLatent(interleaved=lambda _config: interleaved)
    norms = next((pair for pair in _NORMS if hasattr(first, pair[0])), ())
    gate = [_GATE] if hasattr(first, _GATE) else []
    for module in modules:
        _only(module, "its attention", {*_ATTENTION, *norms, "sinks", *gate})
        if missing := [name for name in (*_ATTENTION, *norms, *gate) if getattr(module, name, None) is None]:
            raise UnfitError(f"its attention has no {missing[0]}")
        heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        if getattr(module, "num_key_value_groups", groups) != groups or module.o_proj.in_features != (
            heads * module.head_dim
        ):
            raise UnfitError("its layers attend with unlike heads")
    turned = [_turns(module) for module in modules]
    return GroupedQuery(
        normalized=lambda _config: bool(norms),
        norms=norms or _NORMS[0],
        per_head=bool(norms) and getattr(first, norms[0]).weight.numel() == first.head_dim,
        sinks=getattr(first, "sinks", None) is not None,
        interleaved=_interleaved(first),
        gated=first.q_proj.out_features == 2 * first.o_proj.in_features,
        gate="".join(gate),
        window=_window,
        turned=lambda _config, layer: turned[layer],
    )


def _window(config: Any, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    return int(config.sliding_window) if kinds and kinds[layer] == "sliding_attention" else None


def _turns(module: Any) -> bool:
    """Whether a layer's attention turns queries and keys by rope: a copy with few heads is called with two angles.

    Raises:
        UnfitError: it cannot be called.
    """
    import torch
    from torch import nn

    dim, hidden = module.head_dim, _SMALL[0]
    groups = module.o_proj.in_features // dim * dim // module.k_proj.out_features
    small: Any = copy.copy(module)
    small.config = copy.copy(module.config)
    small.config._attn_implementation = "eager"
    small._modules, small._parameters = dict(module._modules), dict(module._parameters)
    queries = groups * dim
    asked = queries * (module.q_proj.out_features // module.o_proj.in_features)
    rows = {"q_proj": asked, "k_proj": dim, "v_proj": dim, _GATE: queries}
    for name in rows.keys() & module._modules.keys():
        small._modules[name] = nn.Linear(hidden, rows[name])
    small._modules["o_proj"] = nn.Linear(queries, hidden)
    for pair in _NORMS:
        for name, heads in zip(pair, (groups, 1), strict=True):
            if (norm := small._modules.get(name)) is not None:
                small._modules[name] = norm = copy.copy(norm)
                rows = norm.weight.numel() if norm.weight.numel() == dim else heads * dim
                norm._parameters = {"weight": nn.Parameter(torch.ones(rows))}
    if small._parameters.get("sinks") is not None:
        small._parameters["sinks"] = nn.Parameter(torch.zeros(groups))
    x, angles = torch.randn(1, 4, hidden), torch.randn(1, 4, dim // 2).repeat(1, 1, 2)
    kinds = {"num_heads": groups, "num_attention_heads": groups, "num_key_value_heads": 1}
    for name in kinds.keys() & vars(small).keys():
        setattr(small, name, kinds[name])
    try:
        with torch.no_grad():
            found = [
                small(hidden_states=x, position_embeddings=(turn.cos(), turn.sin()), attention_mask=None)[0]
                for turn in (angles, 2 * angles)
            ]
    except Exception as error:
        raise UnfitError(f"its attention ({type(module).__name__}) cannot be called alone") from error
    return not torch.equal(*found)


def _interleaved(module: Any) -> bool:
    """Whether rope turns neighbouring dimensions together."""
    import sys

    import torch

    turn = getattr(sys.modules[type(module).__module__], "rotate_half", None)
    if turn is None:
        raise UnfitError("its rope is not turned as most models do it")
    found = turn(torch.arange(1.0, 5.0)).tolist()
    if found not in ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0]):
        raise UnfitError("its rope is not turned as most models do it")
    return found[0] == -2.0


def _shared(block: Any) -> SharedExpert | None:
    """What every token of a block is given besides its own experts."""
    names = [name for name, _ in block.named_children() if name.startswith("shared") and name != _SHARED_GATE]
    if not names:
        return None
    if len(names) > 1:
        raise UnfitError(f"its layers have parts {names[0]} and {names[1]}")
    _is_swiglu(getattr(block, names[0]))
    return SharedExpert(names[0], gate=_SHARED_GATE if hasattr(block, _SHARED_GATE) else None)


def _is_swiglu(module: Any) -> None:
    """Refuse a block that does not compute down(silu(gate x) * (up x)): a small copy of it is tried.

    Raises:
        UnfitError: it does not.
    """
    import torch
    from torch import nn

    names = next((names for names in (("gate_proj", "up_proj", "down_proj"),) if hasattr(module, names[0])), None)
    if names is None:
        raise UnfitError(f"it has a {type(module).__name__}")
    hidden, neurons = _SMALL
    small: Any = copy.deepcopy(module)
    for name in names:
        own = (neurons, hidden) if name == names[2] else (hidden, neurons)
        linear = nn.Linear(*own, bias=False, dtype=torch.float64)
        linear.weight.data.normal_().mul_(_LARGE if name != names[2] else 1.0)
        setattr(small, name, linear)
    gate, up, down = (getattr(small, name) for name in names)
    x = torch.randn(_TRIED, hidden, dtype=torch.float64)
    with torch.no_grad():
        wanted = down(nn.functional.silu(gate(x)) * up(x))
        try:
            found = small(x)
        except Exception as error:
            raise UnfitError(f"its {type(module).__name__} cannot be called alone") from error
    if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
        raise UnfitError(f"its {type(module).__name__} computes something that floe-chat does not know")


def _random(module: Any) -> Any:
    """A module filled with random numbers, on the CPU."""
    import torch

    module.to_empty(device="cpu").requires_grad_(False)
    for own in (*module.parameters(), *module.buffers()):
        if own.is_floating_point():
            own.copy_(torch.randn_like(own) / math.sqrt(own.shape[-1] if own.dim() > 1 else 4))
        else:
            own.zero_()
    return module.float().eval()


def _routing(block: Any, config: Any) -> Routing:
    """How a block's router chooses: a copy with random weights is called, and compared with what we know.

    Raises:
        UnfitError: it is something else.
    """
    import torch
    from torch import nn

    given: list[tuple[Tensor, Tensor, Tensor]] = []

    class Given(nn.Module):
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            given.append((hidden, index, weights))
            return torch.zeros_like(hidden)

    class Nothing(nn.Module):
        def forward(self, hidden: Tensor, *_others: Any) -> Tensor:
            return torch.zeros_like(hidden)

    small: Any = copy.copy(block)
    small._modules = {
        name: Given() if name == "experts" else Nothing() if name.startswith("shared") else copy.deepcopy(part)
        for name, part in block._modules.items()
    }
    small._parameters, small._buffers = copy.deepcopy(block._parameters), copy.deepcopy(block._buffers)
    named = (*small.named_parameters(), *small.named_buffers())
    matrices = [name for name, tensor in named if tensor.dim() == 2 and len(tensor) > 1]
    if len(matrices) != 1 or not matrices[0].endswith(".weight"):  # before it takes memory
        raise UnfitError("its router is more than a matrix")
    _random(small)
    x = torch.randn(_TRIED, config.hidden_size)
    try:
        small(x[None])
        ((hidden, index, weights),) = given
    except Exception as error:
        raise UnfitError("its router cannot be called alone") from error
    if not torch.equal(hidden.reshape(x.shape), x):
        raise UnfitError("its experts are given something other than its router")
    tensors = dict((*small.named_parameters(), *small.named_buffers()))
    module = matrices[0].removesuffix(".weight")
    rest = [name for name in tensors if name not in (matrices[0], f"{module}.bias") and tensors[name].numel() > 1]
    if len(rest) > 1:
        raise UnfitError(f"its router has parts {rest[0]} and {rest[1]}")
    logits = nn.functional.linear(x, tensors[matrices[0]], tensors.get(f"{module}.bias"))
    wanted = _as_matrix(index, weights, logits)
    for routing, found in _routers(logits, config, module, rest[0] if rest else "", tensors):
        scale = _scale(_as_matrix(*found, logits), wanted, config)
        if scale is not None:
            return replace(routing, scale=scale)
    raise UnfitError("its router chooses in a way that floe-chat does not know")


def _routers(
    logits: Tensor, config: Any, module: str, correction: str, tensors: dict[str, Any]
) -> Iterator[tuple[Routing, tuple[Tensor, Tensor]]]:
    """All that we know, and what they choose by logits."""
    from ...kernels.step import Router

    groups = (getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1)
    kinds: Any = "softmax", "sigmoid"
    bias = tensors[correction].flatten() if correction else None
    for kind, normalized, some in itertools.product(kinds, (True, False), dict.fromkeys(((1, 1), groups))):
        router = Router(
            tensors[f"{module}.weight"],
            top_k(config),
            normalized,
            kind=kind,
            precise=True,
            correction=bias,
            groups=some[0],
            top_groups=some[1],
        )
        routing = Routing(
            module,
            kind,
            normalized,
            precise=True,
            correction=correction,
            top_k=router.top_k,
            groups=some,
        )
        yield routing, router.chosen(logits)


def _as_matrix(index: Tensor, weights: Tensor, logits: Tensor) -> Tensor:
    """(T, E) of a choice."""
    return logits.new_zeros(logits.shape).scatter(1, index.reshape(len(logits), -1), weights.reshape(len(logits), -1))


def _scale(found: Tensor, wanted: Tensor, config: Any) -> float | None:
    """By what number the one is the other's multiple, as config.json has it where it does; None if by none."""
    import torch

    chosen = wanted != 0
    if not torch.equal(chosen, found != 0):
        return None
    ratios = wanted[chosen] / found[chosen]
    ratio = float(ratios.mean())
    if not torch.allclose(ratios, torch.full_like(ratios, ratio), rtol=1e-4):
        return None
    said = (1.0, *(value for value in vars(config).values() if isinstance(value, float)))
    return next((value for value in said if math.isclose(value, ratio, rel_tol=1e-4)), ratio)
