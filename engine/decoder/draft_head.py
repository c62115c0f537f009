"""What a model's own drafting head guesses: a further layer that was trained to say what follows the next token
(multi-token prediction, arXiv 2412.19437, section 2.2).

It is given a token's embedding and what the model's layers had come to before that token, both normed, joined by a
matrix. The first guess takes the model's hidden state, later ones the head's own, behind its last norm. The head sees
the part of a text that it went through itself: of a prompt the last `_MOST` tokens, once the first token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.cpu.native_ends import NativeEnds
from ...kernels.cpu.native_step import NativeStep, Place
from ...kernels.step import ModelEnds, Stepped
from ...kernels.weights import LinearWeights, Planes, Projection
from ...models.families import Family
from ...models.modules import library_model, light_modules
from ...models.pack.draft_head import PackedHead
from ..events import MOST_TOGETHER
from ..experts.moe_layer import Control, MoELayer
from ..quality_presets import X_BITS_COARSE, Preset
from ..telemetry import Telemetry
from .blocks import Unsupported
from .kv_cache import KVCache
from .kv_stores import GrowingStore, Layout
from .layers import kept_dtype, read_layers, read_rope, read_stream
from .passes import NativePass, TorchPass
from .quantized_linear import PackedLinear, through

# Guesses are of the first part of a vocabulary alone in which nearly all of a text is: vocabularies begin with what is
# frequent, and the output layer would take most of a guess's time (FR-Spec, arXiv 2502.14856).
_PARTS, _NEARLY, _RECENT = (8, 4, 1), 0.95, 256
_MOST = 512  # tokens that the head may be behind the model: going through them costs about a token's time
PRESET = Preset("Draft", x_bits=X_BITS_COARSE)


class DraftHead:
    """The head of a model whose experts are in RAM, computed by the CPU, and the text that it is in.

    Args:
        family: of its configuration, which is that of one layer. bits: of the linear layers in `packed.dense`. ends:
            the model's, whose norm is the one behind its last layer. window, kv_bits: the model's.

    Raises:
        Unsupported: a layer that is not computed. PackError: tensors that do not fit the configuration.
    """

    def __init__(
        self, packed: PackedHead, family: Family, bits: int, ends: ModelEnds, window: int, kv_bits: int
    ) -> None:
        control = Control(PRESET)
        tree = _modules(packed, family, bits, ends.embedding, control)
        self._rope, stream = read_rope(tree, family), read_stream(tree, family)
        self._layers = read_layers(tree, family, self._rope, kv_bits)
        heads = self._layers[0].mixer.attending
        if len(self._layers) != 1 or heads is None:
            raise Unsupported("its drafting head is not one layer that attends")
        self._model, self._norm, self._eps = ends, stream.norm, stream.eps
        self._norms = [norm.to(ends.embedding) for norm in (packed.embedding_norm, packed.hidden_norm)]
        self._joined = linear(packed.joined, control, ends.embedding)
        self._parts = {rows: first(ends.head, rows) for rows in parts(len(ends.embedding))}
        dtype = kept_dtype(tree, family, kv_bits)
        self._store = GrowingStore(Layout((heads.entry,), window, dtype, ends.embedding.device))
        self._prepare(control)
        self._kv: KVCache | None = None
        self._ids: list[int] = []  # of the text, as far as the model has computed it
        self._streams: list[Tensor] = []  # behind the model's layers, of the last of them, (T, H) each
        self._length = 0  # entries in the store: of as many of the tokens before these

    def _prepare(self, _control: Control) -> None:
        """What computes, once the weights are there.

        Raises:
            Unsupported: nothing does.
        """
        ends, norm = self._model, self._norm
        self._ends = {
            rows: NativeEnds(ModelEnds(ends.embedding[:rows], norm, self._eps, head, cap=ends.cap))
            for rows, head in self._parts.items()
        }
        try:
            self._step = NativeStep(self._layers[0].dense())
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def saw(self, kv: KVCache, ids: Sequence[int], streams: Tensor) -> None:
        """The model has computed `ids`, which follow what `kv` holds, with these streams (T, H) behind its layers."""
        start = kv.length
        if kv is not self._kv or start != len(self._ids) or len(ids) > MOST_TOGETHER:
            self._turn_to(kv, start)
        self._ids += ids
        self._streams.append(streams)
        if self.behind > _MOST:
            self._length, self._streams = 0, [torch.cat(self._streams)[-_MOST:]]

    def guess(self, token: int, kv: KVCache, more: Callable[[list[float]], bool]) -> tuple[list[int], list[float]]:
        """What may follow `token`, which follows what `kv` holds, and how likely the head finds each.

        Args:
            more: whether to guess another token, by how likely those before are; first there are none.
        """
        tokens, chances = list[int](), list[float]()
        behind = self.behind
        full = self._length + behind + MOST_TOGETHER > self._store.layout.window
        if kv is not self._kv or kv.length != len(self._ids) or not behind or full:
            return tokens, chances
        following = [*self._ids[len(self._ids) - behind + 1 :], token]
        with torch.inference_mode():
            hidden = self._model.norm(torch.cat(self._streams), self._model.eps)
            guesses = self._guesses(following, hidden)
            while len(tokens) < MOST_TOGETHER - 1 and more(chances):
                token, chance = next(guesses)
                tokens.append(token)
                chances.append(chance)
            if tokens:
                self._length, self._streams = self._length + behind, []
        return tokens, chances

    def _guesses(self, following: Sequence[int], hidden: Tensor) -> Iterator[tuple[int, float]]:
        """What follows tokens that the head has not gone through, by what is before each of them (T, H), and how likely
        it is: one guess after another.
        """
        ends, place = self._ends[self._nearest()], self._length + len(following)
        stream = self._follow(self._given(following, hidden))
        while True:
            # Torch would wake threads of its own for this, which takes longer than the sum.
            logits = ends.logits(stream, X_BITS_COARSE)[0].numpy()
            best = int(logits.argmax())
            yield best, 1 / float(np.exp(logits - logits[best]).sum())
            stream = self._through(self._given([best], self._norm(stream, self._eps)), place)
            place += 1

    @property
    def behind(self) -> int:
        """How many tokens the model is ahead of the head."""
        return sum(map(len, self._streams))

    def _turn_to(self, kv: KVCache, start: int) -> None:
        """A text goes on behind its first `start` tokens. What came before them may be what the head knows."""
        before = kv.tokens[:start]
        known, done = self._ids[:start] == before, len(self._ids) - self.behind
        if known and start >= done:
            streams = torch.cat(self._streams)[: start - done] if self._streams else None
            self._streams = [] if streams is None or not len(streams) else [streams]
        else:  # the entry of token start - 1 knows what followed it, which may be something else now
            self._length = max(0, self._length - (done - start) - 1) if known else 0
            self._streams = []
        self._kv, self._ids = kv, before

    def _nearest(self) -> int:
        """Tokens of the smallest part of the vocabulary in which nearly all of the text is."""
        sizes = [*self._parts]
        return sizes[nearest(sizes, self._ids)]

    def _given(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """What enters the layer, (T, H), by tokens and what is before each of them, (T, H)."""
        both = self._model.embedding[list(tokens)] * self._model.scale, hidden
        normed = [F.rms_norm(x, own.shape, own, self._eps) for x, own in zip(both, self._norms, strict=True)]
        return through(self._joined, torch.cat(normed, -1))

    def _follow(self, x: Tensor) -> Tensor:
        """What enters the layer next, (T, H) -> the stream (1, H) behind the last; of the others, keys and values are
        enough.
        """
        store, start, end = self._store, self._length, self._length + len(x)
        store.crop(start)
        store.reserve(end + MOST_TOGETHER)
        if early := max(0, len(x) - MOST_TOGETHER):
            rope = self._rope.tables(start, start + early)
            TorchPass(self._layers, (store, rope, start)).step(0, x[:early], None)
        stream = self._through(x[early:], start + early)
        store.length = end
        return stream

    def _through(self, x: Tensor, start: int) -> Tensor:
        """Tokens from place `start` on through the layer, 4 at most: (T, H) -> the stream (1, H) behind the last."""
        places = [self._place(start + number) for number in range(len(x))]
        layer, stepped = self._layers[0], NativePass([self._step], self._layers, places).step(0, x, None)
        stream, hidden, *routed = (one[-1:] for one in (stepped.stream, stepped.hidden, *stepped.routed))
        parallel = None if stepped.parallel is None else stepped.parallel[-1:]
        experts = None if layer.experts is None else layer.experts(hidden, *routed)
        stream, added = layer.behind(Stepped(stream, hidden, tuple(routed), parallel), experts)
        return stream if added is None else stream + added

    def _place(self, place: int) -> Place:
        return Place(self._rope.tables(place, place + 1)[0], self._store.layers(), place)


def _modules(packed: PackedHead, family: Family, bits: int, embedding: Tensor, control: Control) -> Any:
    """The head's layer and its last norm, as a model without an output layer."""

    def made(config: Any, dtype: torch.dtype) -> nn.Module:
        tree: Any = (light_modules.tree if light_modules.knows(config) else library_model.library)(config, dtype)
        tree.lm_head = nn.Identity()
        return tree

    def experts(_index: int) -> nn.Module:
        assert packed.experts is not None
        layer = packed.experts.there(device)
        return MoELayer(0, layer, control, Telemetry(1, len(layer.signal.q)))

    def packed_linear(weights: LinearWeights, bias: nn.Parameter | None) -> nn.Module:
        return PackedLinear(weights.there(device), bias, control)

    dense, device = packed.dense | {"model.embed_tokens.weight": embedding}, str(embedding.device)
    return library_model.build(
        packed.config, family, dense, bits, experts, packed_linear, embedding.dtype, device, made
    )


