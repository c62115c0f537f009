"""How rows cross this machine's link fastest: staged or read in place, and how many in a chunk.

Measured when a pack first needs it, and kept for the next starts. Staged rows are packed by the CPU into a buffer that
is copied; rows in place are read by the GPU's kernels, which takes no core but pins all rows in RAM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from ....models.errors import UsageError
from ...machine import hardware, saved_figures
from .pinning import PinError, Pinned
from .threaded_link import ThreadedLink
from .transfer import Kind, Transfer, TransferMode

CHUNKS = (25, 50, 100, 200, 400, 800)  # rows
ROWS = 2867  # that are moved: 20 % of a Mixtral expert, as in FloE's figure 7
SAMPLE = 128 << 20  # bytes of rows that these are drawn from, more than caches hold
# Times as fast as staged. Pinning takes seconds of the start, and RAM that nobody else gets: a little gain is too dear.
IN_PLACE_FROM = 1.1

_ROUNDS = 5
_ALIKE = 1.03  # a larger chunk must be faster than this to be worth that urgent rows wait longer
_ENDING = "-transfer.json"

_log = logging.getLogger("floe_chat.engine")
Found = Mapping[Annotated[int, Meta(gt=0)], saved_figures.Rate]


@dataclass(frozen=True, slots=True)
class Tuned(saved_figures.Record):
    """What was measured of a link: bytes per second by rows in a chunk.

    Attributes:
        device, row_bytes: which link, and for rows of how many bytes.
        staged, in_place: by kind; empty what was not measured. why_not: the reason why rows could not be read in place
            when somebody last tried to, or "".
    """

    device: str
    row_bytes: int
    staged: Annotated[Found, Meta(min_length=1)] = field(default_factory=dict[int, float])
    in_place: Found = field(default_factory=dict[int, float])
    why_not: str = ""

    def of(self, kind: Kind) -> Found:
        """The rates of a kind."""
        return self.staged if kind == "staged" else self.in_place

    def chunk(self, kind: Kind) -> int:
        """The smallest of those that are about as fast as the fastest."""
        rates = self.of(kind)
        fastest = max(rates.values())
        return min(size for size, rate in rates.items() if rate * _ALIKE >= fastest)

    def rate(self, kind: Kind) -> float:
        """What a kind reaches in that chunk, in bytes per second."""
        return self.of(kind)[self.chunk(kind)]

    def faster(self) -> Kind:
        """Which kind is worth more."""
        wins = self.in_place and self.rate("in place") >= IN_PLACE_FROM * self.rate("staged")
        return "in place" if wins else "staged"

    def describe(self, kind: Kind) -> str:
        """A kind, its chunk and its rate, in words."""
        how = "staged by the CPU" if kind == "staged" else "read in place by the GPU"
        return f"{how}, {self.chunk(kind)} in a chunk: {self.rate(kind) / 1e9:.3g} GB/s"

    def beside(self, kind: Kind) -> str:
        """What the other kind would be, or why it cannot be; "" where nobody looked."""
        if kind == "staged" and self.why_not:
            return f"not read in place, because {self.why_not}"
        other: Kind = "in place" if kind == "staged" else "staged"
        return self.describe(other) if self.of(other) else ""


def file_of(device: str, row_bytes: int) -> Path:
    """Where a link of this machine is kept."""
    return saved_figures.rates_folder() / f"{hardware.machine_id()}-{device.replace(':', '-')}-{row_bytes}{_ENDING}"


def all_kept() -> Iterator[Tuned]:
    """What was kept of this machine's links."""
    for file in sorted(saved_figures.rates_folder().glob(f"{hardware.machine_id()}-*{_ENDING}")):
        if (tuned := Tuned.load(file)) is not None:
            yield tuned


def forget() -> None:
    """Have all links of this machine measured again, each when it is next used."""
    for file in saved_figures.rates_folder().glob(f"{hardware.machine_id()}-*{_ENDING}"):
        file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """What a link joins.

    Attributes:
        device: its name, for people and for the kept record. place: torch's name of where its tensors lie.
        make: a link of a kind, with chunks of so many rows, that holds what is pinned for it until it is closed.
        obstacle: why rows cannot be read in place here and now; "" where nothing is known to speak against it.
    """

    device: str
    place: str
    make: Callable[[Kind, int, Pinned | None], ThreadedLink]
    obstacle: str


