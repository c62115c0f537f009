"""Checkpoints whose weights were rounded by others, read as the 16-bit ones that they stand for.

Codes, scales and zeros of a matrix become one tensor of the original's name, which is computed when it is read: to the
last bit what transformers (FP8), compressed-tensors, AutoAWQ and GPTQModel compute, and, rounded to bfloat16, ModelOpt
and Quark.

How each is stored: transformers' integrations/finegrained_fp8.py; compressed-tensors' compressors/; AutoAWQ's
awq/utils/packing_utils.py; GPTQModel's nn_modules/qlinear/torch.py; ModelOpt's torch/quantization/qtensor/; Quark's
torch/utils/pack.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checkpoint_files import Around, Shelf, TensorPlace
from .errors import CheckpointError
from .families.storage import EXPONENT_BIAS, fp4_values

WORD_BITS = 2, 4, 8  # of GPTQ's codes that are read
Places = Mapping[str, tuple[str, TensorPlace]]
"""Published tensor name -> shard and place."""

_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # an exponent alone
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_FP8 = "F8_E4M3", "F8_E5M2"
_WIDE = "BF16", "F16", "F32"
_WHOLE = "I32", "I64"
_ENDINGS = "_scale_inv", "_scale", "_zero_point"
# Of activations and of kept keys and values, which we compute with as they are
_UNUSED = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
    *("output_scale", "output_zero_point", "output_global_scale"),
    *("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point"),
)
_BY_MAKERS_OF_CARDS = "modelopt", "quark"
_FOLDED = "pre_quant_scale"  # by which ModelOpt's AWQ multiplies what enters a matrix
# Where in eight columns each half byte of AutoAWQ's words belongs
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Kept(NamedTuple):
    """The codes of a matrix as others found them: (N, n) uint8, zero and scale (N, n / group) float32; w = (codes -
    zero) * scale.
    """

    codes: Tensor
    zero: Tensor
    scale: Tensor
    bits: int


@dataclass(frozen=True, slots=True)
class Made:
    """A matrix, or one for each expert, not read yet.

    Attributes:
        shape, dtype: of it; safetensors' name of the type. sources: the tensors that it is made of, codes first.
        make: one matrix of these, in the same order; None for one that is not there. codes: its codes by them, where
            groups of consecutive columns have a scale; may find that they have not.
    """

    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str | None, ...]
    make: Callable[..., Tensor]
    codes: Callable[..., Kept | None] | None = None


class QuantizedShelf(Around):
    """A `Shelf` of such a checkpoint.

    Args:
        places: of all its tensors. stated: config.json's `quantization_config`. rounding: see `Shelf`.

    Attributes:
        places: as of the original checkpoint; a matrix has the place of its codes, and its own type and shape.

    Raises:
        CheckpointError: a matrix lacks its scales, or they do not fit it; two forms of one are there.
    """

    def __init__(self, shelf: Shelf, places: Places, stated: Mapping[str, Any], rounding: str) -> None:
        super().__init__(shelf, rounding)
        self._raw = places
        self._made = _Finding(places, stated, shelf.name).made()
        if not self._made:
            raise _unfit(shelf.name, f"Its config.json says that its weights are {rounding}, but no tensor has codes.")
        codes = {made.sources[0]: name for name, made in self._made.items()}
        used = {source for made in self._made.values() for source in made.sources[1:]}
        self.places: dict[str, tuple[str, TensorPlace]] = {}
        for stored, (file, place) in places.items():
            if stored in used or stored.rpartition(".")[2] in _UNUSED:
                continue
            name = codes.get(stored, stored)
            if name in self.places or (name != stored and name in places):
                raise _unfit(shelf.name, f"{name} is there at 16 bits and in codes.")
            if (made := self._made.get(name)) is not None:
                nbytes = math.prod(made.shape) * _TORCH[made.dtype].itemsize
                place = TensorPlace(made.dtype, made.shape, place.start, place.start + nbytes)
            self.places[name] = file, place

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`."""
        made = self._made.get(name)
        sources = (name,) if made is None else made.sources
        return [self._raw[each][0] for each in sources if each is not None]

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """See `Shelf.read`."""
        if (made := self._made.get(name)) is None:
            self._shelf.read(name, file, place, index, into)
            return
        if index is not None or len(made.shape) == 2:
            matrix = self._matrix(name, made, index)
        else:
            matrix = torch.stack([self._matrix(name, made, expert) for expert in range(made.shape[0])])
        into[:] = memoryview(matrix.contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]

    def codes(self, name: str) -> Kept | None:
        """The codes of a matrix, where they are in groups of consecutive columns."""
        made = self._made.get(name)
        if made is None or made.codes is None or len(made.shape) != 2:
            return None
        return made.codes(*(None if each is None else self._tensor(each, made, None) for each in made.sources))

    def sample(self, name: str, file: str, place: TensorPlace) -> bytes:
        """See `Shelf.sample`."""
        made = self._made.get(name)
        sources = (name,) if made is None else made.sources
        return b"".join(self._shelf.sample(each, *self._raw[each]) for each in sources if each is not None)

    def _matrix(self, name: str, made: Made, index: int | None) -> Tensor:
        try:
            found = made.make(*(None if each is None else self._tensor(each, made, index) for each in made.sources))
        except (ValueError, IndexError) as error:
            raise _unfit(self.name, f"{name}: {error}.") from error
        return found.to(_TORCH[made.dtype])

    def _tensor(self, name: str, made: Made, index: int | None) -> Tensor:
        """One of the stored tensors, or an expert's part of it."""
        file, place = self._raw[name]
        shape, nbytes = place.shape, place.end - place.start
        if place.dtype == "I64" or place.shape[:1] != made.shape[:1]:  # all experts have the same
            index = None
        if index is not None:
            nbytes, shape = nbytes // shape[0], shape[1:]
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self._shelf.read(name, file, place, index, memoryview(raw.numpy()))  # pyright: ignore[reportArgumentType]
        return raw.view(_TORCH[place.dtype]).view(shape)


