"""A token's pass through all layers in one call of the compiled library, or that of a token of each of some texts
(token_step.cpp), or those of several tokens of one text (decode.cpp).

The interpreter and its lock are not needed meanwhile: a layer costs what its kernels cost, and other work, such as
drawing a screen, continues in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import BYTES, CPU, index, require
from ..layouts import check_roles
from ..sampling import Filters
from ..step import ExpertLayer
from .binding import Stop, addresses_of, check, codes, library, records
from .native_ends import NativeEnds, sampling_record
from .native_step import NativeStep, Place, placed
from .weights import digits, optional, required, rows_record, rule_record, signal_record


class Through(NamedTuple):
    """The result of the pass of T tokens.

    Attributes:
        stream: (T, H) the residual stream after the last layer. chosen, weights: (L, T, K) of each layer's router.
        counts: (L, T, K, 2, 2) of each expert's halves, or of the whole in the first place, how many neurons were
            active and how many of those reached the second threshold; -1 for what was left out whole.
    """

    stream: Tensor
    chosen: Tensor
    weights: Tensor
    counts: Tensor


class Draw(NamedTuple):
    """How tokens are drawn.

    Attributes:
        uniforms: a number from [0, 1) for each token that may be drawn. seen: as `sampling.draw` takes it, kept up to
            date. last: tokens that end it. guessed: what all tokens but the last one are likely to be, or nothing: then
            they go through the layers together, and it ends with the first that is not drawn.
        streamed: whether the streams are wanted, too.
    """

    filters: Filters
    uniforms: Sequence[float]
    seen: Tensor | None
    last: Sequence[int]
    guessed: Sequence[int] = ()
    streamed: bool = False


class Drawn(NamedTuple):
    """N tokens.

    Attributes:
        at: when each was drawn, in seconds since the call. chosen: (N, L, K), counts: (N, L, K, 2, 2) as of one token
            in `Through`, of the tokens before them, whose keys and values are there now; and of guesses that were not
            drawn. streams: (N, H) behind the last layer, that they were drawn from, if wanted.
    """

    tokens: list[int]
    at: list[float]
    chosen: Tensor
    counts: Tensor
    streams: Tensor | None


class NativeToken:
    """The layers of a model, passed to the library once per preset.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: experts that are not as the kernels read them.
    """

    def __init__(self, dense: Sequence[NativeStep], experts: Sequence[ExpertLayer | None]) -> None:
        """`experts`: of each layer; None for one that has none."""
        functions = library()
        self._step, self._decode = functions.token_step, functions.decode
        if not dense or len(dense) != len(experts):
            raise ValueError(f"{len(dense)} dense layers, but experts of {len(experts)}")
        made = [None if layer is None else _expert_record(layer) for layer in experts]
        self._held = dense, made  # the arrays have only their bytes and addresses
        self._dense, self._experts = addresses_of([step.layer for step in dense]), addresses_of(made)
        self._top_k = max(step.layer.router.top_k for step in dense)
        self._rope = max(sum(step.rope) for step in dense)
        self._layers: Any = None  # of the first so many
        self._paced: tuple[Any, Any] = None, None  # the inputs of the last pace, and the pace
        one = dense[0].layer
        self._hidden = one.hidden

    def __call__(self, x: Tensor, places: Sequence[Place], bits: tuple[int, int], stop: Stop) -> Through | None:
        """Run T tokens, each of another text or in order of one; None if `stop`, checked in each layer, was set.

        Args:
            x: (T, H) float32 their embeddings. places: with the keys and values of each of the first L layers, which
                are the layers it runs.
            bits: how much of x's precision the dense part and the experts keep (`kernels.X_BITS`).

        Raises:
            ValueError: sizes that do not fit each other, or a position that kv has no room for.
        """
        require("x", x, (torch.float32,), (len(places), self._hidden), whole=False)
        stream = x.clone(memory_format=torch.contiguous_format)
        first, where = self._where(places)
        chosen, weights, counts = self._room(first.count, len(places))
        trace = records.trace(index=chosen, weights=weights, counts=counts)
        code = self._step(first, len(places), stream, where, self._pace(bits, stop), trace)
        if code == codes.STOPPED:
            return None
        check(code)
        return Through(stream, chosen, weights, counts)

    def decode(
        self,
        ends: NativeEnds,
        token: int,
        place: Place,
        bits: tuple[int, int],
        stop: Stop,
        how: Draw,
        seconds: float,
    ) -> Drawn | None:
        """Draw as many tokens after `token`, at `place`, as there are random numbers, but at least one.

        Fewer if `seconds` have passed, if one of `how.last` was drawn or if `stop`, checked in each layer, is set. None
        if it was set before the first.

        Args:
            place: its rope is (N, 2, D), of as many positions. bits: the head has the experts'.

        Raises:
            ValueError: as the call of one token; logits that nothing can be drawn from.
        """
        most = len(how.uniforms)
        if not most:
            raise ValueError("no number to draw a token by")
        if ends.hidden != self._hidden:
            raise ValueError(f"ends of {ends.hidden} values for layers of {self._hidden}")
        for given in (token, *how.guessed):
            index("token", given, ends.vocabulary)
        if len(how.guessed) not in (0, most - 1):
            raise ValueError(f"{len(how.guessed)} guesses for {most} tokens")
        if not all(0 <= uniform < 1 for uniform in how.uniforms):
            raise ValueError("tokens are drawn by numbers from 0 up to 1")
        first, where = self._where([place], most)
        chosen, weights, counts = self._room(most, first.count)
        tokens, at = (c_int64 * most)(), (c_double * most)()
        streams = torch.empty(most, self._hidden) if how.streamed else None
        draws = records.draws(
            token=token,
            most=most,
            last_count=len(how.last),
            seconds=seconds,
            last=(c_int64 * len(how.last))(*how.last),
            guessed=(c_int64 * (most - 1))(*how.guessed) if how.guessed else None,
            seen=optional("seen", how.seen, (ends.vocabulary,), BYTES),
            uniforms=(c_double * most)(*how.uniforms),
            tokens=tokens,
            at=at,
            streams=streams,
        )
        trace = records.trace(index=chosen, weights=weights, counts=counts)
        sampling = sampling_record(how.filters)
        found = self._decode(first, ends.record, sampling, where, self._pace(bits, stop), draws, trace)
        if found == codes.STOPPED:
            return None
        check(found)
        if how.guessed:
            chosen, counts = (
                part.view(first.count, most, *part.shape[2:]).transpose(0, 1) for part in (chosen, counts)
            )
        else:
            chosen, counts = chosen[:found], counts[:found]
        return Drawn(tokens[:found], at[:found], chosen, counts, None if streams is None else streams[:found])

    def _where(self, places: Sequence[Place], *more: int) -> tuple[Any, Any]:
        """`floe_layers` of those that the places have keys and values of, and their `floe_place`."""
        count = len(places[0].kv) if places else 0
        if not 0 < count <= len(self._dense) or any(len(place.kv) != count for place in places):
            raise ValueError(f"keys and values of {count} layers; there are {len(self._dense)}")
        if self._layers is None or count != self._layers.count:
            self._layers = records.layers(
                count=count, top_k=self._top_k, rope=self._rope, dense=self._dense, experts=self._experts
            )
        return self._layers, placed(self._held[0], places, *more)

    def _pace(self, bits: tuple[int, int], stop: Stop) -> Any:
        """`floe_pace`."""
        key = *bits, torch.get_num_threads(), stop
        if key != self._paced[0]:
            dense, experts = map(digits, bits)
            made = records.pace(dense_digits=dense, expert_digits=experts, threads=key[2], stop=stop.record)
            self._paced = key, made
        return self._paced[1]

    def _room(self, *sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Output buffers for each layer: its experts, their weights, and counts."""
        shape = *sizes, self._top_k
        return torch.empty(shape, dtype=torch.int64), torch.empty(shape), torch.empty(*shape, 2, 2, dtype=torch.int64)


def _expert_record(layer: ExpertLayer) -> Any:
    signal, rows, limits = layer.signal, layer.rows, layer.limits
    signal.check(CPU)
    rows.check(CPU)
    shape = *signal.q.shape[:2], signal.layout.vector.n
    if shape != (rows.experts, rows.neurons, rows.layout.other.n):
        raise ValueError(f"a signal of {shape[:2]} experts and neurons, but rows of {tuple(rows.data.shape[:2])}")
    check_roles(signal.layout, rows.layout)
    given = records.limits(
        experts=rows.experts,
        signal=required("signal", limits.signal, (rows.experts,)),
        product=optional("product", limits.product, (rows.experts,)),
        late=None,
    )
    weights, rule = (signal_record(signal), rows_record(rows)), rule_record(layer.rule)
    return records.expert_layer(signal=weights[0], rows=weights[1], limits=given, rule=rule)
