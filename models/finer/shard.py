"""One shard of the new checkpoint: what becomes of each tensor of the source's shard, written as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .. import private_file
from ..checkpoint import Checkpoint
from ..checkpoint_files import TensorPlace
from ..errors import CheckpointError
from .cutting import Cut, cuts, parts_of
from .routers import finer_router, repeated_names

_PIECE = 64 << 20  # bytes that are copied at a time
_ALIGNED = 8  # bytes: the header's end
_EXPERTS = ".experts."  # in names of a layer that has some


@dataclass(frozen=True, slots=True)
class Whence:
    """A published tensor with experts. layer: counts layers with experts; expert: None where it has all of them."""

    layer: int
    expert: int | None
    place: int
    cut: Cut


class Making:
    """What the new checkpoint is made of.

    Args:
        order: of neurons (L, E, F) int32; None: as they are.

    Attributes:
        left_out: published names of layers that guess further tokens: their experts would not fit the new config.json.
        files: shard -> tensor name -> its place in the source.
    """

    def __init__(self, source: Checkpoint, parts: int, order: Tensor | None = None) -> None:
        self._source, self._parts, self.order = source, parts, order
        self._router = finer_router(source.family, source.config, parts)
        self._experts = dict(self._whences())
        repeated = {
            name: bias for layer in source.layers for name, bias in repeated_names(source.family, layer).items()
        }
        # Published names, which may differ from the module's.
        named = {name: source.family.module_name(name) for name in source.places}
        self._repeated = {name: repeated[own] for name, own in named.items() if own in repeated}
        guessing = {start for start in source.family.unused(source.config) if self._has_experts(start)}
        self.left_out = {name for name in source.unused if name.startswith(tuple(guessing))} if guessing else set[str]()
        self.files: dict[str, dict[str, TensorPlace]] = {}
        for name, (file, place) in (source.places | source.unused).items():
            self.files.setdefault(file, {})[name] = place

    def _has_experts(self, start: str) -> bool:
        return any(name.startswith(start) and _EXPERTS in name for name in self._source.unused)

    def _whences(self) -> Iterator[tuple[str, Whence]]:
        source, storage = self._source, self._source.storage
        for index, layer in enumerate(source.layers):
            for expert in range(1 if storage.together else source.experts):
                for place, name in enumerate(storage.names(layer, expert)):
                    whence = Whence(index, None if storage.together else expert, place, cuts(storage)[place])
                    yield name, whence

    def made_of(self, name: str, place: TensorPlace) -> dict[str, tuple[int, ...]]:
        """The names and shapes of what one tensor becomes, in the order in which `values` gives them."""
        if name in self.left_out:
            return {}
        if name in self._repeated:
            axis = self._axis(place.shape)
            shape = [*place.shape]
            shape[axis] *= self._parts
            return {name: tuple(shape)}
        whence = self._experts.get(name)
        if whence is None:
            return {name: place.shape}
        if whence.expert is None:
            experts, *own = place.shape
            return {name: (experts * self._parts, *whence.cut.shape(tuple(own), self._parts))}
        storage, layer = self._source.storage, self._source.layers[whence.layer]
        first, shape = whence.expert * self._parts, whence.cut.shape(place.shape, self._parts)
        return {storage.names(layer, first + part)[whence.place]: shape for part in range(self._parts)}

    def write(self, path: Path, file: str) -> None:
        """Write the new shard of the source's `file`; it is there when all of it is on the disk.

        Raises:
            CheckpointError: the source cannot be read, or holds values that cannot be scaled. OSError: it cannot be
                written.
        """
        head, _ = self._header(file)
        with private_file.replacing(path, private_file.SHARED) as partial, partial.open("wb") as out:
            out.write(head)
            for name in self._ordered(file):
                if name in self._repeated or name in self._experts:
                    for tensor in self._values(name):
                        out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                elif name not in self.left_out:
                    self._copy(file, name, out)

    def nbytes(self, file: str) -> int:
        """Of the new shard."""
        head, end = self._header(file)
        return len(head) + end

    def index(self) -> dict[str, object]:
        """The content of model.safetensors.index.json."""
        weights = {new: file for file, places in self.files.items() for name in places for new in self._new(file, name)}
        total = sum(self._header(file)[1] for file in self.files)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}

    def _new(self, file: str, name: str) -> dict[str, tuple[int, ...]]:
        return self.made_of(name, self.files[file][name])

    def _ordered(self, file: str) -> list[str]:
        """Wide types first, so that every tensor begins at a multiple of its values' bytes."""
        places = self.files[file]
        width = {name: (place.end - place.start) // max(1, math.prod(place.shape)) for name, place in places.items()}
        return sorted(places, key=lambda name: -width[name])

    def _header(self, file: str) -> tuple[bytes, int]:
        """The shard's header, and the bytes of its tensors."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._ordered(file):
            place = self.files[file][name]
            for new, shape in self._new(file, name).items():
                size = (place.end - place.start) * math.prod(shape) // max(1, math.prod(place.shape))
                entries[new] = {"dtype": place.dtype, "shape": list(shape), "data_offsets": [end, end + size]}
                end += size
        encoded = json.dumps(entries, separators=(",", ":")).encode()
        encoded += b" " * (-(8 + len(encoded)) % _ALIGNED)
        return len(encoded).to_bytes(8, "little") + encoded, end

    def _axis(self, shape: tuple[int, ...]) -> int:
        return 0 if shape[0] == self._source.experts else len(shape) - 1

    def _values(self, name: str) -> Iterator[Tensor]:
        source, parts, factor = self._source, self._parts, self._router.down
        if name in self._repeated:
            tensor = source.tensor(name)
            if self._repeated[name]:
                tensor = tensor * self._router.correction
            yield tensor.repeat_interleave(parts, self._axis(tuple(tensor.shape)))
            return
        whence = self._experts[name]
        for expert in range(source.experts) if whence.expert is None else [whence.expert]:
            tensor = source.tensor(name, expert if whence.expert is None else None)
            order = None if self.order is None else self.order[whence.layer, expert].long()
            try:
                yield from parts_of(tensor, whence.cut, order, parts, factor)
            except ValueError as error:
                raise CheckpointError(
                    f"{name} of the checkpoint cannot be cut into experts",
                    f"Of expert {expert}, {error}.",
                    "Download the checkpoint again, or use one in bfloat16 if this one is in float16.",
                ) from error

    def _copy(self, file: str, name: str, out: BinaryIO) -> None:
        place, path = self.files[file][name], self._source.shelf.path(file)
        with path.open("rb") as shard:
            shard.seek(place.start)
            left = place.end - place.start
            while left:
                piece = shard.read(min(_PIECE, left))
                if not piece:
                    raise CheckpointError(
                        f"{file} of the checkpoint cannot be read", f"It ends inside {name}.", "Download it again."
                    )
                out.write(piece)
                left -= len(piece)
