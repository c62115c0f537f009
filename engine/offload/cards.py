"""Graphics cards by the names that people type, and the machines around them (assets/devices.json).

A card's figures are published ones, not measurements; the file says where they are from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...models import typed_names
from ...models.catalog import asset
from ...models.errors import UsageError
from ...models.quantities import memory
from .lane_rates import TOUCHED, Rates

PREFIX = "sim:"
CHUNK_BYTES = 1 << 20  # at 25 GB/s: 42 us of copying and 5 us of latency, so an urgent row waits at most 47 us

# Of a card's published memory rate and tensor throughput, what kernels reach: FloE table 1 computes one Mixtral expert
# (352 MB) in 0.542 ms on an RTX 3090, 69 % of its 936 GB/s; 62 % on an H100, 68 % on an A100.
REACHED = 0.7
# Launches of one token, which tests count in what is captured: of operations of ours that are several, and of layers.
LAUNCHES = {
    "linear": 2,
    "attend_one": 2,
    "latent_one": 5,
    "route": 2,
    "experts_step": 5,
    "list_active": 3,
    "add_listed": 4,
}
FIND_LAUNCHES = LAUNCHES["list_active"] + 4  # in a pool, behind these: thresholds, then what the host has to know
SUM_LAUNCHES = LAUNCHES["add_listed"] + 1  # in a graph of their own, with what the host has listed
DENSE_LAUNCHES = 10  # before experts: a sum, norm and projection, attention, projection and sum, norm, router
GROUPED_LAUNCHES = 15  # of all experts of a layer for a prompt, however many they are (`kernels/triton/dense.py`)
STREAMED_LAUNCHES, ADD_LAUNCHES = 2, 3  # of one expert that streams; its tokens gathered, weighted and added
ALONE_LAUNCHES = 21  # of one expert, on a card that takes them one by one
SHARED_LAUNCHES, GATE_LAUNCHES = 6, 4  # that a shared expert adds to those, and a gate that scales it
LATENT_LAUNCHES, ASKED_LAUNCHES = 3, 2  # that a latent vector adds, and one of queries, with its norm
SANDWICH_LAUNCHES = 9  # that norms behind a layer's parts add, with the router's own norm and factors
LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe, nominal, one way
LINK_REACHED = 0.8  # share of that which copies from pinned memory usually reach

_OTHERS = (
    (
        r"amd|radeon|rx\d{3,4}|vega|instinct|mi[123]\d\d|ryzen|strix|[678][789]0m$"
        r"|(5[567]00|6[4-9][05]0|7[6-9]00|90[67]0)(xtx|xt|gre|m|s|d)*(\d+gb)?$",
        "AMD cards are",
    ),
    (r"intel|arc|[ab][357][1578]0|iris", "Intel cards are"),
    (r"apple|macbook|macmini|macstudio|m[1-5](pro|max|ultra)?$", "Apple's GPUs are"),
    (
        r"(gtx|gt)?(9[5-8]0|10[1-8]0)(ti)?(\d+gb)?$|(gtx|gt)[4-9]\d0|titan(x|v|xp)|quadro[kmp]\d+|tesla[kpm]\d+"
        r"|v100|p100|p40|p4$|k80|m40",
        "Cards older than the RTX 20 series are",
    ),
)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU and the machine around it: bytes, bytes per second, operations per second, seconds.

    GPU figures are published peaks; link_bytes_s is of large pinned copies, pack_bytes_s of the CPU gathering rows,
    infinite where the device reads them in place.

    Attributes:
        name: as sim:NAME has it. title: as its maker writes it. host: the machine around it, in words.
        node_s: between two kernels of a CUDA graph. clocks_s: of all its multiprocessors, in a second. grouped: whether
            a prompt's experts are computed at once (compute capability 8.0).
    """

    name: str
    vram_bytes: int
    gpu_bytes_s: float
    gpu_flops: float
    link_bytes_s: float
    link_latency_s: float
    launch_s: float
    cpu_bytes_s: float
    cpu_flops: float
    pack_bytes_s: float
    title: str = ""
    host: str = ""
    node_s: float = 0.0
    clocks_s: float = 0.0
    grouped: bool = True

    def graph_s(self, nbytes: float, flops: float, nodes: int, launches: int = 1) -> float:
        """As `gpu_s`, of a CUDA graph: one launch, none for a part of it, and less between its kernels."""
        return self.gpu_s(nbytes, flops, launches) + nodes * self.node_s

    def gpu_s(self, nbytes: float, flops: float, launches: int) -> float:
        """The GPU's time for kernels that read `nbytes` and compute `flops`: the longer of the two, and launching."""
        return max(nbytes / self.gpu_bytes_s, flops / self.gpu_flops) / REACHED + launches * self.launch_s

    def cpu_s(self, nbytes: float, flops: float) -> float:
        """The CPU's time likewise, with its activations' way down from the GPU and back."""
        return max(nbytes / self.cpu_bytes_s, flops / self.cpu_flops) + 2 * self.link_latency_s

    def copy_s(self, nbytes: int) -> float:
        """The link's time for one chunk. Packing overlaps with copying the chunk before: the slower counts."""
        return self.link_latency_s + nbytes / min(self.link_bytes_s, self.pack_bytes_s)

    def rates(self, flops_per_byte: float) -> Rates:
        """The rates that a measurement of this machine would give, for rows with this many operations per byte and
        token. On a virtual clock the lanes do not compete for RAM: rows are divided so that they need not.
        """
        batch = self.cpu_flops / flops_per_byte
        return Rates(
            link_bytes_s=CHUNK_BYTES / self.copy_s(CHUNK_BYTES),
            link_latency_s=self.link_latency_s,
            cpu_bytes_s=min(self.cpu_bytes_s, batch),
            cpu_batch_bytes_s=batch,
            cpu_latency_s=2 * self.link_latency_s,
            gpu_bytes_s=self.gpu_bytes_s * REACHED,
            launch_s=self.launch_s,
            ram_bytes_s=self.cpu_bytes_s,
            touched=TOUCHED["staged" if math.isfinite(self.pack_bytes_s) else "in place"],
        )


