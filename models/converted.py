"""A checkpoint of a family without a record, by the names and shapes of transformers' modules.

Which published tensors a module's are made of, and how, is transformers' own conversion mapping, applied by the
library's own code to what is read when it is needed: one expert's, or one dense tensor's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint_files import Around, Shelf, TensorPlace
from .errors import CheckpointError
from .families.derived import Derived, UnfitError, outer, tables

Places = Mapping[str, tuple[str, TensorPlace]]
"""Published tensor name -> shard and place."""

_PIECE = 64 << 20  # bytes of a table that are read at once
_TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of which the library's converter makes others.

    Attributes:
        target: the first of the others. converter: transformers'; None where one tensor has another name and no more.
        sources: its pattern -> published names, in the order of their numbers; where those of several kinds of experts
            are made at once, all of one kind, then all of another.
    """

    target: str
    converter: Any
    sources: dict[str, list[str]]

    @property
    def kinds(self) -> int:
        """Of experts."""
        return len(self.converter.target_patterns) if self.converter is not None else 1

    def of(self, names: list[str], expert: int | None) -> list[str]:
        """Of a pattern's names, what an expert is made of, or all are."""
        return names if expert is None or len(names) == 1 else names[expert :: len(names) // self.kinds]

    def names(self, expert: int | None = None) -> list[str]:
        """The published names of what is made of an expert, or of all."""
        return [name for names in self.sources.values() for name in self.of(names, expert)]


@dataclass(frozen=True, slots=True)
class _Expert:
    """Where one matrix of one expert is. group: with it. expert: its number. part: of the module's tensor."""

    group: _Group
    expert: int
    part: str


class ConvertedShelf(Around):
    """A `Shelf` of such a checkpoint.

    Args:
        places: of all its tensors. config: of the model that reads. fields: of config.json.

    Attributes:
        places: by modules' names; of experts by those of `families.storage.Joined`. unused: published tensors that the
            library's model does not have. tables: module -> names of the parts that its embedding is read in, in order.

    Raises:
        CheckpointError: tensors that the library's conversion cannot make the model's of.
    """

    def __init__(self, shelf: Shelf, places: Places, family: Derived, config: Any, fields: Mapping[str, Any]) -> None:
        super().__init__(shelf, shelf.rounding)
        self._raw = places
        try:
            self._model, self._reads = outer(fields, config)
        except UnfitError as error:
            raise self._unfit(str(error)) from error
        self._head = next(f"{n}." for n, m in self._model.named_modules() if m is self._model.get_output_embeddings())
        self._dense, self._experts = dict[str, _Group](), dict[str, _Expert]()
        self.tables, self._parts = dict[str, list[str]](), dict[str, str]()
        self.places: dict[str, tuple[str, TensorPlace]] = {}
        self._own = {name: tuple(part.shape) for name, part in self._model.state_dict(keep_vars=True).items()}
        groups, self.unused = self._grouped()
        rows = {f"{name}.weight": shape for name, shape in tables(self._model).items()}
        layers = {f"{self._reads or 'model.'}layers.{layer}.": layer for layer in family.expert_layers(config)}
        for group in groups:
            if self._reads and not group.target.startswith((self._reads, self._head)):
                self.unused |= {name: self._raw[name] for name in group.names()}
                continue
            layer = next((number for prefix, number in layers.items() if group.target.startswith(prefix)), None)
            if layer is not None and ".experts." in group.target:
                self._add_experts(group, layer, family.experts(config))
            elif group.target in rows:
                self._add_table(group, rows[group.target])
            else:
                self._add_dense(group)

    def _grouped(self) -> tuple[list[_Group], dict[str, tuple[str, TensorPlace]]]:
        """What the library would make of the published tensors, as `convert_and_load_state_dict_in_model` does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, groups = self._model.base_model_prefix, dict[str, _Group]()
        unused = dict[str, tuple[str, TensorPlace]]()
        for name in sorted(self._raw, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._own)
            if target not in self._own and name in self._own:
                target, pattern = rename_source_key(name, [], [], prefix, self._own)
            if target not in self._own:
                unused[name] = self._raw[name]
                continue
            converter = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, _Group(target, converter, {}))
            if (group.converter is None) != (pattern is None) or (pattern is None and group.sources):
                raise self._unfit(f"{name} and {group.names()[0]} are both {target}")
            group.sources.setdefault(pattern or name, []).append(name)
        return list(groups.values()), unused

    def _add_dense(self, group: _Group) -> None:
        for name, tensor in self._converted(group, self._meta(group)).items():
            name = self._named(name)
            self._place(name, tensor, group, group.names())
            self._dense[name] = group

    def _add_experts(self, group: _Group, layer: int, experts: int) -> None:
        for names in group.sources.values():
            shape = self._raw[names[0]][1].shape
            there = len(names) // group.kinds if len(names) > 1 or len(shape) < 3 else shape[0]
            if there != experts:
                raise self._unfit(f"{group.target} is of {there} experts where its config.json has {experts}")
            kind = self._raw[names[0]][1].dtype
            for name in names[:there]:
                if (self._raw[name][1].shape, self._raw[name][1].dtype) != (shape, kind):
                    raise self._unfit(
                        f"{name} is {self._raw[name][1].dtype} of {self._raw[name][1].shape}, not {kind} of {shape}"
                    )
        one = self._oriented(group, self._converted(group, self._meta(group, 0)))
        for expert in range(experts):
            for part, tensor in one.items():
                name = f"model.layers.{layer}.experts.{expert}.{part}"
                self._place(name, tensor, group, group.names(expert))
                self._experts[name] = _Expert(group, expert, part)

    def _add_table(self, group: _Group, shape: tuple[int, int]) -> None:
        """An embedding in parts that memory has room for: its published tensors, of which the library makes it by
        concatenation, and these cut where they are stored as they are.
        """
        owner, parts, rows = self._named(group.target).removesuffix(".weight"), list[str](), 0
        steps = [] if group.converter is None else group.converter.operations
        if any(type(step).__name__ != "Concatenate" or step.dim != 0 for step in steps):
            raise self._unfit(f"{group.target} is not stored row by row")
        kinds = {self._raw[source][1].dtype for source in group.names()}
        for source in group.names():
            file, at = self._raw[source]
            if len(kinds) > 1 or len(at.shape) != 2 or at.shape[1] != shape[1]:
                raise self._unfit(f"{source} is {at.dtype} of {at.shape}, no part of a table of {shape}")
            width = (at.end - at.start) // max(1, at.shape[0])
            cut = len(self._shelf.files(source, file)) == 1  # else it has scales: it is made as a whole
            step = max(1, _PIECE // max(1, width) if cut else at.shape[0])
            for first in range(0, at.shape[0], step):
                some, start = min(step, at.shape[0] - first), at.start + first * width
                name = f"{owner}.{len(parts):05}.weight"
                parts.append(name)
                self._parts[name] = source
                self.places[name] = file, TensorPlace(at.dtype, (some, shape[1]), start, start + some * width)
            rows += at.shape[0]
        if rows != shape[0]:
            raise self._unfit(f"{group.target} has {rows:,} rows; {shape[0]:,} are needed")
        self.tables[owner] = parts

    def _named(self, target: str) -> str:
        """A tensor's name in the model that reads, by that in the whole."""
        if target.startswith(self._head):
            return f"lm_head.{target.removeprefix(self._head)}"
        return f"model.{target.removeprefix(self._reads)}" if self._reads and target.startswith(self._reads) else target

    def _place(self, name: str, tensor: Tensor, group: _Group, sources: Sequence[str]) -> None:
        if name in self.places:
            raise self._unfit(f"two of its tensors are {name}")
        kinds = {self._raw[source][1].dtype for source in sources}
        if len(kinds) > 1:
            raise self._unfit(f"{group.target} is made of tensors of several types")
        file, place = self._raw[sources[0]]
        shape = tuple(tensor.shape)
        nbytes = math.prod(shape) * _TORCH[place.dtype].itemsize if place.dtype in _TORCH else place.end - place.start
        self.places[name] = file, TensorPlace(place.dtype, shape, place.start, place.start + nbytes)

    def _meta(self, group: _Group, expert: int | None = None) -> dict[str, list[Tensor]]:
        """What is made, in shapes alone."""
        return {
            pattern: [torch.empty(self._shape(name, expert), device="meta") for name in group.of(names, expert)]
            for pattern, names in group.sources.items()
        }

    def _shape(self, name: str, expert: int | None) -> tuple[int, ...]:
        shape = self._raw[name][1].shape
        return (1, *shape[1:]) if expert is not None and len(shape) == 3 else shape

    def _read(self, group: _Group, expert: int | None = None) -> dict[str, list[Tensor]]:
        """What is made, read."""
        found: dict[str, list[Tensor]] = {}
        for pattern, names in group.sources.items():
            found[pattern] = []
            for name in group.of(names, expert):
                file, place = self._raw[name]
                if place.dtype not in _TORCH:
                    raise self._unfit(f"{name} is {place.dtype}")
                number = expert if expert is not None and len(place.shape) == 3 else None
                nbytes = (place.end - place.start) // (1 if number is None else place.shape[0])
                raw = torch.empty(nbytes, dtype=torch.uint8)
                self._shelf.read(name, file, place, number, memoryview(raw.numpy()))  # pyright: ignore[reportArgumentType]
                found[pattern].append(raw.view(_TORCH[place.dtype]).view(self._shape(name, expert)))
        return found

    def _converted(self, group: _Group, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """By the library's own converter."""
        if group.converter is None:
            return {group.target: next(iter(tensors.values()))[0]}
        converter = copy.deepcopy(group.converter)
        for operation in converter.operations:
            if getattr(operation, "check_dims", False):  # by the shape of all experts together, where one is read
                if self._raw[group.names()[0]][1].shape == self._own[group.target]:
                    return {group.target: next(iter(tensors.values()))[0]}
                operation.check_dims = False
        for pattern, each in tensors.items():
            converter.collected_tensors[pattern] = each
        try:
            found = converter.convert(group.target, model=self._model, config=self._model.config)
        # Operations raise whatever torch does for shapes that do not fit.
        except Exception as error:
            raise self._unfit(f"{group.target} cannot be made of {group.names()[0]}: {str(error)[:200]}") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}

    def _oriented(self, group: _Group, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """One expert's tensors (1, ...) by the last part of their names: gate above up (2 F, H) or up, down (H, F)."""
        module, _, _ = group.target.rpartition(".")
        owner = self._model.get_submodule(module)
        oriented: dict[str, Tensor] = {}
        for name, tensor in found.items():
            if not name.startswith(module):
                continue  # made at once for other experts, of what is not read
            if tensor.dim() != 3 or tensor.shape[0] != 1:
                raise self._unfit(f"{name} is not stored expert by expert")
            matrix, part = tensor[0], name.rpartition(".")[2]
            if getattr(owner, "is_transposed", False):
                matrix = matrix.T
            if part == "gate_up_proj" and not getattr(owner, "is_concatenated", True):
                matrix = matrix.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
            oriented[part] = matrix
        return oriented

    def _unfit(self, cause: str) -> CheckpointError:
        hint = "Download config.json and the weights of the same model."
        return CheckpointError(f"{self.name} cannot be packed", f"{cause}.", hint)

    def _sources(self, name: str) -> list[str]:
        """Published names of what a tensor is made of."""
        if (found := self._experts.get(name)) is not None:
            return found.group.names(found.expert)
        if (part := self._parts.get(name)) is not None:
            return [part]
        return self._dense[name].names()

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`."""
        return [shard for each in self._sources(name) for shard in self._shelf.files(each, self._raw[each][0])]

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """See `Shelf.read`."""
        if (part := self._parts.get(name)) is not None:
            self._shelf.read(part, file, place, None, into)
            return
        if (found := self._experts.get(name)) is not None:
            every = self._oriented(found.group, self._converted(found.group, self._read(found.group, found.expert)))
            tensor = every[found.part]
        else:
            group = self._dense[name]
            every = {self._named(each): tensor for each, tensor in self._converted(group, self._read(group)).items()}
            tensor = every[name]
        into[:] = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]

    def sample(self, name: str, file: str, place: TensorPlace) -> bytes:
        """See `Shelf.sample`."""
        if (part := self._parts.get(name)) is not None:
            return self._shelf.sample(part, file, place)
        return b"".join(self._shelf.sample(each, *self._raw[each]) for each in self._sources(name))
