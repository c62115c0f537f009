"""From a choice to a packed, checked model: download, packing and check as one flow that can be stopped at any time.
A ready pack is fetched or copied instead.

The command line and the wizard hold a `Setup` and read its `progress` as often as they like; one thread does the work,
and nothing waits for it. A note beside the models records the setup until it is finished, so that a later start of the
program can continue it with the fetched shards, the packed layers and the commit.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...models import catalog
from ...models.errors import FloeError
from ...models.gguf.parts import is_gguf
from ...models.hub.fetch_progress import DownloadProgress
from .links import link_to, need_disk
from .ready_words import claims, owner
from .wish import Wish, check_folders, clear_fetched, write_note

if TYPE_CHECKING:
    from ...models.checkpoint import Checkpoint
    from ...models.checkpoint_files import Shelf
    from ...models.hub.fetch_loop import Patience
    from ...models.hub.pack_fetch import PackFetch
    from ...models.hub.ready_pack import Offer
    from ...models.hub.remote_checkpoint import HubShelf
    from ...models.hub.remote_gguf import HubGgufShelf
    from ...models.hub.repository import Repo
    from ...models.packing.pack import PackSpec

SetupState = Literal["looking", "working", "paused", "checking", "done", "failed", "cancelled"]

_log = logging.getLogger("floe_chat.app")


@dataclass(frozen=True, slots=True)
class SetupProgress:
    """A moment of a setup.

    Attributes:
        step: the current work, in words. share: of packing, or of a ready pack's arrival, 0..1. left: seconds to the
        end, None while unknown.
        download: None where nothing is fetched. notices: for the user, in order.
        peak: the most disk space that it takes at once, in bytes; None until known. ready: whether it is a ready pack.
    """

    state: SetupState
    step: str
    share: float
    left: float | None
    download: DownloadProgress | None
    notices: tuple[str, ...] = ()
    peak: int | None = None
    ready: bool = False


class _CancelledError(Exception):
    pass


class Setup:
    """One model being set up; use as a context manager, or `close` it.

    Attributes:
        error: why it failed. wish: with the commit, once that is known. claims: what a ready pack says, in sentences.
    """

    def __init__(
        self,
        wanted: Wish,
        token: str | None = None,
        *,
        tuning: Patience | None = None,
        after: Setup | None = None,
    ) -> None:
        """`token`: for the hub, if not the user's own; it is not saved. tuning: of the download's patience. after: an
        earlier setup that was cancelled and may still hold its folders for a moment.
        """
        self.wish = wanted
        self.error: FloeError | None = None
        self.claims: list[str] = []
        self._token, self._tuning, self._after = token, tuning, after
        self._state: SetupState = "looking"
        self._step, self._share, self._left = "Looking at the model", 0.0, None
        self._shelf: HubShelf | HubGgufShelf | PackFetch | None = None
        self._notices: list[str] = []
        self._peak: int | None = None
        self._cancelled = threading.Event()
        self._going = threading.Event()
        self._going.set()
        self._thread = threading.Thread(target=self._run, name="floe-setup", daemon=True)

    def start(self) -> Setup:
        """Start, or continue an earlier setup; returns at once."""
        self._thread.start()
        return self

    def progress(self) -> SetupProgress:
        """How far it is now."""
        shelf = self._shelf
        download = None if shelf is None else shelf.progress()
        state = self._state
        if state in ("looking", "working", "checking") and not self._going.is_set():
            state = "paused"
        left = self._left
        if left is not None and download is not None and download.left is not None:
            left = max(left, download.left)
        notices = (*self._notices, *(download.notices if download else ()))
        share, ready = self._share, bool(self.wish.pack)
        if ready and download is not None:
            share, left = download.done / max(1, download.total), download.left
        return SetupProgress(state, self._step, share, left, download, notices, self._peak, ready)

    def pause(self) -> None:
        """Stop fetching at once, and packing after the current matrix; nothing is lost."""
        self._going.clear()
        if self._shelf is not None:
            self._shelf.download.pause()

    def resume(self) -> None:
        """Continue after a pause."""
        if self._shelf is not None:
            self._shelf.download.resume()
        self._going.set()

    def cancel(self) -> None:
        """Stop it; a later setup can continue. The state changes at once; the thread may end later."""
        if self._state not in ("done", "failed"):
            self._state = "cancelled"
        self._cancelled.set()
        self._going.set()
        if self._shelf is not None:
            self._shelf.download.cancel()

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancel what still runs, and wait until it has released its folders."""
        self.cancel()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._work()
        except FloeError as error:
            self._fail(error)
        except _CancelledError:
            pass
        except OSError as error:
            self._fail(
                FloeError(
                    f"Setting up {self.wish.name} failed",
                    f"{error.strerror or error}.",
                    "Everything done so far is saved. Solve that, then run the setup again.",
                )
            )
        # The thread's border: every failure below must reach the user, panics of Rust libraries included.
        except BaseException as error:  # noqa: BLE001
            _log.exception("setup failed")
            hint = "This is a bug in floe-chat; the log has the details. Everything done so far is saved."
            self._fail(FloeError("The setup failed", f"{type(error).__name__}: {error}", hint))

    def _fail(self, error: FloeError) -> None:
        if not self._cancelled.is_set():
            self.error, self._state = error, "failed"

    def _work(self) -> None:
        if self._after is not None:
            self._step = "Waiting for the previous setup to stop"
            self._after.close()
            self._after = None
        from ...models.pack.manifest import FILE_NAME, UNFINISHED
        from ...models.pack.packed_model import PackedModel
        from ...models.packing.pack_copy import tidy

        self.wish.spec()
        check_folders(self.wish)
        self.wish.home.mkdir(parents=True, exist_ok=True)
        if self.wish.to:
            need_disk(self.wish.beside, self.wish.name, begun=self.wish.note.exists())
        write_note(self.wish)
        if self.wish.to:
            link_to(self.wish.folder, self.wish.place)
        packed = (self.wish.folder / FILE_NAME).exists() and not (self.wish.folder / UNFINISHED).exists()
        if not packed:  # else it was stopped between packing and the end
            self._make()
        if self.wish.draft and not self.wish.pack and self.wish.local is None:
            self._assist()
        self._reach("checking")
        self._step, self._left = "Checking the pack", None
        PackedModel.open(self.wish.folder)
        tidy(self.wish.folder)
        clear_fetched(self.wish)
        self.wish.note.unlink(missing_ok=True)
        self._step, self._share = "Done", 1.0
        self._reach("done")

    def _make(self) -> None:
        """Pack a checkpoint, or take a ready pack."""
        from ...models.hub.places import look_up
        from ...models.hub.ready_pack import in_folder
        from .taking import need_same

        place: Repo | Path
        if (local := self.wish.local) is not None:
            place, offer = local, in_folder(local)
        else:
            self._step = "Asking the hub"
            place, offer = look_up(self.wish.model, self.wish.commit or "main", self._token)
        self._reach("looking")
        need_same(self.wish, offer)
        commit = "" if isinstance(place, Path) else place.commit
        known = dataclasses.replace(self.wish, commit=self.wish.commit or commit, pack=offer.digest if offer else "")
        if not isinstance(place, Path) and place.gguf is not None and ":" not in self.wish.model:
            known = dataclasses.replace(known, model=f"{place.name}:{place.gguf.label}")
        if known != self.wish:
            self.wish = known
            write_note(self.wish)
        if offer is None:
            self._pack(place)
        else:
            self._take(place, offer)

    def _take(self, place: Repo | Path, offer: Offer) -> None:
        from ...models.hub.download import check_room
        from ...models.hub.pack_fetch import PackFetch
        from ...models.packing.pack_copy import finish
        from .taking import check_place, copy, look_through

        check_place(place, offer)
        self.claims = claims(offer.described(self.wish.model, owner(self.wish.model)))
        self._peak = offer.bytes
        check_room(self.wish.folder, max(0, offer.bytes - self.wish.taken))
        self._step = "Copying the pack" if isinstance(place, Path) else "Fetching the pack"
        self._reach("working")
        if isinstance(place, Path):
            copy(place, offer, self.wish.folder, self._reported)
        else:
            with PackFetch(place, offer, self.wish.folder, tuning=self._tuning) as fetch:
                self._follow(fetch)
                fetch.files()
            self._shelf = None
        self._reach("checking")
        look_through(self.wish, offer, self._reported)
        finish(self.wish.folder, offer.files, offer.content)

    def _pack(self, place: Repo | Path) -> None:
        from ...models.checkpoint import Checkpoint
        from ...models.pack.manifest import COPIED
        from ...models.packing.pack import pack
        from .packing_progress import tokens_of

        spec = self.wish.spec()
        with self._source(place) as source:
            checkpoint = Checkpoint(source)
            for name in COPIED:
                checkpoint.shelf.small(name)
            tokens = tokens_of(checkpoint.folder, None)
            self._need_room(checkpoint, spec)
            self._step = "Waiting for the first weights"
            self._reach("working")
            pack(checkpoint, self.wish.folder, spec, tokens, self.wish.name, self._told)
        self._shelf = None

    def _assist(self) -> None:
        """Fetch the assistant that was published for the model, if one is listed; it can be added later, too."""
        from ...models.checking.repair import add_draft
        from ...models.pack.manifest import DRAFT, Manifest
        from .adding import assistant, assistant_of

        manifest = Manifest.read(self.wish.folder)
        place = "" if DRAFT in manifest.beside else assistant_of(manifest)
        if not place:
            return
        self._step, self._left = f"Fetching {place}", None
        try:
            with assistant(place, self.wish.folder, manifest, self._follow) as source:
                add_draft(source, self.wish.folder, self._reported)
        except FloeError as error:
            self._reach("working")  # where it was stopped, that is the reason
            again = f"To add it later: floe-chat setup {self.wish.name}"
            self._notices.append(f"{error.title}, so there is no assistant that guesses further tokens. {again}")
        self._shelf = None

    @contextmanager
    def _source(self, place: Repo | Path) -> Generator[Path | Shelf]:
        if isinstance(place, Path):
            if not is_gguf(place):
                yield place
                return
            with self._from_file(place) as shelf:
                yield shelf
            return
        from ...models.hub.remote_gguf import remote

        self._step = "Reading the list of tensors"
        with remote(place, self.wish.fetched, tuning=self._tuning) as shelf:
            self._follow(shelf)
            yield shelf

    @contextmanager
    def _from_file(self, file: Path) -> Generator[Shelf]:
        """What a GGUF file was made of; the small files that are made of its metadata are where downloads would be."""
        from ...models.gguf.shelf import GgufShelf
        from ...models.packing.workplace import FETCHING, locked

        self._step = "Reading the file's header"
        self.wish.fetched.mkdir(parents=True, exist_ok=True)
        with locked(self.wish.fetched / FETCHING, f"Another floe-chat sets up {self.wish.name}"):
            yield GgufShelf(file, self.wish.fetched)

    def _follow(self, shelf: HubShelf | HubGgufShelf | PackFetch) -> None:
        """From now on its download is shown, paused and cancelled."""
        self._shelf = shelf
        if not self._going.is_set():
            shelf.download.pause()
        if self._cancelled.is_set():
            raise _CancelledError

    def _need_room(self, checkpoint: Checkpoint, spec: PackSpec) -> None:
        """Raises: FloeError: the disk cannot hold the pack and the files that it needs meanwhile."""
        from ...engine.planning.footprint import Footprint
        from ...models.hub.download import check_room
        from ...models.hub.remote_checkpoint import HubShelf
        from ...models.hub.remote_gguf import HubGgufShelf
        from ...models.packing.draft_part import has_head

        sizes = catalog.described(checkpoint.config.to_dict()).sizes
        self._peak = Footprint.of(sizes, dataclasses.replace(spec, draft=spec.draft and has_head(checkpoint))).disk
        if isinstance(self._shelf, (HubShelf, HubGgufShelf)):
            self._peak += self._shelf.most_unread
        check_room(self.wish.folder, max(0, self._peak - self.wish.taken))

    def _reach(self, state: SetupState) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        self._state = state

    def _told(self, step: str, share: float, left: float | None) -> None:
        from ...models.packing.draft_part import WITHOUT
        from ...models.packing.pack_run import CONTINUES

        if step == CONTINUES or step.startswith(WITHOUT):
            self._notices.append(f"{step.removesuffix('.')}.")
        self._reported(step, share, left)

    def _reported(self, step: str, share: float, left: float | None = None) -> None:
        self._step, self._share, self._left = step, share, left
        self._going.wait()
        if self._cancelled.is_set():
            raise _CancelledError
