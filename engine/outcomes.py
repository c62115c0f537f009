"""Explains failures that no check can rule out: of memory, of a graphics card, and of files that are gone."""

from __future__ import annotations

from ..models.errors import FloeError

# How errors of a card begin, in a plain RuntimeError or torch.AcceleratorError: torch's, Triton's and our link's.
_OF_CARD = "CUDA error:", "CUDA driver error:", "HIP error:", "Triton Error [", "the GPU's driver:"
_ALLOCATION = "CUBLAS_STATUS_ALLOC_FAILED"  # a library of the card finds no memory for its workspace
_ON_CPU = "can't allocate memory"  # the message of torch's RAM allocator, in a plain RuntimeError
# What is known about some of them: a part of the driver's text, and what it means.
_MEANINGS = (
    ("timed out", "The system ends computations on a card that drives a display after some seconds."),
    ("ECC", "The card's memory has a fault: restart the computer, and have the card checked if it happens again."),
    (
        "is lost",
        _AWAY := "The card is no longer there: a driver's update or reset, sleep, heat or its power does that.",
    ),
    ("unavailable", _AWAY),
    ("no CUDA-capable device", _AWAY),
    ("no ROCm-capable device", _AWAY),
)
_OTHERWISE = "A card that is overclocked or too hot, its driver, or a bug in floe-chat does that; the log has details."


def brief(error: BaseException) -> str:
    """The first line of what a library said: others say how to search for it. Its class, if it said nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def ran_out(error: BaseException) -> bool:
    """Whether a card's memory was too small. torch is not imported here, so its error is known by name."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "OutOfMemoryError" in kinds or _ALLOCATION in str(error):
        return True
    # Our link does not go on after an error, so more memory would not help it.
    return "out of memory" in str(error) and str(error).startswith(_OF_CARD[:-1])


def card_failed(error: BaseException) -> str:
    """What a card's driver reported, other than too little memory, in one line; "" for every other error."""
    line = brief(error)
    return line if isinstance(error, RuntimeError) and line.startswith(_OF_CARD) and not ran_out(error) else ""


def card_lost(reported: str) -> FloeError:
    """The error of all answers once a card's driver refuses this process; reported: see `card_failed`."""
    return FloeError(
        "The graphics card no longer answers floe-chat",
        _cause(reported),
        "Start floe-chat again: its driver accepts only a new process. All chats are saved.",
    )


def _cause(reported: str) -> str:
    meaning = next((meaning for part, meaning in _MEANINGS if part in reported), _OTHERWISE)
    return f"{reported.rstrip('.')}. {meaning}"


def explained(error: BaseException) -> FloeError | None:
    """An explanation of an error that is not a bug of the program; None for any other error."""
    if ran_out(error):
        return FloeError(
            "The graphics card ran out of memory",
            "The model, this chat and the computation need more memory than floe-chat may use.",
            "Start a new chat, close other programs that use the card, or load the model with a lower --vram: more of "
            "it then stays in RAM.",
        )
    if reported := card_failed(error):
        return FloeError(
            "The graphics card reported an error",
            _cause(reported),
            "Ask again. If it happens again, load the model again or start floe-chat again.",
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
