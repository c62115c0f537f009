"""The models as lines of a list: installed, unfinished and available."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ....models import catalog
from ....models.catalog_entry import OFFERED
from ....models.errors import FloeError
from ....models.quantities import size
from ...settings.servers import SavedServer, servers
from ...setup.leftovers import Leftover, leftovers
from ...setup.links import shown
from ...setup.wish import Wish, unfinished
from ...text.plain_text import printable
from ..common.themes import MUTED
from . import plan_words

if TYPE_CHECKING:
    from ....models.catalog_entry import CatalogEntry

HEADINGS = {
    "installed": "Installed · bits per weight: up / gate and down / attention",
    "unfinished": "Unfinished setups",
    "left": "Left over by setups that nothing continues",
    "server": "Servers · your questions are sent there",
    "available": "Available, the smallest first",
}
OTHER, SERVER = "other", "server"
"""The ids of the lines that lead to what is not listed yet."""
_LINES = {
    OTHER: "Another model: type a hub id, an address, a folder or a GGUF file …",
    SERVER: "A server that answers instead of this machine: type its address …",
}
_NAME, _SIZE = 32, 8
_STUCK = "This setup cannot be continued"


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        bytes: on the disk, or of its download. about: in a few words. details: in sentences. trouble: why it cannot be
            used, or "". wish: the unfinished setup. left: what a setup left that cannot be continued. server: where it
            answers, if not here.
    """

    kind: Literal["installed", "unfinished", "left", "server", "available"]
    name: str
    bytes: int
    about: str
    details: str
    trouble: str = ""
    folder: Path | None = None
    wish: Wish | None = None
    left: Leftover | None = None
    server: SavedServer | None = None


@dataclass(frozen=True, slots=True)
class KnownModels:
    """All models, in list order; bytes free on the models folder's disk, None if unknown.

    trouble: why nothing could be found, or no server, or "".
    """

    models: tuple[Model, ...]
    free: int | None
    folder: Path
    trouble: str = ""

    @property
    def taken(self) -> int:
        """Bytes of the models in the models folder."""
        return sum(one.bytes for one in self.models if one.kind != "available" and one.name != catalog.DEMO)


def look(entries: Sequence[CatalogEntry]) -> KnownModels:
    """The models now; reads the disk. `entries`: what could be set up."""
    from ....models.hub.download import room

    try:
        installed = catalog.installed()
    except FloeError as error:
        return KnownModels((), None, catalog.models_folder(), f"{error.title}. {error.cause} {error.hint}")
    wishes, left = unfinished(), leftovers()
    begun = {wish.name for wish in wishes} | {path.name for one in left for path in one.paths}
    models = [_installed(one) for one in installed if one.name not in begun]
    models += [_unfinished(wish) for wish in wishes]
    models += [Model("left", one.name, one.bytes, "", one.cause, _STUCK, left=one) for one in left]
    here = {one.name for one in models}
    saved, trouble = _servers()
    models += saved
    models += [_available(entry) for entry in entries if entry.name not in here and entry.folder is None]
    try:
        free = room(catalog.models_folder())
    except OSError:
        free = None
    return KnownModels(tuple(models), free, catalog.models_folder(), trouble)


def line(model: Model, *, here: bool) -> Content:
    """Its row; `here`: this model answers the chat."""
    name = printable(model.name)
    mark = ("● ", "$primary") if here else "  "
    about = ("cannot be used", "$text-error") if model.trouble else (printable(model.about), MUTED)
    if model.server is not None:
        return Content.assemble(mark, (f"{name:<{_NAME}}", "bold"), f"{'remote':>{_SIZE}}  ", about)
    return Content.assemble(mark, (f"{name:<{_NAME}}", "bold"), f"{size(model.bytes):>{_SIZE}}  ", about)


def _installed(one: catalog.Installed) -> Model:
    from ....models.pack.manifest import Manifest

    try:
        manifest = Manifest.read(one.folder)
    except FloeError as error:
        details = " ".join(part for part in (f"{error.title}.", error.cause, error.hint) if part)
        return Model("installed", one.name, one.bytes, "", details, one.trouble or error.title, one.folder)
    bits = plan_words.in_bits(manifest.widths)
    built_in = one.name == catalog.DEMO
    about = f"built in, {bits}" if built_in else bits
    origin = "Comes with floe-chat" if built_in else f"Packed from {manifest.source.called}"
    details = f"{origin}, at {plan_words.named(manifest.widths)}. Folder: {shown(one.folder)}"
    return Model("installed", one.name, one.bytes, about, details, "", one.folder)


def _unfinished(wish: Wish) -> Model:
    details = f"{wish.model} at {plan_words.named(wish)}. Everything done so far is saved in {wish.place}"
    return Model("unfinished", wish.name, wish.taken, "so far", details, wish=wish)


def _servers() -> tuple[list[Model], str]:
    """The saved servers, and why they cannot be read, or ""."""
    try:
        saved = servers()
    except FloeError as error:
        return [], f"{error.title}. {error.cause} {error.hint}"
    return [Model("server", one.name, 0, one.url, _sent(one), server=one) for one in saved], ""


def _sent(server: SavedServer) -> str:
    model = f"Its model {server.model} answers." if server.model else "Its only model answers."
    key = "A key is saved." if server.key else "No key is saved."
    return f"Your questions, the chat before them and attached files are sent to {server.url}. {model} {key}"


def _available(entry: CatalogEntry) -> Model:
    about = plan_words.about(entry)
    fetched = entry.ready.bytes if entry.ready else entry.checkpoint_bytes
    copy = None if entry.ready else entry.as_gguf(OFFERED)
    short = f", or {size(copy.file_bytes)} as {OFFERED}" if copy else ""
    download = f"Setting it up downloads {size(fetched)}{short}. Enter shows how it would run on this machine."
    return Model("available", entry.name, fetched, about, f"{entry.repo or entry.name}: {about}. {download}")


class ModelList(OptionList):
    """The models under their headings, and lines for another model and for a server.

    `models`: the model of each row; None is a heading, or one of those lines.
    """

    def __init__(self) -> None:
        super().__init__(id="models", markup=False)
        self.models: list[Model | None] = []

    @property
    def model(self) -> Model | None:
        """The highlighted one; None on another line."""
        at = self.highlighted
        return self.models[at] if at is not None and at < len(self.models) else None

    @property
    def on_server_line(self) -> bool:
        """Whether the line that leads to a server is highlighted."""
        at = self.highlighted
        return at is not None and self.get_option_at_index(at).id == SERVER

    def show(self, found: KnownModels, current: SavedServer | str | None, to: str | None = None) -> None:
        """Show what was found; the highlight stays on its model, or goes `to` the one of this name. `current`, a
        model's name or a server, is marked.
        """
        to = to or (self.model.name if self.model else None)
        self.models = []
        self.clear_options()
        for kind, heading in HEADINGS.items():
            listed = [model for model in found.models if model.kind == kind]
            if listed or kind == SERVER:
                self._add(Option(Content.styled(heading, "bold $primary"), disabled=True))
            for model in listed:
                self._add(Option(line(model, here=(model.server or model.name) == current)), model)
            if kind == SERVER:
                self._add(_leading(SERVER))
        self._add(_leading(OTHER))
        same = (at for at, one in enumerate(self.models) if one and one.name == to)
        self.highlighted = next(same, 1)

    def _add(self, row: Option, model: Model | None = None) -> None:
        self.models.append(model)
        self.add_option(row)


def _leading(to: str) -> Option:
    return Option(Content.styled(f"  {_LINES[to]}", "italic"), id=to)
