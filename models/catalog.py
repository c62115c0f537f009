"""The known models: on this machine (the built-in demo, the user's models folder, any path) and published ones.

Every command, the screen and the settings resolve names here: `find` for a pack that answers, `described` for anything
that can be planned, `source` for what can be set up or packed. The command line calls this before it shows anything, so
finding a model does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from . import private_file, supported
from . import typed_names as names
from .catalog_entry import CatalogEntry
from .errors import CheckpointError, FloeError, UsageError
from .gguf.parts import Gguf, first_part, is_gguf, model_name, open_gguf
from .paths import expanded
from .published import PUBLISHED

DEMO = "demo"
FETCHED = ".download"  # suffix of a folder with the downloads of a model that is being set up
_SHOWN = 60  # characters of a name in an error
_LARGEST_FILE = 4 << 20  # bytes of a config.json

_chosen_folder: Path | None = None  # the person's setting


@dataclass(frozen=True, slots=True)
class Installed:
    """A packed model that can be named on the command line. `trouble`: why it cannot be used, or None."""

    name: str
    folder: Path
    bytes: int
    trouble: str | None


def asset(*parts: str) -> Path:
    """A file or folder that ships with the program."""
    return Path(str(files("floe_chat.assets").joinpath(*parts)))


def models_folder() -> Path:
    """The folder of packed models: the one set by `use_models_folder`, or else the one in the user's data folder."""
    return _chosen_folder or Path(platformdirs.user_data_dir("floe-chat", appauthor=False)) / "models"


def use_models_folder(folder: Path | None) -> None:
    """Use `folder` for models in this process; None: the one in the user's data folder."""
    global _chosen_folder
    _chosen_folder = expanded(folder) if folder else None


def find(name: str, *, saved: bool = False) -> Path:
    """The folder of the pack called `name`: "demo", a name in the models folder or a part of it that only one
    model has, the listed name or hub id (or address) that it was set up from, or a path.

    Args:
        saved: it was saved earlier (see `reference`), so it is a whole name, or an absolute path.

    Raises:
        UsageError: there is no such model, or there are several. PackError: the folder exists but holds no finished
        pack.
    """
    if name == DEMO:
        return _checked(asset("demo", "packed"))
    if (folder := _existing(name, saved=saved)) is not None:
        return _checked(folder)
    packs, whole = installed(), _called(name)
    meant = [pack.name for pack in packs if pack.name == whole]
    if not meant and not saved:
        meant = names.matches(name, [pack.name for pack in packs if not pack.trouble])
    if len(meant) == 1:
        return next(pack.folder for pack in packs if pack.name == meant[0])
    if meant:
        raise UsageError(f"{name} can mean {' or '.join(meant)}", "", "Give more of the name.")
    if (entry := listed(name)) is not None:
        raise UsageError(
            f"{entry.name} is not set up on this machine",
            f"Installed: {', '.join(pack.name for pack in packs)}.",
            f"Set it up first: floe-chat setup {entry.name}",
        )
    raise supported.refused(name) or UsageError(
        f"There is no model {_shown(name)}",
        f"Installed: {', '.join(pack.name for pack in packs)}.",
        names.did_you_mean(name, [pack.name for pack in packs])
        or f"Give one of these names, or the folder of a packed model. Models by name are in {models_folder()}.",
    )


def _existing(name: str, *, saved: bool) -> Path | None:
    """The folder of exactly that name in the models folder, or of that path."""
    try:
        if name and not any(sign in name for sign in "/\\") and (models_folder() / name).is_dir():
            return models_folder() / name
        if name and (Path(name).is_absolute() or not saved) and Path(name).expanduser().is_dir():
            return Path(name).expanduser().absolute()
    except (OSError, RuntimeError, ValueError):
        pass  # a name too long for the system, or the home of an unknown user
    return None


def _called(name: str) -> str | None:
    """The usual local name of a model set up as `name`, a listed name, a hub id or an address."""
    repo = names.hub_repo(name)
    if (entry := published(repo.id if repo else name) or (with_gguf(repo.id) if repo else None)) is not None:
        return entry.name
    return _usual(repo.id) if repo else None


def _usual(repo: str) -> str:
    """The local name of a model from this repository."""
    return re.sub(r"[-_.]gguf$", "", repo.rstrip("/").rpartition("/")[2].lower())


def _shown(name: str) -> str:
    """The name as typed, in quotes, at most a line long."""
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "…")


def name_of(folder: Path, packed_as: str) -> str:
    """The user's name for the packed model in `folder`: in the models folder it may be a renamed copy.

    Args:
        packed_as: the name in its manifest.
    """
    return folder.name if folder.parent == models_folder() else packed_as


def reference(folder: Path) -> str:
    """A name by which `find` finds the pack in `folder` from any current folder: its name here, or its
    absolute path.
    """
    if folder == asset("demo", "packed"):
        return DEMO
    absolute = folder.absolute()
    return absolute.name if absolute.parent == models_folder().absolute() else str(absolute)


def short_name(model: str) -> str:
    """A short name for a model as `find` takes it: its name, or the last part of its path."""
    return Path(model).name or model


