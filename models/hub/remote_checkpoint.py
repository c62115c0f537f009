"""A checkpoint on a hub: a packer reads it like a folder, while its shards arrive one by one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from .. import private_file
from ..catalog_entry import STRETCH
from ..checkpoint_files import Shards, TensorPlace
from ..errors import CheckpointError
from ..tokenizer import tiktoken
from .download import Download, disk_error
from .fetch_loop import Patience
from .fetch_part import is_intact
from .fetch_progress import DownloadProgress
from .repository import Repo
from .repository_files import RepoFile

_AT_ONCE = 8  # headers requested at the same time
_LARGEST = 4 << 20  # bytes of a tokenizer_config.json


class HubShelf(Shards):
    """A `Shelf` of a repository; use as a context manager, or `close` it.

    Shards are fetched in the background in the given order. At most `ahead` fetched ones are in `folder` unread, and
    each is deleted when it is `done`; files in the user's hub cache are read there and left alone.

    Args:
        folder: for shards and small files; parts are stored there until they are whole. tuning: see `Download`.

    Raises:
        FloeError: as `Download`.
    """

    def __init__(
        self,
        repo: Repo,
        folder: Path,
        *,
        ahead: int = 2,
        tuning: Patience | None = None,
    ) -> None:
        self.name = repo.name
        self.commit: str | None = repo.commit
        self.download = Download(repo, [], folder, ahead=ahead, tuning=tuning)
        self.download.start()
        self._repo, self._folder, self._ahead = repo, folder, ahead

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """See `Shelf.headers`. Raises: CheckpointError: also if the shards disagree with the index."""
        names = [file.name for file in self._repo.shards()]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            headers = dict(zip(names, pool.map(self._repo.header, names), strict=True))
        self._repo.check_index(headers)
        return headers

    @property
    def most_unread(self) -> int:
        """Bytes of the shards that may be on the disk at once."""
        return sum(sorted(file.size for file in self._repo.shards())[-self._ahead :])

    def small(self, name: str) -> Path | None:
        """See `Shelf.small`. Raises: FloeError: it is not available."""
        file = self._repo.file(name)
        path = self._folder / name
        if file is None:
            return self._tokenizer(path) if name == "tokenizer.json" else None
        try:
            if path.is_file() and is_intact(path, file):
                return path
            found = self._repo.cached(file)
            content = found.read_bytes() if found is not None and is_intact(found, file) else self._repo.read(name)
            private_file.replace(path, content or b"", private_file.SHARED)
        except OSError as error:
            raise disk_error(error, self._folder) from error
        return path

    def _tokenizer(self, path: Path) -> Path | None:
        """tokenizer.json, made of a vocabulary in tiktoken's form; None if the repository has none."""
        found = next((name for name in tiktoken.WAYS if self._repo.file(name) is not None), None)
        if found is None or path.is_file():
            return path if found else None
        vocabulary, config, named = self.small(found), self.small("tokenizer_config.json"), "tokenizer_config.json"
        try:
            if config is not None and config.stat().st_size > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST:,} bytes")
            fields: Any = private_file.read_json(config, _LARGEST) if config else {}
            if not isinstance(fields, dict):
                raise ValueError("it is no JSON object")
            named = found
            content = tiktoken.tokenizer_json(found, vocabulary.read_bytes() if vocabulary else b"", fields)
            private_file.replace(path, content, private_file.SHARED)
        except ValueError as error:
            hint = "Use another revision, or another repository of this model."
            raise CheckpointError(f"{named} of {self.name} cannot be used", f"{error}.", hint) from error
        except OSError as error:
            raise disk_error(error, self._folder) from error
        return path

    def order(self, files: Sequence[str]) -> None:
        self.download.order(files)

    def path(self, file: str) -> Path:
        return self.download.wait(file)

    def done(self, file: str) -> None:
        self.download.release(file)

    def progress(self) -> DownloadProgress:
        return self.download.progress()

    def close(self) -> None:
        self.download.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HubTensors(HubShelf):
    """A `HubShelf` that fetches only those tensors whose published names begin in some way, not their shards. As of
    GGUF files (remote_gguf.py), what arrives is not compared with the hub's hash, which is of a whole shard.

    Args:
        begins: of the names.
    """

    def __init__(self, repo: Repo, folder: Path, begins: tuple[str, ...], *, tuning: Patience | None = None) -> None:
        super().__init__(repo, folder, tuning=tuning)
        self._begins = begins
        self._stretches: dict[str, list[RepoFile]] = {}  # of a shard, in its order
        self._places: dict[str, TensorPlace] = {}

    def headers(self) -> dict[str, dict[str, TensorPlace]]:
        """See `HubShelf.headers`."""
        found = super().headers()
        for shard, places in found.items():
            self._places |= {name: place for name, place in places.items() if name.startswith(self._begins)}
            begun: list[tuple[int, int]] = []
            wanted = [place for name, place in places.items() if name in self._places]
            for place in sorted(wanted, key=lambda place: place.start):
                if begun and begun[-1][1] == place.start and place.end - begun[-1][0] <= STRETCH:
                    begun[-1] = begun[-1][0], place.end
                elif place.end > place.start:
                    begun.append((place.start, place.end))
            if begun and (file := self._repo.file(shard)) is not None and self._repo.cached(file) is None:
                self._stretches[shard] = [file.stretch(start, end) for start, end in begun]
                for stretch in self._stretches[shard]:
                    self._repo.cut(stretch)
        return found

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`."""
        stretch = self._stretch(name, file)
        return [file if stretch is None else stretch.name]

    def read(self, name: str, file: str, place: TensorPlace, index: int | None, into: memoryview) -> None:
        """See `Shelf.read`."""
        if (stretch := self._stretch(name, file)) is None:
            super().read(name, file, place, index, into)
            return
        moved = TensorPlace(place.dtype, place.shape, place.start - stretch.start, place.end - stretch.start)
        super().read(name, stretch.name, moved, index, into)

    def _stretch(self, name: str, file: str) -> RepoFile | None:
        if name not in self._places or not (stretches := self._stretches.get(file)):
            return None
        at = bisect_right(stretches, self._places[name].start, key=lambda each: each.start)
        return stretches[at - 1] if at else None
