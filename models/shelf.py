"""Where a checkpoint's files come from: a folder that holds all of them, or a hub from which they arrive one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100_000_000  # bytes: what the safetensors library itself reads at the most
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor as its file's header describes it.

    Attributes:
        dtype: safetensors' name of it, such as "BF16". start, end: its bytes, counted from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Shelf(Protocol):
    """A checkpoint's files as a packer asks for them.

    Attributes:
        name: for people. commit: of the published model, where there is one.
    """

    @property
    def name(self) -> str: ...

    @property
    def commit(self) -> str | None: ...

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """File -> tensor name -> its place, of every shard (see `is_shard`); known before the bytes are here.

        Raises:
            FloeError: there are no shards, or a header cannot be had or makes no sense.
        """
        ...

    def small(self, name: str) -> Path | None:
        """A file such as config.json, under its own name and fetched at once; None if the source lacks it."""
        ...

    def path(self, file: str) -> Path:
        """Where a shard lies; waits until all of it is here and verified. Serves any shard at any time.

        Raises:
            FloeError: it cannot be had.
        """
        ...

    def done(self, file: str) -> None:
        """Nobody reads this shard again; one that was fetched may be deleted."""
        ...

    def order(self, files: Sequence[str]) -> None:
        """In which order shards will be asked for: fetch ahead, but leave at most two unread ones on the disk."""
        ...


def is_shard(name: str) -> bool:
    """Whether a file of a published model holds its weights in transformers' layout."""
    return name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")


def parse_header(file: str, head: bytes, size: int) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file, by name.

    Args:
        file: its name. head: its first bytes, 8 + `header_bytes` of them or more. size: bytes of the whole file.

    Raises:
        CheckpointError: this is not the beginning of such a file, or the file is not as long as it says.
    """
    try:
        length = header_bytes(file, head)
        places = _places(json.loads(head[8 : 8 + length]), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(file, f"Its header makes no sense: {error}.") from error
    end = max((place.end for place in places.values()), default=8 + length)
    if size != end:
        raise _unreadable(file, f"It has {size:,} bytes instead of {end:,}.")
    return places


def header_bytes(file: str, head: bytes) -> int:
    """Length of the header that follows a safetensors file's first 8 bytes.

    Raises:
        CheckpointError: there are no 8 bytes, or the number is absurd.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or not 2 <= length <= _MOST_HEADER:
        raise _unreadable(file, "It is not a safetensors file.")
    return length


def _places(header: dict[str, Any], base: int) -> dict[str, TensorPlace]:
    """Sorted by name, as the safetensors library lists them."""
    places: dict[str, TensorPlace] = {}
    for name, entry in sorted(header.items()):
        if name == "__metadata__":
            continue
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
        bits = _BITS.get(dtype, 8 * (end - start) // max(1, math.prod(shape)))
        if start < 0 or min(shape, default=0) < 0 or 8 * (end - start) != bits * math.prod(shape):
            raise ValueError(f"{name} of {shape} {dtype} cannot take the bytes {start} to {end}")
        places[name] = TensorPlace(dtype, shape, base + start, base + end)
    return places


class FolderShelf:
    """A folder that holds a whole checkpoint. It is only read."""

    commit: str | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        shards = sorted(path for path in self.folder.glob("*.safetensors") if is_shard(path.name))
        if not shards:
            pickles = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(pattern)]
            raise CheckpointError(
                f"The checkpoint at {self.folder} has no safetensors files",
                f"It has {pickles[0]}, but pickle files can run code and are never read." if pickles else "",
                "Download the *.safetensors files of the model.",
            )
        return {path.name: self._header(path) for path in shards}

    def _header(self, path: Path) -> dict[str, TensorPlace]:
        try:
            with path.open("rb") as file:
                head = file.read(8)
                return parse_header(path.name, head + file.read(header_bytes(path.name, head)), path.stat().st_size)
        except OSError as error:
            raise _unreadable(path.name, f"{error.strerror or error}.") from error

    def small(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.is_file() else None

    def path(self, file: str) -> Path:
        return self.folder / file

    def done(self, file: str) -> None:
        pass

    def order(self, files: Sequence[str]) -> None:
        pass


def _unreadable(file: str, cause: str) -> CheckpointError:
    return CheckpointError(f"{file} of the checkpoint cannot be read", cause, "Download that file again.")