class _Finding:
    """Which matrices a checkpoint's tensors make up."""

    def __init__(self, places: Places, stated: Mapping[str, Any], called: str) -> None:
        self._places, self._stated, self._called = places, stated, called
        self._method = stated["quant_method"]
        self._groups = [
            each["weights"]
            for each in (stated.get("config_groups") or {}).values()
            if isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping)
        ]
        blocks = [stated.get("weight_block_size"), *(each.get("block_structure") for each in self._groups)]
        blocks += [[128, 128]] if self._method == "modelopt" else []
        self._blocks = [
            (each[0], each[1])
            for each in blocks
            if isinstance(each, list) and len(each) == 2 and all(type(size) is int and size > 0 for size in each)
        ]

    def made(self) -> dict[str, Made]:
        found: dict[str, Made] = {}
        by_words, packs = self._method in ("awq", "gptq"), self._method == "compressed-tensors"
        for name, (_, place) in self._places.items():
            stem, _, part = name.rpartition(".")
            if part == "weight_packed" and packs:
                published, one = f"{stem}.weight", self._packed(stem, place)
            elif part == "qweight" and by_words:
                published, one = f"{stem}.weight", self._words(stem, place)
            elif place.dtype == "U8" and part == "weight" and self._method in _BY_MAKERS_OF_CARDS:
                published, one = name, self._fours(name, place, f"{name}_scale", f"{name}_scale_2")
            elif part == _FOLDED and self._method in _BY_MAKERS_OF_CARDS:
                raise _unfit(self._called, f"What enters {stem} is multiplied by {name}, which is not read yet.")
            elif place.dtype in (*_FP8, "I8") and not by_words and not name.endswith(_ENDINGS):
                published, one = name, self._scaled(name, place)
            else:
                continue
            found[published] = one
        return found

    def _scaled(self, name: str, place: TensorPlace) -> Made:
        """Numbers of eight bits, each with the scale of its tensor, row or block."""
        scale = self._scale(name)
        shape, kind = place.shape, self._kind(scale)
        zero = self._checked(f"{name}_zero_point", self._shape(scale), ("I8", "U8", *_FP8, *_WIDE))
        block = self._block(name, shape, scale)
        in_float32 = scale.endswith("_inv") or self._method in _BY_MAKERS_OF_CARDS
        dtype = kind if kind in _WIDE and not in_float32 else "BF16"

        def make(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
            given = _scales(scales)
            given = given.float() if in_float32 else given
            values = codes.to(given.dtype)
            if zeros is not None:
                values = values - _spread(zeros.to(given.dtype), values.shape, block)
            return values * _spread(given, values.shape, block)

        return Made(shape, dtype, (name, scale, zero), make)

    def _packed(self, stem: str, place: TensorPlace) -> Made:
        """compressed-tensors' words of several codes, or bytes of two numbers of four bits."""
        name, scale = f"{stem}.weight_packed", f"{stem}.weight_scale"
        if place.dtype == "U8":
            return self._fours(name, place, scale, f"{stem}.weight_global_scale")
        kind = self._kind(self._needed(scale))
        *lead, words = place.shape or (0,)
        if place.dtype != "I32":
            raise _unfit(self._called, f"{name} is {place.dtype}; I32 or U8 is needed.")
        bits = self._bits(stem)
        shape = (*lead, words * 32 // bits)
        block = self._block(name, shape, scale)
        *before, high, wide = (1, 1, *self._shape(scale))
        zeros_at = (*before[2:], -(-high * bits // 32), wide)
        zero = self._checked(f"{stem}.weight_zero_point", zeros_at, ("I32",))
        order = self._checked(f"{stem}.weight_g_idx", shape[-1:], _WHOLE)
        stated = self._checked(f"{stem}.weight_shape", (len(shape),), ("I64",))

        def whole_numbers(
            codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, size: Tensor | None
        ) -> Tensor:
            if size is not None and tuple(size.tolist()[-2:]) != shape[-2:]:
                raise ValueError(f"its codes are {shape[-2:]}, and it says {tuple(size.tolist())}")
            values = _unpacked(codes, bits)
            if zeros is None:
                values = values - (1 << (bits - 1))
            else:
                values = values - _spread(_unpacked(zeros.T, bits).T[: len(scales)], values.shape, block, groups)
            return values.to(scales.dtype) * _spread(scales, values.shape, block, groups)

        def kept(
            codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, _size: object
        ) -> Kept | None:
            if block[0] != 1 or not _in_order(groups, shape[-1], block[1]):
                return None
            scale = scales.float().reshape(len(codes), -1)
            given = zeros if zeros is None else _unpacked(zeros.T, bits).T[: len(codes)].float()
            zero = torch.full_like(scale, 1 << (bits - 1)) if given is None else given.view_as(scale)
            return Kept(_unpacked(codes, bits).to(torch.uint8), zero, scale, bits)

        return Made(shape, self._wide(scale, kind), (name, scale, zero, order, stated), whole_numbers, kept)

    def _fours(self, name: str, place: TensorPlace, scale: str, shared: str) -> Made:
        """Bytes of two numbers of four bits, with scales of blocks and, where there is one, of the whole."""
        *lead, pairs = place.shape or (0,)
        shape, block = (*lead, 2 * pairs), self._block(name, (*lead, 2 * pairs), self._needed(scale))
        divided = self._method not in _BY_MAKERS_OF_CARDS

        def make(codes: Tensor, scales: Tensor, whole: Tensor | None) -> Tensor:
            given = _scales(scales)
            if divided:
                given = given.bfloat16() if whole is None else given.bfloat16() / whole.view(-1)
            else:
                given = given.float() if whole is None else given.float() * whole.float().view(-1)
            values = fp4_values(codes)
            return (values.to(given.dtype) * _spread(given, values.shape, block)).bfloat16()

        return Made(shape, "BF16", (name, scale, self._checked(shared, None, _WIDE)), make)

    def _words(self, stem: str, place: TensorPlace) -> Made:
        """AutoAWQ's and GPTQ's words; both store matrices with a row for each input."""
        name, scale, zero = f"{stem}.qweight", self._needed(f"{stem}.scales"), self._needed(f"{stem}.qzeros")
        if place.dtype != "I32" or len(place.shape) != 2:
            raise _unfit(self._called, f"{name} is {place.dtype} of {place.shape}.")
        rows, columns = place.shape
        awq = self._method == "awq"
        # Layers may have other widths than config.json's: zeros and scales are as many.
        bits = 32 * math.prod(self._shape(zero)) // max(1, math.prod(self._shape(scale)))
        if bits not in ((4,) if awq else WORD_BITS):
            bits = int(self._stated.get("bits") or self._stated.get("w_bit") or 4)
        inputs, outputs = (rows, columns * 32 // bits) if awq else (rows * 32 // bits, columns)
        block = self._block(name, (inputs, outputs), scale)
        *_, high, wide = (1, 1, *self._shape(scale))
        self._checked(zero, (high, wide * bits // 32), ("I32",))
        groups_at = self._checked(f"{stem}.g_idx", (inputs,), _WHOLE)
        # The first version stores zeros less one.
        more = 0 if awq or self._stated.get("checkpoint_format") == "gptq_v2" else 1

        def read(codes: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
            if awq:
                values, levels = (_in_awqs_order(_unpacked(each, bits)) for each in (codes, zeros))
            else:
                values, levels = _unpacked(codes.T, bits).T, _unpacked(zeros, bits)
            return values, levels + more & (1 << bits) - 1 if more else levels

        def kept(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None) -> Kept | None:
            if block[1] != 1 or not _in_order(groups, inputs, block[0]):
                return None
            values, levels = read(codes, zeros)
            return Kept(values.T.to(torch.uint8).contiguous(), levels.T.float(), scales.T.float(), bits)

        def make(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor | None) -> Tensor:
            values, levels = read(codes, zeros)
            given = (levels, scales) if groups is None else (each[groups.long()] for each in (levels, scales))
            grid = block if groups is None else (1, block[1])
            level, factor = (_spread(each, values.shape, grid) for each in given)
            return ((values - level).to(scales.dtype) * factor).T

        return Made((outputs, inputs), self._wide(scale, self._kind(scale)), (name, scale, zero, groups_at), make, kept)

    def _bits(self, stem: str) -> int:
        """Of a matrix in compressed-tensors' words: each group of layers has its own."""
        found = {int(each["num_bits"]) for each in self._groups}
        if len(found) == 1:
            return found.pop()
        # Where there are several, the scales tell: they are for so many columns.
        words, grid = self._shape(f"{stem}.weight_packed")[-1], self._shape(f"{stem}.weight_scale")[-1]
        sizes = [(int(each["num_bits"]), int(each.get("group_size") or 0)) for each in self._groups]
        fitting = {bits for bits, size in sizes if grid * size * bits == 32 * words}
        if len(fitting) != 1:
            raise _unfit(self._called, f"How many bits {stem}.weight_packed has is not clear.")
        return fitting.pop()

    def _block(self, name: str, shape: Sequence[int], scale: str) -> tuple[int, int]:
        """Rows and columns of a matrix, or of each expert's, that share a scale."""
        stored, kind = self._shape(scale), self._kind(scale)
        grid = _grid(stored)
        if len(shape) == 3 and math.prod(grid) != 1:
            grid = grid[1:] if grid[0] == shape[0] else (0, 0)
        grid = (*grid, *(1,) * (2 - len(grid)))
        if len(shape) not in (2, 3) or not all(shape):
            raise _unfit(self._called, f"{name} is no matrix.")
        if kind not in (*_WIDE, *_FP8, "F8_E8M0", "U8"):
            raise _unfit(self._called, f"{scale} is {kind}; floating point is needed.")
        rows, columns = shape[-2:]
        for high, wide in self._blocks:  # the last ones of a row or column may be cut
            if grid == (-(-rows // high), -(-columns // wide)):
                return high, wide
        if len(grid) != 2 or not all(grid) or rows % grid[0] or columns % grid[1]:
            raise _unfit(self._called, f"{scale} of {stored} does not divide {name} of {tuple(shape)}.")
        return rows // grid[0], columns // grid[1]

    def _checked(self, name: str, shape: tuple[int, ...] | None, kinds: tuple[str, ...]) -> str | None:
        """A tensor that may be there, of this shape, or with one value for each matrix, and one of these types."""
        if name not in self._places:
            return None
        place = self._places[name][1]
        if place.dtype not in kinds or (place.shape != shape if shape is not None else place.shape not in ((), (1,))):
            needed = f"{' or '.join(kinds)} of {shape or 'one value'}"
            raise _unfit(self._called, f"{name} is {place.dtype} of {place.shape}; {needed} is needed.")
        return name

    def _wide(self, scale: str, kind: str) -> str:
        if kind not in _WIDE:
            raise _unfit(self._called, f"{scale} is {kind}; floating point is needed.")
        return kind

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def _kind(self, name: str) -> str:
        return self._places[name][1].dtype

    def _needed(self, name: str) -> str:
        if name not in self._places:
            raise CheckpointError(
                f"{self._called} lacks weights", f"No shard holds {name}.", "Download the missing *.safetensors files."
            )
        return name

    def _scale(self, name: str) -> str:
        """Of a tensor in codes: its own, or the number that all parts of one embedding share."""
        own = (name + ending for ending in ("_scale_inv", "_scale") if name + ending in self._places)
        shared = f"{name.removesuffix('.weight').rpartition('.')[0]}.weight_scale"
        return next(own, None) or self._checked(shared, None, _WIDE) or self._needed(f"{name}_scale_inv")


def _scales(given: Tensor) -> Tensor:
    """Scales as numbers; bytes are exponents."""
    if given.dtype == torch.uint8:
        return torch.exp2(given.float() - EXPONENT_BIAS)
    return given if given.dtype in (torch.bfloat16, torch.float16, torch.float32) else given.float()


def _spread(grid: Tensor, shape: Sequence[int], block: tuple[int, int], groups: Tensor | None = None) -> Tensor:
    """A value for each place of a matrix: `grid` has one for each block, or in columns by their `groups`."""
    both = grid.reshape(_grid(grid.shape) if grid.dim() in (2, 4) else (-1, 1))
    if groups is not None:
        both = both[:, groups.long()]
        block = block[0], 1
    for at, step in enumerate(block):
        if both.shape[at] > 1 and step > 1:
            both = both.repeat_interleave(step, at)
    return both[: shape[0], : shape[1]]


def _grid(shape: Sequence[int]) -> tuple[int, ...]:
    """Of scales; ModelOpt's of blocks have four dimensions."""
    return (shape[0], shape[2]) if len(shape) == 4 and shape[1] == shape[3] == 1 else tuple(shape)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes (N, 32 / bits * W) int32 of words (N, W), the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.contiguous()[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _in_order(groups: Tensor | None, columns: int, size: int) -> bool:
    """Whether the columns of a group are neighbours."""
    return groups is None or torch.equal(groups.long(), torch.arange(columns) // size)


def _in_awqs_order(codes: Tensor) -> Tensor:
    order = torch.tensor(_AWQ_ORDER).argsort()
    return codes.view(len(codes), -1, len(_AWQ_ORDER))[..., order].flatten(-2)


def _unfit(called: str, cause: str) -> CheckpointError:
    hint = "Use the model's original checkpoint, or another rounded copy."
    return CheckpointError(f"{called} cannot be packed", cause, hint)
