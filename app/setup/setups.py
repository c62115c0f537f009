"""Work on models while the program runs: one setup and one check at a time, independent of the open screen.

All screens share the program's one `Setups`, start work on it and read its progress. Quitting closes it.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ...models import catalog, supported
from ...models.errors import CheckpointError, FloeError, TryAgainError
from .flow import Setup, SetupProgress
from .packing_progress import time_left
from .ready_words import owner
from .wish import Wish, forget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...engine.machine.hardware import Hardware
    from ...engine.planning.machine import Machine
    from ...models.catalog_entry import CatalogEntry
    from ...models.checking.verify import Damage
    from ...models.hub.fetch_loop import Patience

_LEAVING_S = 2.0  # that quitting waits; the interrupted work is repeated later
_ENDED = ("done", "failed", "cancelled")
_log = logging.getLogger("floe_chat.app")


def first_run(settings: Path) -> bool:
    """Whether nothing has been set up here yet: no settings, and nothing in the models folder."""
    folder = catalog.models_folder()
    try:
        return not settings.exists() and not (folder.is_dir() and any(folder.iterdir()))
    except OSError:
        return False  # there are some, in a folder that cannot be read


@dataclass(frozen=True, slots=True)
class Survey:
    """This machine's hardware, and the machine as plans need it. rates: as measured, by name."""

    hardware: Hardware
    machine: Machine
    rates: dict[str, float]


class Surveyor(Protocol):
    """Looks at the machine: reports the hardware first, then the name of each rate that is being measured.

    `again`: measure although rates were saved earlier.
    """

    def __call__(self, told: Callable[[Hardware | str], None], *, again: bool) -> Survey: ...


