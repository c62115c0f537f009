"""Reads what the fused pass needs from transformers' modules: layers, and rope's tables."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.entries import CODES
from ...kernels.mixers.convolution import Convolution
from ...kernels.mixers.delta import Delta
from ...kernels.mixers.grouped import Heads
from ...kernels.step import DenseLayer, Router, Sandwich, Stepped
from ...kernels.weights import Norm
from ...models.families import FAMILIES, Family
from ...models.families.derived import UnfitError, tree
from ...models.families.family import ThroughLatent
from ...models.families.recognized import recognized
from ...models.modules.light_modules import STATIC_ROPE
from .blocks import Beside, Unsupported, projection, read_beside, read_norm, read_router, read_sandwich
from .kv_stores import BLOCK
from .mixers.convolution import read_convolution
from .mixers.delta import read_delta
from .mixers.grouped import read_grouped
from .mixers.latent import LatentParts, read_latent
from .quantized_linear import PackedLinear, Reordered

ANGLES = 8192  # positions whose angles are computed at once
STILL = "still"  # the kind of layers that rope does not turn

Mixer = Heads | LatentParts | Delta | Convolution


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream as it runs here: divided by what a family multiplies all with that layers add to it.

    Its norms then differ by their `eps` alone, and no layer has to multiply.

    Attributes:
        scale: of the embedding. eps: of all norms. norm: the last one, which scales logits too.
    """

    scale: float
    eps: float
    norm: Norm


def read_stream(model: Any, family: Family) -> Stream:
    """A model's."""
    config = model.config
    scaled, added, divided = (family.factor(config, name) for name in (family.scaled, family.added, family.divided))
    embedding = model.model.embed_tokens  # some modules multiply by themselves, by a number of the weights' type
    own = torch.tensor(getattr(embedding, "scalar_embed_scale", 1.0)).to(embedding.weight.dtype)
    scaled *= float(own)
    last = read_norm(family, model.model.norm)
    if divided != 1:
        last = replace(last, weight=last.weight / divided, bias=None if last.bias is None else last.bias / divided)
    return Stream(scaled / added, getattr(config, family.eps) / added**2, last)


