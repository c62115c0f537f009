"""One token through all layers in one compiled call, if all experts are in RAM and computed by the CPU.

Going layer by layer costs interpreter time in each, and its lock, which the screen needs too. Results are the same to
the last bit: the kernels are the same, and C++ makes the same decisions as Python. Small models draw several tokens per
call: with a busy screen, taking the lock for each would halve their speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...kernels.cpu.native import NativeUnavailableError
from ...kernels.cpu.native_ends import NativeEnds
from ...kernels.cpu.native_step import NativeStep, Place
from ...kernels.cpu.native_token import Draw, NativeToken
from ..experts.moe_layer import Cancelled, Control, MoELayer
from ..quality_presets import Preset
from ..sampling import Sampler
from .layers import DecoderLayer, Unsupported
from .quantized_linear import PackedLinear

MOST, _SECONDS = 64, 0.02  # of a call that draws: a stop, a new preset and the text wait for its end


def in_memory(layers: Sequence[DecoderLayer]) -> list[MoELayer | None]:
    """The experts of layers; None of those that have none.

    Raises:
        Unsupported: experts that are not all where they are computed.
    """
    experts: list[MoELayer | None] = []
    for layer in layers:
        own = layer.experts
        if own is not None and (not isinstance(own, MoELayer) or type(own) is not MoELayer):
            raise Unsupported("a layer does not have all its experts in the memory that computes them")
        experts.append(own)
    return experts


def control_of(experts: Sequence[MoELayer | None]) -> Control:
    """What they share.

    Raises:
        Unsupported: no layer has experts.
    """
    first = next((layer for layer in experts if layer is not None), None)
    if first is None:
        raise Unsupported("no layer has experts")
    return first.control


def hooks_of(experts: Sequence[MoELayer | None]) -> list[Mapping[int, Any]]:
    """The hooks on layers: if any of these has one, each layer must be called. One look costs no call per layer."""
    found = [layer for layer in experts if layer is not None]
    return [hooks for layer in found for hooks in (layer._forward_pre_hooks, layer._forward_hooks)]  # pyright: ignore[reportPrivateUsage]


class TokenPass:
    """All layers of a model.

    Args:
        control: what they go by; None for that of their experts.

    Raises:
        Unsupported: a layer whose experts are elsewhere than in RAM.
    """

    def __init__(
        self,
        steps: Sequence[NativeStep],
        layers: Sequence[DecoderLayer],
        ends: NativeEnds,
        control: Control | None = None,
    ) -> None:
        self._experts = in_memory(layers)
        self._hooks = hooks_of(self._experts)
        self._steps, self._ends, self._control = steps, ends, control or control_of(self._experts)
        self._coded = any(isinstance(part, PackedLinear) for part in (layers[0].first, layers[0].out))
        self._preset: Preset | None = None
        self._token = self._made(self._control.preset)

    def _made(self, preset: Preset) -> NativeToken:
        self._preset = preset
        try:
            return NativeToken(self._steps, [layer and layer.in_force().as_one() for layer in self._experts])
        except (NativeUnavailableError, ValueError) as error:
            raise Unsupported(str(error)) from error

    @property
    def watched(self) -> bool:
        """Whether hooks watch a layer's input or output."""
        return any(self._hooks)

    def run(self, x: Tensor, places: Sequence[Place]) -> Tensor:
        """Tokens of as many texts, x (T, H) -> the residual stream (T, H) after the last of the places' layers.

        Raises:
            Cancelled: the answer was stopped.
        """
        token, bits = self._in_force()
        through = token(x, places, bits, self._control.cancelled.stop)
        if through is None:
            raise Cancelled
        self._count(through.chosen.transpose(0, 1), through.counts.transpose(0, 1))
        return through.stream

    def decode(
        self,
        token: int,
        place: Place,
        sampler: Sampler,
        last: Sequence[int],
        guessed: Sequence[int] = (),
        *,
        streamed: bool = False,
    ) -> tuple[list[int], list[float], Tensor | None]:
        """The next tokens after `token` at `place`, when each was drawn, and by which stream; see `Decoder.several`.

        Args:
            place: its rope is (N, 2, D), N >= 1: the most tokens to draw. streamed: whether streams (T, H) are wanted.

        Raises:
            Cancelled: the answer was stopped before the first.
        """
        native, bits = self._in_force()
        uniforms, seen = sampler.uniforms(len(place.rope)), sampler.seen(self._ends.vocabulary)
        how = Draw(sampler.filters, uniforms, seen, last, guessed, streamed)
        stop = self._control.cancelled.stop
        drawn = native.decode(self._ends, token, place, bits, stop, how, _SECONDS)
        if drawn is None:
            raise Cancelled
        sampler.took(drawn.tokens)
        self._count(drawn.chosen, drawn.counts)
        return drawn.tokens, drawn.at, drawn.streams

    def _in_force(self) -> tuple[NativeToken, tuple[int, int]]:
        """The layers under the preset in force, and how much of x's precision it keeps."""
        if (preset := self._control.preset) is not self._preset:
            self._token = self._made(preset)
        return self._token, (preset.x_bits if self._coded else 22, preset.x_bits)

    def _count(self, chosen: Tensor, counts: Tensor) -> None:
        """Count tokens; (N, L, K) and (N, L, K, 2, 2), see `native_token.Drawn`."""
        if not self._control.counting:
            return
        for index, layer in enumerate(self._experts[: chosen.shape[1]]):
            if layer is None:
                continue
            computed = [part for part in counts[:, index].reshape(-1, 2).tolist() if part[0] >= 0]
            layer.add_counts(layer.ruled, chosen[:, index].tolist(), computed)
