"""Figures that stand in for measurements of this machine or model: assets/figures.json, written by the benchmarks that
measured them (tests/bench/plan_figures.py). For each figure the file names the command, date and machine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...models.catalog import asset

Curve = Sequence[tuple[float, float]]
ByBits = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that plans use.

    Attributes:
        quantization: quality loss, in nats of mean KL divergence, of one part ("up", "gate", "down", "dense", or "kv",
            stored keys and values) at so many bits, on the demo model. Losses of several parts are added, which is an
            indication.
        dropped: router's score, relative to the mean, below which experts are dropped -> share of expert work left out.
        hits: share of a model's rows in the pool -> share of the wanted rows that are there.
        kernels: share of a linear read's rate that our CPU kernels reach on two cores, by kind and bits. core_bytes_s:
            rate of one core, likewise.
        vector_cost: by kind, what a vector costs besides its values, as a share of what Mixtral's 4,096 values take.
        core_prompt_bytes_s: rows times tokens of one core. packed_weights_s: weights that one core packs.
        host_s, host_library_s, host_gpu_s, host_pool_s, host_ram_s: the host's own time for one layer and token on the
            CPU, more of it where transformers' modules run, beside a GPU that holds all rows, with a pool until absent
            rows are asked for, and for experts that the CPU computes beside a GPU. host_behind_s: the rest of it with
            a pool, behind which the device and the link work.
            host_ahead_s, host_fetch_s: what looking one layer ahead adds there, and sending for what was guessed.
        cards: on which our kernels have been measured. card_bytes: for each multiprocessor of a card and clock, what
            our kernels' instructions allow, by kind and bits; what the memory gives is less on most.
        state_bytes_s: states of gated delta rules that the CPU brings a token further.
        lenient_kl: what leaving out weak rows adds at most to the quality loss of the preset Balanced, on the demo
            model.
        rounded_kl: what weights that were rounded in a format before packing add to the demo's quality loss, on text
            that it does not know. gguf_kl: what GGUF files lose by themselves, on the text of `quantization`.
    """

    quantization: ByBits
    dropped: Curve
    hits: Curve
    kernels: ByBits
    core_bytes_s: ByBits
    vector_cost: Mapping[str, float]
    core_prompt_bytes_s: float
    packed_weights_s: float
    host_s: float
    host_library_s: float
    host_gpu_s: float
    host_pool_s: float
    host_behind_s: float
    host_ram_s: float
    host_ahead_s: float
    host_fetch_s: float
    cards: Sequence[str]
    card_bytes: ByBits
    state_bytes_s: float
    lenient_kl: float
    rounded_kl: Mapping[str, float]
    gguf_kl: Mapping[str, float]


@functools.cache
def figures() -> Figures:
    """Those of the installed program."""
    told: Any = json.loads(asset("figures.json").read_text(encoding="utf-8"))
    values = {name: entry["values"] for name, entry in told.items()}
    return Figures(
        quantization={part: {**by_bits, 16: 0.0} for part, by_bits in _by_bits(values["quantization"]).items()},
        dropped=_curve(values["dropped"]),
        hits=_curve(values["hits"]),
        kernels=_by_bits(values["kernels"]),
        core_bytes_s=_by_bits(values["core_bytes_s"], 1e9),
        vector_cost=values["vector_cost"],
        core_prompt_bytes_s=values["core_prompt_bytes_s"] * 1e9,
        packed_weights_s=values["packed_weights_s"] * 1e6,
        host_s=values["host_ms"] / 1e3,
        host_library_s=values["host_library_ms"] / 1e3,
        host_gpu_s=values["host_gpu_ms"] / 1e3,
        host_pool_s=values["host_pool_ms"] / 1e3,
        host_behind_s=values["host_behind_ms"] / 1e3,
        host_ram_s=values["host_ram_ms"] / 1e3,
        host_ahead_s=values["host_ahead_ms"] / 1e3,
        host_fetch_s=values["host_fetch_ms"] / 1e3,
        cards=values["cards"],
        card_bytes=_by_bits(values["card_bytes"]),
        state_bytes_s=values["state_bytes_s"] * 1e9,
        lenient_kl=values["lenient_kl"],
        rounded_kl=values["rounded_kl"],
        gguf_kl=values["gguf_kl"],
    )


def _by_bits(table: Mapping[str, Mapping[str, float]], unit: float = 1.0) -> dict[str, dict[int, float]]:
    return {part: {int(bits): unit * value for bits, value in by_bits.items()} for part, by_bits in table.items()}


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((x, y) for x, y in points)
