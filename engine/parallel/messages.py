"""What process 0 tells the others: small records, written by msgspec."""

from __future__ import annotations

import msgspec

from ..events import Advanced, SpreadBy
from ..quality_presets import Preset

PROTOCOL = 1
"""Changes whenever processes of two versions would not understand each other."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Open a model: its name as `catalog.find` takes it, and how; see `events.Load`."""

    model: str
    preset: str | None
    device: str
    vram: int | None
    advanced: Advanced
    spread: SpreadBy


class Pass(msgspec.Struct, frozen=True, tag=True):
    """Compute `ids` behind the first `start` tokens of conversation `kv`.

    Attributes:
        counting: see `Control`. preset: what a token may skip from now on; None: as before. gone: conversations that
            are not needed any more.
    """

    kv: int
    start: int
    ids: tuple[int, ...]
    counting: bool = False
    preset: Preset | None = None
    gone: tuple[int, ...] = ()


class Look(msgspec.Struct, frozen=True, tag=True):
    """Find the first part of the model whose values for these tokens are not finite."""

    ids: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Unload the model."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The program ends."""


class Ready(msgspec.Struct, frozen=True):
    """What each process reports once it has opened a model, or could not.

    Attributes:
        seal: of the pack's manifest. window: tokens of the longest chat. place: torch's name of the device. title,
            cause, hint: of the error; "" if there was none.
    """

    seal: str = ""
    window: int = 0
    place: str = ""
    title: str = ""
    cause: str = ""
    hint: str = ""
    exit_code: int = 1


class Hello(msgspec.Struct, frozen=True):
    """Who a process is, before it joins. started: when it began, in seconds since 1970."""

    protocol: int
    host: str
    pid: int
    started: float


Message = Open | Pass | Look | Forget | End
_reader = msgspec.msgpack.Decoder(Message)


def written(message: Message) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(message)


def read(content: bytes) -> Message:
    """What process 0 has written."""
    return _reader.decode(content)
