"""A token through all layers as one CUDA graph, from its id to its logits, where all experts are on the card.

Going layer by layer, the host launches some 25 kernels in each, which takes longer than the card computes. Captured
once, the whole token is one launch and one wait. What differs between tokens is in memory that the graph reads: a
record in pinned memory (the id, the position, where keys and values are), and each layer's limits on the card, which
another preset changes in place. Neurons and calls are counted on the card until somebody reads the telemetry.

Some tokens of one text, of which all but the first are guesses, are a graph for each number of them, captured when one
is first needed. Each token's logits are to the last bit what they are alone. What a guess left behind that is not drawn
is overwritten: its entries by the next tokens', and states are there of all tokens of a pass (`kv_stores.Layout`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ...events import MOST_TOGETHER, Notice
from ...experts.moe_layer import Cancelled, Control, MoELayer
from ...experts.ruled_layer import RuledLayer
from ...outcomes import brief
from ..graphs import Captured, capture
from ..kv_stores import GrowingStore
from ..layers import DecoderLayer, Unsupported
from ..token_pass import control_of, hooks_of, in_memory
from .card_ends import Ends
from .card_layers import TokenRecord, before_experts, need_kernels

_SLOWER = "Answers are slower at this quality"
_ALONE = "Guessed words are left out at this quality"
_log = logging.getLogger("floe_chat.engine")


class CardToken:
    """All layers of a model on one card.

    Attributes:
        declined: why the preset in force goes layer by layer; "" if it does not.
        stream: behind the layers, of the tokens of the last pass, (T, H); the next one overwrites it.

    Raises:
        Unsupported: experts elsewhere, or nothing could be captured.
    """

    stream: Tensor

    def __init__(self, layers: Sequence[DecoderLayer], ends: Ends) -> None:
        self._layers, self._ends, self._device = layers, ends, ends.embedding.device
        need_kernels(self._device)
        self._experts = in_memory(layers)
        self._control, self._hooks = control_of(self._experts), hooks_of(self._experts)
        self._record = TokenRecord(layers, self._device, MOST_TOGETHER)
        self._logits = ends.pinned_logits(MOST_TOGETHER)
        self._ropes = torch.stack([ends.rope] * MOST_TOGETHER)
        self._form: _Form | None = None
        self._preset, self.declined = self._control.preset, ""
        self._change(len(layers))
        if self.declined:
            raise Unsupported(self.declined)

    def ready(self, count: int, tokens: int = 1) -> bool:
        """Whether the next tokens, so many of one text, can go through the first `count` layers in one graph."""
        if any(self._hooks):
            return False
        preset = self._control.preset
        if preset is not self._preset or (self._form is not None and self._form.count != count):
            self._preset = preset
            self._change(count)
            if self.declined:
                self._control.notices.append(Notice(_SLOWER, f"Layers are launched one by one: {self.declined}."))
        form = self._form
        if form is None or tokens == 1 or tokens in form.captured:
            return form is not None
        if form.alone:
            return False
        try:
            self._capture(form, tokens)
        except Exception as error:  # noqa: BLE001 - as in `_change`: one by one the same is computed
            form.alone = True
            why = f"{tokens} tokens at once could not be captured: {brief(error)}"
            _log.warning("tokens go one by one, because %s", why, exc_info=True)
            self._control.notices.append(Notice(_ALONE, f"Tokens are computed one by one: {why}."))
        return not form.alone

    def run(self, tokens: Sequence[int], rope: Tensor, position: int, store: GrowingStore) -> Tensor:
        """The logits (T, V) behind some tokens of one text, in pinned memory that the next pass overwrites. Waits once.

        Several are not counted before `count`.

        Args:
            rope: of their positions, and maybe more. position: of the first. store: has room for them.

        Raises:
            Cancelled: the answer was stopped.
        """
        form, several = self._form, len(tokens)
        assert form is not None, "not ready"
        if self._control.cancelled.is_set():
            raise Cancelled
        self._record.write(tokens, position, store, counting=self._control.counting)
        self._ropes[:several].copy_(rope[:several], non_blocking=True)
        captured = form.captured[several]
        captured.replay()
        captured.wait()
        self.stream = captured.outputs[0]
        if self._control.counting and several == 1:
            form.counts.keep()
        return self._logits[:several]

    def count(self, tokens: int) -> None:
        """Count the first so many tokens of the last pass of several: behind each of these another one was drawn."""
        if self._control.counting and self._form is not None:
            self._form.counts.take(tokens)

    def _change(self, count: int) -> None:
        """Compute what the preset in force asks for from now on."""
        ruled = [layer and layer.in_force() for layer in self._experts[:count]]
        if self._form is not None and self._form.serves(ruled):
            self._form.limit(ruled)
            return
        self._form, self.declined = None, ""  # the old one's memory goes first
        try:
            form = _Form(self._layers, self._experts, ruled, self._control)
            self._capture(form, 1)
            self._form = form
        # Whatever a driver or a compiler of kernels raises: layer by layer the same is computed without them.
        except Exception as error:  # noqa: BLE001
            self.declined = f"a token could not be captured: {brief(error)}"
            _log.warning("layer by layer, because %s", self.declined, exc_info=True)

    @torch.inference_mode()
    def _capture(self, form: _Form, tokens: int) -> None:
        """So many tokens of one text, on memory that no conversation has."""
        kept = self._record.rehearse(self._layers, self._device)
        ropes, logits = self._ropes.unbind(), self._logits[:tokens]

        def work() -> tuple[Tensor, ...]:
            self._record.read()
            stream = form.through(self._record, ropes, self._ends.stream(self._record.tokens[:tokens]))
            logits.copy_(self._ends.logits(stream), non_blocking=True)
            return (stream,)

        form.captured[tokens] = capture(work, self._device)
        del kept  # the graph has run on it


class _Form:
    """The work of a token for all presets that differ in the values of their limits only.

    Attributes:
        count: of layers. captured: their work, by the number of tokens. counts: what it did. alone: whether several
            could not be captured.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        experts: Sequence[MoELayer | None],
        ruled: Sequence[RuledLayer | None],
        control: Control,
    ) -> None:
        self.count, self._control = len(ruled), control
        self.captured, self.alone = dict[int, Captured](), False
        self._layers, self._ruled = layers[: self.count], ruled
        top_k = next(layer.router.top_k for layer in layers if layer.router is not None)
        self._structure = _structure(ruled)
        # Rows are all there, so none is late.
        self._limits = [one and replace(one.limits_in_place(), late=None) for one in ruled]
        pairs = [(layer, one) for layer, one in zip(experts, ruled, strict=False) if layer and one]
        self.counts = _Counts([layer for layer, _ in pairs], [one for _, one in pairs], top_k)

    def serves(self, ruled: Sequence[RuledLayer | None]) -> bool:
        """Whether only values differ."""
        return self._structure == _structure(ruled)

    def limit(self, ruled: Sequence[RuledLayer | None]) -> None:
        """Work by these limits from now on."""
        for mine, one in zip(self._limits, ruled, strict=True):
            if mine is not None and one is not None:
                one.limits_into(mine)

    def through(self, record: TokenRecord, ropes: Sequence[Tensor], x: Tensor) -> Tensor:
        """The stream (T, H) behind all layers, by that before them."""
        kept = record.kept[: len(x)]
        done: list[tuple[Tensor, Tensor, Tensor]] = []
        for index, (layer, ruled, limits) in enumerate(zip(self._layers, self._ruled, self._limits, strict=True)):
            stepped = before_experts(layer, index, x, ropes, kept)
            x = stepped.stream
            if ruled is None or limits is None:
                continue
            hidden, (chosen, weights) = stepped.hidden, stepped.routed
            experts = replace(ruled.as_one(), limits=limits)
            added_to = x if layer.sandwich is None else None
            given = hidden, experts, chosen, weights, added_to
            y, counts, thresholds = kernels.experts_step(*given, x_bits=self._control.preset.x_bits)
            if added_to is None:
                y, added = layer.behind(stepped, y)
                y = y if added is None else y + added
            x = y
            done.append((chosen, counts, thresholds))
        self.counts.add(done, record.times)
        return x


