"""dense.safetensors, written stage by stage as the forward pass comes by: the embedding, each layer, the rest; and the
files of tables, part by part before all that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.operations import fast_type
from ..checkpoint import DTYPES, WHOLE, Checkpoint
from ..errors import CheckpointError, PackError
from ..families.derived import Derived, tables
from ..modules import library_model
from ..pack import quantized_linears
from ..pack.quantize import MOST_BITS, Quantizer, finite, keeping, quantize
from ..pack.table import ROWS, Table, tables_of
from ..pack.tensor_file import TensorFile, Tensors, TensorShapes

FILE = "dense.safetensors"


class DensePart:
    """The tensors of a checkpoint that go into dense.safetensors, known from the shards' headers.

    Stage 0 is the embedding, stage n + 1 layer n, and the last stage the rest: the last norm, the head. Of a derived
    family stage 0 is all that lies around layers. Tensors of the
    rest in a shard that an earlier stage reads are stored then, so that the shard need not stay until the end.

    Attributes:
        stages: published names of each. plan: tensors of the file; what stays at 16 bit first, then the codes.
        tables: see pack/table.py; `Checkpoint.tables` has the parts of each.

    Raises:
        CheckpointError: tensors that are missing, or are not what the configuration asks for.
    """

    def __init__(self, source: Checkpoint, bits: int) -> None:
        self._source, self._bits = source, bits
        low = quantized_linears.stored_layers(source, bits)
        self.plan: TensorShapes = {}
        for name in (name for name in source.dense_names() if name.removesuffix(".weight") not in low):
            place = source.places[name][1]
            if place.dtype not in DTYPES | WHOLE:
                raise CheckpointError(
                    f"{name} of the checkpoint cannot be packed",
                    f"It is {place.dtype}; floating point is needed.",
                    "Use the model's original, unquantized checkpoint.",
                )
            self.plan[name] = kept_type(source, name), place.shape
        self._codes: dict[str, list[str]] = {}  # published name -> layers that are stored as codes of it
        for layer, name in low.items():
            rows, columns = source.places[name][1].shape
            self.plan |= quantized_linears.plan(layer, rows, columns, quantized_linears.width_of(layer, bits))
            self._codes.setdefault(name, []).append(layer)
        self.stages = self._staged(source.config.num_hidden_layers + 1)
        try:
            whole = library_model.empty(source.config, torch.float32)
            known = tables(whole) if source.tables else {}
            own = {name: known[name] for name in known if name in source.tables}
            self.tables = tables_of(own, bits, source.float16)
            self._check(whole)
        except PackError as error:
            raise CheckpointError(error.title, error.cause, "Download the checkpoint again.") from error

    @property
    def nbytes(self) -> int:
        """Bytes of weights, those of tables too."""
        own = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.plan.values())
        return own + sum(table.nbytes for table in self.tables)

    def open(self, folder: Path, *, resume: bool) -> TensorFile:
        """The file to write into."""
        return TensorFile(folder / FILE, self.plan, resume=resume)

    def open_table(self, folder: Path, table: Table, *, resume: bool) -> TensorFile:
        """The file of a table to write into."""
        return TensorFile(folder / table.file, table.plan, resume=resume)

    def store_part(self, file: TensorFile, table: Table, tensor: Tensor, start: int) -> None:
        """Write a part of a table that begins with row `start`.

        Raises:
            CheckpointError: its values cannot be quantized.
        """
        try:
            file[ROWS][start : start + len(tensor)].copy_(table.stored(tensor))
        except ValueError as error:
            cause = f"{str(error)[:1].upper()}{str(error)[1:]}."
            raise CheckpointError(f"{table.name} cannot be packed", cause, "Download the checkpoint again.") from error

    def read(self, name: str) -> Tensor:
        """A published tensor of the source.

        Raises:
            CheckpointError: it cannot be read, or holds values that are not finite.
        """
        return read_finite(self._source, name)

    def rounded(self, stage: int) -> dict[str, str]:
        """What a stage rounds for its inputs: names of linear layers in the model -> their published names."""
        family = self._source.family
        names = [name for name in self.stages[stage] if self._bits < MOST_BITS and self._codes.get(name)]
        layers = {family.module_name(name).removesuffix(".weight"): name for name in names}
        return {layer: name for layer, name in layers.items() if family.is_linear(layer) and layer != "lm_head"}

    def store(self, file: TensorFile, name: str, tensor: Tensor, by: Quantizer = quantize) -> None:
        """Write one published tensor in its packed form.

        Raises:
            CheckpointError: its values cannot be quantized.
        """
        if name in self.plan:
            file[name].copy_(tensor)
        for layer in self._codes.get(name, []):
            width = quantized_linears.width_of(layer, self._bits)
            kept = keeping(self._source.codes(name), quantized_linears.layout_of(tensor.shape[1], width), by)
            for stored, value in quantized_linears.store(layer, tensor, width, kept).items():
                file[stored].copy_(value)

    def values(self, file: Tensors, name: str) -> Tensor:
        """What the codes of a published matrix stand for, in the type that is multiplied fastest."""
        (layer,), (rows, columns) = self._codes[name], self._source.places[name][1].shape
        stored = _codes_of(file, layer)
        width = quantized_linears.width_of(layer, self._bits)
        return quantized_linears.load(stored, layer, rows, columns, width).dense(fast_type(torch.device("cpu")))

    def stored(self, file: Tensors, stage: int) -> dict[str, Tensor]:
        """The finished tensors of a stage, by the names in the file."""
        found = {name: file[name] for name in self.stages[stage] if name in self.plan}
        for name in self.stages[stage]:
            for layer in self._codes.get(name, []):
                found |= _codes_of(file, layer)
        return found

    def _staged(self, last: int) -> list[list[str]]:
        source = self._source
        stage_of = {name: self._stage(name, last) for name in source.dense_names()}
        first_read: dict[str, int] = {}  # shard -> the first stage, or the experts after it, that reads it
        for stage in range(last):
            names = [name for name, own in stage_of.items() if own == stage]
            for expert in range(source.experts if stage - 1 in source.layers else 0):
                names += source.expert_names(stage - 1, expert)
            for name in names:
                first_read.setdefault(source.places[name][0], stage)
        stages: list[list[str]] = [[] for _ in range(last + 1)]
        for name, stage in stage_of.items():
            early = first_read.get(source.places[name][0], last)
            stages[early if stage == last else stage].append(name)
        return stages

    def _stage(self, name: str, last: int) -> int:
        match self._source.family.module_name(name).split("."):
            case ["model", "embed_tokens", *_]:
                return 0
            case ["model", "layers", number, *_] if number.isdecimal() and int(number) < last - 1:
                return int(number) + 1
            case ["model", part, *_] if part != "norm" and isinstance(self._source.family, Derived):
                return 0  # such as what lies between the embedding and the first layer
            case _:
                return last

    def _check(self, whole: Any) -> None:
        """Every weight of transformers' model is there, of the right shape.

        Raises:
            PackError: one is not.
        """
        config: Any = self._source.config
        shapes = {
            self._source.family.module_name(name): place.shape for name, (_, place) in self._source.places.items()
        }
        if getattr(config, "tie_word_embeddings", False):
            shapes.setdefault("lm_head.weight", shapes.get("model.embed_tokens.weight", ()))
        shapes |= {f"{table.name}.weight": (table.rows, table.vector.n) for table in self.tables}
        for name, own in whole.state_dict(keep_vars=True).items():
            if ".experts." not in name and shapes.get(name) != tuple(own.shape):
                raise library_model.unfit(name, shapes.get(name), tuple(own.shape))


def kept_type(source: Checkpoint, name: str) -> torch.dtype:
    """The type of a published tensor that a pack stores as numbers: its own, if it is not wider than 16 bits."""
    place = source.place(name)
    exact = not (source.wide or source.shelf.rounding) or place.dtype in WHOLE
    kept = exact or name.endswith(source.family.precise or "\0")
    return (DTYPES | WHOLE)[place.dtype] if kept else source.float16


def read_finite(source: Checkpoint, name: str) -> Tensor:
    """A published tensor.

    Raises:
        CheckpointError: it cannot be read, or holds values that are not finite.
    """
    tensor = source.tensor(name)
    try:
        finite(tensor)
    except ValueError as error:
        title = f"{name} of the checkpoint holds values that are not finite"
        raise CheckpointError(title, "", "Download the checkpoint again.") from error
    return tensor


def _codes_of(file: Tensors, layer: str) -> dict[str, Tensor]:
    """The tensors that a layer is stored as."""
    return {name: file[name] for name in (f"{layer}.{part}" for part in ("q", "scale", "zero"))}
