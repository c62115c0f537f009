"""draft.safetensors: the head that guesses further tokens, rounded by its weights alone, one expert in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.activation import Projection
from ...kernels.layouts import VectorLayout
from ..checkpoint import DTYPES, Checkpoint
from ..errors import CheckpointError, PackError
from ..families.storage import Storage
from ..gguf.shelf import GgufShelf
from ..modules import library_model
from ..pack import quantized_linears
from ..pack.draft_head import EMBEDDING_NORM, EXPERTS, HIDDEN_NORM, JOINED, LAYER, NORM, experts_plan
from ..pack.manifest import Manifest, signal_names
from ..pack.quantize import Quantizer, by_hqq, keeping, quantize, store
from ..pack.tensor_file import TensorFile, TensorShapes
from ..pack.widths import CALIBRATED
from .dense_part import kept_type, read_finite
from .signal_choice import unpackable

WITHOUT = "Packing without the drafting head"  # how a reported step begins that says why


def has_head(source: Checkpoint) -> bool:
    """Whether a checkpoint was published with a head that guesses further tokens, and we can read it."""
    head = source.family.head
    return head is not None and head.joined.format(layer=source.config.num_hidden_layers) in source.unused


def draft_part(source: Checkpoint, manifest: Manifest, said: Callable[[str], None]) -> DraftPart | None:
    """The drafting head of a checkpoint; None where it has none, or where `said` was given why it is left out: a
    checkpoint that states a head lacks it, or a GGUF file of a family that is published with one.
    """
    if not has_head(source):
        head = source.family.head
        if head is not None and (head.count(source.config) or isinstance(source.shelf, GgufShelf)):
            said(f"{WITHOUT}: {source.shelf.name} does not hold it.")
        return None
    try:
        return DraftPart(source, manifest)
    except CheckpointError as error:
        said(f"{WITHOUT}: {error.cause}")
        return None


class DraftPart:
    """The tensors of a checkpoint that go into draft.safetensors, known from the shards' headers.

    Attributes:
        plan: tensors of the file.

    Raises:
        CheckpointError: it has no whole head, or one that is not what the configuration asks for.
    """

    def __init__(self, source: Checkpoint, manifest: Manifest) -> None:
        assert source.family.head is not None
        self._source, self._manifest, self._head = source, manifest, source.family.head
        self._number = source.config.num_hidden_layers
        config = self._head.config(source.config)
        self._experts = source.experts if source.family.expert_layers(config) else 0
        # Names in the file -> published ones: of what stays numbers, and of linear layers that become codes.
        self._numbers, self._codes = dict[str, str](), dict[str, str]()
        self.plan: TensorShapes = {}
        for name, (published, shape) in self._wanted(config).items():
            self._need(published, shape)
            layer = name.removesuffix(".weight")
            coded = name == f"{JOINED}.weight" or source.family.is_linear(layer)
            if manifest.widths.dense < 16 and coded and len(shape) == 2:
                self._codes[layer] = published
                self.plan |= quantized_linears.plan(layer, *shape, manifest.widths.dense)
            else:
                self._numbers[name] = published
                self.plan[name] = kept_type(source, published), shape
        if self._experts:
            self._storage = self._stored()
            self.plan |= experts_plan(manifest)

    @property
    def nbytes(self) -> int:
        """Bytes of weights."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.plan.values())

    def steps(self) -> dict[Hashable, list[str]]:
        """What `write` reads of the source, in order."""
        steps: dict[Hashable, list[str]] = {("draft", None): [*self._numbers.values(), *self._codes.values()]}
        return steps | {("draft", expert): self._names(expert) for expert in range(self._experts)}

    def write(self, path: Path, read: Callable[[Hashable, float], None]) -> None:
        """Write the file, from its start.

        Args:
            read: called with each of `steps`, when it has been read, and the share that is written.

        Raises:
            CheckpointError: the source cannot be read, or not be packed. OSError: of the disk.
        """
        with TensorFile(path, self.plan) as file:
            for name, published in self._numbers.items():
                file[name].copy_(read_finite(self._source, published))
            for layer, published in self._codes.items():
                matrix, bits = read_finite(self._source, published), self._manifest.widths.dense
                layout = quantized_linears.layout_of(matrix.shape[1], bits)
                by = keeping(self._source.codes(published), layout, self._quantizer(layout))
                for stored, value in quantized_linears.store(layer, matrix, bits, by).items():
                    file[stored].copy_(value)
            read(("draft", None), 0.0 if self._experts else 1.0)
            for expert in range(self._experts):
                for part, tensor in self._packed(expert).items():
                    file[f"{EXPERTS}{part}"][expert] = tensor
                read(("draft", expert), (expert + 1) / self._experts)

    def _quantizer(self, layout: VectorLayout) -> Quantizer:
        if self._manifest.widths.rounding != CALIBRATED:
            return by_hqq
        return partial(quantize, short=layout.short)

    def _packed(self, expert: int) -> dict[str, Tensor]:
        """One expert, as the pack's layers hold theirs."""
        signal: Projection = self._source.family.signals[0]
        signals, rows = self._manifest.signal_layout(signal), self._manifest.row_layout(signal)
        found = self._storage.read(self._source.tensor, self._number, expert)
        matrices, names = [found.gate, found.up], self._names(expert)[:2]
        if signal == "up":
            matrices.reverse()
            names.reverse()
        vectors = signals.vector, rows.other
        quantizers = [
            keeping(self._source.codes(name), vector, self._quantizer(vector))
            for name, vector in zip(names, vectors, strict=True)
        ]
        try:
            first, other = (
                store(matrix, vector, rows.float16, by)
                for matrix, vector, by in zip(matrices, vectors, quantizers, strict=True)
            )
            columns = found.down.T.contiguous()
            down = store(columns, rows.down, rows.float16, self._quantizer(rows.down))
        except ValueError as error:
            raise unpackable(self._number, expert, f"{error}.") from error
        records = rows.join(other.vectors(rows.other), down.vectors(rows.down), None)
        q, scale, zero = signal_names(signal)
        return {"rows": records, q: first.packed, scale: first.scale, zero: first.zero}

    def _wanted(self, config: object) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Names in the file -> published names and shapes, of all but experts."""
        source, head, hidden = self._source, self._head, self._source.config.hidden_size
        own = {
            f"{JOINED}.weight": (head.joined, (hidden, 2 * hidden)),
            EMBEDDING_NORM: (head.embedding_norm, (hidden,)),
            HIDDEN_NORM: (head.hidden_norm, (hidden,)),
            NORM: (head.norm, (hidden,)),
        }
        found: dict[str, tuple[str, tuple[int, ...]]]
        found = {name: (self._called(published), shape) for name, (published, shape) in own.items()}
        begin = self._called(head.layer)
        published: dict[str, str] = {
            source.family.module_name(LAYER + name.removeprefix(begin)): name
            for name in source.unused
            if name.startswith(begin)
        }
        try:
            modules = library_model.empty(config, torch.float32).state_dict(keep_vars=True)
        except PackError as error:
            raise CheckpointError(error.title, error.cause, "Download the checkpoint again.") from error
        for name, tensor in modules.items():
            if name.startswith(LAYER) and ".experts." not in name:
                called = published.get(name) or begin + name.removeprefix(LAYER)
                found[name] = called, tuple(tensor.shape)
        return found

    def _stored(self) -> Storage:
        source, head = self._source, self._head
        first = (way for way in head.stored if way.names(self._number, 0)[0] in source.unused)
        storage = next(first, head.stored[0])
        needed = storage.needed(source.experts, source.neurons, source.family.expert_hidden(source.config))
        for expert in range(1 if storage.together else source.experts):
            for name, one in zip(storage.names(self._number, expert), needed, strict=True):
                self._need(name, one.shape)
        return storage

    def _names(self, expert: int) -> list[str]:
        return self._storage.names(self._number, expert)

    def _called(self, name: str) -> str:
        return name.format(layer=self._number)

    def _need(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises: CheckpointError: the source lacks this tensor, or it is none of numbers of this shape."""
        title = f"The drafting head of {self._source.shelf.name} cannot be packed"
        if name not in self._source.unused and name not in self._source.places:
            raise CheckpointError(title, f"It lacks {name}.")
        place = self._source.place(name)
        if place.dtype not in DTYPES or place.shape != shape:
            raise CheckpointError(title, f"{name} is {place.dtype} of {place.shape}; {shape} is needed.")
