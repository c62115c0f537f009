"""A ready pack: somebody else's packed model in a repository or a folder, which is taken as it is.

Its manifest.json is a stranger's. Before anything large is fetched, its version, the names and sizes of its files and
their hashes are compared with what the repository lists, and all of it with the model's own config.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import catalog, private_file
from ..catalog_entry import CatalogEntry, ReadyPack, Sizes
from ..errors import FloeError, HubError, PackError
from ..pack import manifest as manifests
from ..pack import table
from ..pack.manifest import AHEAD, COPIED, DRAFT, FILE_NAME, FRONTIER, LARGEST, FileEntry, Manifest
from ..visible import as_name
from .repository import Repo

_OURS = frozenset({"dense.safetensors", "profile.safetensors", AHEAD, DRAFT, FRONTIER, *COPIED})
_ALIKE = {"dense.safetensors", "profile.safetensors"}  # which no checkpoint has
_SPARE = 64 << 20  # bytes: more than headers, tables of predictors' figures, or a tokenizer take
_HEADER = 1 << 20  # bytes: more than the header of a layer's file takes
_HINT = "Ask its publisher, or pack the model's original weights yourself: `floe-chat plan` lists models."


@dataclass(frozen=True, slots=True)
class Offer:
    """A ready pack. manifest: what it claims. content: its manifest.json, as it came."""

    manifest: Manifest
    content: bytes

    @property
    def files(self) -> dict[str, FileEntry]:
        """What is fetched besides the manifest, the small files first: what is wrong with them shows early."""
        files = {**self.manifest.files, **self.manifest.beside}
        return dict(sorted(files.items(), key=lambda file: file[0].endswith(".safetensors")))

    @property
    def bytes(self) -> int:
        """Of all files."""
        return len(self.content) + sum(entry.size for entry in self.files.values())

    @property
    def digest(self) -> str:
        """The sha256 of manifest.json, which stands for every byte of the pack."""
        return hashlib.sha256(self.content).hexdigest()

    def described(self, place: str, by: str, commit: str = "") -> ReadyPack:
        """For a person, and for a plan. place: where it is. by: who offers it. commit: of its repository."""
        m, w = self.manifest, self.manifest.widths
        return ReadyPack(
            place,
            self.bytes,
            w.up,
            w.gate,
            w.down,
            w.dense,
            w.group,
            w.short,
            by=as_name(by),
            commit=commit,
            digest=self.digest,
            source=m.source.name,
            source_commit=m.source.commit or "",
            draft=DRAFT in m.beside,
            presets=tuple((as_name(preset.name), preset.kl) for preset in m.tuned),
        )


def offered(repo: Repo) -> Offer | None:
    """The pack in a repository, compared with its listing; None if it holds none: it may be a checkpoint.

    Raises:
        PackError: a pack of another version, or one whose files are missing, of other sizes or hashes than its
        manifest states, or not those of a pack. HubError: neither a pack nor a checkpoint. FloeError: as `Repo.read`.
    """
    names = {file.name for file in repo.files}
    alike = names >= _ALIKE
    listed = repo.file(FILE_NAME)
    if listed is None:
        if alike:
            raise _refused(repo.name, f"It has no {FILE_NAME}.")
        return None
    content = b""
    if listed.size <= LARGEST:
        content = repo.read(FILE_NAME) or b""
    elif alike:
        raise _refused(repo.name, f"Its {FILE_NAME} has {listed.size / 1e6:,.0f} MB.")
    if not alike and not manifests.is_manifest(content):
        if any(name.endswith(".safetensors") for name in names):
            return None
        cause = f"It has no *.safetensors files, and its {FILE_NAME} is not that of a pack."
        raise HubError(f"{repo.name} cannot be used", cause, "Look for a repository of this model with its weights.")
    offer = parsed(repo.name, content)
    for name, entry in offer.files.items():
        found = repo.file(name)
        if found is None:
            raise _refused(repo.name, f"{name} is missing.")
        if found.size != entry.size:
            raise _refused(repo.name, f"{name} has {found.size:,} bytes; its manifest states {entry.size:,}.")
        if found.large and found.hash != entry.sha256:
            raise _refused(repo.name, f"{name} has another sha256 than its manifest states.")
    return offer


def in_folder(folder: Path) -> Offer | None:
    """The pack in a folder; None if it holds none: it may be a checkpoint.

    Raises:
        PackError: as `offered`; the hashes are compared when it is copied.
    """
    alike = all((folder / name).is_file() for name in _ALIKE)
    try:
        content = private_file.read(folder / FILE_NAME, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        if alike:
            raise _refused(str(folder), f"It has no {FILE_NAME}.") from None
        return None
    except OSError as error:
        raise _refused(str(folder), f"{FILE_NAME} cannot be read: {error.strerror or error}.") from error
    if not alike and not manifests.is_manifest(content):
        return None
    offer = parsed(str(folder), content)
    for name, entry in offer.files.items():
        try:
            private_file.need_ordinary(folder / name)
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise _refused(str(folder), f"{name} is missing.") from None
        except OSError as error:
            raise _refused(str(folder), f"{name} cannot be read: {error.strerror or error}.") from error
        if size != entry.size:
            raise _refused(str(folder), f"{name} has {size:,} bytes; its manifest states {entry.size:,}.")
    return offer


def parsed(place: str, content: bytes) -> Offer:
    """The pack with this manifest.json; its names and sizes are those of a pack.

    Raises:
        PackError: they are not, or it is another version's.
    """
    try:
        manifest = Manifest.parse(content, place)
    except PackError as error:
        newer = "version" in error.title
        raise PackError(error.title, error.cause, f"Update floe-chat. {_HINT}" if newer else _HINT) from error
    offer = Offer(manifest, content)
    for name, entry in offer.files.items():
        if name not in _OURS and not re.fullmatch(r"(layer|table)_[0-9]{2,4}\.safetensors", name):
            raise _refused(place, f"{as_name(name)!r} is not a file of a pack.")
        if not re.fullmatch("[0-9a-f]{64}", entry.sha256):
            raise _refused(place, f"The sha256 of {name} is not one.")
        if not 0 <= entry.size <= (most := _most(manifest, name)) or (_is_layer(name) and entry.size < most - _HEADER):
            raise _refused(place, f"{name} has {entry.size:,} bytes by its manifest, which no such file can have.")
    return offer


def check_config(place: str, offer: Offer, content: bytes) -> CatalogEntry:
    """The model of a pack by its config.json, whose `content` was fetched, once that is compared with the manifest.

    Raises:
        PackError: it is another file than the manifest states, or of another model, or other tensors than those of
        experts take more room than the model has. CheckpointError: it describes no model that we know.
    """
    stated = offer.manifest.files["config.json"]
    if (len(content), hashlib.sha256(content).hexdigest()) != (stated.size, stated.sha256):
        raise _refused(place, "config.json has another sha256 than its manifest states.")
    try:
        fields: Any = json.loads(content)
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise _refused(place, f"Its config.json cannot be read: {error}.") from error
    entry = catalog.described(fields)
    sizes = entry.sizes
    a = offer.manifest.architecture
    packed = (a.model_type, a.layers, a.experts, a.top_k, a.hidden, a.intermediate)
    if packed != (sizes.model_type, sizes.layers, sizes.experts, sizes.top_k, sizes.hidden, sizes.intermediate):
        raise _refused(place, "Its manifest and its config.json describe models of different sizes.")
    if offer.manifest.files["dense.safetensors"].size > _most_dense(sizes):
        raise _refused(place, "dense.safetensors is larger than all that the model has besides its experts.")
    draft = offer.manifest.beside.get(DRAFT)
    if draft is not None and draft.size > _most(offer.manifest, "layer_00") + _most_dense(sizes) + 8 * sizes.hidden**2:
        raise _refused(place, f"{DRAFT} is larger than a layer and all that the model has besides its experts.")
    vectors = [(rows, table.vector(columns, offer.manifest.widths.dense)) for rows, columns, _ in sizes.tables]
    for name, (rows, vector) in zip(sorted(offer.manifest.tables), vectors, strict=False):
        if not 0 <= offer.manifest.files[name].size - rows * vector.nbytes <= _HEADER:
            raise _refused(place, f"{name} is of another size than the model's table of {rows:,} rows.")
    if len(offer.manifest.tables) > len(vectors):
        raise _refused(place, f"It has {len(offer.manifest.tables)} files of tables; the model has {len(vectors)}.")
    return entry


def _is_layer(name: str) -> bool:
    return name.startswith("layer_")


def _most(manifest: Manifest, name: str) -> int:
    """The largest size of a file that makes sense, in bytes."""
    a = manifest.architecture
    if _is_layer(name):  # as large by either signal
        whole = sum(math.prod(shape) * dtype.itemsize for dtype, shape in manifest.layer_plan().values())
        return whole + _HEADER
    if name in ("profile.safetensors", AHEAD):
        return _SPARE + 8 * a.layers * a.experts * (a.hidden + manifest.calibration.quantiles)
    if name in ("dense.safetensors", DRAFT) or name in manifest.tables:
        return 1 << 40  # `check_config` knows better
    return 2 * _SPARE


def _most_dense(sizes: Sizes) -> int:
    """Bytes of everything besides experts at 16 bits; a tied head is stored once more."""
    return 2 * (sizes.parameters - sizes.in_experts - sizes.in_tables + sizes.embedding) + _SPARE


def _refused(place: str, cause: str) -> FloeError:
    return PackError(f"The pack {place} cannot be used", cause, _HINT)
