"""Finds where a model's values stop being finite: runs it again with a check after every part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...models.families import family_of

NO_PART = "no part when it was run again"


class _Found(Exception):  # noqa: N818 - a result, not an error
    """The first part whose output is not finite; str() names it."""


def first_nonfinite(model: Any, run: Callable[[], object]) -> str:
    """In words, the first part of `model` that makes values that are not finite, such as "expert 3 of layer 7".

    Args:
        model: transformers' causal language model, its experts replaced or not. run: repeats the call that failed.
    """
    ends = {"the embedding": "model.embed_tokens", "the last norm": "model.norm", "the output head": "lm_head"}
    named = dict(model.named_modules())  # the library calls some of them otherwise, and those are not looked at
    handles = [named[name].register_forward_hook(_check(part)) for part, name in ends.items() if name in named]
    family = family_of(model.config.model_type)
    for index, block in zip(family.expert_layers(model.config), family.blocks(model), strict=False):
        handles.append(block.experts.register_forward_hook(_check_experts(index)))
    for index, layer in enumerate(model.model.layers):
        if (attention := getattr(layer, "self_attn", None)) is not None:
            handles.append(attention.register_forward_hook(_check(f"attention of layer {index}")))
        handles.append(layer.register_forward_hook(_check(f"layer {index}")))
    try:
        run()
    except _Found as found:
        return str(found)
    finally:
        for handle in handles:
            handle.remove()
    return NO_PART


def is_finite(value: object) -> bool:
    """Whether a tensor, or each tensor of a tuple, has only finite values."""
    parts: tuple[object, ...] = value if isinstance(value, tuple) else (value,)
    tensors = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.numel()]
    # The smallest and the largest value are NaN if any value is, and need no second tensor.
    return all(bool(torch.isfinite(bound)) for tensor in tensors for bound in tensor.aminmax())


def _check(part: str) -> Callable[[nn.Module, object, object], None]:
    def check(_module: nn.Module, _inputs: object, output: object) -> None:
        if not is_finite(output):
            raise _Found(part)

    return check


def _check_experts(layer: int) -> Callable[[nn.Module, tuple[Tensor, Tensor, Tensor], Tensor], None]:
    def check(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        if is_finite(output):
            return
        hidden, index, weights = inputs
        if not (is_finite(hidden) and is_finite(weights)):
            raise _Found(f"the router of layer {layer}")
        for expert in index.unique().tolist():
            token, slot = (index == expert).nonzero(as_tuple=True)
            alone: Any = module.forward(hidden[token], index[token, slot, None], weights[token, slot, None])
            if not is_finite(alone):
                raise _Found(f"expert {expert} of layer {layer}")
        raise _Found(f"the experts of layer {layer}")

    return check
