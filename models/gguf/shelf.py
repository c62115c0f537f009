"""A model's GGUF files as a `Shelf`, with names, shapes and types of the checkpoint that they were converted from."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .. import private_file
from ..checkpoint import Checkpoint, read_config
from ..checkpoint_files import SAMPLE, TensorPlace
from ..errors import CheckpointError, FloeError
from ..families import family_of
from ..modules import library_model
from ..pack.manifest import COPIED
from ..visible import as_name
from . import rounding, tokenizer
from .configuration import config_of
from .header import undescribed
from .made import Made
from .names import Naming
from .parts import Gguf, is_gguf, open_gguf
from .values import sample


@contextmanager
def opened(source: Path) -> Generator[Checkpoint]:
    """The checkpoint in a folder, or what a GGUF file was made of: its small files are in a temporary folder meanwhile.

    Raises:
        CheckpointError: as `Checkpoint` and `GgufShelf`.
    """
    if not is_gguf(source):
        yield Checkpoint(source)
        return
    with TemporaryDirectory(prefix="floe-chat-") as folder:
        shelf = GgufShelf(source, Path(folder))
        for name in COPIED:
            shelf.small(name)
        yield Checkpoint(shelf)


class GgufShelf:
    """A `Shelf` of a GGUF file, or of all parts of a split one. The files are only read, tensor by tensor.

    Args:
        source: the file, or any of its parts, or what was read of its header. folder: for config.json, the tokenizer's
            files and the chat template, which are made of the metadata. The same file always gives the same bytes.

    Raises:
        CheckpointError: as `open_gguf` and `config_of`.
    """

    commit: str | None = None

    def __init__(self, source: Path | Gguf, folder: Path) -> None:
        self.gguf = open_gguf(source) if isinstance(source, Path) else source
        self.name = self.gguf.name
        self._folder, self._contents = folder, dict[str, bytes | None]()
        self._fields = config_of(self.gguf)
        self.rounding = rounding.rounding(self.gguf, self._fields["model_type"])

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """See `Shelf.headers`. All tensors are said to be in the first file, by name."""
        places = {name: TensorPlace(made.dtype, made.shape, 0, made.nbytes) for name, made in self._made.items()}
        return {self.gguf.path.name: places}

    @cached_property
    def _made(self) -> dict[str, Made]:
        """Published name -> how that tensor is made."""
        self.small("config.json")
        config = self._config
        empty = library_model.empty(config, torch.float32)
        try:
            return Naming(self.gguf, family_of(config.model_type), config).made(empty)
        except ValueError as error:
            raise CheckpointError(
                f"{self.name} cannot be read",
                f"Its tensors are not those that its header describes: {as_name(str(error))}.",
                "Use another file of this model, or its original checkpoint.",
            ) from error

    @cached_property
    def _config(self) -> Any:
        """transformers' configuration, from the file that `small` has made."""
        try:
            return read_config(self._folder, self.name)
        except CheckpointError as error:
            raise undescribed(self.gguf.path, error) from error

    def small(self, name: str) -> Path | None:
        """See `Shelf.small`."""
        if name not in self._contents:
            self._contents[name] = self._content(name)
        if (content := self._contents[name]) is None:
            return None
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                private_file.replace(path, content, private_file.SHARED)
        except OSError as error:
            raise FloeError(f"{path} cannot be written", f"{error.strerror or error}.", "Free some space.") from error
        return path if name != "config.json" or self._config else None

    def _content(self, name: str) -> bytes | None:
        if name == "config.json":
            return json.dumps(self._fields, indent=2).encode()
        try:
            return tokenizer.file(self.gguf, name)
        except ValueError as error:
            raise CheckpointError(
                f"The tokenizer of {self.gguf.name} cannot be read",
                f"{error}.",
                "Use the model's original checkpoint, or a file from a newer converter.",
            ) from error

    def path(self, file: str) -> Path:
        """See `Shelf.path`."""
        return Path(self.gguf.path)

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`."""
        return [file]

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """See `Shelf.read`."""
        found = self._made[name].read(index)
        into[:] = memoryview(found.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]

    def sample(self, name: str, file: str, place: TensorPlace) -> bytes:
        """See `Shelf.sample`."""
        made = self._made[name]
        return b"".join(sample(source, SAMPLE, made.expert) for source in made.sources)

    def done(self, file: str) -> None:
        """See `Shelf.done`."""

    def order(self, files: Sequence[str]) -> None:
        """See `Shelf.order`."""
