"""The GGUF files of a repository: which belong together, what their weights were rounded to, and which to take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..gguf.parts import PART
from ..quantities import size
from .repository_files import RepoFile, is_gguf

# Beginnings of names of files that are no model: what it sees with, statistics, vocabularies, what guesses its tokens.
_NO_MODEL = re.compile(r"(mmproj|imatrix|ggml-vocab|mtp|draft|eagle|dflash)(?![a-z])", re.IGNORECASE)
_ROUNDING = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q[1-8]_\w+|TQ[12]_0|B?F16|F32|MXFP4(?:_MOE)?|NVFP4))$", re.IGNORECASE | re.ASCII
)
# The first that is there: by what each loses for its bytes, as `worth.shorter_pays` weighs it (a test compares), then
# what was not measured, or is long.
BEST = ("Q5_K_M", "Q6_K", "Q4_K_M", "Q8_0", "MXFP4", "MXFP4_MOE", "Q5_K_S", "Q4_K_S", "BF16", "F16")
_WIDE = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """A model's GGUF file, or all parts of a split one in order.

    Attributes:
        label: what its weights were rounded to by its name, such as "Q4_K_M"; where the name does not say, or several
            say the same, the name itself.
    """

    label: str
    files: tuple[RepoFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def stem(self) -> str:
        """The file's name without its ending and the number of a part."""
        return _stem(self.files[0].name)


def every(files: Iterable[RepoFile]) -> list[GgufFiles]:
    """The models among a repository's files, the largest first; what lacks a part is left out."""
    found: dict[tuple[str, int], dict[int, RepoFile]] = {}
    for file in files:
        base = file.name.rpartition("/")[2]
        if is_gguf(base) and not _NO_MODEL.match(base):
            part = PART.fullmatch(file.name)
            whole, number, count = (part[1], int(part[2]), int(part[3])) if part else (file.name, 1, 1)
            found.setdefault((whole, count), {})[number] = file
    models = [
        GgufFiles(_label(parts[1].name), tuple(parts[number] for number in sorted(parts)))
        for (_, count), parts in found.items()
        if sorted(parts) == list(range(1, count + 1))
    ]
    labels = [model.label for model in models]
    models = [GgufFiles(one.stem, one.files) if labels.count(one.label) > 1 else one for one in models]
    return sorted(models, key=lambda one: (-one.bytes, one.label))


def chosen(repo: str, files: Iterable[RepoFile], asked: str = "") -> GgufFiles:
    """The one that was asked for, by its label or its file's name, or else the best by `BEST`.

    Raises:
        UsageError: there is none; the sentence lists what is there.
    """
    models = every(files)
    if not models:
        raise UsageError(
            f"{repo} has no GGUF file of a model", "What it has are parts of models.", "Use another repository."
        )
    if not asked:
        return _best(models)
    wanted = _stem(asked).lower() if is_gguf(asked) else asked.lower()
    named = [one for one in models if wanted in (one.label.lower(), one.stem.lower())]
    for one in named or [one for one in models if wanted == one.label.lower().removeprefix("ud-")]:
        return one
    raise UsageError(
        f"{repo} has no {asked}",
        f"It has {listed(models)}.",
        f"Name one of these: floe-chat setup {repo}:{_best(models).label}",
    )


def listed(models: Sequence[GgufFiles]) -> str:
    """Their labels and sizes, in one line."""
    return ", ".join(f"{one.label} ({size(one.bytes)})" for one in models)


def _best(models: Sequence[GgufFiles]) -> GgufFiles:
    for label in BEST:
        for spelled in (label, f"UD-{label}", f"UD-{label.removesuffix('_M')}_XL"):
            if found := next((one for one in models if one.label.upper() == spelled), None):
                return found
    rounded = [one for one in models if one.label.upper() not in _WIDE]
    return (rounded or models)[0]


def _label(name: str) -> str:
    found = _ROUNDING.search(_stem(name))
    return found[1].upper() if found else _stem(name)


def _stem(name: str) -> str:
    part = PART.fullmatch(name)
    return (part[1] if part else name[: -len(".gguf")]).rpartition("/")[2]
