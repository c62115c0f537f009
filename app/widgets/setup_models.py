"""What there is of models, as lines of a list: on this machine, begun, and to be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from textual.content import Content

from ...models import catalog
from ...models.errors import FloeError
from ..setup_wish import Wish, unfinished
from . import setup_words, units
from .plain import printable
from .themes import MUTED

if TYPE_CHECKING:
    from ...models.published import Entry

HEADINGS = {"installed": "On this machine", "begun": "Begun, and not finished", "available": "To set up"}
_NAME, _SIZE = 24, 10


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        bytes: that it takes of the disk, or that its download has. about: in a few words. details: in sentences.
        trouble: why it cannot be chatted with, or "". begun: what it is a part of.
    """

    kind: Literal["installed", "begun", "available"]
    name: str
    bytes: int
    about: str
    details: str
    trouble: str = ""
    folder: Path | None = None
    begun: Wish | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """All models, in the order of the list; bytes free on the disk of the models folder, None where nobody knows.

    trouble: why nothing could be found, or "".
    """

    models: tuple[Model, ...]
    free: int | None
    folder: Path
    trouble: str = ""

    @property
    def taken(self) -> int:
        """Bytes that those in the models folder take."""
        return sum(one.bytes for one in self.models if one.kind != "available" and one.name != catalog.DEMO)


def look(entries: Sequence[Entry]) -> Found:
    """What there is now; reads the disk. `entries`: what could be set up."""
    from ...models.download import room

    try:
        installed = catalog.installed()
    except FloeError as error:
        return Found((), None, catalog.models_folder(), f"{error.title}. {error.cause} {error.hint}")
    begun = unfinished()
    models = [_installed(one) for one in installed if one.name not in {wish.name for wish in begun}]
    models += [_begun(wish) for wish in begun]
    here = {one.name for one in models}
    models += [_available(entry) for entry in entries if entry.name not in here and entry.folder is None]
    try:
        free = room(catalog.models_folder())
    except OSError:
        free = None
    return Found(tuple(models), free, catalog.models_folder())


def line(model: Model, *, here: bool) -> Content:
    """Its row; `here`: it answers the chat."""
    name = printable(model.name)
    size = units.size(model.bytes)
    mark = ("● ", "$primary") if here else "  "
    about = ("cannot be used", "$text-error") if model.trouble else (printable(model.about), MUTED)
    return Content.assemble(mark, (f"{name:<{_NAME}}", "bold"), f"{size:>{_SIZE}}  ", about)


def _installed(one: catalog.Installed) -> Model:
    from ...models.manifest import Manifest

    try:
        manifest = Manifest.read(one.folder)
    except FloeError as error:
        details = " ".join(part for part in (f"{error.title}.", error.cause, error.hint) if part)
        return Model("installed", one.name, one.bytes, "", details, error.title, one.folder)
    w = manifest.widths
    rounded = f"rounded to {setup_words.bits(w.up, w.gate, w.down)} bits of 16"
    if w.up == w.gate == w.down == 16:
        rounded = "not rounded"
    about = f"built in, {rounded}" if one.name == catalog.DEMO else rounded
    kept = f"experts keep {setup_words.bits(w.up, w.gate, w.down)} bits per weight, attention {w.dense}"
    details = f"Packed from {manifest.source.name}: {kept}. It lies in {one.folder}."
    return Model("installed", one.name, one.bytes, about, details, "", one.folder)


def _begun(wish: Wish) -> Model:
    kept = f"experts keep {setup_words.bits(wish.up, wish.gate, wish.down)} bits per weight, attention {wish.dense}"
    details = f"{wish.model}: {kept}. What is done lies in {wish.folder}."
    return Model("begun", wish.name, wish.taken, "so far", details, begun=wish)


def _available(entry: Entry) -> Model:
    about = setup_words.about(entry)
    details = f"{entry.repo or entry.name}: {about}. Setting it up fetches {units.size(entry.checkpoint_bytes)}; "
    return Model(
        "available", entry.name, entry.checkpoint_bytes, about, details + "the wizard tells what this machine can do."
    )