def survey(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
    """This machine; rates are measured the first time, and again if other programs disturbed that (some seconds)."""
    from ...engine.machine import hardware
    from ...engine.planning import machine, rates

    folder = catalog.models_folder()
    found = hardware.probe(folder)
    told(found)
    saved = None if again else rates.reliable()
    measured = saved or rates.measure(folder, told)
    return Survey(found, machine.here(found, measured), dict(measured.rates))


def look_up(wanted: Wish, token: str | None = None) -> CatalogEntry:
    """Look `wanted` up with as few requests to the hub as possible; this also shows whether the hub grants access.

    Raises:
        AccessError: it asks for a token, or another one. FloeError: it cannot be set up, or cannot be reached.
    """
    from ...models.hub.places import look_up as look_up_place
    from ...models.hub.ready_pack import in_folder
    from .taking import check_place

    if (local := wanted.local) is not None:
        if (offer := in_folder(local)) is None:
            return replace(catalog.described(local), name=wanted.name)
        ready = offer.described(wanted.model, owner(wanted.model))
        return replace(check_place(local, offer), name=wanted.name, ready=ready)
    repo, offer = look_up_place(wanted.model, wanted.commit or "main", token)
    if offer is not None:
        ready = offer.described(wanted.model, owner(wanted.model), repo.commit)
        return replace(check_place(repo, offer), name=wanted.name, ready=ready)
    if repo.gguf is not None:
        from ...models.hub.gguf_files import every
        from ...models.hub.remote_gguf import described

        others = tuple((one.label, one.bytes) for one in every(repo.files) if one != repo.gguf)
        read = catalog.of_gguf(described(repo, repo.gguf))
        known = catalog.with_gguf(repo.name)
        if known is None or known.headless.sizes != read.headless.sizes:
            known = read
        # An assistant is fetched from its own repository, whatever file the model is made of.
        known = replace(known, sizes=replace(read.sizes, draft=known.sizes.draft) if known.assistant else read.sizes)
        place = wanted.model if "://" in wanted.model else f"{repo.name}:{repo.gguf.label}"
        rounded = replace(known, rounding=read.rounding, coarse=read.coarse, file_bytes=repo.gguf.bytes, others=others)
        return replace(rounded, name=wanted.name, repo=place, gated=repo.gated, ready=None)
    try:
        fields = json.loads(repo.read("config.json") or b"{}")
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
        fields = supported.with_modelopts(fields, json.loads(repo.read(supported.MODELOPT) or b"null"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"config.json of {wanted.model} cannot be read", f"{error}.", "Ask its publisher, or use another model."
        ) from error
    if (refused := supported.refused_type(fields, wanted.model)) is not None:
        raise refused
    known = catalog.published(wanted.model) or catalog.described({**fields, "_name_or_path": wanted.model})
    return replace(known, name=wanted.name, repo=wanted.model, gated=repo.gated)


def remove(name: str, *, linked: bool = False) -> None:
    """Delete the packed model `name` of the models folder and the record of its use.

    Of a link only the link is deleted, and with `linked` the pack that it leads to.

    Raises:
        FloeError: it is the demo, there is no such model, its folder is not a pack, or something cannot be deleted.
    """
    from ...engine import state_folder
    from ...models.pack import usage_file
    from ...models.pack.manifest import FILE_NAME, UNFINISHED
    from ...models.packing.workplace import is_ours

    folder = catalog.models_folder() / name
    known = {model.name for model in catalog.installed()} - {catalog.DEMO}
    if name not in known:
        raise FloeError(f"{name} cannot be deleted", "It is not in the models folder.")
    try:
        if folder.is_symlink() and not (linked and folder.exists()):
            folder.unlink()
        elif not is_ours(folder):
            raise FloeError(
                f"{name} cannot be deleted",
                f"{folder} holds files that do not belong to a packed model.",
                "Delete it by hand.",
            )
        else:
            # First: an interrupted deletion leaves an unfinished pack, which can still be deleted.
            (folder / UNFINISHED).touch()
            state_folder.forget_pack(folder)
            (folder / FILE_NAME).unlink(missing_ok=True)
            usage_file.forget(folder)
            shutil.rmtree(folder.resolve())
            folder.unlink(missing_ok=True)  # a link, which leads nowhere now
    except OSError as error:
        raise FloeError(f"{name} cannot be deleted", f"{error.strerror or error}.", "Delete it by hand.") from error


class PackCheck:
    """One packed model being read from end to end, on its own thread.

    Attributes:
        damaged: the damaged files, once it is "done". error: why it could not be checked.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.damaged: list[Damage] = []
        self.error: FloeError | None = None
        self.state: Literal["checking", "done", "failed", "cancelled"] = "checking"
        self.step, self.share = "Looking at the pack", 0.0
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="floe-check", daemon=True)

    def start(self) -> PackCheck:
        """Start; returns at once."""
        self._thread.start()
        return self

    def cancel(self) -> None:
        """Stop it after the current file."""
        if self.state == "checking":
            self.state = "cancelled"
        self._cancelled.set()

    def _run(self) -> None:
        try:
            from ...models.checking.verify import damages
            from ...models.pack.manifest import Manifest

            folder = catalog.find(self.name)
            self.damaged = damages(folder, Manifest.read(folder), self._told)
            self._reach("done")
        except _CancelledError:
            pass
        except FloeError as error:
            self.error = error
            self._reach("failed")
        # The thread's border: every failure below must reach the user, panics of Rust libraries included.
        except BaseException as error:  # noqa: BLE001
            _log.exception("the check failed")
            hint = "This is a bug in floe-chat; the log has the details."
            self.error = FloeError(f"{self.name} could not be checked", f"{type(error).__name__}: {error}", hint)
            self._reach("failed")

    def _reach(self, state: Literal["done", "failed"]) -> None:
        if not self._cancelled.is_set():
            self.share, self.state = 1.0, state

    def _told(self, step: str, share: float) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        self.step, self.share = step, share


class _CancelledError(Exception):
    pass


class Setups:
    """The one setup and the one check of a program.

    Attributes:
        setup, check: the last ones started, until they are dismissed; they may have ended.
    """

    def __init__(self, tuning: Patience | None = None) -> None:
        """`tuning`: of downloads' patience."""
        self.setup: Setup | None = None
        self.check: PackCheck | None = None
        self._stopped: Setup | None = None
        self._tuning = tuning

    @property
    def busy(self) -> bool:
        """Whether a setup is running or paused."""
        return self.setup is not None and self.setup.progress().state not in _ENDED

    @property
    def moving(self) -> bool:
        """Whether a setup works: it is neither paused nor ended."""
        return self.setup is not None and self.setup.progress().state not in ("paused", *_ENDED)

    def start(self, wanted: Wish, token: str | None = None) -> Setup:
        """Set up `wanted`, or continue it.

        Raises:
            TryAgainError: another setup is running.
        """
        if self.setup is not None and self.busy:
            raise TryAgainError(
                f"{self.setup.wish.name} is being set up",
                "Two setups at once would slow each other down.",
                "Wait for it, or stop it first; its work is saved.",
            )
        self.stop()
        self.setup = Setup(wanted, token, tuning=self._tuning, after=self._stopped).start()
        self._stopped = None
        return self.setup

    def stop(self) -> None:
        """Stop the setup; its work is saved for later. Does not wait for the computation in hand."""
        if self.setup is not None:
            self.setup.cancel()
            self.setup, self._stopped = None, self.setup

    def give_up(self, begun: Wish) -> None:
        """Delete an unfinished or failed setup, downloads included, once its thread has ended; that may take a moment.

        Raises:
            FloeError: something cannot be deleted.
        """
        if self.setup is not None and self.setup.wish.folder == begun.folder:
            self.stop()
        if self._stopped is not None:
            self._stopped.close()
        forget(begun)

    def start_check(self, name: str) -> PackCheck:
        """Check the packed model `name`, in place of a check that is running."""
        self.stop_check()
        self.check = PackCheck(name).start()
        return self.check

    def stop_check(self) -> None:
        """Stop the check, or dismiss its result."""
        if self.check is not None:
            self.check.cancel()
            self.check = None

    def words(self) -> str:
        """The setup's progress in a few words, for a line of the chat; "" if there is none."""
        return "" if self.setup is None else words(self.setup.wish.name, self.setup.progress())

    def close(self) -> None:
        """Stop what still runs, and wait a moment for it. Not waiting longer loses nothing."""
        self.stop()
        self.stop_check()
        if self._stopped is not None:
            self._stopped.wait(_LEAVING_S)


def words(name: str, now: SetupProgress) -> str:
    """The progress of the setup of `name`, in words."""
    match now.state:
        case "done":
            return f"{name} is ready"
        case "failed":
            return f"{name}: the setup failed"
        case "paused":
            return f"{name}: paused at {now.share:.0%}"
        case "cancelled":
            return ""
        case _:
            left = "" if now.left is None else f", {time_left(now.left)}"
            return f"{name}: {now.share:.0%}{left}"
