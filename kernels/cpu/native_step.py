"""`step.dense_step` compiled from C++ (dense_step.cpp): a layer's weights are passed once, not in every call. Texts may
go through it together, a token of each, so that weights are read once for all of them.

At small sizes that call takes as long as two of the two dozen operations that torch would need.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from ctypes import c_void_p
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import Shape, index, require
from ..entries import CODES
from ..mixers.convolution import Convolution
from ..mixers.delta import Delta
from ..mixers.grouped import Heads
from ..mixers.latent import Latent
from ..step import DenseLayer, Mixer, Router, Sandwich, Stepped, Swiglu
from ..weights import Norm
from .binding import array_of, check, codes, library, records
from .weights import FLOAT32, digits, norm_record, optional, projection_record, required

_STORED = {torch.float32: codes.KEPT_FLOAT, torch.float16: codes.KEPT_HALF, CODES: codes.KEPT_CODES}
_KINDS = {"softmax": codes.SOFTMAX, "sigmoid": codes.SIGMOID, "sparsemixer": codes.SPARSEMIXER}


class Place(NamedTuple):
    """Where a token is: rope (2, D) of its position, those of several D one behind the other, or (N, ...) from that on;
    and of its text, of each layer, kv (tokens, *entry), whose first entries are of tokens `firsts`, or of the text's
    first one; or (states, numbers), as many of each layer that keeps a state.
    """

    rope: Tensor
    kv: Sequence[Tensor]
    position: int
    firsts: Sequence[int] = ()


class NativeStep:
    """`step.dense_step` for one layer, in float32.

    Attributes:
        layer: its record, for an operation on several. routes: whether it has experts. rope: where its own of a
            position's cosines and sines begin, and how many they are. stored: shape and type of a token's keys and
            values; None where the layer keeps a state. scores: the router's, by token.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
        ValueError: weights that do not fit each other, are not float32, or are not contiguous on the CPU; keys and
            values of another form.
    """

    def __init__(self, layer: DenseLayer) -> None:
        self._step = library().dense_step
        mixer, router, hidden = layer.mixer, layer.router, layer.input_layernorm.weight.numel()
        first, out = mixer.sizes
        self.layer: Any = records.dense_layer(
            hidden=hidden,
            eps=layer.eps,
            before=norm_record("input_layernorm", layer.input_layernorm, hidden),
            after=norm_record("post_attention_layernorm", layer.post_attention_layernorm, hidden),
            first=projection_record("first", layer.first, first, hidden),
            out=projection_record("out", layer.out, hidden, out),
            router=router_record(router, hidden),
            beside=None if layer.beside is None else swiglu_record(layer.beside, hidden),
            sandwich=None if layer.sandwich is None else sandwich_record(layer.sandwich, hidden),
            **_mixer_fields(mixer, hidden),
        )
        check(library().dense_check(self.layer))
        self._hidden, self._top_k = hidden, self.layer.router.top_k
        attending = mixer.attending
        self.rope = (0, 0) if attending is None else (attending.rope_at, 2 * mixer.turned)
        self._state, self._window = mixer.state, attending.window if attending else None
        self.stored = None if attending is None else (attending.entry, attending.cache_dtype)
        self.routes, self._joins = router is not None, layer.sandwich is not None
        self.scores = None if router is None else router.scores
        if self.scores is not None:
            require("scores", self.scores, FLOAT32, (len(self.scores), self.layer.router.experts))

    def __call__(
        self, x: Tensor, added: Tensor | None, rope: Tensor, kv: Tensor, position: int, x_bits: int = 22
    ) -> Stepped:
        """As `step.dense_step`; x_bits as for the other operations.

        Raises:
            ValueError: tensors of other sizes or forms or not in one piece, or a position that kv has no room for.
        """
        return self.together(0, x, added, placed([self], [Place(rope, [kv], position)]), x_bits)

    def together(self, number: int, x: Tensor, added: Tensor | None, where: Any, x_bits: int = 22) -> Stepped:
        """T tokens, each of another text or in order of one: x (T, H), and added; see `__call__`.

        Args:
            where: their places, see `placed`. number: of this layer in their keys and values.
        """
        shape = tokens, _ = len(where), self._hidden
        stream, hidden = torch.empty(shape), torch.empty(shape)
        routed: tuple[Tensor, ...] = ()
        chosen, weights = None, None
        if self._top_k:
            routed = chosen, weights = (
                torch.empty(tokens, self._top_k, dtype=torch.int64),
                torch.empty(tokens, self._top_k),
            )
        require("x", x, FLOAT32, shape)
        if added is not None:
            require("added", added, FLOAT32, shape)
        if self.scores is not None and len(self.scores) < tokens:
            raise ValueError(f"{tokens} tokens, but room for the scores of {len(self.scores)}")
        parallel = torch.empty(shape) if self._joins else None
        outputs = {"stream": stream, "hidden": hidden, "index": chosen, "weights": weights, "parallel": parallel}
        filled = records.routed(**outputs, scores=self.scores)
        given = (self.layer, number, tokens, x, added, where, digits(x_bits), torch.get_num_threads(), filled)
        check(self._step(*given))
        return Stepped(stream, hidden, routed, parallel if self.routes else None)

    def address(self, part: Tensor, first: int, position: int) -> int:
        """Where a text's states are in this layer, or the entry of its first token is or would be, if `part` begins
        with that of token `first`.

        Raises:
            ValueError: of another size or form, or without what the token at `position` sees.
        """
        if self.stored is None:
            return required("states", part, (max(2, len(part)) if part.ndim else 0, self._state)).data_ptr()
        entry, kept = self.stored
        required("kv", part, (len(part) if part.ndim else 0, *entry), (kept,))
        if not 0 <= first <= max(0, position + 1 - self._window if self._window else 0):
            raise ValueError(f"position {position} sees entries before token {first}")
        return part.data_ptr() - first * math.prod(entry) * part.itemsize


def placed(steps: Sequence[NativeStep], places: Sequence[Place], *more: int) -> Any:
    """The places as the library takes them, in the first layers, whose steps these are. more: of rope's sizes, before
    those of one position.

    Raises:
        ValueError: as `NativeStep.__call__`.
    """
    made = [_place(steps, place, more) for place in places]
    found: Any = array_of(made)
    found.held = made
    return found


def _place(steps: Sequence[NativeStep], place: Place, more: Shape) -> Any:
    own = list(zip(steps, place.kv, itertools.chain(place.firsts, itertools.repeat(0)), strict=False))
    rooms = [first + len(part) if part.ndim else 0 for step, part, first in own if step.stored is not None]
    capacity = min(rooms, default=place.position + 1 if own else 0)
    index("position", place.position, capacity)
    stores = (c_void_p * len(own))(*(step.address(part, first, place.position) for step, part, first in own))
    ropes = [step.rope for step in steps if sum(step.rope)]
    numbers = max(map(sum, ropes), default=0)
    # Definitions take one after the other of (2, D); several D lie one behind the other.
    wanted = (numbers,) if any(at for at, _ in ropes) else (2, numbers // 2)
    rope = place.rope if not ropes else required("rope", place.rope, (*more, *wanted))
    counts = {len(part) for step, part, _ in own if step.stored is None}
    if len(counts) > 1:
        raise ValueError(f"layers with {sorted(counts)} states of a text")
    states = max(counts, default=0)
    return records.place(rope=rope, kv=stores, capacity=capacity, position=place.position, states=states)


def _mixer_fields(mixer: Mixer, hidden: int) -> dict[str, Any]:
    """What `floe_dense_layer` has of a mixer.

    Raises:
        ValueError: tensors of another shape or type, or numbers that do not fit them.
    """
    if isinstance(mixer, Heads):
        _check_heads(mixer)
        if mixer.head_dim < 2 or mixer.head_dim % 2:
            raise ValueError(f"a head must have an even number of values, not {mixer.head_dim}")
        return _heads_fields(mixer)
    if isinstance(mixer, Latent):
        return _heads_fields(mixer.heads) | {"latent": latent_record(mixer)}
    if isinstance(mixer, Delta):
        record, sizes = delta_record(mixer, hidden), {"heads": mixer.heads, "kv_heads": mixer.shared}
        return _NO_HEADS | sizes | {"dim": mixer.value_dim, "scale": mixer.key_dim**-0.5, "delta": record}
    return _NO_HEADS | {"convolution": convolution_record(mixer, hidden)}


_PARTS = dict.fromkeys(("q_norm", "k_norm", "sinks", "latent", "delta", "convolution"))
_SIZES = ("heads", "kv_heads", "dim", "window", "rope_at", "scale", "clip")
_NUMBERS = dict.fromkeys((*_SIZES, "each_head", "stored", "gated", "keys_alone", "v_normed", "queries_alone"), 0)
_NO_HEADS: dict[str, Any] = {**_PARTS, **_NUMBERS}


def _heads_fields(heads: Heads) -> dict[str, Any]:
    queries, keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    each_head = heads.q_norm is not None and heads.q_norm.numel() == heads.head_dim
    normed = (heads.head_dim, heads.head_dim) if each_head else (queries, keys)
    return _NO_HEADS | {
        "heads": heads.num_heads,
        "kv_heads": heads.num_kv_heads,
        "dim": heads.head_dim,
        "window": heads.window or 0,
        "each_head": each_head,
        "stored": _STORED[heads.cache_dtype],
        "gated": heads.gated,
        "keys_alone": heads.keys_alone,
        "v_normed": heads.v_normed,
        "queries_alone": heads.queries_alone,
        "rope_at": heads.rope_at,
        "scale": heads.scale,
        "clip": inf if heads.clip is None else heads.clip,
        "q_norm": optional("q_norm", heads.q_norm, (normed[0],)),
        "k_norm": optional("k_norm", heads.k_norm, (normed[1],)),
        "sinks": optional("sinks", heads.sinks, (heads.num_heads,)),
    }


def _check_heads(heads: Heads) -> None:
    """Refuse impossible heads; in Python, where no product overflows."""
    if heads.cache_dtype not in _STORED:
        raise ValueError(f"keys and values must be {' or '.join(map(str, _STORED))}, not {heads.cache_dtype}")
    if heads.num_kv_heads < 1 or heads.num_heads < 1 or heads.num_heads % heads.num_kv_heads:
        raise ValueError(f"{heads.num_heads} heads of queries cannot share {heads.num_kv_heads} heads of keys evenly")
    if heads.window is not None and not 1 <= heads.window < 1 << 63:
        raise ValueError(f"a window must be at least 1 token, not {heads.window}")
    if heads.clip is not None and not heads.clip > 0:
        raise ValueError(f"queries, keys and values are clipped to a number above 0, not {heads.clip}")
    if (heads.q_norm is None) != (heads.k_norm is None) and not heads.queries_alone:
        raise ValueError("queries and keys must both have norms, or neither")


def latent_record(latent: Latent) -> Any:
    """`floe_latent`.

    Raises:
        ValueError: tensors of another shape or type.
    """
    latent.check()
    _check_heads(latent.heads)
    heads, asked, asking = latent.heads.num_heads, None, 0
    if latent.asked is not None and latent.asked_norm is not None:
        asking = latent.asked_norm.numel()
        asked = projection_record("asked", latent.asked, heads * (latent.still + latent.turned), asking)
    return records.latent(
        rank=latent.rank,
        still=latent.still,
        turned=latent.turned,
        value=latent.value,
        eps=latent.eps,
        norm=required("norm", latent.norm, (latent.rank,)),
        made=projection_record("made", latent.made, heads * (latent.still + latent.value), latent.rank),
        asked=asked,
        asked_norm=optional("asked_norm", latent.asked_norm, (asking,)),
    )


def delta_record(delta: Delta, hidden: int) -> Any:
    """`floe_delta`.

    Raises:
        ValueError: tensors of another shape or type.
    """
    taps, channels = delta.conv.shape
    if delta.shared < 1 or delta.heads < 1 or delta.heads % delta.shared:
        raise ValueError(f"{delta.heads} heads of values cannot share {delta.shared} heads of keys evenly")
    if min(delta.key_dim, delta.value_dim) < 1 or taps < 2:
        raise ValueError(f"heads of {delta.key_dim} and {delta.value_dim} values, and a convolution of {taps} tokens")
    if channels != 2 * delta.shared * delta.key_dim + delta.heads * delta.value_dim:
        raise ValueError(f"a convolution of {channels} channels does not fit the heads")
    return records.delta(
        key_dim=delta.key_dim,
        taps=taps,
        eps=delta.eps,
        conv=required("conv", delta.conv, (taps, channels)),
        decay=required("decay", delta.decay, (delta.heads,)),
        bias=required("bias", delta.bias, (delta.heads,)),
        norm=required("norm", delta.norm, (delta.value_dim,)),
        gates=projection_record("gates", delta.gates, 2 * delta.heads, hidden),
    )


def convolution_record(mixer: Convolution, hidden: int) -> Any:
    """`floe_convolution`.

    Raises:
        ValueError: tensors of another shape or type.
    """
    taps = len(mixer.conv)
    if taps < 2:
        raise ValueError(f"a convolution of {taps} tokens")
    return records.convolution(
        taps=taps,
        conv=required("conv", mixer.conv, (taps, hidden)),
        bias=optional("bias", mixer.bias, (hidden,)),
    )


def router_record(router: Router | None, hidden: int) -> Any:
    """`floe_router`.

    Raises:
        ValueError: tensors of another shape or type, or numbers that do not fit them.
    """
    if router is None:
        return records.router(
            **dict.fromkeys(("experts", "top_k", "groups", "top_groups", "kind", "shares", "scale", "jitter"), 0),
            **dict.fromkeys(("weight", "bias", "correction", "down_bias", "factors", "norm"), None),
        )
    experts = router.weight.shape[0] if router.weight.ndim else 0
    if not 1 <= router.top_k <= experts:
        raise ValueError(f"top_k must be from 1 to {experts}, not {router.top_k}")
    return records.router(
        experts=experts,
        top_k=router.top_k,
        groups=router.groups,
        top_groups=router.top_groups,
        kind=_KINDS[router.kind],
        shares=router.norm_topk_prob,
        scale=router.scale,
        jitter=router.jitter,
        weight=required("router", router.weight, (experts, hidden)),
        bias=optional("router.bias", router.bias, (experts,)),
        correction=optional("router.correction", router.correction, (experts,)),
        down_bias=optional("router.down_bias", router.down_bias, (experts, hidden)),
        factors=optional("router.factors", router.factors, (experts,)),
        norm=None if router.norm is None else _rms("router.norm", router.norm, hidden),
    )


def swiglu_record(swiglu: Swiglu, hidden: int) -> Any:
    """`floe_swiglu`.

    Raises:
        ValueError: tensors of another shape or type.
    """
    weight = swiglu.down.weight
    neurons = weight.shape[-1] if isinstance(weight, Tensor) else weight.vector.n
    return records.swiglu(
        neurons=neurons,
        both=projection_record("gate and up", swiglu.both, 2 * neurons, hidden),
        down=projection_record("down", swiglu.down, hidden, neurons),
        scale=optional("scale", swiglu.scale, (1, hidden)),
        gelu=swiglu.function == "gelu",
    )


def sandwich_record(sandwich: Sandwich, hidden: int) -> Any:
    """`floe_sandwich`.

    Raises:
        ValueError: norms of another shape or type, or not by the root mean square alone.
    """
    names = ("mixed", "before", "beside", "experts", "both")
    return records.sandwich(
        scale=sandwich.scale, **{name: _rms(name, getattr(sandwich, name), hidden) for name in names}
    )


def _rms(name: str, norm: Norm | None, hidden: int) -> Any:
    """The weights of a norm, if there is one, that neither subtracts nor adds anything."""
    if norm is None:
        return None
    if norm.kind != "rms" or norm.bias is not None:
        raise ValueError(f"{name} must divide by the root mean square, and no more")
    return required(name, norm.weight, (hidden,))