def open_link(ends: LinkEnds, wanted: TransferMode, rows: Sequence[Tensor]) -> tuple[ThreadedLink, float, str]:
    """The link that is best for these rows, by what was kept or is measured now.

    Args:
        wanted: "auto": the faster kind. rows: (E, F, nbytes) uint8 in RAM, all that may cross; the first are measured.

    Returns:
        the link, the bytes per second that it reaches, and in words how rows cross it and why so.

    Raises:
        UsageError: "in place" is wanted and cannot be. Exception: what a link failed with.
    """
    place, first = torch.device(ends.place), rows[0].flatten(0, 1)
    sample = first[: max(1, SAMPLE // first.shape[1])]
    file = file_of(ends.device, first.shape[1])
    kept_before = Tuned.load(file)

    def measured(kinds: Sequence[Kind]) -> Mapping[Kind, Found]:
        target = torch.empty((min(len(sample), ROWS), first.shape[1]), dtype=torch.uint8, device=place)
        pinned = Pinned([sample], place) if "in place" in kinds else None
        try:
            sample.view(torch.int64).sum()  # brings into RAM what is still on the disk alone
            return measure(lambda kind, chunk: ends.make(kind, chunk, None), kinds, sample, target)
        finally:
            if pinned is not None:
                pinned.release()

    kind, tuned = choose(wanted, kept_before or Tuned(ends.device, first.shape[1]), ends.obstacle, measured)
    pinned = None
    if kind == "in place":
        try:
            pinned = Pinned(rows, place)
        except PinError as error:
            if wanted == "in place":
                raise cannot(str(error)) from error
            kind, tuned = "staged", replace(tuned, why_not=str(error))
    if tuned != kept_before:
        tuned.save(file)
    beside = "asked for" if wanted != "auto" else tuned.beside(kind)
    how = f"rows are {tuned.describe(kind)}" + (f" ({beside})" if beside else "")
    try:
        return ends.make(kind, tuned.chunk(kind), pinned), tuned.rate(kind), how
    except Exception:  # whatever it was: it is raised again, once nothing is pinned
        if pinned is not None:
            pinned.release()
        raise


def choose(
    wanted: TransferMode, known: Tuned, obstacle: str, measured: Callable[[Sequence[Kind]], Mapping[Kind, Found]]
) -> tuple[Kind, Tuned]:
    """The kind of transfer to use, and the figures that this follows from.

    Args:
        wanted: "auto": the faster. known: what was kept; without rates where that is nothing. obstacle: see `Ends`.
        measured: the rates of these kinds, at the same time.

    Raises:
        UsageError: "in place" is wanted and cannot be.
    """
    if not obstacle and wanted != "staged" and not known.in_place:
        try:
            found = measured(("staged", "in place"))
            known = replace(known, staged=found["staged"], in_place=found["in place"])
        # Whatever a driver or a compiler does not like, staged rows may cross: if they do not either, that is raised.
        except Exception as error:  # noqa: BLE001
            obstacle = str(error).splitlines()[0] if str(error) else type(error).__name__
            _log.warning("Rows cannot be read in place: %s", error)
    if obstacle and wanted == "in place":
        raise cannot(obstacle)
    if not known.staged:
        known = replace(known, staged=measured(("staged",))["staged"])
    if wanted != "staged":
        known = replace(known, why_not=obstacle)
    if wanted == "auto":
        return "staged" if obstacle else known.faster(), known
    return wanted, known


def cannot(obstacle: str) -> UsageError:
    """The error for a transfer that was asked for and does not work on this machine."""
    why = obstacle[:1].upper() + obstacle[1:] + "."
    return UsageError("Rows cannot be read in place here", why, "Set advanced.transfer to auto or staged.")


def measure(
    make: Callable[[Kind, int], ThreadedLink],
    kinds: Sequence[Kind],
    source: Tensor,
    target: Tensor,
    sizes: Sequence[int] = CHUNKS,
) -> dict[Kind, dict[int, float]]:
    """Bytes per second of each kind and chunk, all in turn, so that what changes meanwhile changes all of them.

    Args:
        make: a link of a kind with chunks of so many rows; it is closed here.
        source: (R, nbytes) rows in RAM, more than the caches hold. target: (S, nbytes), overwritten.

    Raises:
        Exception: what a link failed with. RuntimeError: one that moves other bytes than it was told.
    """
    count = min(ROWS, source.shape[0], target.shape[0])
    slots, random = np.arange(count, dtype=np.int32), np.random.default_rng(0)
    best: dict[tuple[Kind, int], float] = {}
    links: dict[tuple[Kind, int], ThreadedLink] = {}
    try:
        for kind in kinds:
            for size in sizes:
                links[kind, size] = make(kind, size)
        for turn in range(1 + _ROUNDS):
            for which, link in links.items():
                index = np.sort(random.choice(source.shape[0], count, replace=False))
                before = link.busy_s
                link.submit(Transfer(source, index, target, slots, urgent=True, score=0.0, layer=0))
                link.drain()
                if turn:  # the first one warms up
                    best[which] = min(best.get(which, math.inf), link.busy_s - before)
                if turn == _ROUNDS and not torch.equal(target[:count].cpu(), source[torch.from_numpy(index)]):
                    raise RuntimeError(f"rows that were {which[0]} did not arrive unchanged")
    finally:
        for link in links.values():
            link.close()
    nbytes = count * source.shape[1]
    return {kind: {size: nbytes / best[kind, size] for size in sizes} for kind in kinds}
