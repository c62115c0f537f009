"""One token before each layer's experts as one CUDA graph per layer, where experts are partly elsewhere.

Norms, projections, attention and router are some 20 launches, which take longer than the card computes. What differs
between tokens is in a record in pinned memory that the first graph reads; each graph continues from the one before.
What follows the last layer is a graph too (`card_ends.py`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels.listed import Total
from ....kernels.mixers.convolution import Convolution
from ....kernels.mixers.delta import Delta
from ....kernels.mixers.grouped import KeptTokens
from ....kernels.step import Stepped
from ...events import Notice
from ...experts.moe_layer import MoELayer
from ...experts.offloaded_layer import OffloadedLayer
from ...offload.predictor import Predictor
from ...outcomes import brief
from ...quality_presets import Preset
from ..graphs import Captured, capture, pinned
from ..kv_stores import GrowingStore
from ..layers import DecoderLayer, Unsupported
from ..mixers.latent import LatentParts
from ..quantized_linear import through
from ..token_pass import hooks_of
from .card_ends import CardHead, Ends
from .card_experts import CardExperts

_log = logging.getLogger("floe_chat.engine")
_SLOWER = "Answers are slower at this quality"
_ALIGNED = 16  # bytes: what Triton's kernels know of an address


class TokenRecord:
    """What differs between passes of a token, or of some of one text: in pinned memory, and where a captured copy
    brings it.

    Args:
        most: tokens of a pass.

    Attributes:
        tokens, times, kept: on the device: the ids (most,), whether they are counted (1,), and of each token where what
            is kept is.
    """

    def __init__(self, layers: Sequence[DecoderLayer], device: torch.device, most: int = 1) -> None:
        self._most, self._addresses = most, 2 * most + 1
        self._pinned = pinned(self._addresses + len(layers), dtype=torch.int64, device=device)
        self._written: Any = self._pinned.numpy()
        self._there = torch.zeros_like(self._pinned, device=device)
        self.tokens, positions, self.times, addresses = self._there.split([most, most, 1, len(layers)])
        heads = [each for each in (layer.mixer.attending for layer in layers) if each is not None]
        # Entries of layers, which may differ, lie one behind the other.
        aligned = math.gcd(16, *(math.prod(each.entry) * each.cache_dtype.itemsize for each in heads))
        self.kept = [KeptTokens(addresses, one, aligned, 1 + most) for one in positions.split(1)]
        self._version = -1, 0  # of the store whose addresses these are

    def write(self, tokens: Sequence[int], position: int, store: GrowingStore, *, counting: bool) -> None:
        """For the next tokens, of which the first has that position; the device has done the last pass."""
        if (version := store.version()) != self._version:
            self._written[self._addresses :] = store.addresses()
            self._version = version
        for number, token in enumerate(tokens):
            self._written[number] = token
        self._written[self._most : self._addresses] = *range(position, position + self._most), counting

    def rehearse(self, layers: Sequence[DecoderLayer], device: torch.device) -> list[Tensor]:
        """Write tokens that are not counted, with entries, and states, for all layers that no conversation has;
        returns these.
        """
        heads = [layer.mixer.attending for layer in layers]
        most = max((each for each in heads if each is not None), key=lambda each: math.prod(each.entry))
        entries = torch.empty(self._most, *most.entry, dtype=most.cache_dtype, device=device)
        states = torch.zeros(1 + self._most, max(layer.mixer.state for layer in layers), device=device)
        self._written[:], self._version = 0, (-1, 0)
        self._written[self._most : 2 * self._most] = range(self._most)
        self._written[self._addresses :] = [(states if layer.mixer.state else entries).data_ptr() for layer in layers]
        return [entries, states]

    def read(self) -> None:
        """Bring it to the device: a part of what is captured."""
        self._there.copy_(self._pinned, non_blocking=True)


def before_experts(
    layer: DecoderLayer, index: int, stream: Tensor, ropes: Sequence[Tensor], kept: Sequence[KeptTokens]
) -> Stepped:
    """`kernels.step.dense_step` with nothing that depends on the position but in the device's memory.

    Of several tokens, in order, each one's result is to the last bit what it is alone: weights are read once for all,
    and the mixer computes one token after the other.

    Args:
        stream: (T, H) all that was computed before. ropes, kept: of each token, see `Ends`. index: the layer's number.
    """
    mixer, norm = layer.mixer, (layer.input_layernorm, layer.eps)
    given = through(layer.first, stream, norm=norm)
    if isinstance(mixer, Delta):
        assert isinstance(mixer.gates.weight, Tensor), "gates are numbers"
        gates = kernels.plain(norm[0](stream, norm[1]), mixer.gates.weight, mixer.gates.bias)
        each = zip(_rows(given), _rows(gates), kept, strict=False)
        parts = [kernels.delta_one(row, gate, place, index, mixer) for row, gate, place in each]
    elif isinstance(mixer, Convolution):
        parts = [kernels.convolve_one(row, place, index, mixer) for row, place in zip(_rows(given), kept, strict=False)]
    elif isinstance(mixer, LatentParts):
        record, each = mixer.record(), zip(*map(_rows, mixer.asking(given)), ropes, kept, strict=False)
        parts = [kernels.latent_one(asked, row, rope, place, index, record) for asked, row, rope, place in each]
    else:
        each = zip(_rows(given), ropes, kept, strict=False)
        parts = [kernels.attend_one(row, rope, place, index, mixer, layer.eps) for row, rope, place in each]
    seen = parts[0] if len(parts) == 1 else torch.cat(parts)
    if layer.sandwich is not None:
        return layer.stepped(layer.mixed(stream, through(layer.out, seen)))
    return layer.stepped(through(layer.out, seen, added=stream))


def _rows(x: Tensor) -> Sequence[Tensor]:
    """Each row (1, N), which begins as x does: where another one's address divides, kernels load and add otherwise."""
    rows = x.split(1)
    return rows if len(rows) == 1 or x.stride(0) * x.itemsize % _ALIGNED == 0 else [row.clone() for row in rows]


