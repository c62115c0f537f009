"""A short convolution of a few tokens, gated before and behind (LFM2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import Stateful
from .grouped import KeptTokens


@dataclass(frozen=True, slots=True)
class Convolution(Stateful):
    """y = c * conv(b * x), where the first projection gives b, c and x, H numbers each.

    Attributes:
        conv: (taps, H), the oldest token's factors first. bias: (H,) of its result.
    """

    conv: Tensor
    bias: Tensor | None = None

    @property
    def state(self) -> int:
        """Numbers of a text's state: b * x of the tokens before."""
        taps, channels = self.conv.shape
        return (taps - 1) * channels

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of the layer's first projection, and columns of the one back."""
        channels = self.conv.shape[-1]
        return 3 * channels, channels


def convolution(
    given: Tensor,
    before: Tensor,
    mixer: Convolution,
    after: Tensor,
    along: Mapping[int, Tensor] = MappingProxyType({}),
) -> Tensor:
    """given (T, 3 H), as projected -> (T, H). before: (numbers,) the state before these tokens. after: where the one
    behind them goes. along: where those behind so many of them go.
    """
    taps, channels = mixer.conv.shape
    b, c, x = given.split(channels, 1)
    inside = torch.cat([before.view(taps - 1, channels).to(given.dtype), b * x])
    weight, bias = mixer.conv.T[:, None].to(given.dtype), None if mixer.bias is None else mixer.bias.to(given.dtype)
    out = F.conv1d(inside.T[None], weight, bias, groups=channels)[0].T
    for end, copy in (*along.items(), (len(given), after)):
        copy.copy_(inside[end : end + taps - 1].flatten())
    return c * out


def convolve_one(given: Tensor, kept: KeptTokens, layer: int, mixer: Convolution) -> Tensor:
    """`convolution` with position and address read from memory, on the CPU; see `kernels.convolve_one`."""
    before, after = kept.states(layer, mixer.state)
    return convolution(given, before, mixer, after)
