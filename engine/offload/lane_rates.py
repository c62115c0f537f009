"""The speeds of this machine's link, CPU and GPU for a pack's rows: saved, and corrected while running."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ...kernels.cpu.binding import records
from ...kernels.offload.sharing import Lanes
from ..machine import saved_figures
from .links.transfer import Kind

_STEP = 1 / 16  # weight of a new observation in the moving mean: half a layer stack of Mixtral
_HOPE = 1 + 1 / 512  # per layer and token: a lane believed half as fast as it is gets tried after 11 tokens
_FARTHEST = 2.0  # times the mean: outliers are clamped to this, so that one hiccup moves a rate by 6 %

# Times that RAM moves each byte of a copied row. A staged one is packed (read and written), and read by the copy
# engine. With caches that keep what was just packed it may be less; that was not measured on a card.
TOUCHED: Mapping[Kind, int] = {"staged": 3, "in place": 1}

_LENT = "link_latency_s", "cpu_latency_s", "gpu_bytes_s", "launch_s", "ram_bytes_s", "touched"

RateName = Literal["link", "cpu", "cpu_batch", "gpu"]


@dataclass(slots=True)
class SavedRates(saved_figures.Record):
    """This machine's speeds for a pack's rows (unpacking codes costs the CPU more than reading them).

    Attributes:
        link_bytes_s, link_latency_s: copying rows to the GPU, and a copy's fixed cost.
        cpu_bytes_s: rows that the CPU computes for one token; cpu_latency_s: activations' way there and back.
        cpu_batch_bytes_s: the CPU's rows times tokens in a prompt, where it is bound by arithmetic.
        gpu_bytes_s, launch_s: rows that the GPU computes, and launching its kernels.
    """

    link_bytes_s: saved_figures.Rate
    link_latency_s: saved_figures.Latency
    cpu_bytes_s: saved_figures.Rate
    cpu_batch_bytes_s: saved_figures.Rate
    cpu_latency_s: saved_figures.Latency
    gpu_bytes_s: saved_figures.Rate
    launch_s: saved_figures.Latency


@dataclass(slots=True)
class Rates(SavedRates):
    """All that a placement counts with.

    Attributes:
        ram_bytes_s: a plain read of RAM; infinite if it is not known, so that the lanes alone count.
        touched: times that RAM moves each byte of a copied row, see `TOUCHED`.
    """

    ram_bytes_s: float = math.inf
    touched: int = TOUCHED["staged"]

    def save(self, file: Path) -> None:
        """Without RAM's rate and the link's kind, which each start finds out."""
        SavedRates(*(getattr(self, field.name) for field in dataclasses.fields(SavedRates))).save(file)

    @classmethod
    def load(cls, file: Path) -> Self | None:
        """See `Record`."""
        saved = SavedRates.load(file)
        return None if saved is None else cls(**dataclasses.asdict(saved))

    def observed(self, what: RateName, nbytes: float, seconds: float, cap: float = 1.0) -> None:
        """Correct a rate by the real time of work of `nbytes`: a moving mean of seconds per byte.

        Observations that say nothing about a rate are ignored: no time or no bytes, and work shorter than its latency.
        Outliers count as twice or half the mean.

        Args:
            nbytes: "cpu_batch": bytes of the rows times tokens. cap: share of the CPU's threads that did it; rates are
                those of all.
        """
        latency = {"link": self.link_latency_s, "gpu": self.launch_s}.get(what, self.cpu_latency_s)
        took = seconds - latency
        if not (nbytes > 0 and math.isfinite(nbytes) and took > latency and math.isfinite(took) and cap > 0):
            return
        name = f"{what}_bytes_s"
        mean = 1 / getattr(self, name)
        each = took / nbytes * (cap if what in ("cpu", "cpu_batch") else 1.0)
        each = min(max(each, mean / _FARTHEST), mean * _FARTHEST)
        setattr(self, name, 1 / (mean + _STEP * (each - mean)))

    def lanes(self, row_bytes: float, queued_s: float, cap: float, read: float = 1.0) -> Lanes:
        """What rows of so many bytes take.

        Args:
            queued_s: seconds of work that the link has before it. cap: share of the CPU that may be used, 0 to 1.
            read: share of a row that the CPU reads. A step does not know it beforehand, and counts whole rows.
        """
        # The CPU reads no faster than RAM gives: where whole rows are too many bytes, its own time is the bound.
        reads = max(self.ram_bytes_s, self.cpu_bytes_s * read)
        return Lanes(
            self.cpu_latency_s,
            row_bytes / (self.cpu_bytes_s * cap) if cap > 0 else math.inf,
            queued_s + self.link_latency_s + self.launch_s,
            row_bytes / self.link_bytes_s + row_bytes / self.gpu_bytes_s,
            row_bytes * read / reads,
            row_bytes * self.touched / self.ram_bytes_s,
        )

    def record(self) -> Any:
        """`floe_rates`: the same, for compiled steps."""
        made = records.rates(
            **dict.fromkeys(_LENT, 0.0), link_bytes_s=0.0, cpu_bytes_s=0.0, step=_STEP, farthest=_FARTHEST, hope=_HOPE
        )
        self.lend(made)
        return made

    def lend(self, record: Any) -> None:
        """Bring the record up to date, before a compiled step."""
        record.link_bytes_s, record.cpu_bytes_s = self.link_bytes_s, self.cpu_bytes_s
        record.link_latency_s, record.cpu_latency_s = self.link_latency_s, self.cpu_latency_s
        record.gpu_bytes_s, record.launch_s = self.gpu_bytes_s, self.launch_s
        record.ram_bytes_s, record.touched = self.ram_bytes_s, self.touched

    def take(self, record: Any) -> None:
        """What compiled steps have corrected."""
        self.link_bytes_s, self.cpu_bytes_s = record.link_bytes_s, record.cpu_bytes_s

    def unused(self, what: RateName) -> None:
        """A lane got no work: assume it a little faster each time, until it is tried again.

        A rate that is estimated too low would otherwise never be observed again.
        """
        name = f"{what}_bytes_s"
        setattr(self, name, getattr(self, name) * _HOPE)


def rates_file(machine: str, device: str, row_bytes: int) -> Path:
    """The file with the rates for a machine (its id), device ("cuda:0") and row width."""
    return saved_figures.rates_folder() / f"{machine}-{device.replace(':', '-')}-{row_bytes}.json"
