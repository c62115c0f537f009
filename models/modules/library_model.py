"""transformers' own model with the experts replaced: built without memory, then filled.

Linear layers that the pack holds as codes are replaced likewise. Norms, rope, routers, the rest of attention and the
KV cache stay the library's. Every family whose block calls `experts(hidden, top_k_index, top_k_weights)` works with a
record in families/ and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.weights import LinearWeights
from ..errors import PackError
from ..families import Family, family_of
from ..families.derived import Derived, UnfitError, tables, tree, writing
from ..pack import quantized_linears
from ..pack.manifest import Manifest
from ..pack.table import Table, put, tables_of
from ..transformers_import import import_model_code

Experts = Callable[[int], nn.Module]
Linear = Callable[[LinearWeights, nn.Parameter | None], nn.Module]
Make = Callable[[Any, torch.dtype], nn.Module]


def build(
    config: Any,
    family: Family,
    dense: Mapping[str, Tensor],
    bits: int,
    experts: Experts,
    linear: Linear,
    dtype: torch.dtype,
    device: str,
    make: Make | None = None,
    elsewhere: Mapping[int, tuple[Linear, str]] | None = None,
    lookups: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """The causal language model, ready to call.

    Args:
        config: transformers' configuration. dense: the dense tensors by published names.
        bits: of the linear layers in `dense`; at 16 they stay the library's own.
        experts: number of a layer among those with experts -> module with
            forward(hidden (B, H), top_k_index (B, K), top_k_weights (B, K)) -> (B, H).
        linear: codes and bias -> module with forward(x (..., K)) -> (..., N). The bias is filled in later.
        dtype: of the dense part and of all activations.
        make: the modules to fill, from configuration and dtype; None for the library's own (else `bare.tree`).
        elsewhere: of the decoder's layers that are on other devices, `linear` and `device`.
        lookups: what takes the place of tables, by their modules' names.

    Raises:
        PackError: dense tensors that are missing, or of a shape or dtype that the configuration does not ask for.
    """
    model = empty(config, dtype, make)
    for index, block in enumerate(family.blocks(model)):
        block.experts = experts(index)
    put(model, lookups or {})
    renew(model, family, config, device)
    weights = with_head(config, family, dense)
    for index, (own, place) in (elsewhere or {}).items():
        furnish(model.model.layers[index], f"model.layers.{index}", family, weights, bits, own, dtype, place)
    furnish(model, "", family, weights, bits, linear, dtype, device)
    if left := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]:
        raise PackError(
            "The model cannot be built", f"Nothing fills {left[0]}.", "This family needs a newer floe-chat."
        )
    return model.eval()


def with_head(config: Any, family: Family, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense tensors by published names, with the output head where it is the embedding."""
    weights = dict(dense)
    if getattr(config, "tie_word_embeddings", False):
        embedding = next((tensor for name, tensor in dense.items() if family.is_embedding(name)), torch.empty(0))
        weights.setdefault("lm_head.weight", embedding)
    return weights


def tables_in(config: Any, manifest: Manifest) -> list[Table]:
    """The tables of a pack whose tensors are in files of their own; of packs of before, none.

    Raises:
        PackError: the manifest has other files.
    """
    if not manifest.tables:
        return []
    try:
        found = tables_of(tables(tree(config)), manifest.widths.dense, manifest.float16)
    except UnfitError as error:
        raise PackError("The model's configuration cannot be built", f"{error}.", "Restore config.json.") from error
    if len(found) != len(manifest.tables):
        cause = f"It has {len(manifest.tables)} files of tables; its config.json asks for {len(found)}."
        raise PackError("The pack does not fit its configuration", cause, "Pack the source checkpoint again.")
    return found


