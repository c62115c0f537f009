"""How a token of a text, or of each of several, goes through a model: by torch's operations, as a prompt does, by the
compiled step on the CPU, or by CUDA graphs. It is chosen once; what mixers the layers have makes no difference here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...kernels.cpu.native_ends import NativeEnds
from ...kernels.cpu.native_step import NativeStep, Place
from ...kernels.step import Stepped
from ..events import MOST_TOGETHER
from ..experts.moe_layer import MoELayer
from ..sampling import Sampler
from .card.card_ends import Ends
from .card.card_layers import CardLayers
from .card.card_parts import CardParts
from .card.card_token import CardToken
from .kv_stores import GrowingStore, KvPart
from .layers import DecoderLayer, Unsupported
from .passes import NativePass, TorchPass
from .quantized_linear import PackedLinear, PlanedLinear
from .token_pass import MOST, TokenPass

_log = logging.getLogger("floe_chat.engine")
DenseCall = Callable[[int, Tensor, Tensor | None], Stepped]
Drawn = tuple[list[int], list[float], int]
"""Tokens, when each was drawn, in seconds since the call, and how many guesses were computed with the first one."""


class Text(NamedTuple):
    """Where a text's next tokens are computed. rope: (T, 2, D) of their positions, of which `start` is the first."""

    store: GrowingStore
    rope: Tensor
    start: int


