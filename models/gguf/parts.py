"""A model's GGUF file, or all parts of one that was split; files that are no model by themselves are refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from ..errors import CheckpointError
from ..paths import is_file
from ..visible import as_name
from .header import GgufTensor, Header, Value, read_header, unreadable

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""A part's name: the model's, its number, and how many there are."""
_MOST_PARTS = 1 << 10
_DRAFTS = ("eagle", "dflash", "medusa", "draft")  # beginnings of architectures that guess another model's tokens


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model's files.

    Attributes:
        path: the file, the first of several. values: its metadata. tensors: of all parts, by their names in GGUF.
    """

    path: PurePath
    values: dict[str, Value]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """As its converter called it."""
        return str(self.values["general.architecture"])

    @property
    def name(self) -> str:
        """For people: the file's."""
        return as_name(self.path.name)

    def number(self, key: str) -> int | None:
        """A whole number of the architecture's metadata; None if it is not there or is something else."""
        value = self.values.get(f"{self.architecture}.{key}")
        return value if type(value) is int else None


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file that exists: by its ending or, as Ollama's have none, its first bytes."""
    return is_file(path) and (path.suffix.lower() == ".gguf" or _begins(path))


def _begins(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def first_part(path: Path) -> Path:
    """The first part of a split file, if `path` is one of its parts and the first is there; else `path`."""
    found = PART.fullmatch(path.name)
    first = path.with_name(f"{found[1]}-00001-of-{found[3]}.gguf") if found else path
    return first if first.is_file() else path


def model_name(path: Path) -> str:
    """What a model is called by its file: without the ending, the number of a part, and signs that folders lack."""
    found = PART.fullmatch(path.name)
    return re.sub(r"[^\w.-]+", "-", found[1] if found else path.stem).strip("-.").lower()


def open_gguf(path: Path) -> Gguf:
    """The model in a GGUF file, which may be any part of a split one. Only headers are read.

    Raises:
        CheckpointError: a file is damaged, or a part is missing or belongs to another model, or it is no language model
            with experts; says which and why.
    """
    header = read_header(path)
    return joined([header] if (count := _count(header)) < 2 else _parts(path, header, count))


def joined(parts: Sequence[Header]) -> Gguf:
    """The model whose parts, in order, have these headers.

    Raises:
        CheckpointError: as `open_gguf`.
    """
    count, first = len(parts), parts[0]
    for number, part in enumerate(parts):
        if max(1, _count(part)) != count or (count > 1 and part.values.get("split.no") != number):
            raise unreadable(part.path, f"By its header it is not part {number + 1} of {count}.")
    refuse(first)
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise unreadable(part.path, f"It holds {as_name(name)}, and so does {tensors[name].file.name}.")
            tensors[name] = tensor
    whole = first.values.get("split.tensors.count", len(tensors))
    if count > 1 and whole != len(tensors):
        raise unreadable(first.path, f"Its parts hold {len(tensors):,} tensors instead of {as_name(str(whole))}.")
    found = Gguf(first.path, first.values, tensors)
    _refuse_model(found)
    return found


def _count(header: Header) -> int:
    """Of the model's parts; 0 or 1: it is not split."""
    count = header.values.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= _MOST_PARTS:
        raise unreadable(header.path, "Its number of parts makes no sense.")
    return count


def _parts(path: Path, given: Header, count: int) -> list[Header]:
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path.name} is one of {count} parts, and its name does not say which",
            "",
            f"Give it back its name, NAME-00001-of-{count:05}.gguf, with all parts in one folder.",
        )
    paths = [path.with_name(f"{match[1]}-{number + 1:05}-of-{count:05}.gguf") for number in range(count)]
    if missing := [path for path in paths if not path.is_file()]:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(
            f"{path.name} is one of {count} parts, and {missing[0].name}{more} missing",
            "",
            "Download all parts into one folder.",
        )
    return [given if each == path else read_header(each) for each in paths]


def refuse(header: Header) -> None:
    """Raises: CheckpointError: a file that is no language model, by what it says about itself."""
    values, called = header.values, as_name(header.path.name)
    architecture, kind = values.get("general.architecture"), values.get("general.type", "model")
    hint = "Give the GGUF file of the language model itself."
    if kind == "mmproj" or architecture == "clip":
        raise CheckpointError(f"{called} is only the part of a model that sees or hears (mmproj)", "", hint)
    if kind in ("adapter", "imatrix", "vocab"):
        words = {"adapter": "an adapter (LoRA)", "imatrix": "an importance matrix", "vocab": "a vocabulary"}
        raise CheckpointError(f"{called} is {words[str(kind)]} and no model", "", hint)
    if not isinstance(architecture, str) or not architecture:
        raise unreadable(header.path, "Its header does not name an architecture.")
    if architecture.startswith(_DRAFTS):
        raise CheckpointError(f"{called} is a draft model, which only guesses the tokens of another one", "", hint)


def _refuse_model(gguf: Gguf) -> None:
    hint = "Give the GGUF file of the language model itself."
    if not gguf.tensors:
        raise CheckpointError(f"{gguf.name} holds no weights", "", hint)
    blocks = {int(match[1]) for name in gguf.tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))}
    if blocks and 0 not in blocks and gguf.number("nextn_predict_layers"):
        raise CheckpointError(
            f"{gguf.name} is a draft model: only the layers that guess further tokens (MTP)", "", hint
        )
    if not any("exps." in name or re.search(r"\.ffn_(gate|up|down)\.\d+\.", name) for name in gguf.tensors):
        raise CheckpointError(
            f"{gguf.name} is not a Mixture-of-Experts model", "floe-chat runs only models with experts.", ""
        )
