"""Which models there are on this machine, and where: the built-in demo, the user's models folder, any path.

The command line asks here before it draws anything, so torch is not imported to say where a model lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import platformdirs

from .errors import FloeError, UsageError

DEMO = "demo"


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
    """Where packed models are looked for by name; the user's own data folder, kept by no installation."""
    return Path(platformdirs.user_data_dir("floe-chat", appauthor=False)) / "models"


def find(name: str) -> Path:
    """The packed folder that `name` means: "demo", a name in the models folder, or a path.

    Raises:
        UsageError: there is no such model. PackError: the folder is there but holds no finished pack.
    """
    if name == DEMO:
        return _checked(asset("demo", "packed"))
    try:
        if name and not any(sign in name for sign in "/\\") and (models_folder() / name).is_dir():
            return _checked(models_folder() / name)
        if Path(name).expanduser().is_dir():
            return _checked(Path(name).expanduser())
    except (OSError, RuntimeError, ValueError):
        pass  # a name too long for the system, or a home of nobody: there is no such model either
    known = ", ".join(model.name for model in installed())
    raise UsageError(
        f"There is no model {name!r}",
        f"Known here: {known}.",
        f"Give one of these names or the folder of a packed model. Models by name live in {models_folder()}.",
    )


def installed() -> list[Installed]:
    """The demo and every folder in the models folder, by name."""
    found = [_look(DEMO, asset("demo", "packed"))]
    if models_folder().is_dir():
        found += [_look(path.name, path) for path in sorted(models_folder().iterdir()) if path.is_dir()]
    return found


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
