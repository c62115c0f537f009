"""A ready pack on its way from a repository into its folder: resumable, every hash checked, the manifest last."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ..errors import PackError
from ..pack.manifest import file_entry
from ..packing.pack_copy import copy_file, finish, need_unpacked
from .download import Download
from .fetch_loop import Patience
from .fetch_progress import DownloadProgress
from .ready_pack import Offer
from .repository import Repo


class PackFetch:
    """Fetches `offer` from `repo` into the folder that becomes the pack. Use as a context manager, or `close` it.

    Args:
        tuning: see `Download`.

    Raises:
        UsageError: a model is being packed there. FloeError: as `Download`.
    """

    def __init__(self, repo: Repo, offer: Offer, folder: Path, *, tuning: Patience | None = None) -> None:
        need_unpacked(folder)
        self.download = Download(repo, list(offer.files), folder, tuning=tuning)
        self.download.start()
        self._repo, self._offer, self._folder = repo, offer, folder

    def files(self) -> None:
        """Wait until all files but the manifest are here and verified.

        Raises:
            PackError: one has another hash than the manifest states. FloeError: as `Download.wait`. OSError: of the
            disk.
        """
        for name, entry in self._offer.files.items():
            path = self.download.wait(name)
            if path.parent != self._folder:  # in the hub's own cache
                copy_file(path, self._folder, name, entry, lambda _count: None)
            elif not self._is_compared(name) and file_entry(path) != entry:
                cause = f"{name} has another sha256 than its manifest states."
                raise PackError(f"The pack {self._repo.name} cannot be used", cause, "Ask its publisher.")

    def finish(self) -> None:
        """Make it a pack: write its manifest. Raises: OSError: of the disk."""
        finish(self._folder, self._offer.files, self._offer.content)

    def progress(self) -> DownloadProgress:
        return self.download.progress()

    def close(self) -> None:
        self.download.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_compared(self, name: str) -> bool:
        """Whether the download itself compared the sha256, which was compared with the manifest's before."""
        file = self._repo.file(name)
        return file is not None and file.large
