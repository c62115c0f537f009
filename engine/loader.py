"""From a packed folder to a model that answers: checks, device, dense part, MoE layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..kernels.layouts import ExpertRows, LinearWeights, UpWeights
from ..models import skeleton
from ..models.checkpoint import FAMILIES, read_config
from ..models.errors import UsageError
from ..models.lean import import_model_code
from ..models.manifest import Architecture, damaged
from ..models.packed import PackedLayer, PackedModel
from . import context, hardware, quality
from .dense import PackedLinear
from .events import Loaded
from .moe import Control, MoELayer
from .telemetry import Telemetry

Report = Callable[[str, float], None]


@dataclass(slots=True)
class LoadedModel:
    """A model in memory, what controls it, and what it counts."""

    model: Any
    packed: PackedModel
    control: Control
    telemetry: Telemetry
    window: int
    device: str

    def vram_bytes(self) -> int | None:
        """Device memory that torch holds; None without a GPU."""
        return torch.cuda.memory_reserved(self.device) if self.device.startswith("cuda") else None


def load(folder: Path, preset: str | None, device: str, report: Report) -> tuple[LoadedModel, Loaded]:
    """Open a pack and make it answer.

    Args:
        preset: None for the default one. device: "auto", "cpu", "cuda" or "cuda:N".
        report: called with a step in words and the share that is done, 0..1.

    Raises:
        PackError: the pack is incomplete, of another version, or damaged.
        UsageError: a preset that this pack cannot run, or a device that does not exist.
    """
    started = time.perf_counter()
    report("Starting transformers", 0.05)
    import_model_code()
    report("Checking the packed model", 0.3)
    packed = PackedModel.open(folder)
    manifest = packed.manifest
    chosen = quality.get(preset or quality.DEFAULT, manifest)
    pack_bytes = sum(entry.size for entry in manifest.files.values())
    try:
        place, why = hardware.choose_device(device, pack_bytes)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"The device {device!r} cannot be used", str(error), "Use --device cpu.") from error
    backend = kernels.choose(torch.device(place).type)
    threads, why_threads = hardware.choose_threads(manifest.architecture.hidden, manifest.architecture.intermediate)
    torch.set_num_threads(threads)
    control = Control(chosen)
    telemetry = Telemetry(manifest.architecture.layers, manifest.architecture.experts)
    report("Reading the dense part", 0.5)
    packed_bytes = 0  # of what lies on the device as codes

    def linear(weights: LinearWeights, bias: nn.Parameter | None) -> PackedLinear:
        nonlocal packed_bytes
        q, scale, zero = (part.to(place) for part in (weights.q, weights.scale, weights.zero))
        packed_bytes += q.nbytes + scale.nbytes + zero.nbytes
        return PackedLinear(replace(weights, q=q, scale=scale, zero=zero), bias, control)

    def experts(index: int) -> MoELayer:
        nonlocal packed_bytes
        report(
            f"Mapping layer {index + 1} of {manifest.architecture.layers}",
            0.5 + 0.5 * index / manifest.architecture.layers,
        )
        layer = _to(packed.layer(index), place)
        packed_bytes += layer.up.q.nbytes + layer.up.scale.nbytes + layer.up.zero.nbytes
        return MoELayer(index, layer, control, telemetry)

    config: Any = read_config(folder)
    _compare(folder, config, manifest.architecture)
    # CPUs of this class multiply float32 fastest and match the reference to rounding; GPUs keep the pack's 16 bit.
    dtype = torch.float32 if place == "cpu" else manifest.row_layout.float16
    model: Any = skeleton.build(
        config,
        FAMILIES[manifest.architecture.model_type],
        packed.dense(),
        manifest.widths.dense,
        experts,
        linear,
        dtype,
        place,
    )
    window = context.window(config)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    loaded = Loaded(
        model=manifest.name,
        source=manifest.source.name,
        context_window=window,
        presets=quality.available(manifest),
        preset=chosen.name,
        widths=manifest.widths.describe(),
        device=place,
        backend=backend.name,
        reason=f"{backend.reason}; on {place}, since {why}; {why_threads}",
        seconds=time.perf_counter() - started,
        memory_bytes=parameter_bytes + packed_bytes,
    )
    return LoadedModel(model, packed, control, telemetry, window, place), loaded


def _compare(folder: Path, config: Any, a: Architecture) -> None:
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    for name, configured, packed in (
        ("model type", config.model_type, a.model_type),
        ("number of layers", config.num_hidden_layers, a.layers),
        ("number of experts", experts, a.experts),
        ("experts per token", config.num_experts_per_tok, a.top_k),
        ("hidden size", config.hidden_size, a.hidden),
        ("intermediate size", config.intermediate_size, a.intermediate),
    ):
        if configured != packed:
            raise damaged(folder, f"Its {name} is {packed} by the manifest and {configured} by config.json.")


def _to(layer: PackedLayer, device: str) -> PackedLayer:
    if device == "cpu":
        return layer
    up: UpWeights = layer.up
    rows: ExpertRows = layer.rows
    return PackedLayer(
        up=replace(up, q=up.q.to(device), scale=up.scale.to(device), zero=up.zero.to(device)),
        rows=replace(rows, data=rows.data.to(device)),
        thresholds=layer.thresholds.to(device),
        products=layer.products.to(device),
    )
