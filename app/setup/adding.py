"""The checkpoint that a finished pack was made of, for a repair, or for the drafting head that the pack lacks; and that
of its assistant.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.errors import FloeError, UsageError
from ...models.paths import expanded
from ..progress import note

if TYPE_CHECKING:
    from ...models.checkpoint import Checkpoint
    from ...models.hub.remote_checkpoint import HubShelf
    from ...models.pack.manifest import Manifest
    from ...models.packing.assistant_part import AssistantSource


def lacks_head(folder: Path) -> bool:
    """Whether a pack has no drafting head, though its config.json says that the model was published with one, and no
    assistant, though the catalog knows one.
    """
    from ...models.catalog import described
    from ...models.pack.manifest import DRAFT, Manifest

    try:
        manifest = Manifest.read(folder)
        known = bool(assistant_of(manifest)) if manifest.family.assistant else bool(described(folder).sizes.draft)
        return DRAFT not in manifest.beside and known
    except FloeError:
        return False


def assistant_of(manifest: Manifest) -> str:
    """The repository of the assistant of the model that was packed; "" where none is known."""
    from ...models.catalog import published, with_gguf

    if manifest.family.assistant is None:
        return ""
    place = manifest.source.name.partition(":")[0]
    entry = published(place) or with_gguf(place)
    return entry.assistant if entry else ""


@contextmanager
def assistant(
    place: str, folder: Path, manifest: Manifest, started: Callable[[HubShelf], None] = lambda _shelf: None
) -> Generator[AssistantSource]:
    """A model's assistant.

    Args:
        place: the folder of its checkpoint, or its repository. folder: of the pack. started: given the download.

    Raises:
        FloeError: it cannot be had, or is another kind of model.
    """
    from ...models.catalog import FETCHED
    from ...models.hub.places import look_up
    from ...models.hub.remote_checkpoint import HubShelf
    from ...models.packing.assistant_part import AssistantSource
    from ...models.packing.workplace import is_ours

    if not place:
        hint = f"Give one: floe-chat setup {folder.name} --assistant FOLDER"
        raise UsageError(f"No assistant of {manifest.source.name} is listed", "", hint)
    if (local := expanded(place)).is_dir():
        yield AssistantSource(local, manifest.family)
        return
    fetched = folder.with_name(f"{folder.name}-assistant{FETCHED}")
    if not is_ours(fetched):
        cause = "Downloads would come into this folder, which is deleted at the end."
        raise UsageError(f"{fetched} holds other files", cause, "Rename or move it.")
    with HubShelf(look_up(place)[0], fetched) as shelf:
        started(shelf)
        yield AssistantSource(shelf, manifest.family)
    shutil.rmtree(fetched)  # left there after an error, for the next try


@contextmanager
def source_of(folder: Path, manifest: Manifest, source: Path | None, *, head: bool = False) -> Generator[Checkpoint]:
    """The packed checkpoint: in a folder, or on the hub at the manifest's commit.

    Args:
        head: only the drafting head of it is fetched.

    Raises:
        FloeError: it cannot be had.
    """
    from ...models.catalog import FETCHED
    from ...models.checkpoint import Checkpoint, read_config
    from ...models.gguf.shelf import opened
    from ...models.hub.places import look_up
    from ...models.hub.remote_checkpoint import HubTensors
    from ...models.hub.remote_gguf import remote
    from ...models.pack.manifest import COPIED
    from ...models.packing.workplace import is_ours

    if source is not None:
        with opened(source) as checkpoint:
            yield checkpoint
        return
    note(f"Fetching the needed {'tensors' if head else 'files'} of {manifest.source.name} from the hub.")
    fetched = folder.with_name(folder.name + FETCHED)
    if not is_ours(fetched):
        raise UsageError(
            f"{fetched} holds other files",
            "Downloads would come into this folder, which is deleted at the end.",
            "Rename or move it, or give the checkpoint with --source.",
        )
    repo = look_up(manifest.source.name, manifest.source.commit or "main")[0]
    record = manifest.family.head
    if head and repo.gguf is None and record is not None:
        shelf = HubTensors(repo, fetched, record.begins(read_config(folder)))
    else:
        shelf = remote(repo, fetched)
    with shelf:
        for name in ("config.json",) if head else COPIED:
            shelf.small(name)
        yield Checkpoint(shelf)
    shutil.rmtree(fetched)  # left there after an error, for the next try