def rename(decoder: Any, family: Family) -> None:
    """Give the parts of transformers' decoder the names that most families have; its own code still finds them."""
    if not family.modules:
        return
    for theirs, usual in family.modules:
        part = getattr(decoder, theirs)
        delattr(decoder, theirs)
        decoder.add_module(usual, part)
    kind = type(decoder)
    aliases = {theirs: property(attrgetter(usual)) for theirs, usual in family.modules}
    decoder.__class__ = type(kind.__name__, (kind,), aliases)


def renew(model: Any, family: Family, config: Any, device: str) -> None:
    """Make again what is computed, not stored, and so is empty on the meta device: rope's tables, and the factor by
    which an embedding multiplies; of a derived family whatever there is, as the library does where it loads a model.
    Before weights are filled in.
    """
    if isinstance(family, Derived):
        owners = {name.rpartition(".")[0] for name, _ in model.named_non_persistent_buffers()}
        for module in map(model.get_submodule, owners):
            for name in module._non_persistent_buffers_set:
                if (buffer := module._buffers[name]) is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
            model._init_weights(module)
        return
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(device)
    if (factor := getattr(decoder.embed_tokens, "scalar_embed_scale", None)) is not None:
        decoder.embed_tokens.embed_scale = torch.tensor(factor, device=device)


def empty(config: Any, dtype: torch.dtype, make: Make | None = None) -> Any:
    """The causal language model on the meta device; `make` as for `build`.

    Raises:
        PackError: a configuration that describes no model.
    """
    try:
        with torch.device("meta"):
            return (make or library)(config, dtype)
    # transformers looks configuration values up in its tables and passes on whatever that raises.
    except Exception as error:
        raise PackError(
            "The model's configuration cannot be built", f"{type(error).__name__}: {error}", "Restore config.json."
        ) from error


def furnish(
    module: nn.Module,
    prefix: str,
    family: Family,
    dense: Mapping[str, Tensor],
    bits: int,
    linear: Linear,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Give a part of an empty model its weights; `prefix` is its name in the model, "" for all of it.

    The other arguments are those of `build`. What is no longer on the meta device is left as it is.

    Raises:
        PackError: tensors that are missing, or of a shape or dtype that the configuration does not ask for.
    """
    weights = {family.module_name(name): tensor for name, tensor in dense.items()}
    lead = f"{prefix}." if prefix else ""
    if bits < 16:
        modules: list[tuple[str, Any]] = list(module.named_modules())
        for name, layer in modules:
            if family.is_linear(lead + name) and isinstance(layer, nn.Linear):
                width = quantized_linears.width_of(lead + name, bits)
                stored = quantized_linears.load(weights, lead + name, layer.out_features, layer.in_features, width)
                module.set_submodule(name, linear(stored, layer.bias))
    unfilled = {name: own for name, own in module.state_dict(keep_vars=True).items() if own.is_meta}
    for name, own in unfilled.items():
        tensor = weights.get(lead + name)
        if tensor is None or tensor.shape != own.shape:
            raise unfit(lead + name, None if tensor is None else tuple(tensor.shape), tuple(own.shape))
        owner, _, leaf = name.rpartition(".")
        precise = bool(family.precise) and name.endswith(family.precise)
        kind = torch.float32 if precise else dtype if tensor.is_floating_point() else tensor.dtype
        value = tensor.to(device=device, dtype=kind)
        if isinstance(own, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        setattr(module.get_submodule(owner), leaf, value)


def unfit(name: str, shape: tuple[int, ...] | None, needed: tuple[int, ...]) -> PackError:
    """The error for a dense tensor that is not what the configuration asks for; a shape of None is no tensor."""
    have = "missing" if shape is None else f"of shape {shape}"
    return PackError(
        "The dense part of the model does not fit its configuration",
        f"{name} is {have}; {needed} is needed.",
        "Pack the source checkpoint again.",
    )


def library(config: Any, dtype: torch.dtype) -> nn.Module:
    """The library's own modules, by the names that most families have."""
    if isinstance(family := family_of(config.model_type), Derived):
        return writing(config, dtype)
    import_model_code()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rename(model.model, family)
    return model
