"""Which models there are: on this machine (the built-in demo, the user's models folder, any path), and what is known of
those that could be fetched.

The command line asks here before it draws anything, so torch is not imported to say where a model lies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import platformdirs

from .errors import CheckpointError, FloeError, UsageError
from .home import expanded
from .published import APACHE, PUBLISHED, Entry, Sizes

DEMO = "demo"
FETCHED = ".download"  # ends the name of a folder with what was fetched of a model that is being set up
_LARGEST = 1 << 30  # of any one size: a configuration that names more is damaged

_chosen_folder: Path | None = None  # the person's setting


@dataclass(frozen=True, slots=True)
class Installed:
    """A packed model that can be named on the command line. `trouble` says why it cannot be used, or is None."""

    name: str
    folder: Path
    bytes: int
    trouble: str | None


def asset(*parts: str) -> Path:
    """A file or folder that ships with the program."""
    return Path(str(files("floe_chat.assets").joinpath(*parts)))


def models_folder() -> Path:
    """Where packed models are looked for by name: where `use_models_folder` said, or in the user's own data folder."""
    return _chosen_folder or Path(platformdirs.user_data_dir("floe-chat", appauthor=False)) / "models"


def use_models_folder(folder: Path | None) -> None:
    """Look for models in `folder` from now on, in all of this process; None: in the user's own data folder."""
    global _chosen_folder
    _chosen_folder = expanded(folder) if folder else None


def find(name: str, *, saved: bool = False) -> Path:
    """The packed folder that `name` means: "demo", a name in the models folder, or a path.

    Args:
        saved: it was saved earlier (see `reference`), so a path is absolute and means nothing in the current folder.

    Raises:
        UsageError: there is no such model. PackError: the folder is there but holds no finished pack.
    """
    if name == DEMO:
        return _checked(asset("demo", "packed"))
    try:
        if name and not any(sign in name for sign in "/\\") and (models_folder() / name).is_dir():
            return _checked(models_folder() / name)
        if name and (Path(name).is_absolute() or not saved) and Path(name).expanduser().is_dir():
            return _checked(Path(name).expanduser().absolute())
    except (OSError, RuntimeError, ValueError):
        pass  # a name too long for the system, or a home of nobody: there is no such model either
    known = ", ".join(model.name for model in installed())
    raise UsageError(
        f"There is no model {name!r}",
        f"Known here: {known}.",
        f"Give one of these names or the folder of a packed model. Models by name live in {models_folder()}.",
    )


def name_of(folder: Path, packed_as: str) -> str:
    """What a person calls the packed model in `folder`: in the models folder that may be a copy with a name of its own.

    Args:
        packed_as: the name in its manifest.
    """
    return folder.name if folder.parent == models_folder() else packed_as


def reference(folder: Path) -> str:
    """What `find` takes for the pack in `folder`, from any current folder: its name here, or its absolute path."""
    if folder == asset("demo", "packed"):
        return DEMO
    absolute = folder.absolute()
    return absolute.name if absolute.parent == models_folder().absolute() else str(absolute)


def short_name(model: str) -> str:
    """What to call a model that `find` takes: its name, or the last part of its path."""
    return Path(model).name or model


def installed() -> list[Installed]:
    """The demo and every folder in the models folder, by name.

    Raises:
        FloeError: the models folder cannot be read.
    """
    found = [_look(DEMO, asset("demo", "packed"))]
    try:
        paths = models_folder().iterdir() if models_folder().is_dir() else ()
        folders = [path for path in paths if path.is_dir() and not path.name.endswith(FETCHED)]
    except OSError as error:
        cause = f"{error.filename or models_folder()}: {error.strerror or error}."
        raise FloeError("The models folder cannot be read", cause, "Give yourself the right to read it.") from error
    return found + [_look(path.name, path) for path in sorted(folders)]


def published(name: str) -> Entry | None:
    """The entry of a name or hub id that is listed here, in any case of letters; None if there is none."""
    wanted = name.lower()
    return next((entry for entry in PUBLISHED if wanted in (entry.name, (entry.repo or "").lower())), None)


