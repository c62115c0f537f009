"""A ready pack becomes a model of this machine: looked at, fetched or copied, looked through, and finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...models import catalog
from ...models.errors import PackError, UsageError
from .wish import Wish

if TYPE_CHECKING:
    from ...models.catalog_entry import CatalogEntry
    from ...models.hub.ready_pack import Offer
    from ...models.hub.repository import Repo
    from ...models.pack.manifest import Manifest

Report = Callable[[str, float], None]


def need_same(wanted: Wish, offer: Offer | None) -> None:
    """Raises: UsageError: the pack that was shown when the setup began has been replaced by another one since."""
    if wanted.pack and (offer is None or offer.digest != wanted.pack):
        raise UsageError(
            f"{wanted.model} has changed",
            "It is not the pack that it was when this setup began.",
            f"Delete the setup and begin again: floe-chat setup {wanted.name} --forget",
        )


def check_place(place: Repo | Path, offer: Offer) -> CatalogEntry:
    """The model of a pack by its config.json, which is compared with it before anything large is read.

    Raises:
        FloeError: see `check_config`.
    """
    from ...models import private_file
    from ...models.hub.ready_pack import check_config

    if isinstance(place, Path):
        try:
            return check_config(str(place), offer, private_file.read(place / "config.json", 1 << 25))
        except OSError as error:
            raise PackError(f"{error.filename} cannot be read", f"{error.strerror or error}.") from error
    return check_config(place.name, offer, place.read("config.json") or b"")


def copy(source: Path, offer: Offer, folder: Path, told: Report) -> None:
    """Copy a pack's files, but for its manifest. told: with the share that is copied; may raise to stop it.

    Raises:
        PackError: a file is damaged. TryAgainError: another process writes into the folder. OSError: of a disk.
    """
    from ...models.pack.manifest import FETCHING
    from ...models.packing.pack_copy import copy_file, need_unpacked
    from ...models.packing.workplace import locked

    need_unpacked(folder)
    folder.mkdir(parents=True, exist_ok=True)
    done = 0

    def count(name: str, more: int) -> None:
        nonlocal done
        done += more
        told(f"Copying {name}", done / offer.bytes)

    with locked(folder / FETCHING, f"Another floe-chat is copying into {folder}"):
        for name, entry in offer.files.items():
            copy_file(source / name, folder, name, entry, lambda more, name=name: count(name, more))


def take_again(place: str, folder: Path, manifest: Manifest, names: list[str], told: Report) -> None:
    """Replace files of a finished pack by those of the same pack at `place`, as `catalog.source` understands it.

    Raises:
        UsageError: there is another pack, or none. FloeError: as `look_up` and `Download`. OSError: of a disk.
    """
    from ...models.hub.download import Download
    from ...models.hub.places import look_up
    from ...models.hub.ready_pack import in_folder
    from ...models.packing.pack_copy import copy_file, tidy

    source = catalog.source(place)
    repo, offer = (None, in_folder(source.folder)) if source.folder else look_up(source.repo, source.commit or "main")
    ours = {**manifest.files, **manifest.beside}
    if offer is None or any(offer.files.get(name) != ours[name] for name in names):
        cause = "It is another pack, or a checkpoint." if offer else "It is no pack."
        raise UsageError(f"{place} does not have these files", cause, "Give the place where this pack came from.")
    if repo is not None:
        with Download(repo, names, folder).start() as download:
            for at, name in enumerate(names):
                told(f"Fetching {name}", at / len(names))
                if (path := download.wait(name)).parent != folder:  # in the hub's own cache
                    copy_file(path, folder, name, ours[name], lambda _count: None)
        tidy(folder)
    for at, name in enumerate(names if source.folder else ()):
        assert source.folder is not None
        told(f"Copying {name}", at / len(names))
        copy_file(source.folder / name, folder, name, ours[name], lambda _count: None)


def look_through(wanted: Wish, offer: Offer, told: Report) -> None:
    """Raises: PackError: a file holds impossible values, though its hash is right."""
    from ...models.checking.verify import senseless

    if (damage := senseless(wanted.folder, offer.manifest, told)) is not None:
        raise PackError(
            f"The pack {wanted.model} cannot be used",
            f"{damage.file}: {damage.cause}",
            f"Its maker packed it wrongly. Delete it: floe-chat setup {wanted.name} --forget",
        )
