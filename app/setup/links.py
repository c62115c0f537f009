"""The link in the models folder to a pack that is stored on another disk."""

from __future__ import annotations

from pathlib import Path

from ...models.errors import FloeError, UsageError


def leads_to(link: Path, place: Path) -> bool:
    """Whether `link` is a link to `place`, which need not be there."""
    try:
        return link.is_symlink() and (link.readlink() == place or link.resolve() == place.resolve())
    except OSError:
        return False


def shown(folder: Path) -> str:
    """A model's folder for a person; of a link also where it leads."""
    try:
        return f"{folder} → {folder.readlink()}" if folder.is_symlink() else str(folder)
    except OSError:
        return str(folder)


def need_free(link: Path, place: Path) -> None:
    """Raises: UsageError: `link` is there and leads elsewhere, or is no link."""
    if (link.is_symlink() or link.exists()) and not leads_to(link, place):
        raise UsageError(
            f"The name {link.name} is taken", f"{link} is something else.", "Choose another name with --name."
        )


def need_disk(folder: Path, name: str, *, begun: bool) -> None:
    """Make the folder on another disk, unless a setup has `begun` there: then it is missing with its disk.

    Raises:
        FloeError: it is missing. OSError: it cannot be made.
    """
    if begun and not folder.is_dir():
        raise FloeError(
            f"{folder} is not there",
            f"The setup of {name} stores its pack in it.",
            f"Connect its disk, or delete the setup: floe-chat setup {name} --forget",
        )
    folder.mkdir(parents=True, exist_ok=True)


def link_to(link: Path, place: Path) -> None:
    """Make `place`, a folder, and `link` to it.

    Raises:
        UsageError: as `need_free`. FloeError: links cannot be made here. OSError: the folder cannot be made.
    """
    place.mkdir(exist_ok=True)
    need_free(link, place)
    if link.is_symlink():
        return
    try:
        link.symlink_to(place, target_is_directory=True)
    except (OSError, NotImplementedError) as error:  # Python raises the second where a system has no links
        raise FloeError(
            f"{link} cannot be a link to {place}",
            f"{getattr(error, 'strerror', None) or error}.",
            "On Windows, turn its developer mode on. Or leave --to out, and choose a models folder on the other disk: "
            "folders.models in the settings.",
        ) from error
