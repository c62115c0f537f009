"""Whose graphics cards torch was built for. AMD's are named "cuda" by torch too; here is what differs."""

from __future__ import annotations

from functools import cache

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


def reaches(card: torch.device | str | int, capability: tuple[int, int]) -> bool:
    """Whether a card is one of NVIDIA's, and of this compute capability or newer; the card is not touched."""
    return not is_amd() and torch.cuda.get_device_capability(card) >= capability


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    # Under the interpreter any number will do; a small one keeps it quick.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
