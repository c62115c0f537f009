"""Tables: embeddings besides the vocabulary's, as of n-grams, which no RAM has to hold. A token looks a few rows up.

Each is a file of its own in a pack, row after row, so that one row is one short read.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...kernels.codes import group_size
from ...kernels.layouts import VectorLayout
from ..errors import FloeError, PackError, damaged
from .manifest import table_file
from .quantize import Codes, finite, store
from .tensor_file import TensorShapes, place_of

ROWS = "rows"  # the tensor of a table's file


@dataclass(frozen=True, slots=True)
class Table:
    """One of them.

    Attributes:
        name: of its module. file: in a pack. rows: how many. vector: one of them. float16: what 16-bit rows hold.
    """

    name: str
    file: str
    rows: int
    vector: VectorLayout
    float16: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Of `ROWS`, uint8."""
        return self.rows, self.vector.nbytes

    @property
    def plan(self) -> TensorShapes:
        """Its file."""
        return {ROWS: (torch.uint8, self.shape)}

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.rows * self.vector.nbytes

    def stored(self, values: Tensor) -> Tensor:
        """values (N, n) -> rows (N, nbytes) uint8.

        Raises:
            ValueError: values that are not finite, or too large for codes.
        """
        return store(values, self.vector, self.float16, _by_size).vectors(self.vector)

    def read(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """rows (N, nbytes) uint8 -> values (N, n)."""
        return self.vector.read(raw, self.float16, dtype)

    def opened(self, folder: Path) -> tuple[Tensor, int]:
        """Its rows in a pack, mapped, and where in the file they begin.

        Raises:
            PackError: the file is not one of this table.
        """
        path = folder / self.file
        try:
            with safe_open(path, "pt") as file:
                part = file.get_slice(ROWS)
                found = part.get_dtype(), tuple(part.get_shape())
            if found != ("U8", self.shape):
                cause = f"{self.file} holds {found[0]} of {found[1]} as {ROWS} instead of U8 of {self.shape}."
                raise damaged(folder, cause)
            start = place_of(path, ROWS)
            return _mapped(path, start, self.shape), start
        except (OSError, SafetensorError, ValueError) as error:
            raise damaged(folder, f"{self.file} cannot be read: {error}") from error


def vector(columns: int, dense: int) -> VectorLayout:
    """A row in a pack whose dense part has so many bits: 16 stay 16, all others are 8 (tests/bench/LOG.md)."""
    return VectorLayout(columns, 16 if dense == 16 else 8, group_size(columns))


def tables_of(shapes: Mapping[str, tuple[int, int]], dense: int, float16: torch.dtype) -> list[Table]:
    """Those of a model with such embeddings, rows and columns by their modules' names, in a pack whose dense part has
    so many bits.
    """
    return [
        Table(name, table_file(index), rows, vector(columns, dense), float16)
        for index, (name, (rows, columns)) in enumerate(shapes.items())
    ]


class Lookup(nn.Module):
    """Takes an embedding's place.

    Args:
        rows: gives rows (N, nbytes) uint8 by their numbers (N,) int64, rising, each once. dtype: of what is looked up.

    Attributes:
        weight: an empty one, by whose place transformers decides where ids go.
    """

    def __init__(self, table: Table, rows: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._rows, self._dtype = table, rows, dtype
        self.weight = torch.empty(0, table.vector.n, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (...) -> (..., n), where they are.

        Raises:
            FloeError: there is no such row: what the model makes of tokens is damaged.
        """
        wanted, place = ids.flatten().cpu().unique(return_inverse=True)
        for number in wanted[(wanted < 0) | (wanted >= self._table.rows)][:1].tolist():
            cause = f"Numbers in the model's dense part ask for row {number:,} of {self._table.rows:,}."
            hint = "Pack the source checkpoint again, or choose another model."
            raise FloeError(f"{self._table.file} does not have all rows that are looked up", cause, hint)
        values = self._table.read(self._rows(wanted), self._dtype)
        return values[place].view(*ids.shape, -1).to(ids.device)

    def __deepcopy__(self, _memo: Any) -> Lookup:
        """Itself: nothing in it changes, and it may be larger than RAM."""
        return self


def put(model: nn.Module, lookups: Mapping[str, nn.Module]) -> None:
    """Put them where an empty model has embeddings of these names.

    Raises:
        PackError: it has none.
    """
    for name, lookup in lookups.items():
        if type(dict(model.named_modules()).get(name)) is not nn.Embedding:
            raise PackError("The pack does not fit its configuration", f"The model has no table {name}.")
        model.set_submodule(name, lookup)


def mapped(table: Table, folder: Path, dtype: torch.dtype = torch.float32) -> Lookup:
    """A lookup that leaves reading to the system, and its cache.

    Raises:
        PackError: as `Table.opened`.
    """
    rows, _ = table.opened(folder)
    return Lookup(table, lambda wanted: rows[wanted], dtype)


def _by_size(matrix: Tensor, bits: int, group: int) -> Codes:
    """Codes from a group's largest value to its opposite: as there are tens of billions, in a fifth of the time that
    grids by least squares take, for an error of 0.59 % instead of 0.50 %.
    """
    finite(matrix)
    grouped, middle = matrix.float().view(len(matrix), -1, group), 1 << bits - 1
    most = grouped.abs().amax(-1)
    scale = (most / (middle - 1)).half().clamp(min=2.0**-24)
    below = scale.float() * (middle - 1) < most  # by rounding: the next larger number then
    scale = torch.where(below, (scale.view(torch.int16) + 1).view(torch.float16), scale)
    if not bool(scale.isfinite().all()):
        raise ValueError("the weights are too large for float16 scales")
    codes = (grouped / scale.float()[..., None]).round_().add_(middle).clamp_(0, 2 * middle - 1)
    return Codes(codes.view(matrix.shape).to(torch.uint8), scale, torch.full_like(scale, middle))


def _mapped(path: Path, start: int, shape: tuple[int, int]) -> Tensor:
    """Bytes of a file, read as they are needed and without their neighbours."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing can be written there
        return torch.frombuffer(pages, dtype=torch.uint8, count=shape[0] * shape[1], offset=start).view(shape)
