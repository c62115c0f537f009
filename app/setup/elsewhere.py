"""Copies of a model that other programs on this machine have downloaded: LM Studio, Ollama, llama.cpp.

Their folders are only read, and only when the user agrees: names of files, and headers of those that might be it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models import catalog, private_file
from ...models.catalog_entry import CatalogEntry
from ...models.errors import FloeError
from ...models.published import PUBLISHED

_MOST_FILES, _MOST_DEPTH = 4096, 6  # that are looked at in one folder
_LARGEST_MANIFEST = 1 << 20  # bytes of one of Ollama's; a few hundred are usual
_MODEL = "application/vnd.ollama.image.model"
_SUFFIXES = {"LM Studio": "lmstudio", "Ollama": "ollama", "llama.cpp": "llamacpp"}  # of names in our models folder
_LEAST, _MOST = 1.0, 33.0  # bits per weight of a whole model's files


@dataclass(frozen=True, slots=True)
class Copy:
    """A model in another program's folder.

    Attributes:
        program: whose. entry: what it is; its folder is the GGUF file. called: its name there. bytes: of that file.
    """

    program: str
    entry: CatalogEntry
    called: str
    bytes: int


def folders() -> list[tuple[str, Path]]:
    """The folders of such programs that are there, each with the program's name."""
    home, caches = Path.home(), Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    places = [
        ("LM Studio", _lm_studio(home) / "models"),
        ("LM Studio", home / ".cache" / "lm-studio" / "models"),
        ("Ollama", Path(os.environ.get("OLLAMA_MODELS") or home / ".ollama" / "models")),
        ("Ollama", Path("/usr/share/ollama/.ollama/models")),
        ("llama.cpp", Path(os.environ.get("LLAMA_CACHE") or caches / "llama.cpp")),
    ]
    return [place for place in dict.fromkeys(places) if _is_folder(place[1])]


def programs() -> str:
    """Whose folders are there: "LM Studio and Ollama"; "" if none is."""
    *first, last = dict.fromkeys(program for program, _ in folders()) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def copies(wanted: CatalogEntry | None = None) -> list[Copy]:
    """The models in those folders that floe-chat can pack, those of most bits first.

    Args:
        wanted: only copies of this model, by its sizes and its name; None: of all.
    """
    found: dict[Path, Copy] = {}
    for program, folder in folders():
        for called, path in _ollamas(folder) if program == "Ollama" else _files(folder):
            copy = _copy(program, called, path, wanted)
            if copy is not None and copy.entry.folder is not None:
                found.setdefault(copy.entry.folder, copy)
    return sorted(found.values(), key=lambda one: -one.bytes)


def _lm_studio(home: Path) -> Path:
    """LM Studio's folder, which a file in the home folder names."""
    try:
        named = private_file.read(home / ".lmstudio-home-pointer", 4096).decode().strip()
    except (OSError, ValueError):
        named = ""
    return Path(named) if named and Path(named).is_absolute() else home / ".lmstudio"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # of another user


def _walk(folder: Path) -> Iterator[Path]:
    """Files in a folder and those inside it, not endlessly many."""
    seen = 0
    for base, inside, files in os.walk(folder):
        if len(Path(base).relative_to(folder).parts) >= _MOST_DEPTH:
            inside.clear()
        for name in sorted(files):
            seen += 1
            if seen > _MOST_FILES:
                return
            yield Path(base) / name


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """GGUF files, with their names; of a split one the first part."""
    for path in _walk(folder):
        part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", path.name, re.IGNORECASE)
        if path.suffix.lower() == ".gguf" and (part is None or int(part[1]) == 1):
            yield path.stem, path


def _ollamas(folder: Path) -> Iterator[tuple[str, Path]]:
    """What Ollama's manifests name: NAME:TAG, and the blob with the weights."""
    for path in _walk(folder / "manifests"):
        if (blob := _blob(path)) is not None:
            yield f"{path.parent.name}:{path.name}", folder / "blobs" / blob


def _blob(manifest: Path) -> str | None:
    """The file name of the weights that a manifest names."""
    try:
        fields: Any = private_file.read_json(manifest, _LARGEST_MANIFEST)
        digests = [layer["digest"] for layer in fields["layers"] if layer["mediaType"] == _MODEL]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # One digest, and nothing that could lead elsewhere.
    if len(digests) != 1 or not re.fullmatch(r"sha256:[0-9a-f]{64}", str(digests[0]), re.ASCII):
        return None
    return str(digests[0]).replace(":", "-")


def _copy(program: str, called: str, path: Path, wanted: CatalogEntry | None) -> Copy | None:
    try:
        size = sum(part.stat().st_size for part in _parts(path))
        if wanted is not None and not _LEAST <= 8 * size / wanted.sizes.parameters <= _MOST:
            return None  # before its header is read
        entry = catalog.described(path)
    except (OSError, FloeError):
        return None  # another kind of model, or a file that is not whole
    if wanted is not None and not _is(entry, called, wanted):
        return None
    plain = re.sub(r"[^\w.-]+", "-", called).strip("-.").lower()
    name = wanted.name if wanted else f"{plain}-{_SUFFIXES[program]}"
    return Copy(program, replace(entry, name=name), called, size)


def _parts(path: Path) -> Sequence[Path]:
    split = re.fullmatch(r"(.+)-00001-of-(\d{5})\.gguf", path.name, re.IGNORECASE)
    if split is None:
        return [path]
    return sorted(path.parent.glob(f"{_literal(split[1])}-*-of-{split[2]}.gguf"))


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _is(found: CatalogEntry, called: str, wanted: CatalogEntry) -> bool:
    """Whether a file of these sizes is the wanted model, and by its name no other of the same sizes."""
    if not _same_sizes(found, wanted):
        return False
    rivals = [entry for entry in PUBLISHED if entry.name != wanted.name and _same_sizes(entry, wanted)]
    words = _words(f"{called} {found.name}")
    best = max((_likeness(words, entry) for entry in rivals), default=(-1, 0))
    return _likeness(words, wanted) >= best


def _same_sizes(one: CatalogEntry, other: CatalogEntry) -> bool:
    a, b = (
        (sizes.layers, sizes.experts, sizes.top_k, sizes.hidden, sizes.intermediate)
        for sizes in (one.sizes, other.sizes)
    )
    return a == b


def _likeness(words: set[str], entry: CatalogEntry) -> tuple[int, int]:
    """How many of its name's words are among these, and, as a negative number, how many are not."""
    own = _words(entry.name)
    return len(own & words), -len(own - words)


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word}
