"""Blocks of transformers that call their experts in a way of their own: made to call them as all others do, with
(hidden, top_k_index, top_k_weights), and to compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor


def adapted(model: Any) -> Any:
    """The model, with such blocks changed in place."""
    for module in list(model.modules()):
        if (change := _CHANGES.get(type(module).__name__)) is not None:
            change(module)
    return model


def _changed(module: Any, **members: Any) -> None:
    """Give a module members of a class, as one of a class below its own."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), members)


def _llama4(block: Any) -> None:
    """Experts get the token times the router's weight, and what they give is added as it is (`Llama4TextMoe`): each
    choice is a row of its own, of weight 1.
    """
    _changed(block, forward=_choices_as_rows)
    _changed(block.experts, forward=_each_for_its_rows, is_transposed=True, is_concatenated=True)


def _choices_as_rows(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden)  # 0 for experts that were not chosen
    weights, chosen = scores.topk(self.top_k)
    rows = (hidden[:, None] * weights[..., None]).flatten(0, 1)
    routed = self.experts(rows, chosen.view(-1, 1), rows.new_ones(len(rows), 1))
    return self.shared_expert(hidden) + routed.view(*chosen.shape, -1).sum(1), logits


def _each_for_its_rows(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Those experts, called so; in a small copy, to find out what they compute."""
    import torch

    found = torch.zeros_like(hidden_states)
    for expert in range(len(self.down_proj)):
        rows, place = torch.where(top_k_index == expert)
        gate, up = (hidden_states[rows] @ self.gate_up_proj[expert]).chunk(2, -1)
        found[rows] += (up * self.act_fn(gate)) @ self.down_proj[expert] * top_k_weights[rows, place, None]
    return found


def _ernie_vl(block: Any) -> None:
    """A text without pictures needs no experts for pictures (`Ernie4_5_VLMoeMoeBlock`)."""
    block.vision_moe = None


_CHANGES: dict[str, Callable[[Any], None]] = {"Llama4TextMoe": _llama4, "Ernie4_5_VLMoeMoeBlock": _ernie_vl}
