"""One forward pass with little Python: the dense part's operations, written out for the supported families.

Prompts use torch's operations; how single tokens are computed is chosen once (`ways.py`). The state of a pass is
(T, H): T tokens of one sequence, without a batch dimension.
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
from ...kernels.cpu.native_step import NativeStep
from ...kernels.entries import CODES
from ...kernels.mixers.grouped import Heads
from ...kernels.step import ModelEnds, Stepped, capped
from ...models.pack.assistant import PackedAssistant
from ...models.pack.draft_head import PackedHead
from ..experts.moe_layer import PREFILL_CHUNK, MoELayer
from ..machine.hardware import ram
from ..outcomes import ran_out
from ..sampling import Sampler
from . import graphs
from .card.card_draft import CardDraft
from .card.card_ends import Ends
from .divided import DividedPass, DividedStore, made_store
from .draft_assistant import DraftAssistant
from .draft_head import DraftHead, first
from .draft_model import DraftModel
from .finite_check import NO_PART, is_finite
from .kv_cache import KVCache
from .kv_stores import SLACK, GrowingStore, KvForm, Layout, Room, room_for_past
from .layers import (
    Unsupported,
    embedded,
    kept_dtype,
    projection,
    read_layers,
    read_rope,
    read_stream,
    record_of,
)
from .mixers.grouped import Part
from .passes import TorchPass
from .quantized_linear import in_planes
from .state_store import StatefulStore
from .ways import Compiled, DenseCall, Drawn, Graphs, Text, Way, drawn_behind

_log = logging.getLogger("floe_chat.engine")
_AGAIN = 256  # tokens of a pass that looks for the values that are not finite
_AGREED = 4096  # tokens that have left windows and are kept where processes share a model, whatever RAM each has


class FusedDecoder:
    """The forward pass of one model, made once from its modules.

    Attributes:
        reason: in words, what computes the dense part and why. way: how single tokens are computed. layers: all of
            them. passed, head: see `Decoder`. rooms: device memory that keys and values may borrow, of each card; None
            where they have their own. divide: gives the part of a pass of so many tokens that this process computes
            where other processes compute the rest of it.

    Raises:
        Unsupported: a family, rope or layer that this does not compute.
    """

    def __init__(self, model: Any, window: int, kv: KvForm | None = None) -> None:
        family = record_of(model.config)
        self._model, self._config, self._window, self._kv = model, model.config, window, kv or KvForm()
        self._embedding: Tensor = model.model.embed_tokens.weight
        self.device = self._embedding.device
        self._rope = read_rope(model, family)
        self._turns_again = self._rope.is_long(window)
        self.layers = read_layers(model, family, self._rope, self._kv.bits)
        self._with_experts = [index for index, layer in enumerate(self.layers) if layer.experts is not None]
        self._states = [layer.mixer.state for layer in self.layers]
        self._stateful = any(self._states)
        if self._stateful and (self._kv.parts or all(self._states)):
            raise Unsupported("layers that keep a state are computed on one device, between others that attend")
        attending = [layer.mixer.attending for layer in self.layers]
        self._heads = [heads for heads in attending if heads is not None]
        self._forms = {bits: kept_dtype(model, family, bits) for bits in (16, 8)}
        self._forms[self._kv.bits] = self._heads[0].cache_dtype
        stream = read_stream(model, family)
        self._scale, self._eps, self._norm = stream.scale, stream.eps, stream.norm
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._head: nn.Module = model.lm_head
        self._step: DenseCall | None = None  # of the running pass
        self.rooms: list[Room | None] = [None] * max(1, len(self._kv.parts))
        self.divide: Callable[[int], AbstractContextManager[Part] | None] | None = None
        experts = [layer.experts for layer in self.layers if isinstance(layer.experts, MoELayer)]
        self._apart = not all(layer.alone for layer in experts)
        self.passed: Callable[[float], None] | None = None
        self.head: DraftHead | DraftAssistant | DraftModel | None = None
        self.way = Way(self)
        self.reason = "dense layers in floe-chat's own pass"
        if self._kv.bits == 8:
            coded = self._heads[0].cache_dtype == CODES
            self.reason += " with keys and values of 8 bits" if coded else " with latent vectors of 16 bits"
        try:
            self.way = self._on_card() if graphs.possible(self.device) else self._on_cpu()
            self.reason += f", {self.way.how}"
        except Unsupported as declined:
            self.reason += f", {self.way.how}, because {declined}"
            _log.info("tokens %s, because %s", self.way.how, declined)

    def _on_card(self) -> Graphs:
        turn = self._rope.tables(0, 1).clone()[0]
        ends = Ends(self._embedding, turn, self._norm, self._eps, self._head, self._scale, self._cap)
        return Graphs(self, ends, self._kv.parts)

    def _on_cpu(self) -> Compiled:
        if self.device.type != "cpu":
            raise Unsupported(f"the compiled step runs on the CPU and the dense layers are on {self.device}")
        if self._embedding.dtype != torch.float32:
            raise Unsupported(f"the compiled step computes float32, not {self._embedding.dtype}")
        try:
            steps = [NativeStep(layer.dense()) for layer in self.layers]
            self._model.lm_head = self._head = in_planes(self._head)
            return Compiled(self, steps, NativeEnds(self._ends()), self._head)
        except (NativeUnavailableError, ValueError) as error:
            raise Unsupported(str(error)) from error

    def draft_by(self, packed: PackedHead | PackedAssistant, bits: int) -> None:
        """Guess further tokens by a head of this model, or by its assistant. bits: of linear layers in its dense part.

        Raises:
            Unsupported: a head that is not computed, or tokens that are computed one by one. PackError: its tensors do
                not fit its configuration.
        """
        if self.way.most == 1:
            raise Unsupported(f"tokens are computed {self.way.how}")
        if isinstance(packed, PackedAssistant):
            if self.device.type != "cpu":
                raise Unsupported("it reads keys and values in RAM alone")
            family, kinds = record_of(self._config), self._config.layer_types
            read = self.layers, kinds, self._rope, self._ends(), self.store
            self.head = DraftAssistant(packed, family, bits, *read)
            return
        given = packed, record_of(packed.config), bits, self._ends(), self._window, self._kv.bits
        if not graphs.possible(self.device):
            self.head = DraftHead(*given)
            return
        self.head = head = CardDraft(*given)
        experts = [layer.experts for layer in self.layers if isinstance(layer.experts, MoELayer)]
        head.notices = experts[0].control.notices

    def draft_with(self, model: DraftModel) -> None:
        """Guess further tokens by another model.

        Raises:
            Unsupported: tokens are computed one by one.
        """
        if self.way.most == 1:
            raise Unsupported(f"tokens are computed {self.way.how}")
        self.head = model

    def _ends(self) -> ModelEnds:
        return ModelEnds(self._embedding, self._norm, self._eps, projection(self._head), self._scale, self._cap)

    def _store(self) -> GrowingStore:
        return made_store(self._layout(self._kv.bits), self._kv.parts, self.rooms, self._states)

    def _layout(self, bits: int) -> Layout:
        """bits: of keys and values."""
        form = self._forms[bits]
        entries = tuple(replace(heads, cache_dtype=form).entry for heads in self._heads)
        layout = Layout(entries, self._window, form, self.device, self._kv.most, states=1 + self.way.most)
        windows = [heads.window or self._window for heads in self._heads]
        if self._stateful or min(windows) >= self._window:
            return layout
        windowed = tuple(window < self._window for window in windows)
        sees = max(window for window in windows if window < self._window)
        layout = replace(layout, windowed=windowed, sees=sees, slack=SLACK)
        past = _AGREED if self._apart else room_for_past(ram()[0]) // layout.nbytes_windowed
        return replace(layout, past=past)

    @property
    def count(self) -> int:
        """Of the layers in use: a benchmark leaves out the last ones."""
        return self._config.num_hidden_layers

    def embedded(self, ids: Sequence[int]) -> Tensor:
        """(T,) -> (T, H)."""
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
            if len(ids) > 1 or (logits := self.way.token(ids[0], self._text(store, 1, kv))) is None:
                return self._pass(ids, store, kv.length, long=kv.long, kv=kv)
            if self.head is not None and self.way.stream is not None:
                self.head.saw(kv, ids, self.way.stream.clone())
        finally:
            self._step = None  # its views would keep the store's memory
        store.length = kv.length + 1
        return logits.clone()

    @torch.inference_mode()
    def few(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """As many tokens as `way.most`, computed as single ones are, together: the stream (1, H) behind the last."""
        store, done = self._room_for(len(ids), kv), 0
        try:
            while True:
                start = kv.length + done
                some = ids[done:][: store.unbroken(len(ids) - done)]
                rope = self._rope.tables(start, start + len(some), long=kv.long)
                stream = self.way.together(some, _places(Text(store, rope, start)))
                done += len(some)
                store.length = kv.length + done
                if done == len(ids):
                    return stream[-1:]
        finally:
            self._step = None

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return len(self._embedding)

    def ends_of(self, rows: int) -> NativeEnds:
        """What is around the layers, of the first tokens of the vocabulary, where guesses are read."""
        head = first(projection(self._head), rows)
        return NativeEnds(replace(self._ends(), embedding=self._embedding[:rows], head=head))

    def back(self, kv: KVCache, length: int) -> None:
        """Drop all but the first `length` tokens, where `few` computed the others, fewer than `way.most`: states are
        still there.
        """
        self.store(kv).length = length
        kv.cut(length)

    def _text(self, store: GrowingStore, tokens: int, kv: KVCache) -> Text:
        """Where the next tokens of a conversation go."""
        start = kv.length
        return Text(store, self._rope.tables(start, start + tokens, long=kv.long), start)

    def _pass(
        self, ids: Sequence[int], store: GrowingStore, start: int, *, long: bool, kv: KVCache | None = None
    ) -> Tensor:
        """Logits (1, V) behind `ids`, from `start` on. kv: whose they are, where that has not got them yet."""
        end = start + len(ids)
        rope = self._rope.tables(start, end, long=long)
        alike = all(isinstance(layer.mixer, Heads) for layer in self.layers)
        if self.divide is not None and alike and (part := self.divide(len(ids))) is not None:
            with part as mine:
                return self._partly(ids, store, rope, start, mine)
        step = self._by_torch(store, rope, start)
        if self.head is None or kv is None:
            return self._through(step, self.embedded(ids), store, end)
        x, added = self.walk(step, self.embedded(ids))
        stream, store.length = x if added is None else x + added, end
        self.head.saw(kv, ids, stream)
        return self.logits(stream[-1:])

    def _by_torch(self, store: GrowingStore, rope: Tensor, start: int) -> DenseCall:
        """A pass by torch's operations: the step of each layer. rope: (T, 2, D) of the tokens, from `start` on."""
        if not isinstance(store, DividedStore):
            return TorchPass(self.layers, (store, rope, start)).step

        def made(layers: range, own: GrowingStore, device: torch.device) -> TorchPass:
            return TorchPass(self.layers[layers.start : layers.stop], (own, rope.to(device), start))

        return DividedPass(store, self._kv.parts, made).step

    def _partly(self, ids: Sequence[int], store: GrowingStore, rope: Tensor, start: int, part: Part) -> Tensor:
        """As `_pass`, of which other processes compute the other parts."""
        through = TorchPass(self.layers, (store, rope[part.mine], start), part=part)
        x, added = self.walk(through.step, self.embedded(ids[part.mine]))
        store.length = start + len(ids)
        return self.logits(part.last(x[-1:] if added is None else x[-1:] + added[-1:]))

    @torch.inference_mode()
    def prepare(self) -> None:
        """See `Decoder`."""
        self.reason += self.way.prepare()

    def _through(self, step: DenseCall, x: Tensor, store: GrowingStore, end: int, keep: int = 1) -> Tensor:
        """Logits (keep, V) of the last tokens after x (T, H) went through layer after layer."""
        x, added = self.walk(step, x)
        store.length = end
        return self.logits(x[-keep:] if added is None else x[-keep:] + added[-keep:])

    def walk(self, step: DenseCall, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stream behind all layers (T, H), and what has still to be added to it."""
        self._step = step
        added: Tensor | None = None
        for index, layer in enumerate(self.layers[: self.count]):
            stepped = self._stepped = step(index, x, added)
            experts = None if layer.experts is None else layer.experts(stepped.hidden, *stepped.routed)
            x, added = layer.behind(stepped, experts)
            if self.passed is not None:
                self.passed((index + 1) / self.count)
        return x, added

    def logits(self, last: Tensor) -> Tensor:
        """(N, H) after the last layer -> (N, V)."""
        last = last.to(self.device)
        found = self.way.logits(last)
        return capped(self._head(self._norm(last, self._eps)), self._cap) if found is None else found

    def _room_for(self, tokens: int, kv: KVCache) -> GrowingStore:
        """The conversation's store, with room for this many more tokens."""
        store, start = kv.store_of(GrowingStore, self._store), kv.length
        again = self._turns_again and kv.turn(tokens, self._rope.short)
        store.crop(0 if again else start)
        if isinstance(store, StatefulStore) and not self._apart:  # other processes do not know
            store.turns = kv.turns
        while store.length < start:  # a state or a window cannot be cut anywhere
            some = kv.tokens[store.length :][: min(PREFILL_CHUNK, store.layout.slack)]
            store.reserve(store.length + len(some))
            self._pass(some, store, store.length, long=kv.long)
        store.reserve(start + tokens)
        return store

    @torch.inference_mode()
    def several(
        self, token: int, kv: KVCache, sampler: Sampler, most: int, last: Sequence[int], guessed: Sequence[int] = ()
    ) -> Drawn | None:
        """See `Decoder`."""
        start, alone = kv.length, self.way.draws(sampler)
        if guessed:
            guessed = guessed[: min(most, self.way.most) - 1]
        most = 1 + len(guessed) if guessed else alone if alone < most else most
        if not most:
            return None
        if start < self._rope.short:
            most = min(most, self._rope.short - start)
        try:
            store = self._room_for(most, kv)
            text = self._text(store, store.unbroken(most), kv)
            if guessed:
                guessed = guessed[: self.way.fits(len(text.rope)) - 1]
            if alone:
                streamed = self.head is not None
                drawn = self.way.drawn(token, text, sampler, last, guessed, streamed=streamed)
            else:
                drawn = self._checked([token, *guessed], text, sampler, last)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            return None  # `forward` meets it too, and the caller makes room
        finally:
            self._step = None
        if drawn is None:
            return None
        tokens, at, streams = drawn
        store.length = start + len(tokens)
        if self.head is not None and streams is not None:
            self.head.saw(kv, [token, *tokens[:-1]], streams)
        return tokens, at, len(guessed)

    def _checked(
        self, tokens: Sequence[int], text: Text, sampler: Sampler, last: Sequence[int]
    ) -> tuple[list[int], list[float], Tensor]:
        """The tokens drawn behind each of these, up to the first that is not the next one, or is one of `last`; when,
        and by which streams (T, H).
        """
        began = time.perf_counter()
        stream = self.way.together(tokens, _places(text)[: len(tokens)])
        drawn, at = drawn_behind(self._each(stream), tokens[1:], sampler, last, began)
        return drawn, at, stream[: len(drawn)]

    @torch.inference_mode()
    def together(self, tokens: Sequence[int], kvs: Sequence[KVCache]) -> Tensor | None:
        """See `Decoder`."""
        if self._apart or self._kv.parts:
            return None
        texts = [self._text(self._room_for(1, kv), 1, kv) for kv in kvs]
        try:
            stream = self.way.together(tokens, texts)
        finally:
            self._step = None
        for store, _, start in texts:
            store.length = start + 1
        return self._each(stream)

    def _each(self, stream: Tensor) -> Tensor:
        """Logits (N, V) behind N tokens (N, H), each as by itself: torch's operations on several have other noise."""
        found = self.way.logits(stream)
        return torch.cat([self.logits(row) for row in stream.split(1)]) if found is None else found

    def beside(self) -> KVCache | None:
        """See `Decoder`."""
        if self._apart or self._kv.parts:
            return None
        kv, layout = KVCache(), self._layout(self._kv.bits)
        if self.device.type != "cpu" or self.rooms[0] is not None:
            layout = replace(layout, most=0)  # device memory is planned for one
        kv.store_of(GrowingStore, lambda: made_store(layout, (), [None], self._states, 0))
        return kv

    def store(self, kv: KVCache) -> GrowingStore:
        """See `Decoder`."""
        return kv.store_of(GrowingStore, self._store)

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
            return self._through(step, self.embedded(ids), store, len(ids), keep)
        finally:
            self._step = None

    @torch.inference_mode()
    def echoed(self, ids: Sequence[int], start: int, window: int) -> tuple[list[Stepped], Tensor]:
        """What blocks are given, and logits (1, V), of a text that begins at a position, if experts gave back what they
        are given.

        Args:
            window: how far layers see that do not see all.
        """
        form, layers, found = self._embedding.dtype, list(self.layers), list[Stepped]()
        for index, layer in enumerate(layers):
            if isinstance(layer.mixer, Heads) and layer.mixer.window:
                layers[index] = replace(layer, mixer=replace(layer.mixer, window=window))
        entries = tuple(replace(heads, cache_dtype=form).entry for heads in self._heads)
        store = made_store(Layout(entries, self._window, form, self.device), (), [None])
        store.reserve(len(ids))
        rope = self._rope.tables(start, start + len(ids), long=self._rope.is_long(start + len(ids)))
        through, x = TorchPass(layers, (store, rope, 0)), self.embedded(ids)
        added: Tensor | None = None
        for index, layer in enumerate(layers):
            found.append(through.step(index, x, added))
            x, added = layer.behind(found[-1], None if layer.experts is None else found[-1].hidden)
        return found, self.logits(x[-1:] if added is None else x[-1:] + added[-1:])

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
        x = self.embedded(ids)
        if not is_finite(x):
            return "the embedding"
        self._step = self._by_torch(store, rope, start)
        try:
            added: Tensor | None = None
            for index, layer in enumerate(self.layers):
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
        """The input of layer + 1's block, (T, H), if this layer, whose block is running, added `output`. Layers are
        those with experts.

        Keys and values of these tokens are then guesses; layer + 1 overwrites them when it runs.
        """
        assert self._step is not None, "no pass is running"
        place, following = self._with_experts[layer], self._with_experts[layer + 1]
        x, added = self.layers[place].behind(self._stepped, output)
        for index in range(place + 1, following):  # layers without experts
            x, added = self.layers[index].behind(self._step(index, x, added), None)
        return self._step(following, x, added).hidden


def _places(text: Text) -> list[Text]:
    """Where each of a text's next tokens goes."""
    store, rope, start = text
    return [Text(store, rope[i : i + 1], start + i) for i in range(len(rope))]