def parts(vocabulary: int) -> list[int]:
    """How many tokens the first parts of a vocabulary have that guesses are of, the smallest first."""
    return [max(1, vocabulary // part) for part in _PARTS]


def nearest(sizes: Sequence[int], ids: Sequence[int]) -> int:
    """Which of such parts is the smallest that has nearly all of a text's last tokens; the last one has all."""
    recent = ids[-_RECENT:]
    least = _NEARLY * len(recent)
    return next(number for number, size in enumerate(sizes) if sum(token < size for token in recent) >= least)


def linear(weights: LinearWeights | Tensor, control: Control, like: Tensor) -> nn.Module:
    """y = x · Wᵀ by a pack's weights, of the type and on the device of `like`."""
    if isinstance(weights, LinearWeights):
        return PackedLinear(weights.there(str(like.device)), None, control)
    made = nn.Linear(weights.shape[1], weights.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weights.to(like), requires_grad=False)
    return made


def first(head: Projection, rows: int) -> Projection:
    """An output layer's first rows; of two planes, the one that tells about how likely a token is."""
    weight, bias = head.weight, None if head.bias is None else head.bias[:rows]
    if isinstance(weight, Planes):
        weight = weight.high
    if isinstance(weight, Tensor):
        return Projection(weight[:rows], bias)
    return Projection(LinearWeights(weight.vector, weight.q[:rows], weight.scale[:rows], weight.zero[:rows]), bias)
