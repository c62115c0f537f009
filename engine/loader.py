"""From a packed folder to a model that answers: checks, device, dense part, MoE layers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..kernels import operations as kernels
from ..kernels.layouts import LinearWeights
from ..models import bare, configuration, heat, skeleton
from ..models.catalog import name_of
from ..models.checkpoint import read_config
from ..models.errors import damaged
from ..models.families import FAMILIES
from ..models.lean import import_model_code
from ..models.manifest import Architecture
from ..models.packed import PackedLayer, PackedModel
from . import device_choice, hardware, predictor, quality, step
from .dense import PackedLinear
from .events import Advanced, Loaded
from .finite import is_finite
from .moe import STREAMED_CHUNK, Control, MoELayer
from .offload import Offload, Parts
from .offloaded import Neighbours, OffloadedLayer
from .step import Decoder, LeanDecoder
from .telemetry import Telemetry

Report = Callable[[str, float], None]
_log = logging.getLogger("floe_chat.engine")


@dataclass(slots=True)
class LoadedModel:
    """A model in memory, what controls it, and what it counts.

    Attributes:
        decoder: computes the next tokens. offload: what its layers share where rows lie in RAM; else None.
    """

    model: Any
    decoder: Decoder
    packed: PackedModel
    control: Control
    telemetry: Telemetry
    window: int
    device: str
    offload: Offload | None

    def close(self) -> None:
        """End what runs beside the engine, and keep for the next start what was used how much."""
        if self.offload is not None:
            self.offload.close()
            try:
                heat.write(heat.file_of(self.packed.folder), self.offload.pool.heat())
            except OSError as error:
                _log.warning("expert use was not saved: %s", error)

    def vram_bytes(self) -> int | None:
        """Device memory that torch holds; None without a GPU."""
        return torch.cuda.memory_reserved(self.device) if self.device.startswith("cuda") else None


def load(
    folder: Path,
    preset: str | None,
    device: str,
    report: Report,
    *,
    vram: int | None = None,
    advanced: Advanced | None = None,
    parts: Parts | None = None,
    library: bool = False,
) -> tuple[LoadedModel, Loaded]:
    """Open a pack and make it answer.

    Args:
        preset: None for the default one. device: "auto", "cpu", "cuda", "cuda:N" or a test device.
        vram: the most of a device's memory to use, in bytes. advanced: how rows that do not fit it are handled;
            parts: the same in full, for measurements.
        report: called with a step in words and the share that is done, 0..1.
        library: whether `model` has to be transformers' own, which can be called. Importing that takes longer than all
            else here, so it is left out where the lean pass can do without.

    Raises:
        PackError: the pack is incomplete, of another version, or damaged.
        UsageError: a preset that this pack cannot run, or a device that does not exist or has too little memory.
    """
    started = time.perf_counter()
    report("Checking the packed model", 0.3)
    packed = PackedModel.open(folder)
    manifest = packed.manifest
    chosen = quality.get(quality.DEFAULT if preset is None else preset, manifest)
    config: Any = configuration.read(folder)
    _compare(folder, config, manifest.architecture)
    ram = [packed.layer(index) for index in range(manifest.architecture.layers)]
    choice = device_choice.choose(device, manifest, ram, config, vram)
    choice.enforce()
    place = choice.place
    backend = kernels.choose(place)
    threads, why_threads = hardware.choose_threads(manifest.architecture.hidden, manifest.architecture.intermediate)
    torch.set_num_threads(threads)
    control = Control(chosen)
    telemetry = Telemetry(manifest.architecture.layers, manifest.architecture.experts)
    telemetry.budget = choice.budget
    report("Reading the dense part", 0.5)
    packed_bytes = 0  # of what lies on the device as codes

    def linear(weights: LinearWeights, bias: nn.Parameter | None) -> PackedLinear:
        nonlocal packed_bytes
        q, scale, zero = (part.to(place) for part in (weights.q, weights.scale, weights.zero))
        packed_bytes += q.nbytes + scale.nbytes + zero.nbytes
        return PackedLinear(replace(weights, q=q, scale=scale, zero=zero), bias, control)

    # CPUs of this class multiply float32 fastest and match the reference to rounding; GPUs keep the pack's 16 bit.
    dtype = torch.float32 if place == "cpu" else manifest.row_layout.float16
    advanced = advanced or Advanced()
    shared = device_choice.offload(choice, ram, parts or Parts.of(advanced))
    experts = _Experts(ram, place, shared, control, telemetry, report)
    library = library or not bare.knows(config)
    if library:
        report("Starting transformers", 0.5)
        import_model_code()
        config = read_config(folder)
    model: Any = skeleton.build(
        config,
        FAMILIES[manifest.architecture.model_type],
        packed.dense(),
        manifest.widths.dense,
        experts,
        linear,
        dtype,
        place,
        None if library else bare.tree,
    )
    _need_numbers(folder, model)
    decoder = step.choose(model, choice.shares.window)
    # The library's cache takes nothing from the pool.
    window = choice.shares.window if isinstance(decoder, LeanDecoder) else choice.shares.reserved
    if shared is not None:
        report("Filling the pool of rows", 1.0)
        experts.join(model, packed, shared, decoder)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    moves = f"; {shared.device.moves}" if shared is not None and shared.device.moves else ""
    loaded = Loaded(
        model=name_of(folder, manifest.name),
        folder=str(folder),
        source=manifest.source.name,
        context_window=window,
        vocabulary=config.vocab_size,
        presets=quality.available(manifest),
        preset=chosen.name,
        widths=manifest.widths.describe(),
        device=place if shared is None else shared.device.name,
        backend=backend.name,
        reason=f"{backend.reason}; {decoder.reason}; on {place}, because {choice.why}; {why_threads}{moves}",
        seconds=time.perf_counter() - started,
        memory_bytes=parameter_bytes + packed_bytes + experts.nbytes,
        advanced=() if shared is None else advanced.changed(),
    )
    return LoadedModel(model, decoder, packed, control, telemetry, window, place, shared), loaded


class _Experts:
    """Makes each layer's experts: where their rows lie, or offloaded.

    Attributes:
        nbytes: device memory of the up projections.
    """

    def __init__(
        self,
        ram: Sequence[PackedLayer],
        place: str,
        shared: Offload | None,
        control: Control,
        telemetry: Telemetry,
        report: Report,
    ) -> None:
        self._ram, self._place, self._shared = ram, place, shared
        self._control, self._telemetry, self._report = control, telemetry, report
        self._made: list[OffloadedLayer] = []
        self.nbytes = 0

    def __call__(self, index: int) -> MoELayer:
        count = len(self._ram)
        self._report(f"Mapping layer {index + 1} of {count}", 0.5 + 0.5 * index / count)
        layer = _to(self._ram[index], self._place, rows=self._shared is None)
        self.nbytes += layer.up.nbytes
        if self._shared is None:
            return MoELayer(index, layer, self._control, self._telemetry)
        made = OffloadedLayer(index, layer, self._ram[index], self._shared, self._control, self._telemetry)
        self._made.append(made)
        return made

    def join(self, model: Any, packed: PackedModel, shared: Offload, decoder: Decoder) -> None:
        """Let offloaded layers know each other and their routers, and fill the pool."""
        self._telemetry.memory = shared
        if not shared.device.real:
            self._telemetry.clock = shared.device.now
        self._control.make_room, self._control.chunk = shared.make_room, STREAMED_CHUNK
        if isinstance(decoder, LeanDecoder):  # the library's own cache lies where it likes
            decoder.room = shared
            shared.share()
        following = [*self._made[1:], None]
        for layer, after, block in zip(self._made, following, model.model.layers, strict=True):
            layer.neighbours = Neighbours(block.mlp.gate, after)
        if shared.parts.predictor != "none":
            ahead = decoder.ahead if isinstance(decoder, LeanDecoder) else None
            shared.predictor = predictor.make(shared.parts.predictor, model, packed, ahead)
        shared.warm(_heat(packed))


def _heat(packed: PackedModel) -> heat.Heat:
    """What was used before, or else what calibration found popular."""
    a = packed.manifest.architecture
    kept = heat.read(heat.file_of(packed.folder), a.layers, a.experts, a.intermediate)
    if kept is not None:
        return kept
    return heat.from_popularity(packed.profile()["popularity"].numpy(), a.intermediate)


def _need_numbers(folder: Path, model: nn.Module) -> None:
    """Raises PackError: some weight of the dense part is NaN or infinite; experts are found out when they are used."""
    weights = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            weights |= {f"{name}.scale": module.weights.scale, f"{name}.zero": module.weights.zero}
    for name, values in weights.items():
        if not is_finite(values.detach()):
            raise damaged(folder, f"{name} in dense.safetensors has values that are NaN or infinite.")


def _compare(folder: Path, config: Any, a: Architecture) -> None:
    for name, configured, packed in (
        ("model type", config.model_type, a.model_type),
        ("number of layers", config.num_hidden_layers, a.layers),
        ("number of experts", FAMILIES[config.model_type].experts(config), a.experts),
        ("experts per token", config.num_experts_per_tok, a.top_k),
        ("hidden size", config.hidden_size, a.hidden),
        ("number of neurons per expert", FAMILIES[config.model_type].neurons(config), a.intermediate),
    ):
        if configured != packed:
            raise damaged(folder, f"Its {name} is {packed} by the manifest and {configured} by config.json.")


def _to(layer: PackedLayer, device: str, *, rows: bool) -> PackedLayer:
    """A layer on the device; its rows too, or not."""
    if device == "cpu":
        return layer
    up, own = layer.up, layer.rows
    up = replace(up, q=up.q.to(device), scale=up.scale.to(device), zero=up.zero.to(device))
    own = replace(own, data=own.data.to(device)) if rows else own
    return PackedLayer(up, own, layer.thresholds.to(device), layer.products.to(device))
