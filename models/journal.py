"""What an interrupted pack has finished: an append-only journal, and the state of calibration at the last layer's end.

Both lie in a folder of their own beside the pack's files until the manifest is written. A line is added only when the
bytes that it speaks of are on the disk, so whatever the journal says may be relied on after a kill or a power cut; a
last line that is torn is nothing that was finished.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .errors import FloeError, UsageError
from .manifest import FileEntry
from .tensorfile import write_tensors
from .widths import Rare

FOLDER = "packing"
Settings = dict[str, str | int | None]
_NAME = "journal.jsonl"
_WORDS = {  # the rest are parts and their widths
    "source": "source",
    "device": "device",
    "group": "group size",
    "narrow": "choice of narrow experts",
}


class Journal:
    """The journal of one pack. Open it with `open`; safe to use from several threads.

    Attributes:
        folder: where working files lie. settings: that the pack was begun with. resumed: whether there was one.
        dense: published names of the dense tensors that are finished. experts: (layer, expert) likewise.
        files: finished files of the pack, hashed. rare: which experts of a layer are narrow, decided before the first
            of the layer's is packed.
    """

    def __init__(self, folder: Path, settings: Settings, *, resumed: bool) -> None:
        self.folder, self.settings, self.resumed = folder, settings, resumed
        self.dense: set[str] = set()
        self.experts: set[tuple[int, int]] = set()
        self.files: dict[str, FileEntry] = {}
        self.rare: dict[int, Rare] = {}
        self._lock = threading.Lock()

    @staticmethod
    def exists(pack: Path) -> bool:
        """Whether the folder of a pack has one."""
        return (pack / FOLDER / _NAME).is_file()

    @classmethod
    def open(cls, pack: Path, settings: Settings) -> Journal:
        """Go on with the journal in the folder of a pack, or begin one.

        The number of threads does not have to be the same: sums depend on it, so the one of the beginning is kept.

        Raises:
            UsageError: the pack was begun with other settings; says which. FloeError: the journal is damaged.
        """
        path = pack / FOLDER / _NAME
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            partial = path.with_suffix(".part")
            _write_line(partial, {"settings": settings})
            partial.replace(path)
            return cls(path.parent, settings, resumed=False)
        try:
            whole, _, torn = path.read_bytes().rpartition(b"\n")
            first, *lines = [json.loads(line) for line in whole.splitlines()]
            begun: Settings = dict(first["settings"])
            journal = cls(path.parent, begun, resumed=True)
            for line in lines:
                journal._take(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise lost(pack, f"Its journal cannot be read: {error}.") from error
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

    def note_rare(self, layer: int, rare: Rare) -> None:
        """These experts of a layer are going to be narrow."""
        self._note({"rare": layer, "experts": rare.experts, "popularity": rare.popularity})

    def note_file(self, name: str, entry: FileEntry) -> None:
        """This file is finished."""
        self._note({"file": name, "size": entry.size, "sha256": entry.sha256})

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep working tensors under a name, all of them or none, in the place of earlier ones."""
        partial = self.folder / f"{name}.part"
        write_tensors(partial, tensors)
        partial.replace(self.folder / f"{name}.safetensors")
        _sync_folder(self.folder)

    def kept(self, name: str) -> dict[str, Tensor] | None:
        """What was kept under a name."""
        path = self.folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        return {name: tensor for name, tensor in load_file(path).items() if not name.startswith("_pad.")}

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
            case {"rare": int(layer), "experts": experts, "popularity": popularity}:
                self.rare[layer] = Rare(tuple(experts), tuple(popularity))
            case {"file": str(name), "size": int(size), "sha256": str(sha256)}:
                self.files[name] = FileEntry(size, sha256)
            case _:
                raise ValueError(f"{line} means nothing")


def text_digest(tokens: Tensor) -> str:
    """A sha256 that stands for calibration tokens (N, T)."""
    import hashlib

    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + tokens.to(torch.int64).numpy().tobytes()).hexdigest()


def lost(pack: Path, cause: str) -> FloeError:
    """The error for an interrupted pack that cannot be gone on with."""
    return FloeError(
        f"The interrupted pack at {pack} cannot be continued", cause, "Start it over: add --fresh to the command."
    )


def _compare(pack: Path, begun: Settings, asked: Settings) -> None:
    causes = {
        "version": "Another version of floe-chat began it.",
        "weights": "The source's weights are not those that it was begun with.",
        "text": "It was begun with another calibration text.",
    }
    for name in (*causes, *asked):
        if name != "threads" and begun.get(name) != asked.get(name):
            width = " bit" if name not in _WORDS else ""
            before, now = (settings.get(name) or "none" for settings in (begun, asked))
            told = f"Its {_WORDS.get(name, name)} is {before}{width}, not {now}{width}."
            raise UsageError(
                f"The interrupted pack at {pack} was begun with other settings",
                causes.get(name, told),
                "Give it those to continue, or add --fresh to start over.",
            )


def _write_line(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename last; systems that cannot open a folder keep renames themselves."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
