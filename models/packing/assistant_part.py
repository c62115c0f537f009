"""draft.safetensors of a model that has a small one to guess its tokens, from that one's own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import private_file
from ..checkpoint import DTYPES, LARGEST_CONFIG, Checkpoint, places_of
from ..checkpoint_files import FolderShelf, Shelf
from ..errors import CheckpointError, NoCheckpointError, PackError, UsageError
from ..families import Family
from ..modules import assistant_modules
from ..pack import assistant, quantized_linears
from ..pack.assistant import BACK, CONFIG, HEAD, JOINED
from ..pack.manifest import Manifest
from ..pack.quantize import Quantizer, by_hqq, quantize
from ..pack.tensor_file import TensorFile, TensorShapes
from ..pack.widths import CALIBRATED
from .dense_part import kept_type, read_finite

_PUBLISHED = {f"{JOINED}.weight": "pre_projection.weight", f"{BACK}.weight": "post_projection.weight"}
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")  # the output layer: usually the embedding


class AssistantSource(Checkpoint):
    """The checkpoint of a small model that guesses another one's tokens.

    Attributes:
        fields: its config.json.

    Raises:
        CheckpointError: there is none, or it is another kind of model. UsageError: the other model takes none.
    """

    def __init__(self, source: Path | Shelf, family: Family) -> None:  # pyright: ignore[reportMissingSuperCall]
        """family: of the other model."""
        if family.assistant is None:
            raise UsageError("An assistant cannot be packed with this model", f"{family.called} has none.")
        made = family.assistant
        self.shelf: Shelf = FolderShelf(source) if isinstance(source, Path) else source
        path = self.shelf.small("config.json")
        called = str(source) if isinstance(source, Path) else self.shelf.name
        if path is None:
            raise NoCheckpointError(f"There is no checkpoint at {called}", "It has no config.json.")
        self.folder = path.parent
        try:
            fields: Any = private_file.read_json(path, LARGEST_CONFIG)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read", f"{error}", "Download it again.") from error
        kind = fields.get("model_type") if isinstance(fields, dict) else None
        if kind != made.model_type:
            cause = f"Its config.json describes {ascii(kind)[:40]}; {made.model_type} is needed."
            raise CheckpointError(f"{called} is not {made.layers.called}", cause)
        self.fields: dict[str, Any] = fields
        self.family, self.exact, self.wide, self.unused, self.tables = made.layers, True, False, {}, {}
        self.places = places_of(self.shelf)


class AssistantPart:
    """The tensors of its checkpoint that go into the file, known from the headers.

    Attributes:
        plan: tensors of the file.

    Raises:
        CheckpointError: it lacks some, or belongs to another model than the manifest's.
    """

    def __init__(self, source: AssistantSource, manifest: Manifest, model: Any) -> None:
        """model: configuration of the manifest's."""
        self._source, self._manifest = source, manifest
        title = f"{source.shelf.name} cannot guess the tokens of {manifest.name}"
        fields = assistant.kept_fields(source.fields)
        try:
            config = assistant.config_of(fields, model, manifest.family)
            shapes = assistant_modules.shapes_of(config, model.hidden_size)
        except (ValueError, PackError) as error:
            cause = error.cause if isinstance(error, PackError) else str(error)
            raise CheckpointError(title, cause, "Give the one that was published for this model.") from error
        self._config = torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)
        self._numbers, self._codes = dict[str, str](), dict[str, str]()
        self.plan: TensorShapes = {CONFIG: (torch.uint8, tuple(self._config.shape))}
        for name, shape in shapes.items():
            head = next((each for each in _HEADS if each in source.places), _HEADS[1])
            published = head if name == f"{HEAD}.weight" else _PUBLISHED.get(name, name)
            place = source.places[published][1] if published in source.places else None
            if place is None or place.dtype not in DTYPES or place.shape != shape:
                have = "nothing" if place is None else f"{place.dtype} of {place.shape}"
                raise CheckpointError(title, f"It has {have} as {published}; numbers of {shape} are needed.")
            layer = name.removesuffix(".weight")
            coded = layer in (JOINED, BACK) or source.family.is_linear(layer)
            if manifest.widths.dense < 16 and coded and len(shape) == 2:
                self._codes[layer] = published
                self.plan |= quantized_linears.plan(layer, *shape, self._bits(layer))
            else:
                self._numbers[name] = published
                self.plan[name] = kept_type(source, published), shape

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.plan.values())

    def steps(self) -> dict[Hashable, list[str]]:
        """What `write` reads of the source."""
        return {"draft": [*self._numbers.values(), *self._codes.values()]}

    def write(self, path: Path, read: Callable[[Hashable, float], None]) -> None:
        """Write the file; see `DraftPart.write`."""
        by: Quantizer = by_hqq
        with TensorFile(path, self.plan) as file:
            file[CONFIG].copy_(self._config)
            for name, published in self._numbers.items():
                file[name].copy_(read_finite(self._source, published))
            for layer, published in self._codes.items():
                matrix, bits = read_finite(self._source, published), self._bits(layer)
                if self._manifest.widths.rounding == CALIBRATED:
                    by = partial(quantize, short=quantized_linears.layout_of(matrix.shape[1], bits).short)
                for stored, value in quantized_linears.store(layer, matrix, bits, by).items():
                    file[stored].copy_(value)
        read("draft", 1.0)

    def _bits(self, layer: str) -> int:
        return quantized_linears.width_of(layer, self._manifest.widths.dense)
