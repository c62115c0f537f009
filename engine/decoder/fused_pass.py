"""One forward pass with little Python: the dense part's operations, written out for the supported families.

A single token on the CPU takes one compiled operation per layer (`kernels/step.py`), or one for all of them
(`token_pass.py`). On a GPU it is one graph (`card/card_token.py`), or one per layer where some experts are
elsewhere (`card/card_layers.py`). Prompts and everything else use torch's operations. The state of a pass is (T, H): T
tokens of one sequence, without a batch dimension.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.cpu.native import NativeUnavailableError
from ...kernels.cpu.native_ends import NativeEnds
from ...kernels.cpu.native_step import NativeStep, Place
from ...kernels.entries import CODES
from ...kernels.mixers.grouped import Heads
from ...kernels.step import ModelEnds, Stepped, capped
from ..experts.moe_layer import PREFILL_CHUNK, MoELayer
from ..machine.hardware import ram
from ..sampling import Sampler
from . import graphs
from .card.card_ends import Ends
from .card.card_layers import CardLayers
from .card.card_parts import CardParts
from .card.card_token import CardToken
from .divided import DividedPass, DividedStore, made_store
from .finite_check import NO_PART, is_finite
from .kv_cache import KVCache
from .kv_stores import SLACK, GrowingStore, KvForm, Layout, Room, room_for_past
from .layers import (
    Unsupported,
    check_family,
    embedded,
    kept_dtype,
    projection,
    read_layers,
    read_rope,
    read_stream,
)
from .mixers.grouped import Part
from .mixers.latent import LatentParts
from .passes import NativePass, TorchPass
from .quantized_linear import PackedLinear, PlanedLinear, in_planes
from .state_store import StatefulStore
from .token_pass import MOST, TokenPass

_log = logging.getLogger("floe_chat.engine")
_AGAIN = 256  # tokens of a pass that looks for the values that are not finite
_AGREED = 4096  # tokens that have left windows and are kept where processes share a model, whatever RAM each has
DenseCall = Callable[[int, Tensor, Tensor | None], Stepped]


class FusedDecoder:
    """The forward pass of one model, made once from its modules.

    Attributes:
        reason: in words, what computes the dense part and why. steps, ends: each layer's for one token, and the parts
            before and after them; without them torch's operations compute. rooms: device memory that keys and values
            may borrow, of each card; None where they have their own. divide: gives the part of a pass of so many tokens
            that this process computes where other processes compute the rest of it.

    Raises:
        Unsupported: a family, rope or layer that this does not compute.
    """

    def __init__(self, model: Any, window: int, kv: KvForm | None = None) -> None:
        family = check_family(model.config)
        self._model, self._config, self._window, self._kv = model, model.config, window, kv or KvForm()
        self._embedding: Tensor = model.model.embed_tokens.weight
        self.device = self._embedding.device
        self._rope = read_rope(model, family)
        self._turns_again = self._rope.is_long(window)
        self._layers = read_layers(model, self._rope, self._kv.bits)
        self._states = [layer.mixer.state for layer in self._layers]
        self._stateful = any(self._states)
        if self._stateful and (self._kv.parts or all(self._states)):
            raise Unsupported("layers that keep a state are computed on one device, between others that attend")
        attending = [layer.mixer.attending for layer in self._layers]
        self._heads = [heads for heads in attending if heads is not None]
        self._forms = {bits: kept_dtype(model, bits) for bits in (16, 8)}
        self._forms[self._kv.bits] = self._heads[0].cache_dtype
        stream = read_stream(model, family)
        self._scale, self._eps, self._norm = stream.scale, stream.eps, stream.norm
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._head: nn.Module = model.lm_head
        self._step: DenseCall | None = None  # of the running pass
        self.rooms: list[Room | None] = [None] * max(1, len(self._kv.parts))
        self.divide: Callable[[int], AbstractContextManager[Part] | None] | None = None
        self.steps: list[NativeStep] = []
        self.ends: NativeEnds | None = None
        self._whole: TokenPass | None = None
        experts = [layer.experts for layer in self._layers if isinstance(layer.experts, MoELayer)]
        self._apart = not all(layer.alone for layer in experts)
        self._card: CardToken | None = None
        self._graphs: CardLayers | CardParts | None = None
        self._turn: Tensor | None = None  # rope of the position, (1, ...), which graphs read
        self._declined = ""  # why they were given up
        self.reason = "dense layers in floe-chat's own pass"
        if self._kv.bits == 8:
            coded = self._heads[0].cache_dtype == CODES
            self.reason += " with keys and values of 8 bits" if coded else " with latent vectors of 16 bits"
        try:
            self.reason += f", {self._on_card() if graphs.possible(self.device) else self._on_cpu()}"
        except Unsupported as declined:
            self.reason += f" by torch's operations, because {declined}"
            _log.info("no compiled step: %s", declined)

    def _on_card(self) -> str:
        if isinstance(self._layers[0].mixer, LatentParts):
            raise Unsupported("attention through a latent vector has no kernels there")
        if self._apart:
            raise Unsupported("a graph does not wait for other processes")
        self._turn = self._rope.tables(0, 1).clone()
        ends = Ends(self._embedding, self._turn[0], self._norm, self._eps, self._head, self._scale, self._cap)
        if self._kv.parts:
            self._graphs = CardParts(self._layers, ends, self._kv.parts)
            return "one graph per layer and token, on each card"
        try:
            self._card = CardToken(self._layers, ends)
        except Unsupported as declined:
            self._graphs = CardLayers(self._layers, ends)
            return f"one graph per layer and token, because {declined}"
        return "one graph per token"

    def _on_cpu(self) -> str:
        self.steps, self.ends = self._native_steps()
        return self._compiled()

    def _native_steps(self) -> tuple[list[NativeStep], NativeEnds]:
        if self.device.type != "cpu":
            raise Unsupported(f"the compiled step runs on the CPU and the dense layers are on {self.device}")
        if self._embedding.dtype != torch.float32:
            raise Unsupported(f"the compiled step computes float32, not {self._embedding.dtype}")
        try:
            steps = [NativeStep(layer.dense()) for layer in self._layers]
            self._model.lm_head = self._head = in_planes(self._head)
            ends = ModelEnds(self._embedding, self._norm, self._eps, projection(self._head), self._scale, self._cap)
            return steps, NativeEnds(ends)
        except (NativeUnavailableError, ValueError) as error:
            raise Unsupported(str(error)) from error

    def _compiled(self) -> str:
        """Which parts of a token's pass are compiled, in words."""
        assert self.ends is not None
        try:
            self._whole = TokenPass(self.steps, self._layers, self.ends)
        except Unsupported as declined:
            _log.info("a call per layer: %s", declined)
            return "one compiled call per layer and token"
        return "one compiled call per token"

    def _store(self) -> GrowingStore:
        return made_store(self._layout(self._kv.bits), self._kv.parts, self.rooms, self._states)

    def _layout(self, bits: int) -> Layout:
        """bits: of keys and values."""
        form = self._forms[bits]
        entries = tuple(replace(heads, cache_dtype=form).entry for heads in self._heads)
        layout = Layout(entries, self._window, form, self.device, self._kv.most)
        windows = [heads.window or self._window for heads in self._heads]
        if self._stateful or min(windows) >= self._window:
            return layout
        windowed = tuple(window < self._window for window in windows)
        sees = max(window for window in windows if window < self._window)
        layout = replace(layout, windowed=windowed, sees=sees, slack=SLACK)
        past = _AGREED if self._apart else room_for_past(ram()[0]) // layout.nbytes_windowed
        return replace(layout, past=past)

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        given = torch.tensor(list(ids), dtype=torch.long, device=self.device)
        return embedded(given, self._embedding, self._scale)

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`.

        Raises:
            ValueError: more tokens than the window, or more than `SLACK` at once where layers see a window of their
            own. IndexError: a token that the vocabulary does not have.
        """
        if min(ids) < 0 or max(ids) >= len(self._embedding):  # a GPU would not survive it
            raise IndexError(f"a token outside the vocabulary of {len(self._embedding)}")
        store = self._room_for(len(ids), kv)
        try:
            if len(ids) == 1 and (logits := self._by_graphs(ids[0], store, kv)) is not None:
                return logits.clone()
            return self._pass(ids, store, kv.length, long=kv.long)
        finally:
            self._step = None  # its views would keep the store's memory

    def _pass(self, ids: Sequence[int], store: GrowingStore, start: int, *, long: bool) -> Tensor:
        end = start + len(ids)
        rope = self._rope.tables(start, end, long=long)
        alike = all(isinstance(layer.mixer, Heads) for layer in self._layers)
        if self.divide is not None and alike and (part := self.divide(len(ids))) is not None:
            with part as mine:
                return self._partly(ids, store, rope, start, mine)
        x = self._embedded(ids)
        if len(ids) == 1 and self._whole is not None and not self._whole.watched:
            last = self._whole.run(x, [self._place(rope[0], store, start)])
            store.length = end
            return self._logits(last)
        if len(ids) == 1 and self.steps:
            step = NativePass(self.steps, self._layers, [self._place(rope[0], store, start)]).step
        else:
            step = self._by_torch(store, rope, start)
        return self._through(step, x, store, end)

    def _by_torch(self, store: GrowingStore, rope: Tensor, start: int) -> DenseCall:
        """A pass by torch's operations: the step of each layer. rope: (T, 2, D) of the tokens, from `start` on."""
        if not isinstance(store, DividedStore):
            return TorchPass(self._layers, (store, rope, start)).step

        def made(layers: range, own: GrowingStore, device: torch.device) -> TorchPass:
            return TorchPass(self._layers[layers.start : layers.stop], (own, rope.to(device), start))

        return DividedPass(store, self._kv.parts, made).step

    def _partly(self, ids: Sequence[int], store: GrowingStore, rope: Tensor, start: int, part: Part) -> Tensor:
        """As `_pass`, of which other processes compute the other parts."""
        through = TorchPass(self._layers, (store, rope[part.mine], start), part=part)
        x, added = self._walk(through.step, self._embedded(ids[part.mine]))
        store.length = start + len(ids)
        return self._logits(part.last(x[-1:] if added is None else x[-1:] + added[-1:]))

    def _by_graphs(self, token: int, store: GrowingStore, kv: KVCache) -> Tensor | None:
        """Logits (1, V) of one token, which the next one overwrites; None if nothing is captured."""
        count, position = self._config.num_hidden_layers, kv.length
        if self._turn is not None:
            self._turn.copy_(self._rope.tables(position, position + 1, long=kv.long), non_blocking=True)
        if self._card is not None and self._card.ready(count):
            logits = self._card.run(token, position, store)
        elif (layers := self._layers_now()) is not None:
            layers.begin(token, position, store)
            if isinstance(layers, CardParts) or layers.pooled():
                logits = layers.run(count)
            elif (added := self._walk(layers.step, self._embedding[:1])[1]) is not None:
                logits = layers.end(count, added)
            else:
                logits = layers.run(count)
        else:
            return None
        store.length = position + 1
        return logits

    def _layers_now(self) -> CardLayers | CardParts | None:
        """The layers' graphs with what is in force captured, if there are any."""
        try:
            if self._graphs is not None:
                self._graphs.prepare()
        except Unsupported as declined:
            self._graphs, self._declined = None, str(declined)
            _log.warning("by torch's operations, because %s", declined)
        return self._graphs

    @torch.inference_mode()
    def prepare(self) -> None:
        """See `Decoder`."""
        if self._graphs is not None:
            layers = self._layers_now()
            self.reason += layers.how() if layers else f", but by torch's operations, because {self._declined}"

    def _through(self, step: DenseCall, x: Tensor, store: GrowingStore, end: int, keep: int = 1) -> Tensor:
        """Logits (keep, V) of the last tokens after x (T, H) went through layer after layer."""
        x, added = self._walk(step, x)
        store.length = end
        return self._logits(x[-keep:] if added is None else x[-keep:] + added[-keep:])

    def _walk(self, step: DenseCall, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream behind all layers (T, H), and what has still to be added to it."""
        self._step = step
        added: Tensor | None = None
        for index, layer in enumerate(self._layers[: self._config.num_hidden_layers]):
            stepped = self._stepped = step(index, x, added)
            experts = None if layer.experts is None else layer.experts(stepped.hidden, *stepped.routed)
            x, added = layer.behind(stepped, experts)
        return x, added

    def _place(self, rope: Tensor, store: GrowingStore, position: int) -> Place:
        """In the layers in use: a benchmark leaves out the last ones."""
        count = self._config.num_hidden_layers
        return Place(rope, store.layers()[:count], position, store.firsts()[:count])

    def _logits(self, last: Tensor) -> Tensor:
        """(N, H) after the last layer -> (N, V)."""
        last = last.to(self.device)
        if self.ends is None or len(last) > 1:
            return capped(self._head(self._norm(last, self._eps)), self._cap)
        head = self._head
        return self.ends.logits(
            last, head.control.preset.x_bits if isinstance(head, (PackedLinear, PlanedLinear)) else 22
        )

    def _room_for(self, tokens: int, kv: KVCache) -> GrowingStore:
        """The conversation's store, with room for this many more tokens."""
        store = kv.store_of(GrowingStore, self._store)
        again = self._turns_again and kv.turn(tokens, self._rope.short)
        store.crop(0 if again else kv.length)
        if isinstance(store, StatefulStore) and not self._apart:  # other processes do not know
            store.turns = kv.turns
        while store.length < kv.length:  # a state or a window cannot be cut anywhere
            some = kv.tokens[store.length :][: min(PREFILL_CHUNK, store.layout.slack)]
            store.reserve(store.length + len(some))
            self._pass(some, store, store.length, long=kv.long)
        store.reserve(kv.length + tokens)
        return store

    @torch.inference_mode()
    def several(
        self, token: int, kv: KVCache, sampler: Sampler, most: int, last: Sequence[int]
    ) -> tuple[list[int], list[float]] | None:
        """See `Decoder`."""
        if self._card is not None or self._graphs is not None:
            return self._one_by_graphs(token, kv, sampler)
        whole = self._whole
        if whole is None or whole.watched or sampler.alone:
            return None
        start, most = kv.length, min(most, MOST)
        if start < self._rope.short:
            most = min(most, self._rope.short - start)
        store = self._room_for(most, kv)
        most = store.unbroken(most)
        place = self._place(self._rope.tables(start, start + most, long=kv.long), store, start)
        tokens, at = whole.decode(token, place, sampler, last)
        store.length = start + len(tokens)
        return tokens, at

    @torch.inference_mode()
    def together(self, tokens: Sequence[int], kvs: Sequence[KVCache]) -> Tensor | None:
        """See `Decoder`."""
        if self._apart or self._kv.parts:
            return None
        stores = [self._room_for(1, kv) for kv in kvs]
        ropes = [self._rope.tables(kv.length, kv.length + 1, long=kv.long) for kv in kvs]
        texts = list(zip(stores, ropes, [kv.length for kv in kvs], strict=True))
        x, added = self._embedded(tokens), None
        try:
            if self.steps:
                places = [self._place(rope[0], store, start) for store, rope, start in texts]
                if self._whole is not None and not self._whole.watched:
                    x = self._whole.run(x, places)
                else:
                    x, added = self._walk(NativePass(self.steps, self._layers, places).step, x)
            else:
                x, added = self._walk(TorchPass(self._layers, *texts).step, x)
        finally:
            self._step = None
        for store, _, start in texts:
            store.length = start + 1
        # Row by row: several at once have other noise than one, so an answer would have other tokens than alone.
        return torch.cat([self._logits(row) for row in (x if added is None else x + added).split(1)])

    def beside(self) -> KVCache | None:
        """See `Decoder`."""
        if self._apart or self._kv.parts:
            return None
        kv, layout = KVCache(), self._layout(self._kv.bits)
        if self.device.type != "cpu" or self.rooms[0] is not None:
            layout = replace(layout, most=0)  # device memory is planned for one
        kv.store_of(GrowingStore, lambda: made_store(layout, (), [None], self._states, 0))
        return kv

    def _one_by_graphs(self, token: int, kv: KVCache, sampler: Sampler) -> tuple[list[int], list[float]] | None:
        """`several` on a card."""
        began = time.perf_counter()
        try:
            logits = self._by_graphs(token, self._room_for(1, kv), kv)
        except torch.OutOfMemoryError:
            return None  # `forward` meets it too, and the caller makes room
        finally:
            self._step = None
        return None if logits is None else ([sampler.draw(logits)], [time.perf_counter() - began])

    @torch.inference_mode()
    def read(self, ids: Sequence[int], keep: int, bits: int) -> Tensor:
        """Logits (keep, V) after the last tokens of a text. Every token reads keys and values as they are stored.

        Args:
            bits: of the stored keys and values, 16 or 8, whatever a chat's have.
        """
        layout = replace(self._layout(bits), windowed=())  # all at once
        store = made_store(layout, self._kv.parts, self.rooms, self._states)
        store.reserve(len(ids))
        try:
            rope = self._rope.tables(0, len(ids), long=self._rope.is_long(len(ids)))
            step = self._by_torch(store, rope, 0)
            return self._through(step, self._embedded(ids), store, len(ids), keep)
        finally:
            self._step = None

    @torch.inference_mode()
    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """See `Decoder`."""
        store = made_store(self._layout(self._kv.bits), self._kv.parts, [None] * len(self.rooms), self._states, 0)
        for start in range(0, len(ids), _AGAIN):
            some = ids[start : start + _AGAIN]
            store.reserve(start + len(some))
            rope = self._rope.tables(start, start + len(some), long=self._rope.is_long(len(ids)))
            if part := self._nonfinite(some, store, rope, start):
                return part
        return NO_PART

    def _nonfinite(self, ids: Sequence[int], store: GrowingStore, rope: Tensor, start: int) -> str:
        """The first part whose values are not finite in a pass of these tokens, or nothing."""
        x = self._embedded(ids)
        if not is_finite(x):
            return "the embedding"
        self._step = self._by_torch(store, rope, start)
        try:
            added: Tensor | None = None
            for index, layer in enumerate(self._layers):
                stepped = self._stepped = self._step(index, x, added)
                x, hidden, routed, _ = stepped
                for part, value in (("attention", x), ("a norm", hidden), ("the router", routed)):
                    if not is_finite(value):
                        return f"{part} of layer {index}"
                experts = None if layer.experts is None else layer.experts(hidden, *routed)
                if experts is not None and not is_finite(experts):
                    return f"the experts of layer {index}"
                x, added = layer.behind(stepped, experts)
        finally:
            self._step = None
        store.length = start + len(ids)
        last = (x[-1:] if added is None else x[-1:] + added[-1:]).to(self.device)
        return "" if is_finite(self._head(self._norm(last, self._eps))) else "the last norm or the output head"

    def ahead(self, layer: int, output: Tensor | None) -> Tensor:
        """The input of layer + 1's block, (T, H), if this layer, whose block is running, added `output`.

        Keys and values of these tokens are then guesses; layer + 1 overwrites them when it runs.
        """
        assert self._step is not None, "no pass is running"
        return self._step(layer + 1, *self._layers[layer].behind(self._stepped, output)).hidden
