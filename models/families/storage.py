"""How a published checkpoint stores a layer's experts: names, shapes, and how an expert is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # the command line reads families before it needs torch
    from torch import Tensor

    Read = Callable[[str, int | None], Tensor]
    """A tensor by its published name, or a numbered one of those that it consists of."""

BLOCK = 32  # values of mxfp4 that share a scale
# The values of four bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling, table 5).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENT_BIAS = 127


class ExpertBiases(NamedTuple):
    """Of one expert: gate and up (F,), down (H,)."""

    gate: Tensor
    up: Tensor
    down: Tensor


class ExpertTensors(NamedTuple):
    """One expert: gate and up (F, H), down (H, F), in the checkpoint's type or what its codes stand for.

    A gate that it lacks is one zero, seen as (F, H), which nobody stores or multiplies.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: ExpertBiases | None = None


class Needed(NamedTuple):
    """A tensor that a layer has to have. codes: whether it holds bytes, and not numbers."""

    shape: tuple[int, ...]
    codes: bool = False


class Storage(Protocol):
    """One way. E experts, F neurons, H hidden size."""

    @property
    def together(self) -> bool:
        """Whether a tensor holds all experts of a layer."""
        ...

    def names(self, layer: int, expert: int) -> list[str]:
        """The published names of the tensors with an expert; `layer` is the decoder's."""
        ...

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """What each of these has to be."""
        ...

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """One expert."""
        ...


@dataclass(frozen=True, slots=True)
class Apart:
    """Three matrices for each expert.

    Attributes:
        name: with fields {layer}, {expert} and {part}. gate, up, down: what {part} is.
    """

    name: str = "model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    together: bool = False

    def names(self, layer: int, expert: int) -> list[str]:
        """See `Storage`."""
        parts = (self.gate, self.up, self.down)
        return [self.name.format(layer=layer, expert=expert, part=part) for part in parts]

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """See `Storage`."""
        wide = Needed((neurons, hidden))
        return [wide, wide, Needed((hidden, neurons))]

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """See `Storage`."""
        gate, up, down = (read(name, None) for name in self.names(layer, expert))
        return ExpertTensors(gate, up, down)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Gate above up in one tensor (E, 2 F, H) of all experts, down (E, H, F) in another.

    Attributes:
        name: with fields {layer} and {part}. both, down: what {part} is.
    """

    name: str
    both: str
    down: str
    together: bool = True

    def names(self, layer: int, expert: int) -> list[str]:
        """See `Storage`."""
        return [self.name.format(layer=layer, part=part) for part in (self.both, self.down)]

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """See `Storage`."""
        return [Needed((experts, 2 * neurons, hidden)), Needed((experts, hidden, neurons))]

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """See `Storage`."""
        both, down = (read(name, expert) for name in self.names(layer, expert))
        gate, up = both.chunk(2)
        return ExpertTensors(gate, up, down)


@dataclass(frozen=True, slots=True)
class Joined:
    """Gate above up in one tensor (2 F, H) for each expert, and down (H, F): what `converted.py` makes of others.

    Attributes:
        gated: whether there is a gate; else up (F, H) alone.
    """

    gated: bool = True
    together: bool = False

    def names(self, layer: int, expert: int) -> list[str]:
        """See `Storage`."""
        first = "gate_up" if self.gated else "up"
        return [f"model.layers.{layer}.experts.{expert}.{part}_proj" for part in (first, "down")]

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """See `Storage`."""
        return [Needed(((2 if self.gated else 1) * neurons, hidden)), Needed((hidden, neurons))]

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """See `Storage`."""
        both, down = (read(name, None) for name in self.names(layer, expert))
        gate, up = both.chunk(2) if self.gated else (both.new_zeros(()).expand(both.shape), both)
        return ExpertTensors(gate, up, down)


_GPT_OSS = "model.layers.{layer}.mlp.experts.{part}"


def _biases(both: Tensor, down: Tensor) -> ExpertBiases:
    return ExpertBiases(both[::2].float(), both[1::2].float(), down.float())


@dataclass(frozen=True, slots=True)
class Interleaved:
    """gpt-oss at 16 bits: columns of gate and up in turn (E, H, 2 F), down (E, F, H), and biases."""

    together: bool = True

    def names(self, layer: int, expert: int) -> list[str]:
        """See `Storage`."""
        parts = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        return [_GPT_OSS.format(layer=layer, part=part) for part in parts]

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """See `Storage`."""
        shapes = (hidden, 2 * neurons), (neurons, hidden), (2 * neurons,), (hidden,)
        return [Needed((experts, *shape)) for shape in shapes]

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """See `Storage`."""
        both, down, bias, down_bias = (read(name, expert) for name in self.names(layer, expert))
        gate, up = both[:, ::2].T.contiguous(), both[:, 1::2].T.contiguous()
        return ExpertTensors(gate, up, down.T, _biases(bias, down_bias))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss as published: rows of gate and up in turn, in blocks of 32 values of four bits with one exponent."""

    together: bool = True

    def names(self, layer: int, expert: int) -> list[str]:
        """See `Storage`."""
        parts = [f"{part}_proj_{kind}" for part in ("gate_up", "down") for kind in ("blocks", "scales", "bias")]
        return [_GPT_OSS.format(layer=layer, part=part) for part in parts]

    def needed(self, experts: int, neurons: int, hidden: int) -> list[Needed]:
        """See `Storage`."""
        found: list[Needed] = []
        for rows, columns in ((2 * neurons, hidden), (hidden, neurons)):
            blocks = (experts, rows, columns // BLOCK)
            found += [Needed((*blocks, BLOCK // 2), codes=True), Needed(blocks, codes=True), Needed((experts, rows))]
        return found

    def read(self, read: Read, layer: int, expert: int) -> ExpertTensors:
        """See `Storage`."""
        blocks, scales, bias, down_blocks, down_scales, down_bias = (
            read(name, expert) for name in self.names(layer, expert)
        )
        both = mxfp4_values(blocks, scales)
        return ExpertTensors(both[::2], both[1::2], mxfp4_values(down_blocks, down_scales), _biases(bias, down_bias))


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of blocks (N, n / 32, 16) uint8 by scales (N, n / 32) uint8: (N, n) bfloat16, which holds all of them
    exactly.
    """
    import torch

    values = fp4_values(blocks) * torch.exp2(scales.float() - EXPONENT_BIAS)[..., None]
    return values.flatten(-2).bfloat16()


def fp4_values(codes: Tensor) -> Tensor:
    """The float32 values (..., 2 n) of bytes (..., n), the lower four bits first."""
    import torch

    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