def embedded(tokens: Tensor, embedding: Tensor, scale: float) -> Tensor:
    """tokens (T,) -> the stream before the first layer, (T, H)."""
    x = F.embedding(tokens, embedding)
    return x if scale == 1 else x * scale


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts.

    Attributes:
        input_layernorm, post_attention_layernorm: the norms. first, out: the projections before and behind the mixer,
            as modules. router, experts: hidden (T, H), and its experts and weights (T, K) -> (T, H); None where the
            layer has none. beside: what every token is given besides experts, if anything. sandwich: see `DenseLayer`.
    """

    input_layernorm: Norm
    first: nn.Module
    mixer: Mixer
    out: nn.Module
    post_attention_layernorm: Norm
    eps: float
    router: Router | None
    experts: nn.Module | None
    beside: Beside | None = None
    sandwich: Sandwich | None = None

    def projected(self, hidden: Tensor) -> Tensor:
        """What the layer's mixer is given of a block's input (T, H): its first projection, and a state's gates."""
        first, mixer = self.first(hidden), self.mixer
        return torch.cat([first, mixer.gates(hidden)], -1) if isinstance(mixer, Delta) else first

    def mixed(self, stream: Tensor, out: Tensor) -> Tensor:
        """The stream behind the mixer by what its projection gives, (T, H) each."""
        return stream + (out if self.sandwich is None else self.sandwich.mixed(out, self.eps))

    def stepped(self, stream: Tensor) -> Stepped:
        """What a block is given, by the stream behind the mixer, (T, H)."""
        sandwich, parallel = self.sandwich, None
        hidden = self.post_attention_layernorm(stream, self.eps)
        if sandwich is not None:
            parallel = sandwich.parallel(self.beside, stream, hidden, self.eps)
            if self.router is None:
                return Stepped(sandwich.close(stream, parallel, None, self.eps), hidden, ())
        elif self.beside is not None:
            stream = self.beside(hidden, stream)
        if (router := self.router) is None:
            return Stepped(stream, hidden, ())
        routed = kernels.route(router.given(hidden, stream, self.eps), router)
        bias = router.bias_of(*routed, product=kernels.plain)
        return Stepped(stream if bias is None else stream + bias.to(stream.dtype), hidden, routed, parallel)

    def behind(self, stepped: Stepped, experts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stream behind the layer, and what has still to be added to it, by what its experts give, (T, H) each.

        Without a `parallel`, a sandwich is left to the next step.
        """
        if self.sandwich is None or stepped.parallel is None or experts is None:
            return stepped.stream, experts
        return self.sandwich.close(stepped.stream, stepped.parallel, experts, self.eps), None

    def dense(self) -> DenseLayer:
        """As one operation takes it.

        Raises:
            Unsupported: projections of an unknown kind.
        """
        first, out = projection(self.first), projection(self.out)
        beside = None if self.beside is None else self.beside.swiglu
        norms = self.input_layernorm, self.post_attention_layernorm, self.eps
        mixer = self.mixer.record() if isinstance(self.mixer, LatentParts) else self.mixer
        return DenseLayer(*norms, mixer, first, out, self.router, beside, self.sandwich)


def record_of(config: Any) -> Family:
    """The record of a model's family, or what transformers' modules say where there is none.

    Raises:
        Unsupported: it has something that the fused pass does not compute.
    """
    try:
        return FAMILIES.get(config.model_type) or recognized(tree(config))
    except UnfitError as declined:
        raise Unsupported(str(declined)) from declined


def read_layers(model: Any, family: Family, rope: Ropes, kv_bits: int = 16) -> list[DecoderLayer]:
    """A model's layers. Query, key and value projections are joined into one; the modules keep views of it.

    Args:
        kv_bits: of stored keys and values: 16 (more where the computation's are not rounded yet) or 8, which latent
            vectors do not have.

    Raises:
        Unsupported: a layer that the fused pass does not compute.
    """
    kept, eps = kept_dtype(model, family, kv_bits), read_stream(model, family).eps
    read: list[DecoderLayer] = []
    for index, layer in enumerate(model.model.layers):
        rope_at, order = rope.of(index)
        there = None if order is None else order.to(_device(layer))
        first, mixer = _read_mixer(_mixer_of(layer), index, family, model.config, kept, there, rope_at)
        read.append(read_layer(layer, index, family, model.config, eps, first, mixer))
    return read


def _device(layer: Any) -> torch.device:
    """Where a layer is: cards may have some each."""
    return next(layer.parameters()).device


def kept_dtype(model: Any, family: Family, kv_bits: int) -> torch.dtype:
    """The dtype of stored keys and values. Those of 16 bits have that of the computation, but float16 instead of
    float32 if weights are codes.

    That halves the reads of each token in a long conversation, with an error far below that of the codes.
    """
    if kv_bits == 8 and not isinstance(family.attention, ThroughLatent):
        return CODES
    computed: torch.dtype = model.model.embed_tokens.weight.dtype
    coded = all(_is_packed(_last(layer)) for layer in model.model.layers)
    return torch.float16 if coded and computed == torch.float32 else computed


def _last(layer: Any) -> nn.Module:
    """The projection behind a layer's mixer."""
    mixer = _mixer_of(layer)
    return mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj


def _mixer_of(layer: Any) -> Any:
    """A layer's module with its mixer."""
    return next(getattr(layer, name) for name in ("self_attn", "linear_attn", "conv") if hasattr(layer, name))


def _is_packed(module: nn.Module) -> bool:
    return isinstance(module.inner if isinstance(module, Reordered) else module, PackedLinear)


def read_layer(
    layer: Any, index: int, family: Family, config: Any, eps: float, first: nn.Module, mixer: Mixer
) -> DecoderLayer:
    """One layer's parts around its mixer, which `first` leads to. Raises: Unsupported: as `read_layers`."""
    block, has_experts = family.block_of(layer), index not in family.dense_layers(config)
    return DecoderLayer(
        read_norm(family, getattr(layer, family.first_norm)),
        first,
        mixer,
        _last(layer),
        read_norm(family, getattr(layer, family.norm)),
        eps,
        read_router(family, block) if has_experts else None,
        block.experts if has_experts else None,
        read_beside(family, block, has_experts=has_experts),
        read_sandwich(family, layer),
    )


def _read_mixer(
    module: Any, index: int, family: Family, config: Any, kept: torch.dtype, order: Tensor | None, rope_at: int
) -> tuple[nn.Module, Mixer]:
    """A layer's first projection, and its mixer."""
    if hasattr(module, "A_log"):
        return read_delta(module)
    if hasattr(module, "conv"):
        return read_convolution(module)
    if isinstance(family.attention, ThroughLatent):
        return read_latent(module, config, kept, order)
    return read_grouped(module, index, family, config, kept, order, rope_at)


class Rope:
    """Rope's tables, computed by the library's module block by block as positions are needed.

    The first half of the sines is negated, so that a rotation is x * cos + roll(x, D / 2) * sin.

    Args:
        kind: of layers, where the module has several. interleaved: whether neighbouring dimensions turn together, and
            not those half a head apart. once: whether the module gives each angle once, and not for both dimensions
            that it turns.

    Attributes:
        order: (D,) of a head's dimensions, so that each is half a head from the one that it turns with; those that do
            not turn are behind them in each half. None where they are so already. dim: D.
        short: the length of a text beyond which longrope turns all of it by other frequencies.

    Raises:
        Unsupported: another type that changes with the length of the text.
    """

    def __init__(
        self, module: Any, dim: int, like: Tensor, *, interleaved: bool = False, once: bool = False, kind: str = ""
    ) -> None:
        type_ = module.rope_type[kind] if kind else module.rope_type
        if type_ not in (*STATIC_ROPE, "longrope"):
            raise Unsupported(f"rope of the type {type_} changes with the length of the text")
        self._module, self._like, self.dim, self._kind = module, like, dim, kind
        self.short = sys.maxsize
        if type_ == "longrope":
            self.short = int(module.config.rope_parameters["original_max_position_embeddings"])
        self._tables = dict.fromkeys((False, True), like.new_empty(0, 2, dim))
        turned = self._angles(0, 1, 1)[0].shape[-1]
        turned *= 2 if once else 1
        self._half, rest = turned // 2, (dim - turned) // 2
        places = torch.arange(turned, device=like.device).view(*((-1, 2) if interleaved else (2, -1)))
        first, second = places.unbind(1 if interleaved else 0)
        still = torch.arange(turned, dim, device=like.device).split(rest) if rest else ()
        parts = [first, *still[:1], second, *still[1:]]
        order = torch.cat(parts)
        self.order = None if order.equal(torch.arange(dim, device=like.device)) else order

    def tables(self, start: int, end: int, *, long: bool = False) -> Tensor:
        """Cosines and sines of positions start..end-1, (positions, 2, D). long: of a text beyond `short`."""
        table = self._tables[long]
        if end > (made := table.shape[0]):
            most = -(-max(end, made * 3 // 2) // BLOCK) * BLOCK
            most = max(most, self.short + 1) if long else min(most, self.short)
            table = self._tables[long] = self._grown(table, most)
        return table[start:end]

    def _grown(self, table: Tensor, positions: int) -> Tensor:
        """The table of so many positions, of which the first are there. Some at a time: all angles of a long text at
        once would take four times as much as the table.
        """
        grown = table.new_empty(positions, 2, self.dim)
        grown[: len(table)] = table
        still, half = (0, self.dim // 2 - self._half), self._half
        for start in range(len(table), positions, ANGLES):
            cos, sin = (each[:, :half] for each in self._angles(start, min(start + ANGLES, positions), positions))
            parts = F.pad(cos, still, value=1.0), F.pad(cos, still, value=1.0), F.pad(-sin, still), F.pad(sin, still)
            grown[start : start + len(cos)] = torch.cat(parts, -1).unflatten(-1, (2, -1))
        return grown

    def _angles(self, start: int, end: int, positions: int) -> tuple[Tensor, Tensor]:
        """The module's cosines and sines, (end - start, angles), which some families have as complex numbers; by the
        frequencies of a text of so many positions.
        """
        kinds = [self._kind] if self._kind else []
        # The module takes the length of a text from its last position.
        places = torch.arange(start, end + 1, device=self._like.device)
        places[-1] = positions - 1
        found = self._module(self._like, places[None], *kinds)
        cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found
        return cos[0, :-1], sin[0, :-1]


class Still:
    """As `Rope`, of layers that turn nothing."""

    order, short = None, sys.maxsize

    def __init__(self, dim: int, like: Tensor) -> None:
        self.dim, self._turn = dim, torch.stack([like.new_ones(dim), like.new_zeros(dim)])

    def tables(self, start: int, end: int, *, long: bool = False) -> Tensor:
        """See `Rope`."""
        return self._turn.expand(end - start, -1, -1)


class Ropes:
    """The tables of all layers: of each kind of layers that turn alike, one behind the other.

    Attributes:
        short: see `Rope`.
    """

    def __init__(self, ropes: Mapping[str, Rope | Still], kinds: Sequence[str]) -> None:
        self._ropes, self._kinds = ropes, kinds  # kinds: of each layer
        ends = list(itertools.accumulate(2 * rope.dim for rope in ropes.values()))
        self._at = dict(zip(ropes, [0, *ends], strict=False))
        self.short = min(rope.short for rope in ropes.values())
        self._only = next(iter(ropes.values())) if len(ropes) == 1 else None

    def of(self, layer: int) -> tuple[int, Tensor | None]:
        """Where a layer's numbers begin among those of a position, and `Rope.order`."""
        kind = self._kinds[layer]
        return self._at[kind], self._ropes[kind].order

    def is_long(self, length: int) -> bool:
        """Whether a text of so many tokens is beyond `short`."""
        return length > self.short

    def tables(self, start: int, end: int, *, long: bool = False) -> Tensor:
        """Cosines and sines of positions start..end-1, (positions, 2, D), or (positions, numbers) of several kinds."""
        if self._only is not None:
            return self._only.tables(start, end, long=long)
        found = [rope.tables(start, end, long=long).flatten(1) for rope in self._ropes.values()]
        return torch.cat(found, 1)


def read_rope(model: Any, family: Family) -> Ropes:
    """A model's."""
    layers, how = model.model.layers, family.attention
    module, like, kinds = model.model.rotary_emb, model.model.embed_tokens.weight, [""] * len(layers)
    if isinstance(how, ThroughLatent):
        turned = {"interleaved": how.interleaved(model.config), "once": how.angles_once}
        return Ropes({"": Rope(module, model.config.qk_rope_head_dim, like, **turned)}, kinds)
    dims = [layer.self_attn.head_dim if hasattr(layer, "self_attn") else 0 for layer in layers]
    if isinstance(module.rope_type, dict):
        kinds = list(model.config.layer_types)
    kinds = [kind if how.turned(model.config, index) else STILL for index, kind in enumerate(kinds)]
    found = {kind: dim for kind, dim in zip(kinds, dims, strict=True) if dim}
    turned: Any = {"interleaved": how.interleaved, "once": how.angles_once}
    made = {
        kind: Still(dim, like) if kind == STILL else Rope(module, dim, like, **turned, kind=kind)
        for kind, dim in found.items()
    }
    return Ropes(made, kinds)
