"""The sources of a checkpoint's files: a folder with all of them, or a hub from which they arrive one by one."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
SAMPLE = 4096  # bytes of each tensor that `Shelf.sample` reads
_MOST_HEADER = 16 << 20  # bytes: 100,000 tensors; parsed, a header takes ten times as much
_LARGEST = 1 << 50  # of a size or an offset
_MOST_DIMENSIONS = 16
_MOST_QUOTED = 100  # characters of a name in an error
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
    """A checkpoint's files, in the interface that a packer needs.

    Attributes:
        name: for people. commit: of the published model, where there is one. rounding: what its weights were rounded to
            since they were published, such as "Q4_K_M"; "" where they are as published.
    """

    @property
    def name(self) -> str: ...

    @property
    def commit(self) -> str | None: ...

    @property
    def rounding(self) -> str: ...

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """File -> tensor name -> its place, of every shard (see `is_shard`); known before the bytes are here.

        Raises:
            FloeError: there are no shards, or a header cannot be read or makes no sense.
        """
        ...

    def small(self, name: str) -> Path | None:
        """The path of a file such as config.json, fetched at once; None if the source lacks it."""
        ...

    def path(self, file: str) -> Path:
        """The path of a shard; waits until all of it is here and verified. Any shard may be asked for at any time.

        Raises:
            FloeError: it is not available.
        """
        ...

    def files(self, name: str, file: str) -> list[str]:
        """What has to be here to read a tensor that `headers` has in `file`: the names that `order` and `done` get."""
        ...

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """Fill `into` with a tensor's bytes, or with those of number `index` of the tensors that it consists of.

        Args:
            name: of the tensor. file, place: where `headers` has it.

        Raises:
            FloeError: its shard is not available, or damaged.
        """
        ...

    def sample(self, name: str, file: str, place: TensorPlace) -> bytes:
        """The first bytes of a tensor, by which a changed file is noticed.

        Raises:
            FloeError: as `read`.
        """
        ...

    def done(self, file: str) -> None:
        """Called when a shard will not be read again; if it was downloaded, it may be deleted."""
        ...

    def order(self, files: Sequence[str]) -> None:
        """Announce the order in which shards will be read: fetch ahead, with at most two unread ones on the disk."""
        ...


class Around:
    """What a `Shelf` around another one leaves to it."""

    def __init__(self, shelf: Shelf, rounding: str) -> None:
        self.name, self.commit, self.rounding = shelf.name, shelf.commit, rounding
        self._shelf = shelf

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """See `Shelf.headers`: as stored."""
        return self._shelf.headers()

    def small(self, name: str) -> Path | None:
        """See `Shelf.small`."""
        return self._shelf.small(name)

    def path(self, file: str) -> Path:
        """See `Shelf.path`."""
        return self._shelf.path(file)

    def done(self, file: str) -> None:
        """See `Shelf.done`."""
        self._shelf.done(file)

    def order(self, files: Sequence[str]) -> None:
        """See `Shelf.order`."""
        self._shelf.order(files)


def is_shard(name: str) -> bool:
    """Whether a file of a published model holds its weights in transformers' layout."""
    return name.endswith(".safetensors") and "/" not in name and not name.startswith("consolidated")


def parse_header(file: str, head: bytes, size: int) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file, by name.

    Args:
        file: its name. head: its first bytes, 8 + `header_bytes` of them or more. size: bytes of the whole file.

    Raises:
        CheckpointError: this is not the beginning of such a file, or the file has another size than it says.
    """
    try:
        length = header_bytes(file, head)
        places = _places(json.loads(head[8 : 8 + length]), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(file, f"Its header is invalid ({type(error).__name__}): {error}.") from error
    end = max((place.end for place in places.values()), default=8 + length)
    if size != end:
        raise _unreadable(file, f"It has {size:,} bytes; its header needs {end:,}.")
    return places


def header_bytes(file: str, head: bytes) -> int:
    """Length of the header that follows a safetensors file's first 8 bytes.

    Raises:
        CheckpointError: there are no 8 bytes, or the number cannot be a length.
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
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if not isinstance(dtype, str) or len(shape) > _MOST_DIMENSIONS or not _sensible(*shape, start, end):
            raise ValueError(f"{_quoted(name)} has no type, shape or place")
        count = math.prod(shape)
        bits = _BITS.get(dtype) or 8 * (end - start) // max(1, count)
        if 8 * (end - start) != bits * count:
            raise ValueError(f"{_quoted(name)} of {shape} {_quoted(dtype)} does not fit the bytes {start:,} to {end:,}")
        places[name] = TensorPlace(dtype, shape, base + start, base + end)
    return places


def _sensible(*sizes: object) -> bool:
    return all(type(size) is int and 0 <= size <= _LARGEST for size in sizes)


def _quoted(text: str) -> str:
    return repr(text[:_MOST_QUOTED])


class Shards(ABC):
    """How a `Shelf` of safetensors files reads tensors; the rest is up to its subclasses."""

    rounding = ""

    @abstractmethod
    def path(self, file: str) -> Path:
        """See `Shelf.path`."""

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`."""
        return [file]

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """See `Shelf.read`."""
        path = self.path(file)
        try:
            with path.open("rb") as shard:
                shard.seek(place.start + (index or 0) * len(into))
                read = shard.readinto(into)
        except OSError as error:
            raise _unreadable(file, f"{error.strerror or error}.") from error
        if read != len(into):
            raise _unreadable(file, f"It ends inside {name}.")

    def sample(self, name: str, file: str, place: TensorPlace) -> bytes:
        """See `Shelf.sample`."""
        try:
            with self.path(file).open("rb") as shard:
                shard.seek(place.start)
                return shard.read(min(SAMPLE, place.end - place.start))
        except OSError as error:
            raise _unreadable(file, f"{name}: {error.strerror or error}.") from error


class FolderShelf(Shards):
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
                f"It has {pickles[0]}, but pickle files can run code, so they are never read." if pickles else "",
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
