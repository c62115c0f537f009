"""Which of several processes this one is, from the environment that torchrun sets. Importing this file is cheap."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...models.errors import UsageError

MOST = 1024  # processes
STALL, STALL_S = "FLOE_CHAT_STALL_S", 60
PATTERNS = ("ep", "etp", "s-etp", "tp")
"""How experts are divided: `Spread.of` explains them."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among `size` of them.

    Attributes:
        rank: its number; 0 leads. local: its number on its machine. beside: processes of this machine, 0 if not known.
        stall: seconds that a process may take for its part of a layer; experts may first have to come from a disk.
    """

    rank: int
    size: int
    local: int = 0
    beside: int = 0
    stall: int = STALL_S

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> World | None:
        """By WORLD_SIZE, RANK and LOCAL_RANK, and FLOE_CHAT_STALL_S; None where this process is alone.

        Raises:
            UsageError: they are no numbers, or do not fit each other.
        """
        if environment.get("WORLD_SIZE", "1") == "1":
            return None
        size, rank = _number(environment, "WORLD_SIZE", MOST + 1), _number(environment, "RANK", MOST)
        if rank >= size:
            raise _wrong("RANK", str(rank), f"of {size} processes, the last is {size - 1}")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise _wrong(name, "", "all processes meet at the address and port of process 0")
        local = _number(environment, "LOCAL_RANK", MOST) if "LOCAL_RANK" in environment else rank
        beside = _number(environment, "LOCAL_WORLD_SIZE", MOST + 1) if "LOCAL_WORLD_SIZE" in environment else 0
        stall = _number(environment, STALL, 1 << 16) if STALL in environment else STALL_S
        return cls(rank, size, local, beside, max(1, stall))


def _number(environment: Mapping[str, str], name: str, beyond: int) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < beyond):
        raise _wrong(name, text, f"it is a whole number below {beyond:,}")
    return int(text)


def _wrong(name: str, text: str, why: str) -> UsageError:
    return UsageError(
        f"{name} is {text!r} in the environment" if text else f"{name} is not set in the environment",
        f"With WORLD_SIZE, floe-chat is one of several processes: {why}.",
        "Start all of them with torchrun, which sets these variables, or unset WORLD_SIZE.",
    )
