"""What the weights of a GGUF file were rounded to, in the words of those who made it."""

from __future__ import annotations

from collections import Counter

from ..families import FAMILIES
from .names import is_expert
from .parts import Gguf

_AS_PUBLISHED = ("F32", "F16", "BF16")
_LEAST_BITS = 8.0  # per weight, below which another file is recommended


def rounding(gguf: Gguf, model_type: str) -> str:
    """Such as "Q4_K_M"; "" where all weights have 16 bits or more, or the blocks that they were published in."""
    coded = type(FAMILIES[model_type].stored[0]).__name__ == "Mxfp4"
    weights = Counter[str]()
    for name, tensor in gguf.tensors.items():
        published = tensor.kind in _AS_PUBLISHED or (coded and tensor.kind == "MXFP4" and is_expert(name))
        if not published:
            weights[tensor.kind] += tensor.nbytes
    if not weights:
        return ""
    (most, _), *_ = weights.most_common(1)
    named = _named(gguf)
    return named if named.startswith(most) or most.startswith(named[:3]) else most


def _named(gguf: Gguf) -> str:
    """The file's own word for it; a type's name otherwise."""
    from gguf.constants import LlamaFileType

    stated = gguf.values.get("general.file_type")
    try:
        return LlamaFileType(stated).name.removeprefix("MOSTLY_")
    except ValueError:
        return "?"


def bits(gguf: Gguf) -> float:
    """Bits per weight of the matrices, on average."""
    matrices = [tensor for tensor in gguf.tensors.values() if len(tensor.shape) > 1]
    count = sum(_values(tensor.shape) for tensor in matrices)
    return 8 * sum(tensor.nbytes for tensor in matrices) / max(1, count)


def is_coarse(gguf: Gguf, model_type: str) -> bool:
    """Whether a file of Q8_0 or 16 bits keeps noticeably more of the model."""
    return bool(rounding(gguf, model_type)) and bits(gguf) < _LEAST_BITS


def _values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
