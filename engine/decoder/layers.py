"""Reads what the fused pass needs from transformers' modules: layers, and rope's tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.entries import CODES
from ...kernels.step import DenseLayer, Heads, Projection, Router
from ...models.families import FAMILIES, Family
from ...models.modules.light_modules import STATIC_ROPE
from ..experts.offloaded_layer import OffloadedLayer
from .kv_stores import BLOCK
from .quantized_linear import PackedLinear, join


class Unsupported(Exception):  # noqa: N818 - not an error: something slower runs instead
    """The fused pass cannot compute this model; the text says why."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts. input_layernorm, post_attention_layernorm: (H,) weights of its norms.

    Attributes:
        qkv, out: the projections, as modules. router: None where the block is called with the hidden state alone.
        block: hidden (T, H), and with a router its experts and weights (T, K) -> (T, H). beside: what else it computes
            besides experts, in words.
    """

    input_layernorm: Tensor
    qkv: nn.Module
    heads: Heads
    out: nn.Module
    post_attention_layernorm: Tensor
    eps: float
    router: Router | None
    block: Callable[..., Tensor]
    beside: str = ""

    def dense(self) -> DenseLayer:
        """As one operation takes it.

        Raises:
            Unsupported: projections of an unknown kind.
        """
        qkv, out = projection(self.qkv), projection(self.out)
        return DenseLayer(
            self.input_layernorm, self.post_attention_layernorm, self.eps, self.heads, qkv, out, self.router
        )


def check_family(config: Any) -> Family:
    """The family of a model that the fused pass computes.

    Raises:
        Unsupported: it does not.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise Unsupported(f"the fused pass does not know the family {config.model_type}")
    if family.attention is None:
        raise Unsupported(family.why)
    return family


def read_layers(model: Any, kv_bits: int = 16) -> list[DecoderLayer]:
    """A model's layers. Query, key and value projections are joined into one; the modules keep views of it.

    Args:
        kv_bits: of stored keys and values: 16 (more where the computation's are not rounded yet) or 8.

    Raises:
        Unsupported: a family or a layer that the fused pass does not compute.
    """
    family = check_family(model.config)
    kept = kept_dtype(model, kv_bits)
    return [_read(layer, index, family, model.config, kept) for index, layer in enumerate(model.model.layers)]


def kept_dtype(model: Any, kv_bits: int) -> torch.dtype:
    """The dtype of stored keys and values. Those of 16 bits have that of the computation, but float16 instead of
    float32 if weights are codes.

    That halves the reads of each token in a long conversation, with an error far below that of the codes.
    """
    if kv_bits == 8:
        return CODES
    computed: torch.dtype = model.model.embed_tokens.weight.dtype
    coded = all(isinstance(layer.self_attn.k_proj, PackedLinear) for layer in model.model.layers)
    return torch.float16 if coded and computed == torch.float32 else computed


def _read(layer: Any, index: int, family: Family, config: Any, kept: torch.dtype) -> DecoderLayer:
    attention, kind = layer.self_attn, family.attention
    assert kind is not None
    normalized = kind.normalized(config)
    heads = Heads(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        scale=attention.scaling,
        window=kind.window(config, index),
        clip=getattr(config, "clip_qkv", None),
        q_norm=attention.q_norm.weight if normalized else None,
        k_norm=attention.k_norm.weight if normalized else None,
        cache_dtype=kept,
    )
    return DecoderLayer(
        layer.input_layernorm.weight,
        _joined(attention),
        heads,
        attention.o_proj,
        layer.post_attention_layernorm.weight,
        config.rms_norm_eps,
        *_block(layer.mlp, family, has_experts=index not in family.dense_layers(config)),
    )


def _block(mlp: Any, family: Family, *, has_experts: bool) -> tuple[Router | None, Callable[..., Tensor], str]:
    """The router of a layer's block, the rest of the block, and what that computes besides experts."""
    if not has_experts:
        return None, mlp, "layers without experts"
    if family.routing.kind != "softmax":
        return None, _Alone(mlp), "routers of sigmoids"
    gate, shared = mlp.gate, family.shared
    # Mixtral keeps the weights in float32.
    dtype = gate.weight.dtype if hasattr(gate, "norm_topk_prob") else torch.float32
    scores = mlp.experts.hears(gate.weight) if isinstance(mlp.experts, OffloadedLayer) else None
    router = Router(gate.weight, gate.top_k, family.normalizes(gate), dtype, scores)
    if shared is None:
        return router, mlp.experts, ""
    beside = getattr(mlp, shared.module)
    scale = None if shared.gate is None else getattr(mlp, shared.gate)

    def both(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = beside(hidden)
        if scale is not None:
            own = torch.sigmoid(F.linear(hidden, scale.weight)) * own
        return mlp.experts(hidden, index, weights) + own

    return router, both, "shared experts"


class _Alone:
    """A block of the library's for tokens without a batch dimension."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (T, H) -> (T, H)."""
        return self._block(hidden[None])[0]


def _joined(attention: Any) -> nn.Module:
    try:
        return join(attention.q_proj, attention.k_proj, attention.v_proj)
    except ValueError as error:
        raise Unsupported(f"the query, key and value projections cannot be joined: {error}") from error


def projection(module: nn.Module) -> Projection:
    """As one operation takes it.

    Raises:
        Unsupported: a module of an unknown kind.
    """
    if isinstance(module, PackedLinear):
        return Projection(module.weights, module.bias)
    if type(module) is nn.Linear:
        return Projection(module.weight, module.bias)
    raise Unsupported(f"a projection is a {type(module).__name__}")


class Rope:
    """Rope's tables, computed by the library's module block by block as positions are needed.

    The first half of the sines is negated, so that a rotation is x * cos + roll(x, D / 2) * sin.

    Raises:
        Unsupported: a type that changes with the length of the text, or one that turns a part of each head.
    """

    def __init__(self, module: Any, dim: int, like: Tensor) -> None:
        if module.rope_type not in STATIC_ROPE:
            raise Unsupported(f"rope of the type {module.rope_type} changes with the length of the text")
        self._module, self._like = module, like
        self._table = like.new_empty(0, 2, dim)
        if (width := self._computed(1).shape[-1]) != dim:
            raise Unsupported(f"rope turns {width} of the {dim} dimensions of a head")

    def tables(self, start: int, end: int) -> Tensor:
        """Cosines and sines of positions start..end-1, (positions, 2, D)."""
        if end > len(self._table):
            self._table = self._computed(-(-max(end, len(self._table) * 3 // 2) // BLOCK) * BLOCK)
        return self._table[start:end]

    def _computed(self, positions: int) -> Tensor:
        cos, sin = self._module(self._like, torch.arange(positions, device=self._like.device)[None])
        sin[..., : sin.shape[-1] // 2].neg_()
        return torch.stack([cos[0], sin[0]], 1)
