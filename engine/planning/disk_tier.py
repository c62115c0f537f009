"""A pack that RAM does not hold: its up projections and the rows used most stay there, the others are read from the
disk by many requests at once, as soon as a token or the predictor names them.

The system's own cache reads them one by one, each when it is needed, with its neighbours, and drops what is needed
next. But it can use all memory that is free: where RAM is only a little short, it reads less, and the tier is not used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from ...kernels.cpu.binding import NativeUnavailableError, library
from ...models.checkpoint import read_config
from ...models.pack.packed_model import PackedLayer, PackedModel
from ...models.quantities import memory as size
from .. import quality_presets
from ..machine import hardware
from ..offload.links.disk_files import DiskFiles, RowFile, disk_link
from ..offload.links.link import Link
from ..offload.links.pinning import Pinned
from ..offload.links.transfer import Kind
from ..offload.links.tuned_link import LinkEnds
from ..offload.table_rows import cached as table_cache
from .footprint import Footprint
from .memory_plan import PROGRAM, RAM_LEAST, RAM_SHARE, Needs
from .speed_estimate import TokenWork, disk_reads


@dataclass(frozen=True, slots=True)
class DiskTier:
    """How a pack is opened that RAM does not hold.

    Attributes:
        needs: in RAM. budget: bytes of it for weights, keys and values. why: in words.
    """

    needs: Needs
    budget: int
    why: str


def wanted(packed: PackedModel, needs: Needs) -> DiskTier | str:
    """The tier for a pack that RAM does not hold; in words why there is none, "" where RAM holds all of it.

    Args:
        needs: the pack's on a GPU, where keys and values have 16 bits; the CPU's have 32.
    """
    needs = dataclasses.replace(needs, dense=dense_bytes(packed), kv=needs.kv.times(2))
    budget = room() - table_cache(sum(packed.manifest.files[name].size for name in packed.manifest.tables))
    if budget >= needs.whole():
        return ""
    lacking = f"RAM has {size(budget)} for a pack of {size(needs.whole())}"
    if os.name != "posix":
        return f"{lacking}; the system reads the rest as it is needed"
    try:
        library()
    except NativeUnavailableError as error:
        return f"{lacking}; the system reads the rest as it is needed, because {error}"
    pages = budget + reserve()
    if pages >= needs.whole():
        return ""
    if budget < needs.least():
        return f"{lacking}, less than the {size(needs.least())} of what every token reads: the system reads the rest"
    takes = Footprint.of_pack(packed.manifest, read_config(packed.folder))
    preset = quality_presets.get(quality_presets.DEFAULT, packed.manifest)
    work, beside = TokenWork.of(preset, packed.manifest, gated=takes.sizes.gated), _beside(takes, needs)
    in_ram, cached = ((nbytes - beside) / (takes.ups + takes.rows) for nbytes in (budget, pages))
    if not disk_reads(takes, work, in_ram, cached)[1]:
        return f"{lacking}: the system reads the rest as it is needed, which is less than rows that are asked for"
    return DiskTier(needs, budget, f"{lacking}: the rows used most stay there, the others are read from the disk")


def room() -> int:
    """Bytes of RAM that weights, keys and values may take now: what is free, less what the program will still use."""
    free = hardware.ram()[1]
    return free - reserve() - max(0, PROGRAM - psutil.Process().memory_info().rss)


def reserve() -> int:
    """Bytes of RAM that stay free for other programs. The system's cache may use them meanwhile."""
    return max(int(hardware.ram()[0] * RAM_SHARE), RAM_LEAST)


def _beside(takes: Footprint, needs: Needs) -> int:
    """What takes RAM besides the experts."""
    return needs.whole() - takes.ups - takes.rows


def ends(packed: PackedModel, layers: Sequence[PackedLayer]) -> LinkEnds:
    """The link from the pack's files to RAM."""
    row = layers[0].rows.layout.nbytes

    def link(_kind: Kind, chunk: int, _pinned: Pinned | None) -> Link:
        places = [packed.rows_place(index) for index in range(len(layers))]
        files = [RowFile(layer.rows.data, path, offset) for layer, (path, offset) in zip(layers, places, strict=True)]
        return disk_link(DiskFiles(files), row, chunk)

    disk = packed.folder.stat().st_dev
    return LinkEnds(f"disk-{disk}", "cpu", link, "the CPU computes", "read from the disk")


def dense_bytes(packed: PackedModel) -> int:
    """Bytes of the dense part in RAM: what a pack stores in 16 bits is computed in 32."""
    parts = packed.dense().values()
    return sum(part.nbytes * (2 if part.dtype in (torch.bfloat16, torch.float16) else 1) for part in parts)
