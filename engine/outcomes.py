"""Explains failures that no check can rule out: memory that runs out, and files that can no longer be read."""

from __future__ import annotations

from ..models.errors import FloeError

_ON_CPU = "can't allocate memory"  # the message of torch's RAM allocator, in a plain RuntimeError


def explained(error: BaseException) -> FloeError | None:
    """An explanation of an error that is not a bug of the program; None for any other error.

    torch is not imported here, so its error is known by name.
    """
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
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