class Walker(Protocol):
    """The decoder of the model. layers: of which it uses the first `count`."""

    layers: list[DecoderLayer]

    @property
    def count(self) -> int: ...

    def walk(self, step: DenseCall, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream behind all layers (T, H), and what has still to be added to it."""
        ...

    def embedded(self, ids: Sequence[int]) -> Tensor:
        """(T, H)."""
        ...

    def logits(self, last: Tensor) -> Tensor:
        """(N, H) after the last layer -> (N, V)."""
        ...


class Way:
    """By torch's operations.

    Attributes:
        how: in words. most: tokens of one text, in order, that may be `together`. stream: behind the last `token`,
            (1, H), until the next one; None where nobody knows it.
    """

    how = "by torch's operations"
    most = 1
    stream: Tensor | None = None

    def __init__(self, model: Walker) -> None:
        self._model = model

    def prepare(self) -> str:
        """See `Decoder`; in words that follow `how`, what is known now."""
        return ""

    def token(self, _token: int, _text: Text) -> Tensor | None:
        """Logits (1, V), which the next token may overwrite. None: it goes through the layers as a prompt."""
        return None

    def fits(self, tokens: int) -> int:
        """How many of some tokens of one text, at most `most`, `drawn` computes in one pass now."""
        return tokens

    def draws(self, _sampler: Sampler) -> int:
        """How many tokens `drawn` computes at most; 0 if it is not there."""
        return 0

    def drawn(
        self,
        token: int,
        text: Text,
        sampler: Sampler,
        _last: Sequence[int],
        _guessed: Sequence[int] = (),
        *,
        streamed: bool = False,
    ) -> tuple[list[int], list[float], Tensor | None] | None:
        """See `Decoder.several`, of as many tokens as the text has rope for."""
        began, logits = time.perf_counter(), self.token(token, text)
        return None if logits is None else ([sampler.draw(logits)], [time.perf_counter() - began], None)

    def together(self, tokens: Sequence[int], texts: Sequence[Text]) -> Tensor:
        """The stream (N, H) behind a token of each of the texts, or of one text's next places."""
        return _sum(*self._model.walk(TorchPass(self._model.layers, *texts).step, self._model.embedded(tokens)))

    def logits(self, _last: Tensor) -> Tensor | None:
        """(N, H) after the last layer -> (N, V), each as by itself, of few; None: torch's operations compute them."""
        return None


class Compiled(Way):
    """By a compiled call for each layer, or for all of them."""

    most = MOST_TOGETHER

    def __init__(self, model: Walker, steps: Sequence[NativeStep], ends: NativeEnds, head: nn.Module) -> None:
        super().__init__(model)
        self._steps, self._ends, self._head = steps, ends, head
        self._whole: TokenPass | None = None
        self.how = "one compiled call per token"
        try:
            self._whole = TokenPass(steps, model.layers, ends)
        except Unsupported as declined:
            _log.info("a call per layer: %s", declined)
            self.how = "one compiled call per layer and token"

    def token(self, token: int, text: Text) -> Tensor:
        """See `Way`."""
        self.stream = self.together([token], [text])
        return self._model.logits(self.stream)

    def draws(self, sampler: Sampler) -> int:
        """See `Way`."""
        return 0 if self._all_at_once() is None or sampler.alone else MOST

    def drawn(
        self,
        token: int,
        text: Text,
        sampler: Sampler,
        last: Sequence[int],
        guessed: Sequence[int] = (),
        *,
        streamed: bool = False,
    ) -> tuple[list[int], list[float], Tensor | None] | None:
        """See `Way`."""
        if (whole := self._all_at_once()) is None:
            return None
        return whole.decode(token, self._place(text, text.rope), sampler, last, guessed, streamed=streamed)

    def together(self, tokens: Sequence[int], texts: Sequence[Text]) -> Tensor:
        """See `Way`."""
        x, places = self._model.embedded(tokens), [self._place(text, text.rope[0]) for text in texts]
        if (whole := self._all_at_once()) is not None:
            return whole.run(x, places)
        return _sum(*self._model.walk(NativePass(self._steps, self._model.layers, places).step, x))

    def logits(self, last: Tensor) -> Tensor | None:
        """See `Way`."""
        if len(last) > MOST_TOGETHER:
            return None
        head = self._head
        bits = head.control.preset.x_bits if isinstance(head, (PackedLinear, PlanedLinear)) else 22
        return self._ends.logits(last.contiguous(), bits)

    def _all_at_once(self) -> TokenPass | None:
        return None if self._whole is None or self._whole.watched else self._whole

    def _place(self, text: Text, rope: Tensor) -> Place:
        count = self._model.count
        return Place(rope, text.store.layers()[:count], text.start, text.store.firsts()[:count])


class Graphs(Way):
    """By a CUDA graph of all layers, or of each; by torch's operations where they turn out not to be captured.

    Args:
        parts: where several cards have some of the layers each.

    Attributes:
        by_layer: each layer's graphs; None where one is of all, or where they could not be captured.

    Raises:
        Unsupported: nothing could be captured.
    """

    def __init__(self, model: Walker, ends: Ends, parts: Sequence[KvPart]) -> None:
        super().__init__(model)
        layers, self._ends, self._declined = model.layers, ends, ""
        if not all(layer.experts.alone for layer in layers if isinstance(layer.experts, MoELayer)):
            raise Unsupported("a graph does not wait for other processes")
        self._token: CardToken | None = None
        self.by_layer: CardLayers | CardParts | None = None
        if parts:
            self.by_layer, self.how = (
                CardParts(layers, ends, parts),
                "one graph per layer and token, on each card, without guesses",
            )
            return
        try:
            self._token, self.how, self.most = CardToken(layers, ends), "one graph per token", MOST_TOGETHER
        except Unsupported as declined:
            self.by_layer = CardLayers(layers, ends)
            self.how = f"one graph per layer and token, without guesses, because {declined}"

    @torch.inference_mode()
    def prepare(self) -> str:
        """See `Way`."""
        if self.by_layer is None:
            return ""
        layers = self._captured()
        return f", but by torch's operations, because {self._declined}" if layers is None else layers.how()

    def token(self, token: int, text: Text) -> Tensor | None:
        """See `Way`."""
        count, self.stream = self._model.count, None
        if (card := self._token) is not None and card.ready(count):
            logits = card.run([token], text.rope, text.start, text.store)
            self.stream = card.stream
            return logits
        self._ends.rope.copy_(text.rope[0], non_blocking=True)
        if (layers := self._captured()) is None:
            return None
        layers.begin(token, text.start, text.store)
        if isinstance(layers, CardParts) or layers.pooled():
            return layers.run(count)
        added = self._model.walk(layers.step, self._ends.embedding[:1])[1]
        return layers.run(count) if added is None else layers.end(count, added)

    def fits(self, tokens: int) -> int:
        """See `Way`: one where the graph of several could not be captured."""
        return tokens if self._token is not None and self._token.ready(self._model.count, tokens) else 1

    def draws(self, _sampler: Sampler) -> int:
        """See `Way`."""
        return 1

    def drawn(
        self,
        token: int,
        text: Text,
        sampler: Sampler,
        last: Sequence[int],
        guessed: Sequence[int] = (),
        *,
        streamed: bool = False,
    ) -> tuple[list[int], list[float], Tensor | None] | None:
        """See `Way`; `fits` has been asked."""
        began, card = time.perf_counter(), self._token
        if card is None or not guessed:
            if (logits := self.token(token, text)) is None:
                return None
            stream = self.stream.clone() if streamed and self.stream is not None else None
            return [sampler.draw(logits)], [time.perf_counter() - began], stream
        logits = card.run([token, *guessed], text.rope, text.start, text.store)
        tokens, at = drawn_behind(logits, guessed, sampler, last, began)
        card.count(len(tokens))
        return tokens, at, card.stream[: len(tokens)].clone() if streamed else None

    def _captured(self) -> CardLayers | CardParts | None:
        """The layers' graphs with what is in force captured, if there are any."""
        try:
            if self.by_layer is not None:
                self.by_layer.prepare()
        except Unsupported as declined:
            self.by_layer, self._declined = None, str(declined)
            _log.warning("by torch's operations, because %s", declined)
        return self.by_layer


def drawn_behind(
    logits: Tensor, guessed: Sequence[int], sampler: Sampler, last: Sequence[int], began: float
) -> tuple[list[int], list[float]]:
    """The tokens drawn behind a token and some guesses, logits (T, V), up to the first that is not the next guess, or
    is one of `last`; and when, in seconds since `began`.
    """
    drawn, at = list[int](), list[float]()
    for row, following in itertools.zip_longest(logits.split(1), guessed):
        drawn.append(sampler.draw(row))
        at.append(time.perf_counter() - began)
        if drawn[-1] != following or following in last:
            break
    return drawn, at


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added