def need_kernels(device: torch.device) -> None:
    """Raises Unsupported: plain torch computes on the device, and would wait in the middle of a capture."""
    backend = kernels.choose(device)
    if backend.name == "reference":
        raise Unsupported(f"a graph needs the Triton kernels: {backend.reason}")


class CardLayers:
    """A graph for each layer, which continues with the experts where those are in a pool (`card_experts.py`).

    Args:
        inbox: (1, H) on the card where these layers are, if a token comes there from another one's layers; None for the
            embedding. alone: whether they are all layers, so that the head follows; else see `through`.

    Attributes:
        declined: why experts in a pool are launched one by one; "" if they are not. head: what follows the last layer.

    Raises:
        Unsupported: nothing could be captured.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], ends: Ends, inbox: Tensor | None = None, *, alone: bool = True
    ) -> None:
        embedding = ends.embedding if inbox is None else inbox
        self._layers, self._ends, self._ropes, self._device = layers, ends, [ends.rope], embedding.device
        self._inbox, self._alone = inbox, alone
        need_kernels(self._device)
        self.head, self._count = CardHead(ends), len(layers)
        self._record = TokenRecord(layers, self._device)
        added = embedding.new_zeros(1, embedding.shape[1])
        self._total = Total(added, torch.zeros(1, dtype=torch.int64, device=self._device))
        self._graphs: list[Captured] = []
        self._pooled = [layer.experts if isinstance(layer.experts, OffloadedLayer) else None for layer in layers]
        self._runs = _runs([block is not None for block in self._pooled])
        self._first = next((block for block in self._pooled if block is not None), None)
        self._hooks = hooks_of([block for block in self._pooled if block is not None])
        self._experts: CardExperts | None = None
        self._preset: Preset | None = None
        self.declined = ""
        self._control = next((layer.experts.control for layer in layers if isinstance(layer.experts, MoELayer)), None)
        self._x_bits = 0
        if self._first is None:  # else `prepare` knows what has to be captured
            self._capture_by_bits()

    @torch.inference_mode()
    def _capture(self) -> None:
        self._graphs.clear()  # their memory goes first
        try:
            kept = self._record.rehearse(self._layers, self._device)
            for index in range(len(self._layers)):
                self._graphs.append(capture(partial(self._work, index), self._device))
            if (experts := self._experts) is not None:
                for index in range(len(self._layers)):
                    for one in experts.looks(index):
                        experts.look(index, one, capture(partial(self._ahead, index, one), self._device))
            del kept  # the graphs have run on it
        # Whatever a driver or a compiler of kernels raises: torch's operations compute the same without them.
        except Exception as error:
            raise Unsupported(f"a layer could not be captured: {brief(error)}") from error
        self._end_behind(self._count)

    def _capture_by_bits(self) -> None:
        """Capture without experts, once for each precision of x."""
        x_bits = 0 if self._control is None else self._control.preset.x_bits
        if x_bits != self._x_bits or not self._graphs:
            self._x_bits = x_bits
            self._capture()

    def _end_behind(self, count: int) -> None:
        """The token has so many layers from now on: a benchmark leaves out the last ones."""
        self._count = count
        if not self._alone:
            return
        self.head.capture(partial(self._behind, count - 1))

    def _work(self, index: int) -> tuple[Tensor, ...]:
        if index == 0:
            self._record.read()
            stream = self._ends.stream(self._record.tokens) if self._inbox is None else self._inbox
        else:
            stream = self._behind(index - 1)
        stepped = before_experts(self._layers[index], index, stream, self._ropes, self._record.kept)
        if self._experts is not None and self._pooled[index] is not None:
            self._experts.find(index, stepped.hidden, *stepped.routed)
        parallel = () if stepped.parallel is None else (stepped.parallel,)
        return stepped.stream, stepped.hidden, *stepped.routed, *parallel

    def _ahead(self, index: int, predictor: Predictor) -> tuple[Tensor, ...]:
        """What the next layer will need, by what is known of this one's output. Keys, values and states of the token
        are guesses then, which the layer's own graph overwrites.
        """
        experts, stepped, following = self._experts, self._stepped(index), index + 1
        assert experts is not None, "not pooled"
        if predictor.attends:
            given = self._behind(index), self._ropes, self._record.kept
            guess = before_experts(self._layers[following], following, *given).hidden
        else:
            guess = predictor.guess(experts.number(index), stepped.hidden, None)
        experts.predict(index, predictor, stepped.hidden, guess)
        return ()

    def _stepped(self, index: int) -> Stepped:
        """What a layer's graph leaves."""
        stream, hidden, *rest = self._graphs[index].outputs
        return Stepped(stream, hidden, tuple(rest[:2]), *rest[2:])

    def _behind(self, index: int) -> Tensor:
        """The stream behind a layer, (1, H), once its experts' output is in `_total`."""
        stream, added = self._layers[index].behind(self._stepped(index), self._total.y)
        return stream if added is None else stream + added

    def begin(self, token: int, position: int, store: GrowingStore) -> None:
        """The next steps are of this token, after `prepare`. The device has done the last one: its logits were read."""
        self._record.write([token], position, store, counting=False)

    def prepare(self) -> None:
        """Capture what the preset in force needs, and where rows are now. In inference mode, as all that follows.

        Raises:
            Unsupported: as for the class.
        """
        first = self._first
        if first is None:
            self._capture_by_bits()
            return
        preset, before = first.control.preset, self._preset
        was_declined = self.head.declined
        try:
            if preset is not before:
                self._preset, self.declined = preset, ""
                self._change()
            if self._experts is not None:
                self._experts.begin()
        # Likewise: one by one the same is computed.
        except Exception as error:  # noqa: BLE001
            self.declined = f"they could not be captured: {brief(error)}"
            if before is not None:  # else it is part of what is said of the model
                text = f"Experts are launched one by one: {self.declined}."
                first.control.notices.append(Notice(_SLOWER, text))
            self._one_by_one()
        if self.head.declined and not was_declined and before is not None:
            text = f"The last norm and the head are launched one by one: {self.head.declined}."
            first.control.notices.append(Notice(_SLOWER, text))

    def _change(self) -> None:
        """Take experts in by the preset in force."""
        if self._experts is not None and self._experts.serves():
            self._experts.limit()
        else:
            self._leave()
            among = next(layer.router.top_k for layer in self._layers if layer.router is not None)
            self._experts = CardExperts(self._pooled, among, self._total)
            self._capture()

    def _one_by_one(self) -> None:
        _log.warning("experts are launched one by one, because %s", self.declined)
        if self._experts is not None or not self._graphs:
            self._leave()
            self._capture()

    def _leave(self) -> None:
        """Give up the captured experts; what they counted is not lost."""
        if self._experts is not None:
            self._experts.counts.drain()
            self._experts = None

    def pooled(self) -> bool:
        """Whether experts in a pool go by graphs, so that `run` is for this token."""
        return self._experts is not None and not any(self._hooks)

    def how(self) -> str:
        """What is captured besides layers, and what is not and why, in words that follow others."""
        how = ", with the experts in the pool" if self.pooled() else ""
        if self.declined:
            how = f", experts one by one, because {self.declined}"
        if self.head.declined:
            how += f", the last norm and the head one by one, because {self.head.declined}"
        return how

    def run(self, count: int) -> Tensor:
        """The first `count` layers of the token, and its logits as `end` gives them.

        Raises:
            Cancelled: the answer was stopped.
        """
        self._by_runs(count)
        return self._logits(count)

    def through(self, count: int) -> Tensor:
        """The first `count` layers of the token: the stream behind them, (1, H).

        Raises:
            Cancelled: the answer was stopped.
        """
        if self.pooled():
            self._by_runs(count)
        else:
            self._one_after_another(range(count))
        return self._behind(count - 1)

    def _by_runs(self, count: int) -> None:
        experts = self._experts
        assert experts is not None, "not pooled"
        for among, layers in self._runs:
            if layers.start >= count:
                break
            some = range(layers.start, min(layers.stop, count))
            if among:
                experts.run(some, self._graphs[some.start : some.stop])
            else:
                self._one_after_another(some)
        experts.end(count)

    def _one_after_another(self, layers: range) -> None:
        """Layers whose experts are elsewhere."""
        for index in layers:
            self._graphs[index].replay()
            _, hidden, routed, _ = self._stepped(index)
            experts = self._layers[index].experts
            if experts is None:
                self._total.y.zero_()
            else:
                self._total.y.copy_(experts(hidden, *_apart(routed)))

    def step(self, index: int, _stream: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, (1, H) each, behind the step of the layer before, whose stream it reads.

        added: that layer's block's output. The results are overwritten by the next step of this layer. They have no
            `parallel`: the graph of the next layer joins it with what is added.
        """
        if index and added is None:
            self._total.y.zero_()
        elif added is not None:
            self._total.y.copy_(added)
        self._graphs[index].replay()
        stream, hidden, routed, _ = self._stepped(index)
        return Stepped(stream, hidden, _apart(routed))

    def end(self, count: int, added: Tensor) -> Tensor:
        """The logits (1, V) behind the first `count` steps, which the next token overwrites.

        added: the last layer's block's output.
        """
        self._total.y.copy_(added)
        return self._logits(count)

    def _logits(self, count: int) -> Tensor:
        if count != self._count:
            self._end_behind(count)
        return self.head.run()


def _runs(pooled: Sequence[bool]) -> list[tuple[bool, range]]:
    """Neighbouring layers that are alike."""
    ends = [i for i in range(1, len(pooled) + 1) if i == len(pooled) or pooled[i] != pooled[i - 1]]
    return [(pooled[start], range(start, end)) for start, end in itertools.pairwise([0, *ends])]


def _apart(routed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Experts are counted later, when another token may have been here."""
    return (routed[0].clone(), *routed[1:]) if routed else ()
