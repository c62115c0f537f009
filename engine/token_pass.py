"""One token through all layers as one compiled call, where all experts lie in RAM and are the CPU's.

Layer by layer the interpreter takes some time more for each, and its lock, which the screen needs too. What it computes
is the same to the last bit: the kernels are, and what `Plan` decides in Python is decided in C++ likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..kernels.cpu.native import NativeUnavailableError
from ..kernels.cpu.native_step import NativeStep
from ..kernels.cpu.native_token import NativeToken
from .dense import PackedLinear
from .layers import Layer, Unsupported
from .moe import Cancelled, MoELayer
from .quality import Preset


class TokenPass:
    """All layers of a model.

    Raises:
        Unsupported: a layer that has more than experts, or whose experts are not all of one width in RAM.
    """

    def __init__(self, steps: Sequence[NativeStep], layers: Sequence[Layer]) -> None:
        self._experts: list[MoELayer] = []
        for layer in layers:
            block: object = layer.block
            whole = isinstance(block, MoELayer) and type(block) is MoELayer and block.packed.narrow is None
            if not isinstance(block, MoELayer) or not whole:
                raise Unsupported("a layer has more than experts of one width in RAM")
            self._experts.append(block)
        self._steps, self._control = steps, self._experts[0].control
        self._coded = any(isinstance(part, PackedLinear) for part in (layers[0].qkv, layers[0].out))
        self._preset: Preset | None = None
        self._token = self._made(self._control.preset)

    def _made(self, preset: Preset) -> NativeToken:
        self._preset = preset
        try:
            return NativeToken(self._steps, [layer.in_force().as_one() for layer in self._experts])
        except (NativeUnavailableError, ValueError) as error:
            raise Unsupported(str(error)) from error

    @property
    def watched(self) -> bool:
        """Whether somebody wants to see what a layer is given or gives."""
        return any(layer._forward_pre_hooks or layer._forward_hooks for layer in self._experts)  # pyright: ignore[reportPrivateUsage]

    def run(self, x: Tensor, rope: Tensor, kv: Sequence[Tensor], position: int) -> Tensor:
        """x (1, H) -> the residual stream (1, H) behind the last of len(kv) layers; see `kernels.step.dense_step`.

        Raises:
            Cancelled: the answer was stopped.
        """
        control = self._control
        if (preset := control.preset) is not self._preset:
            self._token = self._made(preset)
        bits = preset.x_bits if self._coded else 22, preset.x_bits
        through = self._token(x, rope, kv, position, bits, control.cancelled.seen_there)
        if through is None:
            raise Cancelled
        if control.counting:
            found = zip(self._experts, through.chosen.tolist(), through.counts.tolist(), strict=False)
            for layer, chosen, counts in found:
                computed = [part for expert in counts for part in expert if part[0] >= 0]
                layer.add_counts([chosen], computed, len(computed))
        return through.stream
