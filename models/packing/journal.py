"""Records what an interrupted pack has finished: an append-only journal, and the state of calibration after the last
layer.

Both are in a folder of their own beside the pack's files until the manifest is written. A line is added only when the
bytes that it records are on the disk, so the journal holds after a kill or a power cut; a torn last line is ignored.
Lines and working tensors carry checksums: a pack that continued from damaged ones would be wrong, with valid checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...kernels.activation import Projection
from .. import private_file
from ..errors import FloeError, UsageError
from ..pack.manifest import FileEntry
from ..pack.tensor_file import TensorShapes, write_tensors

FOLDER = "packing"
Settings = dict[str, str | int | None]
_NAME = "journal.jsonl"
_DIGEST = "sha256"  # the working tensor that is the others' checksum
_LARGEST = 64 << 20  # bytes: 25 for each expert and each dense tensor
_WORDS = {  # the rest are parts and their widths
    "source": "source",
    "device": "device",
    "group": "group size",
    "signal": "signal",
    "rounding": "rounding",
}


class Journal:
    """The journal of one pack. Open it with `open`; safe to use from several threads.

    Attributes:
        folder: with the working files. settings: that the pack was started with. resumed: whether there was a journal.
        dense: published names of the finished dense tensors. experts: (layer, expert) of the finished experts.
        signals: layer -> the projection that is its signal. files: finished files of the pack, hashed.
        whole: layer -> whether its neurons may not be skipped.
        loses: the first tensor of the source that 16 bits do not hold, "" while there is none.
    """

    def __init__(self, folder: Path, settings: Settings, *, resumed: bool) -> None:
        self.folder, self.settings, self.resumed = folder, settings, resumed
        self.dense: set[str] = set()
        self.experts: set[tuple[int, int]] = set()
        self.signals: dict[int, Projection] = {}
        self.whole: dict[int, bool] = {}
        self.files: dict[str, FileEntry] = {}
        self.loses = ""
        self._lock = threading.Lock()

    @staticmethod
    def exists(pack: Path) -> bool:
        """Whether the folder of a pack has one."""
        return (pack / FOLDER / _NAME).is_file()

    @classmethod
    def open(cls, pack: Path, settings: Settings) -> Journal:
        """Continue the journal in the folder of a pack, or start one.

        The number of threads may differ: sums depend on it, so the journal's number is used.

        Raises:
            UsageError: the pack was started with other settings; says which. FloeError: the journal is damaged.
        """
        path = pack / FOLDER / _NAME
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            with private_file.replacing(path, private_file.SHARED) as partial:
                _write_line(partial, {"settings": settings})
            return cls(path.parent, settings, resumed=False)
        try:
            whole, _, torn = private_file.read(path, _LARGEST).rpartition(b"\n")
            first, *lines = [_read_line(line) for line in whole.splitlines()]
            begun: Settings = dict(first["settings"])
            journal = cls(path.parent, begun, resumed=True)
            for line in lines:
                journal._take(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise lost(pack, f"Its journal is damaged: {error}.") from error
        _compare(pack, begun, settings)
        if torn:
            os.truncate(path, len(whole) + 1)
        return journal

    def note_dense(self, names: Iterable[str]) -> None:
        """These dense tensors are on the disk."""
        self._note({"dense": list(names)})

    def note_expert(self, layer: int, expert: int) -> None:
        """This expert is on the disk, and what was measured of it."""
        self._note({"expert": [layer, expert]})

    def note_signal(self, layer: int, signal: str) -> None:
        """This projection is the layer's signal."""
        self._note({"signal": [layer, signal]})

    def note_whole(self, layer: int, whole: bool) -> None:
        """Whether the layer's neurons may not be skipped."""
        self._note({"whole": [layer, whole]})

    def note_loses(self, name: str) -> None:
        """This tensor of the source has numbers that 16 bits do not hold."""
        if not self.loses:
            self._note({"loses": name})

    def note_file(self, name: str, entry: FileEntry) -> None:
        """This file is finished."""
        self._note({"file": name, "size": entry.size, "sha256": entry.sha256})

    def keep(self, name: str, tensors: Mapping[str, Tensor], *, sealed: bool = True) -> None:
        """Store working tensors under a name, all of them or none, in place of earlier ones.

        Args:
            sealed: with a checksum. Files that are later written in place have none.
        """
        with private_file.replacing(self.folder / f"{name}.safetensors", private_file.SHARED) as partial:
            write_tensors(partial, {**tensors, _DIGEST: _digest(tensors)} if sealed else tensors)

    def kept(self, name: str, plan: TensorShapes | None = None) -> dict[str, Tensor] | None:
        """The tensors that were stored under a name, or None.

        Args:
            plan: dtype and shape by name, if they were stored without a checksum.

        Raises:
            FloeError: they are damaged.
        """
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        try:
            found = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("_pad.")}
            if plan is not None:
                if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} != plan:
                    raise ValueError("it holds different tensors")
            elif not torch.equal(found.pop(_DIGEST), _digest(found)):
                raise ValueError("its checksum is wrong")
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise lost(self.folder.parent, f"{path.name} is damaged: {error}.") from error
        return found

    def _note(self, line: dict[str, Any]) -> None:
        with self._lock:
            _write_line(self.folder / _NAME, line)
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        match line:
            case {"dense": names}:
                self.dense.update(names)
            case {"expert": [int(layer), int(expert)]}:
                self.experts.add((layer, expert))
            case {"signal": [int(layer), ("up" | "gate") as signal]}:
                self.signals[layer] = signal
            case {"whole": [int(layer), bool(whole)]}:
                self.whole[layer] = whole
            case {"loses": str(name)}:
                self.loses = name
            case {"file": str(name), "size": int(size), "sha256": str(sha256)}:
                self.files[name] = FileEntry(size, sha256)
            case _:
                raise ValueError("a line has no meaning")