def described(model: str | Path | Mapping[str, Any]) -> Entry:
    """What is known of a model: one that is listed, one on this machine, or any of a family that packs know.

    Args:
        model: a name that `find` knows, a listed name or hub id, the folder of a pack or a checkpoint, a hub id whose
            config.json lies in the hub's own cache, or the fields of a config.json. No network is used.

    Raises:
        UsageError: there is no such model, or nothing is known of it here.
        CheckpointError: it is no Mixture-of-Experts model of a known family, or its configuration makes no sense.
    """
    if isinstance(model, Mapping):
        return Entry(str(model.get("_name_or_path") or "model"), _sizes(model, "The configuration"))
    if isinstance(model, str) and (entry := published(model)):
        return entry
    folder = _folder(str(model))
    if folder is not None:
        packed = (folder / "manifest.json").exists()
        name = str(model) if str(model) == DEMO else folder.resolve().name
        entry = Entry(name, _sizes(_config(folder / "config.json"), str(folder)), folder=folder, packed=packed)
        return replace(entry, licence=APACHE, gated=False, chat="turns by its own template") if name == DEMO else entry
    if isinstance(model, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", model) and (cached := _cached_config(model)):
        return Entry(model.rpartition("/")[2].lower(), _sizes(_config(cached), model), model)
    listed = ", ".join(entry.name for entry in PUBLISHED)
    raise UsageError(
        f"Nothing is known of a model {str(model)!r}",
        f"Listed are: {listed}. Here are: {', '.join(known.name for known in installed())}.",
        "Give one of these, a folder with a config.json, or a hub id whose config.json was downloaded before.",
    )


def _folder(name: str) -> Path | None:
    """Where a pack or a checkpoint of that name lies, if one does."""
    if name == DEMO:
        return asset("demo", "packed")
    try:
        places = [Path(name).expanduser()] if name else []
        if name and not any(sign in name for sign in "/\\"):
            places.insert(0, models_folder() / name)
        return next((place for place in places if (place / "config.json").is_file()), None)
    except (OSError, RuntimeError, ValueError):
        return None  # a name too long for the system, or a home of nobody


def _cached_config(repo: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, "config.json")
    return Path(found) if isinstance(found, str) else None


def _config(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", str(error), "Download it again.") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} does not describe a model", "It holds no fields.", "Download it again.")
    return fields


def _sizes(fields: Mapping[str, Any], what: str) -> Sizes:
    """The architecture of a config.json; `what` names it in errors."""
    from .checkpoint import FAMILIES

    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{what} is no model that floe-chat knows",
            f"Its model type is {kind!r}, which is not a Mixture-of-Experts model of a known family.",
            f"Use a model of one of these types: {', '.join(sorted(FAMILIES))}.",
        )

    def number(*names: str, default: int | None = None) -> int:
        value = next((fields[name] for name in names if fields.get(name) is not None), default)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise CheckpointError(
                f"{what} does not describe a model", f"Its {names[0]} is {value!r}.", "Download config.json again."
            )
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    sizes = Sizes(
        model_type=kind,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        experts=number("num_local_experts", "num_experts"),
        top_k=number("num_experts_per_tok"),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        vocab=number("vocab_size"),
        window=number("max_position_embeddings", default=4096),
        tied=fields.get("tie_word_embeddings") is True,
    )
    if sizes.top_k > sizes.experts:
        cause = f"A token uses {sizes.top_k} of {sizes.experts} experts."
        raise CheckpointError(f"{what} does not describe a model", cause, "Download config.json again.")
    return sizes


def _checked(folder: Path) -> Path:
    if not (folder / "manifest.json").exists():
        from .manifest import Manifest

        Manifest.read(folder)  # raises, and knows what to say
    return folder


def _look(name: str, folder: Path) -> Installed:
    from .manifest import Manifest

    try:
        manifest = Manifest.read(folder)
    except FloeError as error:
        return Installed(name, folder, 0, error.title)
    return Installed(name, folder, sum(entry.size for entry in manifest.files.values()), None)
