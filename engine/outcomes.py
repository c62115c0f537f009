"""Explains failures that no check can rule out: memory that runs out, and files that can no longer be read."""

from __future__ import annotations

from ..models.errors import FloeError

# Of a plain RuntimeError, where a library of the card finds no memory for a workspace or a kernel's code.
_ON_CARD = "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory"
_ON_CPU = "can't allocate memory"  # the message of torch's RAM allocator, in a plain RuntimeError


def ran_out(error: BaseException) -> bool:
    """Whether a card's memory was too small. torch is not imported here, so its error is known by name."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return "OutOfMemoryError" in kinds or any(words in str(error) for words in _ON_CARD)


def explained(error: BaseException) -> FloeError | None:
    """An explanation of an error that is not a bug of the program; None for any other error."""
    if ran_out(error):
        return FloeError(
            "The graphics card ran out of memory",
            "The model, this chat and the computation need more memory than floe-chat may use.",
            "Start a new chat, close other programs that use the card, or load the model with a lower --vram: more of "
            "it then stays in RAM.",
        )
    if isinstance(error, MemoryError) or _ON_CPU in str(error):
        return FloeError(
            "This computer ran out of memory",
            "The model, this chat and other programs need more RAM than there is.",
            "Close other programs, start a new chat, or choose a smaller model.",
        )
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return FloeError(
            "The model's files cannot be read",
            f"{file}{error.strerror or error}.",
            "Check that the disk with the model is there, then run `floe-chat verify`.",
        )
    return None