def installed() -> list[Installed]:
    """The demo and every folder in the models folder, by name.

    Raises:
        FloeError: the models folder cannot be read.
    """
    found = [_look(DEMO, asset("demo", "packed"))]
    try:
        paths = models_folder().iterdir() if models_folder().is_dir() else ()
        folders = [path for path in paths if (path.is_dir() or _is_lost(path)) and not path.name.endswith(FETCHED)]
    except OSError as error:
        cause = f"{error.filename or models_folder()}: {error.strerror or error}."
        raise FloeError("The models folder cannot be read", cause, "Check the permissions of the folder.") from error
    return found + [_look(path.name, path) for path in sorted(folders)]


def published(name: str) -> CatalogEntry | None:
    """The entry of a listed name or hub id, ignoring case; None if there is none."""
    wanted = name.lower()
    return next((entry for entry in PUBLISHED if wanted in (entry.name, (entry.repo or "").lower())), None)


def with_gguf(repo: str) -> CatalogEntry | None:
    """The listed model of which a repository has GGUF files, ignoring case; None if it is of none."""
    return next((entry for entry in PUBLISHED if entry.gguf and entry.gguf.lower() == repo.lower()), None)


def listed(name: str) -> CatalogEntry | None:
    """The listed model that a name, a part of one, a hub id or an address means; None if it means none.

    Of several ("mixtral") the first in the list: the smallest that can chat.
    """
    if (entry := published(name)) is not None:
        return entry
    if (repo := names.hub_repo(name)) is not None:
        return published(repo.id)
    if any(sign in name for sign in "/\\") or supported.refused_format(name):
        return None
    found = names.matches(name, [entry.name for entry in PUBLISHED])
    return published(found[0]) if found else None


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a model: the folder of a checkpoint, a GGUF file, or a repository on the hub.

    Attributes:
        folder: or the file. repo: owner/name, or an address on another host (`typed_names.other_address`).
        commit: of the repository, "" for the current main. file: which of its GGUF files, "" where that is not said.
        entry: the listed model, if it is one.
    """

    folder: Path | None = None
    repo: str = ""
    commit: str = ""
    file: str = ""
    entry: CatalogEntry | None = None

    @property
    def place(self) -> str:
        """The folder or file, the hub id, with ":Q4_K_M" if such a file is meant, or the address."""
        return str(self.folder) if self.folder else f"{self.repo}:{self.file}" if self.file else self.repo

    @property
    def name(self) -> str:
        """The model's default name."""
        if self.folder is not None and is_gguf(self.folder):
            return model_name(self.folder)
        return self.entry.name if self.entry else _usual(self.repo or self.place)


def source(model: str) -> Source:
    """The source of `model`: a folder, a GGUF file, a listed name or a part of one, a hub id or its page's address.

    Raises:
        UsageError: it is none of these, with the reason if the name says one (GGUF, another family).
    """
    try:
        folder = expanded(model) if model else None
        if folder is not None and folder.is_dir() and published(model) is None:
            return Source(folder=folder.resolve())
        if folder is not None and is_gguf(folder):
            return Source(folder=first_part(folder.resolve()))
    except (OSError, ValueError):
        pass  # too long a name, or a path that may not be read
    address = names.other_address(model, os.environ.get("HF_ENDPOINT", ""))
    if address is not None and (
        model.strip().endswith(("/", "/manifest.json")) or published("/".join(address.split("/")[3:5])) is None
    ):
        return Source(repo=address)
    repo = names.hub_repo(model)
    if (entry := listed(model)) is not None and entry.repo:
        found = repo or names.NamedRepo(entry.repo)
        return Source(repo=entry.repo, commit=found.commit, file=found.file, entry=entry)
    called, _, file = model.partition(":")
    if file and (entry := published(called)) is not None and entry.gguf:
        return Source(repo=entry.gguf, file=file, entry=entry)
    # A repository's config.json decides what it is; its name can only rule out its format.
    if repo is not None and supported.refused_format(model) is None:
        return Source(repo=repo.id, commit=repo.commit, file=repo.file, entry=with_gguf(repo.id))
    raise supported.refused(model) or _unknown(model)


