"""What a small model guesses that was published for a model: its queries see the keys and values which that model has
stored, in the last of its layers of the same kind.

It is given the next token's embedding and what the model's layers had come to before that token, both the model's. It
never reads a text: all guesses behind a token see the same keys and values, at that token's position (transformers'
`SinglePositionMultiTokenCandidateGenerator`). A layer with a window of W sees W + 1 tokens, as transformers' masks say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.cpu.native_step import NativeStep, Place
from ...kernels.cpu.native_token import NativeToken
from ...kernels.mixers.grouped import Heads
from ...kernels.step import ModelEnds
from ...kernels.weights import LinearWeights
from ...models.families.family import Family
from ...models.modules import assistant_modules, library_model
from ...models.pack import assistant
from ...models.pack.assistant import PackedAssistant
from ..events import MOST_TOGETHER
from ..experts.moe_layer import Cancelled, Control
from .blocks import Unsupported, in_order, norm_weight, projection, read_norm
from .draft_head import PRESET, first, linear, nearest, parts
from .kv_cache import KVCache
from .kv_stores import GrowingStore
from .layers import DecoderLayer, Ropes, read_layer
from .quantized_linear import PackedLinear, through


class DraftAssistant:
    """The small model, and the text that it is asked about; see `DraftHead`.

    Args:
        family: of the model. bits: of the linear layers in `packed.dense`. layers, kinds: the model's, and what kind
            each is of. rope, ends: the model's. store: of a text.

    Raises:
        Unsupported: layers that are not computed. PackError: tensors that do not fit the configuration.
    """

    def __init__(
        self,
        packed: PackedAssistant,
        family: Family,
        bits: int,
        layers: Sequence[DecoderLayer],
        kinds: Sequence[str],
        rope: Ropes,
        ends: ModelEnds,
        store: Callable[[KVCache], GrowingStore],
    ) -> None:
        control, made = Control(PRESET), assistant.of(family).layers
        tree = _modules(packed, made, bits, control)
        last = {kind: number for number, kind in enumerate(kinds)}
        self._numbers = [last[kind] for kind in packed.config.layer_types]
        self._norm, self._eps = read_norm(made, tree.model.norm), getattr(packed.config, made.eps)
        read = [
            _read(layer, index, made, packed.config, self._eps, layers[number], rope.of(number))
            for index, (layer, number) in enumerate(zip(tree.model.layers, self._numbers, strict=True))
        ]
        try:
            self._steps = [NativeStep(layer.dense()) for layer in read]
            self._token = NativeToken(self._steps, [None] * len(read))
        except ValueError as error:
            raise Unsupported(str(error)) from error
        windows = [layer.mixer.window for layer in read if isinstance(layer.mixer, Heads) and layer.mixer.window]
        self._back_to = max(windows, default=0)  # tokens that it sees, and the one that it is asked about
        self._bits = PRESET.x_bits if isinstance(read[0].out, PackedLinear) else 22
        self._joined, self._back = (
            linear(weights, control, ends.embedding) for weights in (packed.joined, packed.back)
        )
        self._sizes, head = parts(len(ends.embedding)), projection(tree.lm_head)
        self._heads = [linear(_weights(first(head, rows).weight), control, ends.embedding) for rows in self._sizes]
        self._control, self._rope, self._model, self._store = control, rope, ends, store
        self._kv: KVCache | None = None
        self._length, self._stream = 0, torch.empty(0)  # of the text, and the stream (1, H) behind its last token

    behind = 0
    """How many tokens the model is ahead of it: it reads none."""

    def saw(self, kv: KVCache, ids: Sequence[int], streams: Tensor) -> None:
        """See `DraftHead.saw`."""
        self._kv, self._length, self._stream = kv, kv.length + len(ids), streams[-1:].clone()

    def guess(self, token: int, kv: KVCache, more: Callable[[list[float]], bool]) -> tuple[list[int], list[float]]:
        """See `DraftHead.guess`."""
        tokens, chances = list[int](), list[float]()
        if kv is not self._kv or kv.length != self._length or (place := self._place(kv)) is None:
            return tokens, chances
        head, following = self._heads[nearest(self._sizes, kv.tokens)], token
        with torch.inference_mode():
            hidden = self._model.norm(self._stream, self._model.eps)
            while len(tokens) < MOST_TOGETHER - 1 and more(chances):
                normed = self._normed(following, hidden, place)
                logits = through(head, normed)[0].numpy()  # torch would wake threads of its own for the sum
                tokens.append(following := int(logits.argmax()))
                chances.append(1 / float(np.exp(logits - logits[following]).sum()))
                hidden = through(self._back, normed)
        return tokens, chances

    def _normed(self, token: int, hidden: Tensor, place: Place) -> Tensor:
        """What its last norm gives, (1, h), of a token and what is before it, (1, H)."""
        embedded = self._model.embedding[token : token + 1] * self._model.scale
        x = through(self._joined, torch.cat([embedded, hidden], -1))
        found = self._token(x, [place], (self._bits, self._bits), self._control.cancelled.stop)
        if found is None:
            raise Cancelled
        return self._norm(found.stream, self._eps)

    def _place(self, kv: KVCache) -> Place | None:
        """Behind a text, if its layers keep what is seen from there."""
        store, position = self._store(kv), kv.length
        if not position or position >= store.layout.window:
            return None
        store.reserve(position + 1)
        entries, firsts = store.layers(), store.firsts() or [0] * store.layout.layers
        own = [firsts[number] for number in self._numbers]
        if max(own) > max(0, position + 1 - self._back_to):  # the text has been gone back in, just as far as it is kept
            return None
        rope = self._rope.tables(position, position + 1, long=kv.long)[0]
        return Place(rope, [entries[number] for number in self._numbers], position, own)


def _modules(packed: PackedAssistant, family: Family, bits: int, control: Control) -> Any:
    def made(weights: LinearWeights, bias: nn.Parameter | None) -> nn.Module:
        return PackedLinear(weights, bias, control)

    def none(_index: int) -> nn.Module:
        raise AssertionError("no layer has experts")

    how = bits, none, made, torch.float32, "cpu", assistant_modules.tree
    return library_model.build(packed.config, family, packed.dense, *how)


def _read(
    layer: Any, index: int, family: Family, config: Any, eps: float, of: DecoderLayer, turned: tuple[int, Tensor | None]
) -> DecoderLayer:
    """One layer. of: the model's whose keys and values it sees. turned: how rope turns these."""
    heads, (_, order), attention = of.mixer, turned, layer.self_attn
    if not isinstance(heads, Heads):
        raise Unsupported("the model stores latent vectors")
    count, dim, norm = config.num_attention_heads, heads.head_dim, norm_weight(family, attention.q_norm)
    rows = None if order is None else (torch.arange(count)[:, None] * dim + order).flatten()
    mixer = replace(
        heads,
        num_heads=count,
        window=None if heads.window is None else heads.window + 2,
        q_norm=norm if order is None else norm[order],
        k_norm=None,
        keys_alone=False,
        v_normed=False,
        queries_alone=True,
    )
    queries = in_order(attention, ("q_proj",), rows, "query")
    return read_layer(layer, index, family, config, eps, queries, mixer)


def _weights(head: Any) -> LinearWeights | Tensor:
    assert isinstance(head, LinearWeights | Tensor)
    return head
