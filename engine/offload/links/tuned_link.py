"""The fastest way for rows over this machine's link: staged or in place, and how many in a chunk.

Measured when a pack first needs it, and saved for later starts. Staged rows are packed by the CPU into a buffer that
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
from ...machine import gpus, hardware, saved_figures
from ...outcomes import brief
from .link import Link
from .pinning import PinError, Pinned
from .transfer import Kind, Transfer, TransferMode

STAGED = "staged by the CPU"
CHUNKS = (25, 50, 100, 200, 400, 800)  # rows
ROWS = 2867  # rows moved: 20 % of a Mixtral expert, as in FloE's figure 7
SAMPLE = 128 << 20  # bytes of the rows to choose from, more than caches hold
# Required speed-up over staged. Pinning takes seconds of the start, and RAM from other programs: a small gain is not
# worth it.
IN_PLACE_FROM = 1.1

_ROUNDS = 5
_ALIKE = 1.03  # a larger chunk must be this much faster, since urgent rows wait longer
_ENDING = "-transfer.json"

_log = logging.getLogger("floe_chat.engine")
Found = Mapping[Annotated[int, Meta(gt=0)], saved_figures.Rate]


@dataclass(frozen=True, slots=True)
class Tuned(saved_figures.Record):
    """A link's measurements: bytes per second by rows in a chunk.

    Attributes:
        device, row_bytes: which link, and for rows of how many bytes.
        staged, in_place: by kind; empty if not measured. why_not: why rows could not be read in place at the last
            attempt, or "".
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
        """The smallest chunk that is about as fast as the fastest."""
        rates = self.of(kind)
        fastest = max(rates.values())
        return min(size for size, rate in rates.items() if rate * _ALIKE >= fastest)

    def rate(self, kind: Kind) -> float:
        """A kind's speed with that chunk, in bytes per second."""
        return self.of(kind)[self.chunk(kind)]

    def faster(self) -> Kind:
        """The better kind."""
        wins = self.in_place and self.rate("in place") >= IN_PLACE_FROM * self.rate("staged")
        return "in place" if wins else "staged"

    def describe(self, kind: Kind, staged: str = STAGED) -> str:
        """A kind, its chunk and its rate, in words."""
        how = staged if kind == "staged" else "read in place by the GPU"
        return f"{how}, {self.chunk(kind)} in a chunk: {self.rate(kind) / 1e9:.3g} GB/s"

    def beside(self, kind: Kind) -> str:
        """The other kind's speed, or why it is impossible; "" if it was not tried."""
        if kind == "staged" and self.why_not:
            return f"not read in place, because {self.why_not}"
        other: Kind = "in place" if kind == "staged" else "staged"
        return self.describe(other) if self.of(other) else ""


def file_of(device: str, row_bytes: int) -> Path:
    """The file with a link's measurements on this machine."""
    return saved_figures.rates_folder() / f"{hardware.machine_id()}-{device.replace(':', '-')}-{row_bytes}{_ENDING}"


def all_kept() -> Iterator[Tuned]:
    """The saved measurements of this machine's links."""
    for file in sorted(saved_figures.rates_folder().glob(f"{hardware.machine_id()}-*{_ENDING}")):
        if (tuned := Tuned.load(file)) is not None:
            yield tuned


def forget() -> None:
    """Delete the measurements of all links, so that each is measured again when next used."""
    for file in saved_figures.rates_folder().glob(f"{hardware.machine_id()}-*{_ENDING}"):
        file.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """The two ends of a link.

    Attributes:
        device: its name, for people and for the saved record. place: torch's name of where its tensors are.
        make: makes a link of a kind, with chunks of this many rows; it holds what is pinned for it until it is closed.
        obstacle: why rows cannot be read in place here and now; "" if nothing is known to prevent it.
        staged: how rows go if not in place, in words. report: is given steps that take a while, in words.
    """

    device: str
    place: str
    make: Callable[[Kind, int, Pinned | None], Link]
    obstacle: str
    staged: str = STAGED
    report: Callable[[str], None] = lambda _step: None


