"""One forward pass with little Python in it: the dense part's operations, written out for the families known here.

transformers' modules stay the reference that this is tested against, and what runs where this declines; the reason is
kept and shown. All operations are torch's own or this package's, on any device. The state of a pass is (T, H): T tokens
of one sequence, without a batch dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dense import join
from .kv import BLOCK, GrowingStore, KVCache, LibraryStore

# How rope's types that depend on the position alone are called; the others change their tables with the length.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_log = logging.getLogger("floe_chat.engine")


class Unsupported(Exception):  # noqa: N818 - not an error: the library's own modules run instead
    """This model has something that the lean pass does not compute; the text says what."""


class Decoder(Protocol):
    """Computes the next tokens of a sequence.

    Attributes:
        reason: in words, what computes the dense part and why.
    """

    reason: str
    device: torch.device

    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """Logits (1, V) after the last of `ids`, which follow what `kv` holds; their keys and values are added to it.

        `kv.computed` is the caller's to call, once this has returned.
        """
        ...


class LibraryDecoder:
    """transformers' own forward pass."""

    def __init__(self, model: Any, reason: str = "transformers' own dense layers") -> None:
        self.model, self.reason = model, reason
        self.device: torch.device = model.get_input_embeddings().weight.device

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`."""
        cache = kv.store_of(LibraryStore, LibraryStore).cache
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def choose(model: Any, window: int) -> LeanDecoder | LibraryDecoder:
    """The lean pass of a transformers model, or the library's own with the reason why."""
    try:
        return LeanDecoder(model, window)
    except Unsupported as declined:
        _log.info("no lean pass: %s", declined)
        return LibraryDecoder(model, f"transformers' own dense layers, since {declined}")


@dataclass(frozen=True, slots=True)
class _Family:
    """What distinguishes a family's layers, as transformers writes them.

    Attributes:
        norm: what queries and keys are normalized over before rope: "" not at all, "all" heads together, each "head".
        window: layer's attention module and configuration -> how many tokens it looks back, itself included; None all.
    """

    norm: str
    window: Callable[[Any, Any], int | None]


_FAMILIES = {
    "mixtral": _Family("", lambda _attention, config: config.sliding_window),
    "olmoe": _Family("all", lambda _attention, _config: None),
    "qwen2_moe": _Family("", lambda attention, _config: getattr(attention, "sliding_window", None)),
    "qwen3_moe": _Family("head", lambda _attention, config: config.sliding_window),
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's parts. Weights of norms are (H,), of query and key heads as `_Family.norm` says."""

    before: Tensor
    qkv: Callable[[Tensor], Tensor]
    heads_norm: tuple[Tensor, ...]
    window: int | None
    out: Callable[[Tensor], Tensor]
    after: Tensor
    block: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _View:
    """What the queries of a pass see, layer by layer: keys and values, and which of them, where it is not all."""

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass: where its tokens' keys and values go, what its queries see, rope's tables."""

    places: Sequence[Tensor]
    views: dict[int | None, _View]
    cos: Tensor
    sin: Tensor
    tokens: int


class LeanDecoder:
    """The forward pass of one model, made once from its modules.

    Query, key and value projections are joined into one; the modules keep views of it, so nothing is there twice and
    the library's pass goes on working.

    Raises:
        Unsupported: a family, rope or layer that this does not compute.
    """

    def __init__(self, model: Any, window: int) -> None:
        self._config = config = model.config
        family = _FAMILIES.get(config.model_type)
        if family is None:
            raise Unsupported(f"the lean pass does not know the family {config.model_type}")
        attention = model.model.layers[0].self_attn
        self.reason = "one lean pass for the dense layers"
        self._window, self._family = window, family
        self._heads, self._kv_heads, self._dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
        )
        self._scale, self._eps = attention.scaling, config.rms_norm_eps
        self._clip: float | None = getattr(config, "clip_qkv", None)
        self._embedding: Tensor = model.model.embed_tokens.weight
        self.device = self._embedding.device
        # torch's rms_norm of one token takes three times as long as three operations, but they read a number back.
        self._by_hand = self.device.type == "cpu" and self._embedding.dtype == torch.float32
        self._zero = torch.zeros(1, 1, dtype=self._embedding.dtype, device=self.device)
        self._rope = _Rope(
            model.model.rotary_emb, self._heads + self._kv_heads, self._kv_heads, self._dim, self._embedding
        )
        self._layers = [self._layer(layer, config) for layer in model.model.layers]
        self._windows = {layer.window for layer in self._layers}
        self._prepares = bool(family.norm) or self._clip is not None
        self._norm: Tensor = model.model.norm.weight
        self._head: nn.Module = model.lm_head

    def _layer(self, layer: Any, config: Any) -> _Layer:
        attention = layer.self_attn
        norms: tuple[Tensor, ...] = ()
        if self._family.norm:
            norms = (attention.q_norm.weight, attention.k_norm.weight)
        if self._family.norm == "head":  # one weight for all query and key heads, (heads, D)
            counts = torch.tensor([self._heads, self._kv_heads], device=self.device)
            norms = (torch.stack(norms).repeat_interleave(counts, 0),)
        return _Layer(
            before=layer.input_layernorm.weight,
            qkv=_joined(attention).forward,
            heads_norm=norms,
            window=self._family.window(attention, config),
            out=attention.o_proj.forward,
            after=layer.post_attention_layernorm.weight,
            block=_block(layer.mlp),
        )

    def _store(self) -> GrowingStore:
        dtype = self._embedding.dtype
        return GrowingStore(len(self._layers), self._kv_heads, self._dim, self._window, dtype, self.device)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`.

        Raises:
            ValueError: more tokens than the window. IndexError: a token that the vocabulary does not have.
        """
        if min(ids) < 0 or max(ids) >= len(self._embedding):  # a GPU would not survive it
            raise IndexError(f"a token outside the vocabulary of {len(self._embedding)}")
        store = kv.store_of(GrowingStore, self._store)
        tokens, start, end = len(ids), kv.length, kv.length + len(ids)
        store.crop(start)
        store.reserve(end)
        places = store.places(end)
        views = {window: self._view(store, window, start, end) for window in self._windows}
        self._pass = _Pass(places, views, *self._rope.tables(start, end), tokens)
        norm = self._norm_one if tokens == 1 and self._by_hand else self._norm_any
        x = F.embedding(torch.tensor(list(ids), dtype=torch.long, device=self.device), self._embedding)
        for index, layer in enumerate(self._layers[: self._config.num_hidden_layers]):
            x += self._attention(index, x)
            self._stream = x
            x += layer.block(norm(x, layer.after))
        store.length = end
        return self._head(self._norm_any(x[-1:], self._norm))

    def ahead(self, layer: int, output: Tensor | None) -> Tensor:
        """What the block of layer + 1 would be given, (T, H), if this layer, whose block runs now, added `output`.

        Keys and values of these tokens are guesses then; layer + 1 writes its own over them when it runs.
        """
        x = self._stream if output is None else self._stream + output
        x = x + self._attention(layer + 1, x)
        return self._norm_any(x, self._layers[layer + 1].after)

    def _attention(self, index: int, x: Tensor) -> Tensor:
        """What a layer's attention adds to the stream x (T, H); sets the keys and values of these tokens."""
        layer, step = self._layers[index], self._pass
        norm = self._norm_one if step.tokens == 1 and self._by_hand else self._norm_any
        attend = self._attend_one if step.tokens == 1 else self._attend_any
        qkv = layer.qkv(norm(x, layer.before)).view(step.tokens, -1, self._dim)
        if self._prepares:
            self._prepare(qkv, layer)
        qkv = torch.addcmul(qkv * step.cos, qkv.roll(self._dim // 2, 2), step.sin)
        queries, both = qkv.split_with_sizes((self._heads, 2 * self._kv_heads), 1)
        step.places[index].copy_(both)
        view = step.views[layer.window]
        return layer.out(attend(queries, view.keys[index], view.values[index], view.mask))

    def _view(self, store: GrowingStore, window: int | None, start: int, end: int) -> _View:
        first = 0 if window is None else max(0, start + 1 - window)
        return _View(*store.seen(first, end), _mask(first, start, end, window, self.device))

    def _norm_any(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / rms(x) * weight over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _norm_one(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same of one token, (1, H) of float32 on the CPU."""
        flat = x.view(-1)
        scale = (torch.dot(flat, flat).item() / flat.shape[0] + self._eps) ** -0.5
        return torch.addcmul(self._zero, x, weight, value=scale)

    def _prepare(self, qkv: Tensor, layer: _Layer) -> None:
        """What some families do before rope: norms of queries and keys, limits; in place, (T, all heads, D)."""
        if self._family.norm == "all":
            sizes = (self._heads, self._kv_heads, self._kv_heads)
            for heads, weight in zip(qkv.split(sizes, 1), layer.heads_norm, strict=False):
                heads.copy_(self._norm_any(heads.flatten(1), weight).view(heads.shape))
        elif self._family.norm == "head":
            both = qkv.narrow(1, 0, self._heads + self._kv_heads)
            both.copy_(F.rms_norm(both, (self._dim,), None, self._eps) * layer.heads_norm[0])
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)

    # Key heads stand in the batch dimension, so that the query heads which share one need no copy of it.

    def _attend_one(self, queries: Tensor, keys: Tensor, values: Tensor, _mask: Tensor | None) -> Tensor:
        """queries (1, heads, D), keys and values (kv_heads, 1, N, D) -> (1, heads * D)."""
        grouped = queries.view(self._kv_heads, 1, -1, self._dim)  # as if they were positions: all see all tokens
        return F.scaled_dot_product_attention(grouped, keys, values, scale=self._scale).reshape(1, -1)

    def _attend_any(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """queries (T, heads, D) -> (T, heads * D). mask: None for plain causal attention, T = N."""
        tokens, groups = queries.shape[0], self._heads // self._kv_heads
        grouped = queries.unflatten(1, (self._kv_heads, groups)).permute(1, 2, 0, 3)
        keys, values = (part.expand(-1, groups, -1, -1) for part in (keys, values))
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scale
        )
        return out.permute(2, 0, 1, 3).reshape(tokens, -1)


def _mask(first: int, start: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of tokens first..end-1 each of start..end-1 sees, (T, N); None for plain causal attention or one token."""
    if end - start == 1 or (start == 0 and (window is None or window >= end)):
        return None
    ago = torch.arange(start, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return ago >= 0 if window is None else (ago >= 0) & (ago < window)


def _block(mlp: Any) -> Callable[[Tensor], Tensor]:
    """What follows attention in a layer, (T, H) -> (T, H)."""
    if not hasattr(mlp, "experts"):  # a layer without experts
        return mlp
    if {name for name, _ in mlp.named_children()} != {"gate", "experts"}:  # shared experts: the library's own block

        def whole(x: Tensor) -> Tensor:
            return mlp(x.unsqueeze(0)).squeeze(0)

        return whole
    gate, experts = mlp.gate, mlp.experts
    weight, top_k = gate.weight, gate.top_k
    # Mixtral always shares the weight among the chosen, and keeps it in float32.
    mixtral = not hasattr(gate, "norm_topk_prob")
    shares = mixtral or gate.norm_topk_prob
    dtype = torch.float32 if mixtral else weight.dtype

    def routed(x: Tensor) -> Tensor:
        # The operations of the library's router, without a module around them.
        probabilities = torch.softmax(F.linear(x, weight), -1, dtype=torch.float32)
        weights, index = probabilities.topk(top_k, -1)
        if shares:
            weights /= weights.sum(-1, keepdim=True)
        return experts(x, index, weights.to(dtype))

    return routed


def _joined(attention: Any) -> nn.Module:
    try:
        return join(attention.q_proj, attention.k_proj, attention.v_proj)
    except ValueError as error:
        raise Unsupported(f"the query, key and value projections cannot be joined: {error}") from error


class _Rope:
    """Rope's tables, computed by the library's module block by block as positions are asked for.

    Both are (positions, heads, D) over the heads of queries, keys and values, which stay as they are. The first half of
    `sin` is negated, so that a rotation is x * cos + roll(x, D / 2) * sin.
    """

    def __init__(self, module: Any, turned: int, still: int, dim: int, like: Tensor) -> None:
        if module.rope_type not in STATIC_ROPE:
            raise Unsupported(f"rope of the type {module.rope_type} changes with the length of the text")
        self._module, self._like = module, like
        self._turned, self._still, self._dim = turned, still, dim
        self._cos = self._sin = like.new_empty(0, 1, dim)
        if (width := self._computed(1)[0].shape[-1]) != dim:
            raise Unsupported(f"rope turns {width} of the {dim} dimensions of a head")

    def tables(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions start..end-1."""
        if end > self._cos.shape[0]:
            self._cos, self._sin = self._computed(-(-max(end, self._cos.shape[0] * 3 // 2) // BLOCK) * BLOCK)
        cos, sin = self._cos[start:end], self._sin[start:end]
        still = cos.new_ones(end - start, self._still, self._dim)
        cos = torch.cat([cos.expand(-1, self._turned, -1), still], 1)
        return cos, torch.cat([sin.expand(-1, self._turned, -1), torch.zeros_like(still)], 1)

    def _computed(self, positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(self._like, torch.arange(positions, device=self._like.device)[None])
        sin[..., : self._dim // 2].neg_()
        return cos.transpose(0, 1).contiguous(), sin.transpose(0, 1).contiguous()
