"""Launches one token of the mixers that keep a state."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..mixers.convolution import Convolution
from ..mixers.delta import Delta
from ..mixers.grouped import KeptTokens
from . import launch
from .recurrent import DeltaShape, convolve_kernel, delta_kernel

# Numbers of a head's state for each warp: 32 registers of a thread. With 64, more than 180 would be needed in all.
STATE_OF_WARP, MOST_WARPS = 1024, 16
CHANNELS = 128  # of a program of the convolution


def delta_one(qkv: Tensor, gates: Tensor, kept: KeptTokens, layer: int, delta: Delta) -> Tensor:
    """See `kernels.delta_one`. Reads position and address on the device, so that it can be captured.

    Raises:
        ValueError: tensors that are not on the device.
    """
    launch.check_device(qkv.device)
    taps, channels = delta.conv.shape
    group, keys, values = delta.heads // delta.shared, delta.key_dim, delta.value_dim
    shape = DeltaShape(delta.heads, group, keys, values, taps, channels, delta.eps, kept.ring)
    tile = triton.next_power_of_2(keys), triton.next_power_of_2(values)
    y = torch.empty(1, delta.heads * values, dtype=qkv.dtype, device=qkv.device)
    with launch.on(qkv.device):
        delta_kernel[(delta.heads,)](
            *(qkv, gates, kept.addresses, kept.position, delta.conv, delta.decay, delta.bias, delta.norm, y, layer),
            *(shape, *tile),
            num_warps=max(1, min(MOST_WARPS, tile[0] * tile[1] // STATE_OF_WARP)),
        )
    return y


def convolve_one(given: Tensor, kept: KeptTokens, layer: int, mixer: Convolution) -> Tensor:
    """See `kernels.convolve_one`. Reads position and address on the device, so that it can be captured.

    Raises:
        ValueError: tensors that are not on the device.
    """
    launch.check_device(given.device)
    (taps, channels), biased = mixer.conv.shape, mixer.bias is not None
    y = torch.empty(1, channels, dtype=given.dtype, device=given.device)
    block = launch.block_of(channels, CHANNELS)
    with launch.on(given.device):
        convolve_kernel[(triton.cdiv(channels, block),)](
            *(given, kept.addresses, kept.position, mixer.conv, mixer.bias if biased else given, y, layer),
            *(taps, channels, biased, kept.ring, block),
        )
    return y
