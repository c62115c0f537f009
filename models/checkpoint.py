"""A published checkpoint's tensors, by its family's names, read one at a time.

The shards' headers are checked before the first byte of weights is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import config_limits, private_file
from .checkpoint_files import INDEX, FolderShelf, Shelf, TensorPlace
from .converted import ConvertedShelf
from .errors import CheckpointError, NoCheckpointError
from .families import FAMILIES, family_of, language_fields
from .families.derived import Derived, configured, fit
from .families.sizes import NAMES
from .families.storage import ExpertTensors, Storage
from .quantized import Kept, QuantizedShelf
from .supported import MODELOPT, quantization, refused_type, with_modelopts
from .transformers_import import import_library

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {  # by safetensors' names: the ones of weights that can be packed
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
WHOLE = {"I64": torch.int64}  # of tensors that are no weights, which are kept as they are
CODES = "U8"  # bytes that are no numbers by themselves
LARGEST_CONFIG = 1 << 22  # bytes of a config.json: a few kilobytes are usual
_HEADS = {"head_dim", "num_key_value_heads"}  # in which layers of one model may differ


def read_config(folder: Path, called: str = "") -> PretrainedConfig:
    """The transformers configuration of the language model in `folder`; the checkpoint's own code is never run.

    Args:
        called: what errors call the checkpoint; "": by its folder.

    Raises:
        CheckpointError: no config.json, one that cannot be read, or a model that cannot be run.
    """
    path = folder / "config.json"
    try:
        fields: Any = read_fields(folder)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError(
            f"There is no checkpoint at {folder}",
            "It has no config.json." if folder.is_dir() else "It is no folder.",
            "Give the folder that holds config.json and the *.safetensors files of a downloaded model.",
        ) from None
    except (OSError, ValueError) as error:
        cause = (isinstance(error, OSError) and error.strerror) or str(error)
        raise CheckpointError(f"{path} cannot be read", cause, "Download the checkpoint again.") from error
    if (refused := refused_type(fields, called or f"The checkpoint at {folder}")) is not None:
        raise refused
    # transformers makes lists of as many entries as there are layers, so sizes are checked before it sees them.
    fields = language_fields(fields)
    if str(fields["model_type"]) not in FAMILIES:
        return configured(fields)  # which was checked there
    defaults = FAMILIES[str(fields["model_type"])].defaults
    _check_values(path, config_limits.in_force(fields, defaults))
    import_library()
    from transformers import AutoConfig

    FAMILIES[str(fields["model_type"])].register()
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config = config if config.model_type in FAMILIES else config.text_config
        family = FAMILIES[config.model_type]
        for values in _values_of(config):
            values |= {"num_local_experts": family.experts(config)}
            _check_values(path, config_limits.in_force(values, defaults))
        if (used := getattr(config, "hidden_act", family.activation)) != family.activation:
            raise ValueError(f"its experts use {used!r}; floe-chat computes {family.activation}")
        if cause := config_limits.out_of_range(family.width, getattr(config, family.width)):
            raise ValueError(cause)
        family.parts(config)  # which a family may refuse
        if not family.expert_layers(config):
            raise ValueError("none of its layers has experts")
    except CheckpointError:
        raise
    # transformers' configurations raise all kinds of errors, down to ZeroDivisionError.
    except Exception as error:
        raise CheckpointError(f"{path} does not describe a model", str(error), "Download it again.") from error
    return config


def read_fields(folder: Path) -> Any:
    """config.json, with what ModelOpt says of rounding in a file of its own.

    Raises:
        OSError, ValueError: one of them cannot be read.
    """
    fields, beside = private_file.read_json(folder / "config.json", LARGEST_CONFIG), folder / MODELOPT
    if not isinstance(fields, dict) or not beside.is_file():
        return fields
    return with_modelopts(fields, private_file.read_json(beside, LARGEST_CONFIG))


def _check_values(path: Path, values: Mapping[str, Any]) -> None:
    by_either_name = [values[name] for name in NAMES["num_local_experts"] if values.get(name) is not None]
    for experts in by_either_name or [None]:
        given = dict(values) if experts is None else {**values, "num_local_experts": experts}
        if cause := config_limits.problem(given):
            raise CheckpointError(f"{path} does not describe a model", cause, "Download it again.")


def _values_of(config: Any) -> list[dict[str, Any]]:
    """What limits are for, once for each kind of layers, and with rope's values.

    Raises:
        ValueError: layers differ in more than their heads.
    """
    kinds, differ = [config], config.per_layer_attributes or set()
    if config.is_heterogeneous:
        kinds = [config.per_layer_config[kind] for kind in sorted({*config.layer_types})]
        if more := sorted(differ - _HEADS) + ["skip" for kind in kinds if kind.skip]:
            raise ValueError(f"its layers differ in {more[0]}")
    rope: dict[str, Any] = config.rope_parameters or {}
    ropes = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value] or [rope]
    names = (*config_limits.SIZES, *config_limits.FIGURES, "use_sliding_window")
    found = [{name: getattr(kind, name) for name in names if hasattr(kind, name)} for kind in kinds]
    return [values | rope for values in found for rope in ropes]


class Checkpoint:
    """A published model: safetensors shards and config.json, in a folder or on a shelf.

    Attributes:
        config: transformers' configuration. family: its names.
        layers: the decoder layers that have experts.
        storage: how it stores experts.
        exact: False when they were rounded before. wide: whether experts' weights are wider than 16 bits, which may
            still be 16-bit numbers (`loses`).
        folder: with its small files. places: published tensor name -> (shard, place), shards in order, without tensors
            that the language model does not use. unused: these. tables: names of the parts of embeddings that are
            tables (pack/table.py), by their modules'.

    Raises:
        CheckpointError: there is no such model, or its files contradict each other; says which and how.
    """

    def __init__(self, source: Path | Shelf) -> None:
        self.shelf: Shelf = FolderShelf(source) if isinstance(source, Path) else source
        self.folder = source if isinstance(source, Path) else _folder_of(source)
        here = isinstance(self.shelf, FolderShelf)
        self._called = f"The checkpoint at {self.folder}" if here else self.shelf.name
        self.shelf.small(MODELOPT)
        self.config: Any = read_config(self.folder, self._called)
        self.family = family_of(self.config.model_type)
        if isinstance(self.family, Derived):
            self.family = family_of(self.config.model_type, fit(self.config))
        self.layers = self.family.expert_layers(self.config)
        unused = self.family.unused(self.config)
        every = places_of(self.shelf)
        fields = read_fields(self.folder)
        if (rounded := quantization(fields)) is not None:
            self.shelf = QuantizedShelf(self.shelf, every, rounded.stated, rounded.called)
            every = self.shelf.places
        self.places = {name: place for name, place in every.items() if not name.startswith(unused)}
        self.unused = {name: place for name, place in every.items() if name.startswith(unused)}
        self.tables: Mapping[str, list[str]] = {}
        if isinstance(self.family, Derived):
            self.shelf = ConvertedShelf(self.shelf, every, self.family, self.config, fields)
            self.places, self.unused, self.tables = self.shelf.places, self.shelf.unused, self.shelf.tables
        self.storage = self._stored()
        self._check()
        dtypes = {self.places[name][1].dtype for name in self._every_expert_name()} - {CODES} or {"BF16"}
        self.exact, self.wide, self._dtypes = not self.shelf.rounding, "F32" in dtypes, dtypes

    @cached_property
    def float16(self) -> torch.dtype:
        """float16 or bfloat16, what 16-bit widths store: of expert weights that are wider or of both types, what loses
        nothing of the first expert's.

        Raises:
            FloeError: that expert cannot be read.
        """
        if self.shelf.rounding or self._dtypes == {"BF16"}:
            return torch.bfloat16
        if self._dtypes == {"F16"}:
            return torch.float16
        first = self.expert(0, 0)
        keeping = (kind for kind in (torch.bfloat16, torch.float16) if not any(loses(each, kind) for each in first))
        return next(keeping, torch.bfloat16)

    @property
    def experts(self) -> int:
        """How many a layer has."""
        return self.family.experts(self.config)

    @property
    def top_k(self) -> int:
        """How many a token uses."""
        return self.family.top_k(self.config)

    @property
    def neurons(self) -> int:
        """How many an expert has."""
        return self.family.neurons(self.config)

    def expert(self, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """gate (F, H), up (F, H) and down (H, F) of an expert of the `layer`-th layer that has some, in the
        checkpoint's dtype, or bfloat16 where it has codes.
        """
        return self.whole_expert(layer, expert)[:3]

    def whole_expert(self, layer: int, expert: int) -> ExpertTensors:
        """These three, with their biases."""
        return self.storage.read(self.tensor, self.layers[layer], expert)

    def expert_names(self, decoder: int, expert: int) -> list[str]:
        """Published names of the tensors with an expert of a decoder layer."""
        return self.storage.names(decoder, expert)

    def dense_names(self) -> list[str]:
        """Published names of everything that is not an expert, nor of a table."""
        others = {*self._every_expert_name(), *(part for parts in self.tables.values() for part in parts)}
        return [name for name in self.places if name not in others]

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """One tensor by its published name, or number `index` of those that it consists of, in its own memory.

        Raises:
            CheckpointError: the shard that should hold it is missing or damaged. FloeError: it cannot be had.
        """
        file, place = self._found(name)
        shape, nbytes = place.shape, place.end - place.start
        if index is not None:
            nbytes, shape = nbytes // shape[0], shape[1:]
        raw = torch.empty(nbytes, dtype=torch.uint8)
        self.shelf.read(name, file, place, index, memoryview(raw.numpy()))  # pyright: ignore[reportArgumentType]
        return raw.view(_dtype(name, place)).view(shape)

    def rows(self, table: str, wanted: Tensor) -> Tensor:
        """Rows (N, columns) of a table by their numbers (N,), rising, each read by itself.

        Raises:
            CheckpointError: as `tensor`. FloeError: they cannot be had.
        """
        found, start = list[Tensor](), 0
        for name in self.tables[table]:
            file, place = self.places[name]
            some = wanted[(wanted >= start) & (wanted < start + place.shape[0])] - start
            start += place.shape[0]
            if len(some) and len(self.shelf.files(name, file)) > 1:  # made of codes and scales, as a whole
                found.append(self.tensor(name)[some])
                continue
            width = (place.end - place.start) // max(1, place.shape[0])
            raw = torch.empty(len(some), width, dtype=torch.uint8)
            for row, number in zip(raw.numpy(), some.tolist(), strict=True):
                at = place.start + number * width
                one = TensorPlace(place.dtype, (1, place.shape[1]), at, at + width)
                self.shelf.read(name, file, one, None, memoryview(row))  # pyright: ignore[reportArgumentType]
            found.append(raw.view(_dtype(name, place)))
        return torch.cat(found)

    def codes(self, name: str) -> Kept | None:
        """The codes that a matrix was published in, where they may be kept."""
        return self.shelf.codes(name) if isinstance(self.shelf, QuantizedShelf) else None

    def files(self, name: str) -> list[str]:
        """The shards that hold a tensor, by its published name: several where its scales are not with its codes."""
        return self.shelf.files(name, self._found(name)[0])

    def place(self, name: str) -> TensorPlace:
        """Where in its shard a tensor lies, one that the language model does not use too."""
        return self._found(name)[1]

    def _found(self, name: str) -> tuple[str, TensorPlace]:
        return self.places.get(name) or self.unused[name]

    def fingerprint(self) -> str:
        """A sha256 that identifies these weights: the place of every tensor, and the commit, or samples of
        the bytes.
        """
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for name, (file, place) in self.places.items():
            digest.update(repr((name, file, place.dtype, place.shape, place.start, place.end)).encode())
        if self.shelf.commit is not None:
            digest.update(self.shelf.commit.encode())
        else:
            for name, (file, place) in self.places.items():
                digest.update(self.shelf.sample(name, file, place))
        return digest.hexdigest()

    def _stored(self) -> Storage:
        """How it stores experts: the first way whose first tensor is there, or else the usual one."""
        ways, first = self.family.stored, next(iter(self.layers), 0)
        return next((way for way in ways if way.names(first, 0)[0] in self.places), ways[0])

    def _every_expert_name(self) -> Iterator[str]:
        for layer in self.layers:
            for expert in range(1 if self.storage.together else self.experts):
                yield from self.expert_names(layer, expert)

    def _check(self) -> None:
        last, names = self.config.num_hidden_layers, self.expert_names
        beyond = [names(last, 0)[0]]
        if not self.storage.together:
            beyond.append(names(self.layers[0], self.experts)[0])
        if extra := next((name for name in beyond if name in self.places), None):
            raise CheckpointError(
                f"{self._called} does not fit its config.json",
                f"By config.json it has {last} layers of {self.experts} experts, but it also holds {extra}.",
                "Download config.json and the weights of the same model.",
            )
        for name, (_, place) in self.places.items():
            if name.endswith(".weight") and place.dtype not in DTYPES:
                raise self._unfit(name, place, place.shape)
        all_needed = self.storage.needed(self.experts, self.neurons, self.family.expert_hidden(self.config))
        for index, name in enumerate(self._every_expert_name()):
            if name not in self.places:
                raise CheckpointError(
                    f"{self._called} lacks weights",
                    f"No shard holds {name}.",
                    "Download the missing *.safetensors files.",
                )
            place, needed = self.places[name][1], all_needed[index % len(all_needed)]
            known = place.dtype == CODES if needed.codes else place.dtype in DTYPES
            if not known or place.shape != needed.shape:
                raise self._unfit(name, place, needed.shape, "bytes" if needed.codes else "floating point")

    def _unfit(
        self, name: str, place: TensorPlace, needed: tuple[int, ...], kind: str = "floating point"
    ) -> CheckpointError:
        return CheckpointError(
            f"{self._called} cannot be packed",
            f"{name} is {place.dtype} of {place.shape}; {kind} of {needed} is needed.",
            "Use the model's original, unquantized checkpoint.",
        )


def loses(tensor: Tensor, kind: torch.dtype) -> bool:
    """Whether numbers of another type change it."""
    return tensor.dtype != kind and not torch.equal(tensor.to(kind).float(), tensor.float())


def _folder_of(shelf: Shelf) -> Path:
    config = shelf.small("config.json")
    if config is None:
        raise CheckpointError(
            f"{shelf.name} is not a model that floe-chat supports", "It has no config.json.", "Choose another model."
        )
    return config.parent


def places_of(shelf: Shelf) -> dict[str, tuple[str, TensorPlace]]:
    """Published tensor name -> shard and place; an index, if there is one, has to agree."""
    headers = shelf.headers()
    index = _index(shelf)
    if index is not None:
        for file in sorted(set(index.values())):
            if file not in headers:
                raise _disagree(f"It names {file}, which is missing.")
        headers = {file: places for file, places in headers.items() if file in set(index.values())}
    found: dict[str, tuple[str, TensorPlace]] = {}
    for file, places in sorted(headers.items()):
        for name, place in places.items():
            if index is not None and index.get(name) != file:
                raise _disagree(f"{file} holds {name}, which the index {_says(index.get(name))}.")
            if name in found:
                raise _disagree(f"Both {found[name][0]} and {file} hold {name}.")
            found[name] = file, place
    if index is not None and (lost := sorted(index.keys() - found.keys())):
        raise _disagree(f"{index[lost[0]]} should hold {lost[0]}, but does not.")
    return found


def _says(file: str | None) -> str:
    return "does not list" if file is None else f"expects in {file}"


def _index(shelf: Shelf) -> dict[str, str] | None:
    path = shelf.small(INDEX)
    if path is None:
        return None
    try:
        listed: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", f"{error}", "Download that file again.") from error


def _disagree(cause: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint's shards disagree with its index",
        cause,
        f"Download {INDEX} and the *.safetensors files of the same model again.",
    )


def _dtype(name: str, place: TensorPlace) -> torch.dtype:
    if place.dtype == CODES:
        return torch.uint8
    if place.dtype not in DTYPES | WHOLE:
        raise CheckpointError(
            f"{name} of the checkpoint cannot be read",
            f"It is {place.dtype}; floating point of 16 or 32 bit is needed.",
            "Use the model's original, unquantized checkpoint.",
        )
    return (DTYPES | WHOLE)[place.dtype]