def described(model: str | Path | Mapping[str, Any]) -> CatalogEntry:
    """Describes a model: a listed one, one on this machine, or any of a supported family.

    Args:
        model: whatever `find` and `listed` understand, the folder of a pack or a checkpoint, a GGUF file, a hub id or
            address whose config.json is in the hub's own cache, or the fields of a config.json. No network is used.

    Raises:
        UsageError: there is no such model, or it is unknown here. CheckpointError: its family is not
        supported, it has no experts, or its configuration makes no sense.
    """
    if isinstance(model, Mapping):
        name = str(model.get("_name_or_path") or "")
        return _of_fields(model, name or "model", name or "The configuration")
    if isinstance(model, str) and (entry := published(model)):
        return entry
    if is_gguf(file := expanded(model)):
        return _of_file(first_part(file.resolve()))
    folder = _folder(str(model))
    if folder is None and isinstance(model, str):
        if (entry := listed(model)) is not None:
            return entry
        if (repo := names.hub_repo(model)) is not None:
            if cached := _cached_config(repo.id):
                return replace(_of_fields(_config(cached), repo.id.rpartition("/")[2].lower(), repo.id), repo=repo.id)
            raise supported.refused(repo.id) or UsageError(
                f"{repo.id} is not known on this machine",
                "`floe-chat plan` does not use the network, and its config.json was not downloaded before.",
                f"`floe-chat setup {repo.id}` asks the hub, and shows the plan before it downloads anything.",
            )
        packs = [pack.name for pack in installed() if not pack.trouble]
        if len(found := names.matches(model, packs)) == 1:
            folder = _folder(found[0])
    if folder is None:
        raise supported.refused(str(model)) or _unknown(str(model))
    packed = (folder / "manifest.json").exists()
    name = DEMO if folder == asset("demo", "packed") else folder.resolve().name
    fields, beside = _config(folder / "config.json"), folder / supported.MODELOPT
    fields = supported.with_modelopts(fields, _config(beside)) if beside.is_file() else fields
    entry = replace(_of_fields(fields, name, str(folder)), folder=folder, packed=packed)
    entry = replace(entry, rounding="") if packed else entry
    if name == DEMO:
        return replace(entry, licence="Apache-2.0", gated=False, chat="turns, from its own template")
    return entry


def _of_fields(fields: Mapping[str, Any], name: str, what: str) -> CatalogEntry:
    """What a config.json describes; `what` names it in errors."""
    entry = CatalogEntry(name, supported.sizes(fields, what))
    rounded = supported.quantization(fields)
    if rounded is None:
        return entry
    bits, dense, codes = rounded.bits, rounded.dense, rounded.code_bits
    return replace(entry, rounding=rounded.called, expert_bits=bits, dense_bits=dense, code_bits=codes)


def _of_file(path: Path) -> CatalogEntry:
    """Describes the model in a GGUF file, whose header is read."""
    return replace(of_gguf(open_gguf(path)), name=model_name(path), folder=path)


def of_gguf(gguf: Gguf) -> CatalogEntry:
    """Describes the model of which these are the headers.

    Raises:
        CheckpointError: its architecture is not supported, or its metadata makes no sense.
    """
    from .gguf.configuration import config_of
    from .gguf.header import undescribed
    from .gguf.rounding import is_coarse, rounding

    fields = config_of(gguf)
    kind = str(fields["model_type"])
    try:
        entry = CatalogEntry(gguf.name, supported.sizes(fields, gguf.name))
    except CheckpointError as error:
        raise undescribed(gguf.path, error) from error
    return replace(entry, rounding=rounding(gguf, kind), coarse=is_coarse(gguf, kind))


def _unknown(model: str) -> UsageError:
    known = [entry.name for entry in PUBLISHED] + [pack.name for pack in installed()]
    return UsageError(
        f"There is no model {_shown(model)}",
        f"Listed: {', '.join(entry.name for entry in PUBLISHED)}. "
        f"Installed: {', '.join(pack.name for pack in installed())}.",
        f"{names.did_you_mean(model, known)} {_by_id(model)}".strip()
        or "Give one of these names, a hub id (owner/name) or its address, the folder of a downloaded checkpoint, or a "
        "GGUF file.",
    )


def _by_id(model: str) -> str:
    """A sentence that says how to name a model that is not listed but, by its name, of a supported family; or ""."""
    family = supported.called_so(model)
    return f"Other {family} models work by hub id (owner/name)." if family else ""


def _folder(name: str) -> Path | None:
    """The folder of a pack or a checkpoint of that name or path, or None."""
    if name == DEMO:
        return asset("demo", "packed")
    try:
        places = [Path(name).expanduser()] if name else []
        if name and not any(sign in name for sign in "/\\"):
            places.insert(0, models_folder() / name)
        return next((place for place in places if (place / "config.json").is_file()), None)
    except (OSError, RuntimeError, ValueError):
        return None  # a name too long for the system, or the home of an unknown user


def _cached_config(repo: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo, "config.json")
    except ValueError:  # not an id by the hub's own rules, such as "a-/b"
        return None
    return Path(found) if isinstance(found, str) else None


def _config(path: Path) -> Mapping[str, Any]:
    try:
        fields = private_file.read_json(path, _LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", str(error), "Download it again.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not describe a model", "It is not a JSON object.", "Download it again.")
    return fields


def _checked(folder: Path) -> Path:
    if not (folder / "manifest.json").exists():
        from .pack.manifest import Manifest

        Manifest.read(folder)  # raises, and knows what to say
    return folder


def _is_lost(link: Path) -> bool:
    """Whether it is a link to what is not there."""
    return link.is_symlink() and not link.exists()


def _look(name: str, folder: Path) -> Installed:
    from .pack.manifest import Manifest

    if _is_lost(folder):
        return Installed(name, folder, 0, f"{folder.readlink()} is not there: its disk may not be connected")
    try:
        manifest = Manifest.read(folder)
    except FloeError as error:
        return Installed(name, folder, 0, error.title)
    return Installed(name, folder, manifest.nbytes, None)