def _structure(ruled: Sequence[RuledLayer | None]) -> list[object]:
    return [one and one.structure for one in ruled]


class _Counts:
    """What tokens did in each layer, added up on the device: at once of a token that is alone; of several, which may be
    guesses, once it is known how many count.
    """

    def __init__(self, experts: Sequence[MoELayer], ruled: Sequence[RuledLayer], top_k: int) -> None:
        self._experts, self._ruled = experts, ruled
        device, among = ruled[0].limits.signal.device, experts[0].packed.signal.q.shape[0]
        calls = [top_k * one.rule.parts for one in ruled]
        self._rows, self._all_count = dict[int, Tensor](), dict[int, Tensor]()
        for tokens in range(1, 1 + MOST_TOGETHER):  # of that many tokens, each call's row of totals
            of = [(token, index) for index, own in enumerate(calls) for token in range(tokens) for _ in range(own)]
            self._rows[tokens] = torch.tensor([token * len(ruled) + index for token, index in of]).to(device)
            self._all_count[tokens] = torch.tensor([not ruled[index].rule.drops for _, index in of]).to(device)
        # Of each layer: calls that were computed, active neurons, those of the second threshold; then calls by expert.
        self._totals = torch.zeros(len(ruled), 3 + among, dtype=torch.int64, device=device)
        self._each = self._totals.new_zeros(MOST_TOGETHER, *self._totals.shape)  # the same of tokens of one pass
        self._asked = False

    def add(self, done: Sequence[tuple[Tensor, Tensor, Tensor]], times: Tensor) -> None:
        """Add the choice (T, K), counts (P, 2) and thresholds (P,) of each layer; times (1,): 0 or 1."""
        choices, neurons, thresholds = zip(*done, strict=True)
        chosen, tokens = torch.stack(choices, 1).flatten(0, 1), len(choices[0])
        totals = self._totals if tokens == 1 else self._each[:tokens].zero_().flatten(0, 1)
        computed = self._all_count[tokens] | (torch.cat(thresholds) != torch.inf)
        calls = torch.cat([computed[:, None], torch.cat(neurons)], 1)
        totals[:, :3].index_add_(0, self._rows[tokens], calls * times)
        totals[:, 3:].scatter_add_(1, chosen, times.expand_as(chosen))

    def take(self, tokens: int) -> None:
        """Count so many of the last pass of several."""
        self._totals.add_(self._each[:tokens].sum(0))
        self.keep()

    def keep(self) -> None:
        """Have the telemetry read the totals when it is read itself."""
        if not self._asked:
            self._asked = True
            self._experts[0].telemetry.count(self._read, self._totals)

    @torch.inference_mode()
    def _read(self, totals: Tensor) -> None:
        """Totals on the host, which begin again on the device."""
        for layer, ruled, row in zip(self._experts, self._ruled, totals.tolist(), strict=False):
            computed, active, reached, *calls = row
            layer.add_totals(ruled, calls, computed, active, reached)
        self._totals.zero_()
        self._asked = False