def expert_launches(*, grouped: bool) -> int:
    """Of one expert that streams in a prompt; grouped: see `Card`."""
    return (STREAMED_LAUNCHES if grouped else ALONE_LAUNCHES) + ADD_LAUNCHES


def named(text: str, *, study: bool = False) -> Card:
    """The card that a person means: "rtx3090-24gb", "sim:rtx3090-24gb", "RTX 3090", "3090", "GeForce RTX 3080 12GB";
    with limited memory "rtx3090@12gb" (GiB). Of cards sold with several memory sizes it is the usual one. What people
    write for short is understood too: "4080S", "3060 12G".

    Args:
        study: in the machine of the paper that used the card, where there is one, instead of the usual one.

    Raises:
        UsageError: no such card, with the reason where it is of another maker or too old; or a limit that is no number
        of GB or above what the card has.
    """
    wanted, at, limit = text.strip().removeprefix(PREFIX).partition("@")
    name = _name(wanted)
    if name is None:
        raise _unknown(wanted)
    found = _cards(study=study)[name]
    if not at:
        return found
    has = f"The {found.title} has {memory(found.vram_bytes)}."
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:gi?b?)?\s*", limit, re.IGNORECASE)
    if size is None:
        raise UsageError(f'"{limit}" is not a memory size', has, f'Write it as in "{name}@8gb".')
    vram = int(float(size[1]) * 2**30)
    if not 0 < vram <= found.vram_bytes:
        raise UsageError(f"{limit} is more than the card has", has, f"Give a limit up to that, such as {name}@8gb.")
    return dataclasses.replace(found, name=f"{name}@{size[1]}gb", vram_bytes=vram)


def of_gpu(name: str) -> Card | None:
    """The card that a driver calls so, such as "NVIDIA GeForce RTX 3090"; None if the list has none."""
    known = _name(name)
    return None if known is None else _cards()[known]


def by_series() -> dict[str, list[Card]]:
    """All cards, oldest and smallest first, by series."""
    found: dict[str, list[Card]] = {}
    for name, own in _file()["cards"].items():
        found.setdefault(own["series"], []).append(_cards()[name])
    return found


def _name(text: str) -> str | None:
    """The key of the card in the file."""
    wanted = _letters(text)
    if not wanted:
        return None
    cards = _cards()
    whole = {name: _letters(name) for name in cards}
    models = {name: _letters(card.title) for name, card in cards.items()}
    for spelled in (wanted, "rtx" + wanted, "quadro" + wanted):
        for table in (whole, models):
            if found := [name for name, letters in table.items() if letters == spelled]:
                return found[0]
    return None


def _unknown(text: str) -> UsageError:
    letters = _letters(text)
    for pattern, called in _OTHERS:
        if re.match(pattern, letters):
            return UsageError(
                f"{called} not supported yet",
                "floe-chat runs on NVIDIA cards of the RTX 20 series and later (compute capability 7.5), or on the "
                "CPU alone.",
                "--card none plans for a machine without a GPU.",
            )
    series = {card.title for card in _cards().values()}
    near = typed_names.did_you_mean(f"RTX {text}" if text[:1].isdigit() else text, sorted(series))
    return UsageError(
        f"There is no card {text[:40]!r} in the list",
        near,
        "`floe-chat plan --card list` prints the cards. --vram, --pcie and --link-gbs describe any other.",
    )


@functools.cache
def _letters(text: str) -> str:
    return re.sub(
        r"nvidia|geforce|gpu|edition|mobile", lambda word: "laptop" if word[0] == "mobile" else "", _signs(text)
    )


def _signs(text: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", text.lower()).replace("gib", "gb")
    return re.sub(r"(\d\d\d0)s(?=\d|$)", r"\1super", re.sub(r"(?<=\d)g$", "gb", plain))


@functools.cache
def _file() -> Any:
    return json.loads(asset("devices.json").read_text(encoding="utf-8"))


@functools.cache
def _cards(*, study: bool = False) -> Mapping[str, Card]:
    told = _file()
    hosts = {name: (own.get("study") if study else None) or own["host"] for name, own in told["cards"].items()}
    return {name: _card(name, own, told["hosts"][hosts[name]], told["common"]) for name, own in told["cards"].items()}


def _card(name: str, own: Mapping[str, Any], host: Mapping[str, Any], common: Mapping[str, Any]) -> Card:
    generation, lanes = map(int, own["pcie"].split("x"))
    return Card(
        name=name,
        vram_bytes=own["vram_bytes"],
        gpu_bytes_s=own["gpu_bytes_s"],
        gpu_flops=own["gpu_flops"],
        link_bytes_s=LANE_BYTES_S[generation] * lanes * LINK_REACHED,
        link_latency_s=common["link_latency_s"]["value"],
        launch_s=common["launch_s"]["value"],
        node_s=common["node_s"]["value"],
        cpu_bytes_s=host["cpu_bytes_s"]["value"],
        cpu_flops=host["cpu_flops"]["value"],
        pack_bytes_s=host["pack_bytes_s"]["value"],
        title=own["title"],
        host=host["about"],
        clocks_s=own["sms"] * own["clock_hz"],
        grouped=own["year"] >= 2020 and own["series"] != "GeForce RTX 20",  # the others are Turing's, 7.5
    )
