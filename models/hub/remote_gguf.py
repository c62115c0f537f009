"""GGUF files on a hub: their headers, and their tensors layer by layer as a packer needs them; never a whole file.

A hub's hash is of a whole file, so what arrives is not compared with it. Each answer has to be of the listed commit and
of a file with the listed sha256 and size (by the hub's own words), and to hold exactly the bytes that were asked for;
connections are encrypted. A file that is in the user's hub cache is compared as a whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Self

from ..catalog_entry import STRETCH
from ..errors import CheckpointError
from ..gguf.header import GgufTensor, Header, OnDisk, parsed
from ..gguf.names import layer_of
from ..gguf.parts import Gguf, joined
from ..gguf.shelf import GgufShelf
from .download import Download
from .fetch_loop import Patience
from .fetch_part import is_intact
from .fetch_progress import DownloadProgress
from .gguf_files import GgufFiles
from .remote_checkpoint import HubShelf
from .repository import Repo
from .repository_files import RepoFile

_AT_ONCE = 8  # headers requested at the same time
_FIRST = 1 << 20  # bytes of a header requested first; each further request doubles what is here
_SMALL = 1 << 20  # bytes of a tensor that may be requested by itself, such as rope's factors


def described(repo: Repo, files: GgufFiles) -> Gguf:
    """What the headers of `files` say.

    Raises:
        CheckpointError: as `joined`. FloeError: as `Repo.piece`.
    """
    return joined(_headers([_Far(repo, file) for file in files.files]))


def remote(repo: Repo, folder: Path, *, tuning: Patience | None = None) -> HubShelf | HubGgufShelf:
    """The checkpoint in a repository, or what `repo.gguf` was made of. See `HubShelf` and `HubGgufShelf`."""
    if repo.gguf is None:
        return HubShelf(repo, folder, tuning=tuning)
    return HubGgufShelf(repo, repo.gguf, folder, tuning=tuning)


class HubGgufShelf(GgufShelf):
    """A `Shelf` of GGUF files in a repository; use as a context manager, or `close` it.

    Stretches of the files, a layer or more each, are fetched in the background in the order in which they are packed.
    At most `ahead` of them are in `folder` unread, and each is deleted when it is `done`.

    Args:
        folder: for stretches and small files. tuning: see `Download`.

    Raises:
        FloeError: as `described` and `Download`.
    """

    def __init__(
        self,
        repo: Repo,
        files: GgufFiles,
        folder: Path,
        *,
        ahead: int = 2,
        tuning: Patience | None = None,
    ) -> None:
        self.download = Download(repo, [], folder, ahead=ahead, tuning=tuning)
        try:
            self._files = [_Far(repo, file, _in_cache(repo, file)) for file in files.files]
            headers = _headers(self._files)
            super().__init__(joined(headers), folder)
            for file, header in zip(self._files, headers, strict=True):
                file.cut(list(header.tensors.values()))
        except BaseException:
            self.download.close()
            raise
        self.name, self.commit = f"{repo.name}:{files.label}", repo.commit
        self._ahead = ahead
        self.download.start()

    @property
    def most_unread(self) -> int:
        """Bytes of the files that may be on the disk at once."""
        sizes = sorted(stretch.size for file in self._files for stretch in file.stretches)
        return sum(sizes[-self._ahead :])

    def files(self, name: str, file: str) -> list[str]:
        """See `Shelf.files`: the stretches with what a tensor is made of; none where the whole file is here."""
        sources = [(source.file, source.start) for source in self._made[name].sources]
        found = [far.stretch_at(start) for far, start in sources if isinstance(far, _Far)]
        return list(dict.fromkeys(stretch.name for stretch in found if stretch is not None))

    def order(self, files: Sequence[str]) -> None:
        """See `Shelf.order`."""
        for file in self._files:
            file.arrives = self.download.wait
        self.download.order(files)

    def done(self, file: str) -> None:
        """See `Shelf.done`."""
        self.download.release(file)

    def progress(self) -> DownloadProgress:
        return self.download.progress()

    def close(self) -> None:
        self.download.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Far:
    """The `Bytes` of a file on a hub: small pieces are requested by themselves, others come with their stretch.

    Attributes:
        stretches: in the file's order, once it was `cut`. here: the whole file in the user's hub cache, or None.
        arrives: waits for a stretch, by its name; None before anything large is read.
    """

    def __init__(self, repo: Repo, file: RepoFile, here: OnDisk | None = None) -> None:
        self.name = file.name
        self.here = here
        self.stretches: list[RepoFile] = []
        self.arrives: Callable[[str], Path] | None = None
        self._repo, self._file = repo, file

    def header(self) -> Header:
        """Raises: CheckpointError: as `parsed`. FloeError: as `Repo.piece`."""
        return parsed(PurePosixPath(self.name), self, _Beginning(self, self._file.size), self._file.size)

    def beginning(self, start: int, end: int) -> bytes:
        """Bytes [start, end), of the header."""
        if self.here is None:
            return self._repo.piece(self._file, start, end - start)
        raw = bytearray(end - start)
        return bytes(raw[: self.here.fill(start, memoryview(raw))])

    def cut(self, tensors: list[GgufTensor]) -> None:
        """Cut the file where layers end, into stretches of whole layers, and of what is in none."""
        if self.here is not None:
            return
        begun: list[tuple[int | None, int, int]] = []  # a layer, and where its stretch begins and ends
        for tensor in sorted(tensors, key=lambda each: each.start):
            layer, end = layer_of(tensor.name), tensor.start + tensor.nbytes
            if begun:
                before, start, last = begun[-1]
                if layer == before or ((layer is None) == (before is None) and last - start < STRETCH):
                    begun[-1] = layer, start, end
                    continue
            begun.append((layer, tensor.start, end))
        self.stretches = [self._file.stretch(start, end) for _, start, end in begun]
        for stretch in self.stretches:
            self._repo.cut(stretch)

    def stretch_at(self, offset: int) -> RepoFile | None:
        """The stretch with the tensor that begins there; None if the whole file is here."""
        at = bisect_right(self.stretches, offset, key=lambda each: each.start)
        return self.stretches[at - 1] if at else None

    def fill(self, start: int, into: memoryview) -> int:
        """See `Bytes.fill`."""
        if self.here is not None:
            return self.here.fill(start, into)
        if self.arrives is None:
            if len(into) > _SMALL:
                cause = f"Its header asks for {len(into):,} bytes of a tensor of which a model has a few."
                raise CheckpointError(f"{self.name} cannot be read", cause, "Use another file of this model.")
            into[:] = self._repo.piece(self._file, start, len(into))
            return len(into)
        stretch = self.stretch_at(start)
        assert stretch is not None
        return OnDisk(self.arrives(stretch.name)).fill(start - stretch.start, into)


class _Beginning:
    """A file's first bytes, read forward and requested as far as they are needed."""

    def __init__(self, file: _Far, size: int) -> None:
        self._file, self._size = file, size
        self._content, self._at = bytearray(), 0

    def read(self, count: int, /) -> bytes:
        """The next bytes; fewer at the file's end."""
        end = min(self._at + count, self._size)
        if (here := len(self._content)) < end:
            self._content += self._file.beginning(here, min(max(end, 2 * here, _FIRST), self._size))
        found = bytes(self._content[self._at : end])
        self._at = end
        return found


def _headers(files: list[_Far]) -> list[Header]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_Far.header, files))


def _in_cache(repo: Repo, file: RepoFile) -> OnDisk | None:
    """The file in the user's hub cache, if its hash is right."""
    found = repo.cached(file)
    try:
        return OnDisk(found) if found is not None and is_intact(found, file) else None
    except OSError:
        return None
