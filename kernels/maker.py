"""Whose graphics cards torch was built for. AMD's are named "cuda" by torch too; here is what differs."""

from __future__ import annotations

import torch


def is_amd() -> bool:
    """Whether torch computes on AMD's cards, by ROCm."""
    return torch.version.hip is not None


def has_ptx() -> bool:
    """Whether kernels may use instructions of NVIDIA's."""
    return torch.version.hip is None and torch.version.xpu is None


def without() -> str:
    """Why torch computes on no card that we use; "" if it was built for some."""
    if torch.version.xpu is not None:
        return "this torch is built for Intel's cards, which floe-chat does not use yet"
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA"
    return ""


def architecture(index: int) -> str:
    """What kernels are compiled for on a card, such as gfx1100 or compute capability 8.9; the card is not touched."""
    if is_amd():
        return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"compute capability {major}.{minor}"