def open_link(ends: LinkEnds, wanted: TransferMode, rows: Sequence[Tensor]) -> tuple[Link, Kind, float, str]:
    """The best link for these rows, by saved or new measurements.

    Args:
        wanted: "auto": the faster kind. rows: (E, F, nbytes) uint8 in RAM, all that may cross; the first are measured.

    Returns:
        the link, its kind, its bytes per second, and in words how rows cross it and why.

    Raises:
        UsageError: "in place" is wanted and cannot be. Exception: what a link failed with.
    """
    place, first = torch.device(ends.place), rows[0].flatten(0, 1)
    sample = first[: max(1, SAMPLE // first.shape[1])]
    file = file_of(ends.device, first.shape[1])
    kept_before = Tuned.load(file)

    def measured(kinds: Sequence[Kind]) -> Mapping[Kind, Found]:
        target = torch.empty((min(len(sample), ROWS), first.shape[1]), dtype=torch.uint8, device=place)
        ends.report("Measuring the link to the GPU")
        pinned = Pinned([sample], place) if "in place" in kinds else None
        try:
            gpus.wake(ends.place)
            sample.view(torch.int64).sum()  # brings rows into RAM that are still only on the disk
            return measure(lambda kind, chunk: ends.make(kind, chunk, None), kinds, sample, target)
        finally:
            if pinned is not None:
                pinned.release()

    kind, tuned = choose(wanted, kept_before or Tuned(ends.device, first.shape[1]), ends.obstacle, measured)
    pinned = None
    if kind == "in place":
        try:
            pinned = Pinned(rows, place, ends.report)
        except PinError as error:
            if wanted == "in place":
                raise cannot(str(error)) from error
            kind, tuned = "staged", replace(tuned, why_not=str(error))
    if tuned != kept_before:
        tuned.save(file)
    beside = "asked for" if wanted != "auto" else tuned.beside(kind)
    how = f"rows are {tuned.describe(kind, ends.staged)}" + (f" ({beside})" if beside else "")
    try:
        return ends.make(kind, tuned.chunk(kind), pinned), kind, tuned.rate(kind), how
    except Exception:  # any error: it is raised again, once nothing is pinned
        if pinned is not None:
            pinned.release()
        raise


def choose(
    wanted: TransferMode, known: Tuned, obstacle: str, measured: Callable[[Sequence[Kind]], Mapping[Kind, Found]]
) -> tuple[Kind, Tuned]:
    """The kind of transfer to use, and the figures behind the choice.

    Args:
        wanted: "auto": the faster. known: the saved measurements; without rates if there are none. obstacle: see
            `Ends`.
        measured: the rates of these kinds, at the same time.

    Raises:
        UsageError: "in place" is wanted and cannot be.
    """
    if not obstacle and wanted != "staged" and not known.in_place:
        try:
            found = measured(("staged", "in place"))
            known = replace(known, staged=found["staged"], in_place=found["in place"])
        # Whatever a driver or a compiler rejects, staged rows may still work: if they fail too, that error is raised.
        except Exception as error:  # noqa: BLE001
            obstacle = brief(error)
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
    """The error for a requested transfer that does not work on this machine."""
    why = obstacle[:1].upper() + obstacle[1:] + "."
    return UsageError("Rows cannot be read in place here", why, "Set advanced.transfer to auto or staged.")


def measure(
    make: Callable[[Kind, int], Link],
    kinds: Sequence[Kind],
    source: Tensor,
    target: Tensor,
    sizes: Sequence[int] = CHUNKS,
) -> dict[Kind, dict[int, float]]:
    """Bytes per second of each kind and chunk, all in turn, so that disturbances affect all of them.

    Args:
        make: makes a link of a kind with chunks of this many rows; it is closed here.
        source: (R, nbytes) rows in RAM, more than the caches hold. target: (S, nbytes), overwritten.

    Raises:
        Exception: what a link failed with. RuntimeError: a link that moves the wrong bytes.
    """
    count = min(ROWS, source.shape[0], target.shape[0])
    slots, random = np.arange(count, dtype=np.int32), np.random.default_rng(0)
    best: dict[tuple[Kind, int], float] = {}
    links: dict[tuple[Kind, int], Link] = {}
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
                if turn:  # the first one is a warm-up
                    best[which] = min(best.get(which, math.inf), link.busy_s - before)
                if turn == _ROUNDS and not torch.equal(target[:count].cpu(), source[torch.from_numpy(index)]):
                    raise RuntimeError(f"rows that were {which[0]} did not arrive unchanged")
    finally:
        for link in links.values():
            link.close()
    nbytes = count * source.shape[1]
    return {kind: {size: nbytes / best[kind, size] for size in sizes} for kind in kinds}