def _digest(tensors: Mapping[str, Tensor]) -> Tensor:
    """sha256 of working tensors: uint8 (32,)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def text_digest(tokens: Tensor) -> str:
    """A sha256 that stands for calibration tokens (N, T)."""
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + tokens.to(torch.int64).numpy().tobytes()).hexdigest()


def lost(pack: Path, cause: str) -> FloeError:
    """The error for an interrupted pack that cannot be continued."""
    return FloeError(
        f"The interrupted pack at {pack} cannot be continued",
        cause,
        "Start again: add --fresh to `floe-chat pack`, or delete an unfinished setup with `floe-chat setup --forget`.",
    )


def _compare(pack: Path, begun: Settings, asked: Settings) -> None:
    causes = {
        "version": "Another version of floe-chat started it.",
        "weights": "The source's weights have changed since it was started.",
        "text": "It was started with another calibration text.",
    }
    for name in (*causes, *asked):
        if name != "threads" and begun.get(name) != asked.get(name):
            width = " bit" if name not in _WORDS else ""
            before, now = (settings.get(name) or "none" for settings in (begun, asked))
            changed = f"Its {_WORDS.get(name, name)} is {before}{width}, not {now}{width}."
            raise UsageError(
                f"The interrupted pack at {pack} was started with other settings",
                causes.get(name, changed),
                "Use the same settings to continue, or add --fresh to start again.",
            )


def _write_line(path: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line, separators=(",", ":")).encode()
    with path.open("ab") as file:
        file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        file.flush()
        os.fsync(file.fileno())


def _read_line(line: bytes) -> dict[str, Any]:
    """A line as `_write_line` wrote it. Raises: ValueError: it is damaged."""
    if int(line[:8], 16) != zlib.crc32(line[9:]):
        raise ValueError("the checksum of a line is wrong")
    return json.loads(line[9:])
