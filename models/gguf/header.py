"""The header of a GGUF file, read by ourselves: each count, length and offset is checked against the file's size before
it is used, and only the header's own bytes are read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Protocol

from .. import private_file
from ..errors import CheckpointError

Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]
"""Of metadata."""

_VERSIONS = (2, 3)
_MOST_HEADER = 256 << 20  # bytes: vocabularies and merges take 20 MB
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18  # DeepSeek-V3 with its experts apart has 50,000
_MOST_ELEMENTS = 1 << 22  # of all arrays together
_MOST_TEXT = 1 << 24  # bytes
_MOST_NAME = 1 << 10
_MOST_DIMENSIONS = 4
_LARGEST = 1 << 50  # of a size or an offset
_MOST_QUOTED = 100  # characters of a name in an error
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # bytes of an entry
_LEAST_KEY = 8 + 1 + 4 + 1

_TEXT, _ARRAY, _FLOAT32, _FLOATS = 8, 9, 6, (6, 12)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", _FLOAT32: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Types that are no weights, or whose values need a second tensor.
_NO_WEIGHTS = {"Q8_1", "Q8_K", "Q1_0", "NVFP4", "I8", "I16", "I32", "I64", "F64"}


class Bytes(Protocol):
    """Where a file's bytes come from."""

    @property
    def name(self) -> str: ...

    def fill(self, start: int, into: memoryview) -> int:
        """Fill `into` with the file's bytes from `start` on; how many there were.

        Raises:
            OSError: of the disk. FloeError: they are not available.
        """
        ...


@dataclass(frozen=True, slots=True)
class OnDisk:
    """The bytes of a file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def fill(self, start: int, into: memoryview) -> int:
        """See `Bytes.fill`."""
        with self.path.open("rb") as file:
            file.seek(start)
            return file.readinto(into)  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
        kind: ggml's name of its type, such as "Q4_K". shape: as torch has it, the widest stride first.
        file: that holds it. start: of its bytes in there.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Bytes
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself. path: of it, here or in a repository. values: its metadata."""

    path: PurePath
    values: dict[str, Value]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> Header:
    """The header of a GGUF file.

    Raises:
        CheckpointError: it is none, is damaged, or says what cannot be; the cause is one sentence.
    """
    try:
        private_file.need_ordinary(path)
        with path.open("rb", buffering=1 << 20) as file:
            return parsed(path, OnDisk(path), file, path.stat().st_size)
    except OSError as error:
        raise unreadable(path, f"{error.strerror or error}.") from error


def parsed(path: PurePath, holder: Bytes, beginning: Beginning, size: int) -> Header:
    """The header of a file of `size` bytes. beginning: is read as far as the header goes. holder: of its tensors.

    Raises:
        CheckpointError: as `read_header`.
    """
    try:
        return _read(path, holder, _Reader(beginning, size))
    except _BadHeaderError as error:
        raise unreadable(path, f"{error}") from error


class Beginning(Protocol):
    """A file that is read from its beginning on."""

    def read(self, count: int, /) -> bytes: ...


def unreadable(file: PurePath | Bytes, cause: str) -> CheckpointError:
    """The error for a file that is damaged, and not of a kind that is not supported."""
    return CheckpointError(f"{file.name} cannot be read", cause, "Download that file again.")


def undescribed(path: PurePath, error: CheckpointError) -> CheckpointError:
    """The error for a file whose metadata gives a config.json that is refused, for which `error` blames that one."""
    return CheckpointError(
        f"{path.name} cannot be read",
        f"Its header does not describe a model that works: {error.cause or error.title}",
        "Use another file of this model, or its original checkpoint.",
    )


class _BadHeaderError(Exception):
    """Why a header is wrong, in a sentence."""


class _Reader:
    """Reads a header from its beginning, never beyond the file's end."""

    def __init__(self, file: Beginning, size: int) -> None:
        self._file, self.size, self.at = file, size, 0
        self._elements = _MOST_ELEMENTS

    def need(self, count: int) -> None:
        """Raises: _BadHeaderError: the file, or a header of a sensible size, does not have so many more bytes."""
        if count > self.size - self.at:
            raise _BadHeaderError(f"Its header goes on behind its end at {self.size:,} bytes: it is cut off.")
        if self.at + count > _MOST_HEADER:
            raise _BadHeaderError(f"Its header has more than {_MOST_HEADER >> 20} MB.")

    def take(self, count: int) -> bytes:
        self.need(count)
        found = self._file.read(count)
        if len(found) != count:
            raise _BadHeaderError("It became shorter while it was read.")
        self.at += count
        return found

    def number(self, form: str) -> int | float | bool:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def count(self, what: str, most: int, least_bytes: int = 1) -> int:
        """A number of 64 bits that counts things of at least so many bytes each."""
        count = int(self.number("Q"))
        if count > most:
            raise _BadHeaderError(f"Its header claims {count:,} {what}.")
        self.need(count * least_bytes)
        return count

    def text(self, most: int = _MOST_TEXT) -> str:
        raw = self.take(self.count("bytes of one text", most))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _BadHeaderError(f"Its header holds a text that is not UTF-8: {_quoted(repr(raw))}.") from None

    def value(self) -> Value:
        kind = int(self.number("I"))
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _BadHeaderError(f"Its header holds a value of the unknown type {kind}.")
        found = self.number(_SCALARS[kind])
        return shortest(float(found)) if kind == _FLOAT32 else found

    def _array(self) -> Value:
        kind = int(self.number("I"))
        if kind == _TEXT:
            count = self.count("texts", self._elements, 8)
            self._elements -= count
            return [self.text() for _ in range(count)]
        if kind not in _SCALARS:
            raise _BadHeaderError(f"Its header holds a list of values of the unknown type {kind}.")
        form = _SCALARS[kind]
        size = struct.calcsize("<" + form)
        count = self.count("values of one list", self._elements, size)
        self._elements -= count
        return list(struct.unpack(f"<{count}{form}", self.take(count * size)))


