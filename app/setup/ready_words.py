"""A ready pack in words: what it says it is, who says so, and what taking it needs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from ...models.catalog_entry import ReadyPack
from ...models.pack.widths import Widths
from ...models.quantities import size, trimmed

_PRESETS = 5  # that are named
_COMMIT = 12  # digits shown of a commit's hash


def in_short(ready: ReadyPack) -> str:
    """For a list: "ready pack, 12.3 GB, nothing to compute"."""
    return f"ready pack, {size(ready.bytes)}, nothing to compute"


def owner(place: str) -> str:
    """Who offers the pack at a hub id or an address; "" of a folder on this machine."""
    if Path(place).is_absolute():
        return ""
    if "://" not in place:
        return place.partition("/")[0]
    parts = urlsplit(place)
    return parts.netloc if place.endswith("/") else f"{parts.path.split('/')[1]} on {parts.netloc}"


def claims(ready: ReadyPack) -> list[str]:
    """What it says, in sentences; none of it is known to be true."""
    bits = Widths(ready.up, ready.gate, ready.down, ready.dense, "", ready.group).describe()
    if not ready.digest:
        return [f"The pack {ready.place}: {bits}."]
    says = f"A pack by {ready.by}, which says" if ready.by else "A pack, which says"
    commit = f", commit {ready.source_commit[:_COMMIT]}" if ready.source_commit else ""
    source = f"it was made from {ready.source}{commit}" if ready.source else "nothing about its source"
    return [f"{says}: {source}; {bits}.", _presets(ready)]


def takes(ready: ReadyPack) -> str:
    """What taking it needs."""
    what = f"downloads {size(ready.bytes)}" if is_remote(ready) else f"copies {size(ready.bytes)}"
    return f"It {what}, and the disk holds just that: nothing has to be packed."


def is_remote(ready: ReadyPack) -> bool:
    """Whether it has to be downloaded."""
    return bool(owner(ready.place))


def _presets(ready: ReadyPack) -> str:
    if not ready.presets:
        return "It has no presets of its own: `floe-chat tune` measures them."
    told = ", ".join(f"{name} (KL {trimmed(kl, 2)})" for name, kl in ready.presets[:_PRESETS])
    more = f" and {len(ready.presets) - _PRESETS} more" if len(ready.presets) > _PRESETS else ""
    return f"Its own presets, as its maker measured them: {told}{more}."
