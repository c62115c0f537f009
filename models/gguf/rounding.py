"""What the weights of a GGUF file were rounded to, in the words of those who made it."""

from __future__ import annotations

import math
from collections import Counter

from ..families import family_of
from ..families.storage import Mxfp4
from .header import GgufTensor
from .names import is_expert
from .parts import Gguf

_AS_PUBLISHED = ("F32", "F16", "BF16")
_LEAST_BITS = 8.0  # per weight, below which another file keeps noticeably more


def rounding(gguf: Gguf, model_type: str) -> str:
    """Such as "Q4_K_M"; "" where all weights have 16 bits or more, or the blocks that they were published in."""
    weights = Counter[str]()
    for tensor in _rounded(gguf, model_type):
        weights[tensor.kind] += tensor.nbytes
    if not weights:
        return ""
    ((most, _),) = weights.most_common(1)
    named = _named(gguf)
    alike = named.startswith("IQ") and named.partition("_")[0] == most.partition("_")[0]  # such as IQ2_M of IQ2_S
    return named if named.startswith(most) or alike else most


def is_coarse(gguf: Gguf, model_type: str) -> bool:
    """Whether a file of Q8_0 or 16 bits would keep noticeably more of the model."""
    rounded = _rounded(gguf, model_type)
    count = sum(math.prod(tensor.shape) for tensor in rounded)
    return 8 * sum(tensor.nbytes for tensor in rounded) < _LEAST_BITS * count


def _rounded(gguf: Gguf, model_type: str) -> list[GgufTensor]:
    in_blocks = isinstance(family_of(model_type).stored[0], Mxfp4)
    return [
        tensor
        for name, tensor in gguf.tensors.items()
        if tensor.kind not in _AS_PUBLISHED and not (in_blocks and tensor.kind == "MXFP4" and is_expert(name))
    ]


def _named(gguf: Gguf) -> str:
    """The file's own word for it, "" where it has none."""
    from gguf.constants import LlamaFileType

    try:
        return LlamaFileType(gguf.values.get("general.file_type")).name.removeprefix("MOSTLY_")
    except ValueError:
        return ""