def shortest(value: float) -> float:
    """The decimal number that somebody meant by this one of 32 bits: 1e-06, and not 9.999999974752427e-07."""
    for digits in range(6, 9):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value


def _read(path: PurePath, holder: Bytes, reader: _Reader) -> Header:
    if reader.size < 4 or reader.take(4) != b"GGUF":
        raise _BadHeaderError("It is not a GGUF file.")
    version = int(reader.number("I"))
    if version not in _VERSIONS:
        if not version & 0xFFFF:
            raise _BadHeaderError("It is a big-endian GGUF file, which only machines of that byte order use.")
        raise _BadHeaderError(f"It is GGUF version {version:,}; versions 2 and 3 can be read.")
    count = reader.count("tensors", _MOST_TENSORS)
    keys = reader.count("keys", _MOST_KEYS, _LEAST_KEY)
    values: dict[str, Value] = {}
    for _ in range(keys):
        key = reader.text(_MOST_NAME)
        if key in values:
            raise _BadHeaderError(f"Its header has the key {_quoted(key)} twice.")
        values[key] = reader.value()
    reader.need(count * _LEAST_TENSOR)
    tensors: dict[str, GgufTensor] = {}
    size_of = _sizes()
    for _ in range(count):
        tensor = _tensor(holder, reader, size_of)
        if tensor.name in tensors:
            raise _BadHeaderError(f"Its header has the tensor {_quoted(tensor.name)} twice.")
        tensors[tensor.name] = tensor
    return Header(path, values, _placed(tensors, values.get("general.alignment", 32), reader))


def _sizes() -> Callable[[int], tuple[str, int, int] | None]:
    """Number of a type -> its name, and the values and bytes of a block; None if there is no such type."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}.get


def _tensor(file: Bytes, reader: _Reader, size_of: Callable[[int], tuple[str, int, int] | None]) -> GgufTensor:
    name = reader.text(_MOST_NAME)
    dimensions = int(reader.number("I"))
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _BadHeaderError(f"Its tensor {_quoted(name)} has {dimensions:,} dimensions.")
    shape = tuple(int(reader.number("Q")) for _ in range(dimensions))[::-1]
    number, start = int(reader.number("I")), int(reader.number("Q"))
    if not all(1 <= size <= _LARGEST for size in (*shape, math.prod(shape), start + 1)):
        raise _BadHeaderError(f"Its tensor {_quoted(name)} has an impossible size or place.")
    if (found := size_of(number)) is None:
        raise _BadHeaderError(f"Its tensor {_quoted(name)} is of type {number}, which is not known.")
    kind, values, nbytes = found
    if kind in _NO_WEIGHTS:
        raise _BadHeaderError(f"Its tensor {_quoted(name)} is of type {kind}, which is not read.")
    if shape[-1] % values:
        raise _BadHeaderError(f"A row of its tensor {_quoted(name)} is no whole number of {kind} blocks.")
    return GgufTensor(name, kind, shape, file, start, math.prod(shape) // values * nbytes)


def _placed(tensors: dict[str, GgufTensor], alignment: Value, reader: _Reader) -> dict[str, GgufTensor]:
    """The tensors with places counted from the beginning of the file, which has room for all of them."""
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise _BadHeaderError("Its alignment is not a power of two.")
    base = -(-reader.at // alignment) * alignment
    placed = {name: replace(tensor, start=base + tensor.start) for name, tensor in tensors.items()}
    last = base
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.start):
        if tensor.start % alignment or tensor.start < last:
            raise _BadHeaderError(f"Its tensor {_quoted(tensor.name)} is not where it could be: {tensor.start:,}.")
        last = tensor.start + tensor.nbytes
    if placed and last > reader.size:
        raise _BadHeaderError(f"It has {reader.size:,} bytes; its header needs {last:,}.")
    return placed


def _quoted(text: str) -> str:
    return repr(text[:_MOST_QUOTED])
