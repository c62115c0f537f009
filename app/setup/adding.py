"""The checkpoint that a finished pack was made of, for a repair, or for the drafting head that the pack lacks."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...models.errors import FloeError, UsageError
from ..progress import note

if TYPE_CHECKING:
    from ...models.checkpoint import Checkpoint
    from ...models.pack.manifest import Manifest


def lacks_head(folder: Path) -> bool:
    """Whether a pack has no drafting head, though its config.json says that the model was published with one."""
    from ...models.catalog import described
    from ...models.pack.manifest import DRAFT, Manifest

    try:
        return DRAFT not in Manifest.read(folder).beside and bool(described(folder).sizes.draft)
    except FloeError:
        return False


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
