"""From a packed folder to a model that answers: checks, device, dense part, MoE layers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..kernels import maker
from ..kernels import operations as kernels
from ..kernels.backend import BFLOAT16_FROM
from ..kernels.weights import LinearWeights
from ..models.catalog import name_of
from ..models.checkpoint import read_config
from ..models.errors import FloeError, PackError, UsageError, damaged
from ..models.families import family_of
from ..models.modules import library_model, light_modules
from ..models.pack import usage_file
from ..models.pack.manifest import FILE_NAME, Manifest, file_entry
from ..models.pack.packed_model import PackedModel
from ..models.transformers_import import import_model_code
from . import quality_presets
from .context import CONTEXT
from .decoder import decoders
from .decoder.decoders import Decoder, FusedDecoder
from .decoder.draft_model import DraftModel
from .decoder.finite_check import is_finite
from .decoder.layers import Unsupported
from .decoder.quantized_linear import PackedLinear
from .events import Advanced, Load, Loaded, Notice
from .experts.moe_layer import STREAMED_CHUNK, Control, MoELayer, chunk_for
from .experts.offloaded_layer import Neighbours, OffloadedLayer
from .experts.whole_layers import RamLayer, ResidentLayer
from .machine import hardware
from .offload import predictor
from .offload.offload import Offload, Parts
from .offload.pools import Pools
from .offload.table_rows import lookups
from .opening import Opened, opened
from .parallel.led import Led
from .parallel.messages import Open, Ready
from .parallel.spread import Spread
from .parallel.spread_layer import SpreadLayer
from .planning import drafter
from .planning.footprint import Footprint
from .planning.memory_plan import HEAD
from .planning.opened_pack import Asked
from .planning.several.placement import Placement
from .telemetry import Telemetry

Report = Callable[[str, float], None]
_log = logging.getLogger("floe_chat.engine")


@dataclass(slots=True)
class LoadedModel:
    """A model in memory, with its control and its telemetry.

    Attributes:
        decoder: computes the next tokens. offload: what its layers share if rows are in RAM and a pool; else None.
        pools: likewise where several cards have some layers each; then `offload` is None.
        places: torch's names of all devices that have layers; `device` is the first.
    """

    model: Any
    decoder: Decoder
    packed: PackedModel
    control: Control
    telemetry: Telemetry
    window: int
    device: str
    offload: Offload | None
    pools: Pools | None
    places: tuple[str, ...]

    @property
    def shared(self) -> Offload | Pools | None:
        """What its layers share, on one device or several."""
        return self.offload or self.pools

    def close(self) -> None:
        """Stop background work, and save expert and neuron use for the next start."""
        if self.shared is not None:
            self.shared.close()
            try:
                usage_file.write(usage_file.file_of(self.packed.folder), self.shared.heat(_heat(self.packed)))
            except OSError as error:
                _log.warning("expert use was not saved: %s", error)

    def vram_bytes(self) -> int | None:
        """Device memory that torch holds; None without a GPU."""
        if not self.device.startswith("cuda"):
            return None
        return sum(torch.get_device_module(place).memory_reserved(place) for place in self.places)


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
    spread: Spread | None = None,
) -> tuple[LoadedModel, Loaded]:
    """Open a pack and make it answer.

    Args:
        preset: None for the default one. device: see `placement.choose`.
        vram: the most of each device's memory to use, in bytes. advanced: how rows that do not fit it are handled;
            parts: the same in full, for measurements.
        report: called with a step in words and the share done, 0..1.
        spread: over which processes the experts are to be divided, each of which calls this.
        library: whether `model` must be transformers' own, callable model. Importing that takes longer than all else
            here, so it is skipped if the fused pass does not need it.

    Raises:
        PackError: the pack is incomplete, of another version, or damaged.
        UsageError: a preset that this pack cannot run, or a device that does not exist or has too little memory.
    """
    started = time.perf_counter()
    report("Checking the packed model", 0.3)
    advanced = advanced or Advanced()
    parts = parts or Parts.of(advanced)
    asked = Asked.of(advanced, parts.mix, parts.division)
    pack = opened(folder, preset, device, vram, asked, spread, lambda step: report(step, 0.4))
    if library and len({*pack.placement.places}) > 1:
        cause = "transformers' own model runs on one device."
        raise UsageError("Several cards cannot be used for this", cause, "Name one card with --device.")
    for part in pack.placement.parts:
        part.choice.enforce()
    why_threads = _set_threads(pack, 1 if spread is None else spread.group.members.beside)
    a = pack.architecture
    control, telemetry = Control(pack.preset, chunk_for(a.experts, a.top_k)), Telemetry(a.layers, a.experts)
    control.narrow = computed_type(pack.placement.places, pack.packed.manifest) == torch.float16
    telemetry.budget = pack.placement.budget
    report("Reading the dense part", 0.5)
    offloads = pack.placement.offloads(pack.layers, parts, lambda step: report(step, 0.5))
    shared = _shared(offloads)
    linears = {place: _Linear(place, control) for place in pack.placement.places}
    experts = _Experts(pack, offloads, control, telemetry, report, spread)
    model = _build(pack, linears, experts, report, library=library)
    window, decoder = _decoder(model, pack.placement)
    if isinstance(advanced.draft, str):
        _draft_with(advanced.draft, decoder, pack, control, report, alone=spread is None)
    if advanced.draft and spread is None and isinstance(decoder, FusedDecoder) and decoder.head is None:
        shares = pack.placement.first.shares
        _draft(decoder, pack.packed, room=shares.place != "gpu" or HEAD in shares.uses)
    if shared is not None:
        report("Filling the pool of rows", 1.0)
        experts.join(model, shared, decoder)
    decoder.prepare()
    if spread is not None and isinstance(decoder, FusedDecoder):
        decoder.divide = spread.divide
    if spread is not None and spread.group.rank == 0:
        decoder = Led(decoder, spread.group, control, spread.grid.words())
    places = pack.placement.places
    one, several = (None, shared) if isinstance(shared, Pools) else (shared, None)
    loaded = LoadedModel(model, decoder, pack.packed, control, telemetry, window, places[0], one, several, places)
    nbytes = sum(parameter.nbytes for parameter in model.parameters()) + experts.nbytes
    nbytes += sum(linear.nbytes for linear in linears.values())
    pooled = any(part.choice.shares.mix is not None and part.choice.shares.mix.pool for part in pack.placement.parts)
    drafting = isinstance(decoder.head, DraftModel)
    changed = advanced.changed(offloaded=shared is not None, pooled=shared is not None and pooled, drafting=drafting)
    return loaded, _describe(loaded, pack, why_threads, nbytes, changed, time.perf_counter() - started)


def load_together(
    find: Callable[[], Path], asked: Load | Open, report: Report, spread: Spread
) -> tuple[LoadedModel, Loaded]:
    """As `load`, in all processes of a group: this one's part.

    Args:
        find: gives the pack's folder here.

    Raises:
        FloeError: it cannot be opened in one of them.
    """

    def opening() -> tuple[tuple[LoadedModel, Loaded], Ready]:
        folder, place = find(), spread.place(asked.device)
        asking = folder, asked.preset, place, report
        loaded, event = load(*asking, vram=asked.vram, advanced=asked.advanced, spread=spread)
        return (loaded, event), Ready(file_entry(folder / FILE_NAME).sha256, loaded.window, loaded.device)

    (loaded, event), loaded.window = spread.together(opening)
    return loaded, replace(event, context_window=loaded.window)


def _shared(offloads: Sequence[Offload | None]) -> Offload | Pools | None:
    """What the layers of a model share, on one device or several."""
    each = [one for one in offloads if one is not None]
    return Pools(each) if len(offloads) > 1 and each else each[0] if each else None


def _set_threads(pack: Opened, beside: int) -> str:
    """Set the best number of threads for this model, one of `beside` processes here; returns the reason, in words."""
    threads, why = hardware.choose_threads(pack.architecture.hidden, pack.architecture.intermediate)
    torch.set_num_threads(max(1, threads // beside))
    return why if beside == 1 or threads == 1 else f"{max(1, threads // beside)} of {why}"


def _build(pack: Opened, linears: Mapping[str, _Linear], experts: _Experts, report: Report, *, library: bool) -> Any:
    """The model's modules with their weights: transformers' own if requested or if there are no others."""
    manifest, place, config = pack.packed.manifest, pack.placement.first.place, pack.config
    library = library or not light_modules.knows(config)
    if library:
        report("Starting transformers", 0.5)
        import_model_code()
        config = read_config(pack.packed.folder)
    dtype = computed_type(pack.placement.places, manifest)
    model: Any = library_model.build(
        config,
        family_of(manifest.architecture.model_type),
        pack.packed.dense(),
        manifest.widths.dense,
        experts,
        linears[place],
        dtype,
        place,
        None if library else light_modules.tree,
        {
            layer: (linears[part.choice.place], part.choice.place)
            for part in pack.placement.parts
            for layer in part.decoder
            if part.choice.place != place
        },
        lookups(library_model.tables_in(config, manifest), pack.packed.folder, dtype),
    )
    _need_numbers(pack.packed.folder, model)
    return model


def computed_type(places: Sequence[str], manifest: Manifest) -> torch.dtype:
    """The type of all activations.

    CPUs multiply float32 fastest and match the reference up to rounding. GPUs use the pack's 16-bit type, but float16
    before compute capability 8.0 where the model's values fit it: those multiply bfloat16 many times slower, and have
    no fused attention for it.
    """
    if places[0] == "cpu":
        return torch.float32
    old = not maker.is_amd() and not all(maker.reaches(place, BFLOAT16_FROM) for place in places)
    return torch.float16 if old and not manifest.family.wide else manifest.float16


def _decoder(model: Any, where: Placement) -> tuple[int, Decoder]:
    """Tokens of the longest chat, and what computes it.

    Raises:
        UsageError: the layers are divided among cards, and transformers' modules would compute them.
    """
    shares = where.first.shares
    decoder = decoders.choose(model, shares.window, where.kv(torch.device))
    if isinstance(decoder, FusedDecoder):
        return shares.window, decoder
    if len(where.parts) > 1:
        raise UsageError("This model cannot be divided among cards", f"{decoder.reason}.", "Name one with --device.")
    # The library's cache takes nothing from the pool, and stores 16 bits.
    return max(1, shares.reserved * shares.kv_bits // 16), decoder


def _draft_with(name: str, decoder: Decoder, pack: Opened, control: Control, report: Report, *, alone: bool) -> None:
    """Guess further tokens by another pack, in RAM, if that can be done. Why it cannot is a notice."""
    try:
        if not alone or not isinstance(decoder, FusedDecoder):
            raise Unsupported("other processes compute them too" if not alone else decoder.reason)
        folder, found = drafter.of_packs(name, pack.packed.folder, CONTEXT)
        name = found.name
        a, mixes = pack.architecture, [one.choice.shares.mix for one in pack.placement.parts]
        in_ram = 1 - sum(0 if mix is None else mix.gpu for mix in mixes) / a.layers
        drafter.need_room(found, Footprint.of_pack(pack.packed.manifest, pack.config), in_ram, whole=mixes[0] is None)
        report(f"Opening {name}, which guesses tokens", 0.9)
        loaded, _ = load(folder, "Fast", "cpu", lambda _step, _share: None, advanced=Advanced(draft=False))
        _set_threads(pack, 1)
        if not isinstance(loaded.decoder, FusedDecoder) or loaded.decoder.way.most == 1:
            raise Unsupported(f"its own tokens are computed otherwise: {loaded.decoder.reason}")
        loaded.control.cancelled = control.cancelled
        decoder.draft_with(DraftModel(name, loaded.decoder, loaded.control, loaded.window, found.cost))
        decoder.reason += f", with {name} guessing tokens"
    except (FloeError, Unsupported) as declined:
        title, why = f"{name} guesses no tokens here", str(declined)
        if isinstance(declined, FloeError):
            title, why = declined.title, f"{declined.cause} {declined.hint}".strip()
        control.notices.append(Notice(title, f"{why.rstrip('.')}. Answers come without its guesses."))
        decoder.reason += f", without guesses by {name}, because {why.rstrip('.')}"
        _log.warning("no guesses by %s: %s", name, why)


def _draft(decoder: FusedDecoder, packed: PackedModel, *, room: bool) -> None:
    """Guess further tokens by the pack's drafting head or assistant, if it has one that can be used here. room: whether
    its memory is planned.
    """
    head, why, called = packed.head(), packed.headless, packed.manifest.family.drafter
    if head is not None and not room:
        why = "the card has no memory left for it"
    elif head is not None:
        try:
            decoder.draft_by(head, packed.manifest.widths.dense)
        except (Unsupported, PackError) as declined:
            why = str(declined)
    if decoder.head is not None:
        decoder.reason += f", with the model's {called}"
    elif why:
        decoder.reason += f", without the model's {called}, because {why}"
        _log.info("no drafting head: %s", why)


def _describe(
    loaded: LoadedModel, pack: Opened, why_threads: str, nbytes: int, changed: tuple[str, ...], seconds: float
) -> Loaded:
    """Describes what was loaded and how, for people."""
    manifest, shared, place = pack.packed.manifest, loaded.shared, pack.placement.first.place
    backend, on = kernels.choose(place), " and ".join(dict.fromkeys(pack.placement.places))
    reasons = [backend.reason, loaded.decoder.reason, f"on {on}, because {pack.placement.why}", why_threads]
    if place != "cpu" and (computed := computed_type(pack.placement.places, manifest)) != manifest.float16:
        reasons.append(
            f"computed in {str(computed).removeprefix('torch.')}, since this card multiplies bfloat16 slowly"
        )
    if shared is not None and shared.device.moves:
        reasons.append(shared.device.moves)
    return Loaded(
        model=name_of(pack.packed.folder, manifest.name),
        folder=str(pack.packed.folder),
        source=manifest.source.called,
        context_window=loaded.window,
        vocabulary=pack.config.vocab_size,
        presets=quality_presets.available(manifest),
        preset=pack.preset.name,
        widths=manifest.describe(),
        device=on if shared is None else shared.name,
        backend=backend.name,
        reason="; ".join(reasons),
        seconds=seconds,
        memory_bytes=nbytes,
        advanced=changed,
        remedy=pack.placement.first.remedy,
        placed="; ".join(part.choice.shares.words for part in pack.placement.parts),
        pools=pack.placement.first.pools if len(pack.placement.parts) == 1 else None,
        drafter=head.name if isinstance(head := loaded.decoder.head, DraftModel) else "",
    )


class _Linear:
    """Makes the dense part's quantized projections.

    Attributes:
        nbytes: device memory of their codes.
    """

    def __init__(self, place: str, control: Control) -> None:
        self._place, self._control = place, control
        self.nbytes = 0

    def __call__(self, weights: LinearWeights, bias: nn.Parameter | None) -> PackedLinear:
        weights = weights.there(self._place)
        self.nbytes += weights.q.nbytes + weights.scale.nbytes + weights.zero.nbytes
        return PackedLinear(weights, bias, self._control)


class _Experts:
    """Makes each layer's experts: all on the device, offloaded, or in RAM.

    Attributes:
        nbytes: device memory of the up projections.
    """

    def __init__(
        self,
        pack: Opened,
        offloads: Sequence[Offload | None],
        control: Control,
        telemetry: Telemetry,
        report: Report,
        spread: Spread | None = None,
    ) -> None:
        self._pack, self._offloads, self._spread = pack, offloads, spread
        self._control, self._telemetry, self._report = control, telemetry, report
        self._made: list[OffloadedLayer] = []
        self.nbytes = 0

    def __call__(self, index: int) -> MoELayer:
        rows, count = self._pack.layers[index], len(self._pack.layers)
        self._report(f"Mapping layer {index + 1} of {count}", 0.5 + 0.5 * index / count)
        number = self._pack.placement.number(index)
        part, shared = self._pack.placement.parts[number], self._offloads[number]
        mix = part.choice.shares.mix
        where = "gpu" if mix is None else mix.places[index - part.layers.start]
        layer = rows.there(part.choice.place, up=where != "cpu", rows=where == "gpu")
        self.nbytes += 0 if where == "cpu" else layer.signal.nbytes
        if self._spread is not None:
            return SpreadLayer(index, layer, self._control, self._telemetry, self._spread)
        if shared is None:
            return MoELayer(index, layer, self._control, self._telemetry)
        if where == "gpu":
            return ResidentLayer(index, layer, shared, self._control, self._telemetry)
        if where == "cpu":
            return RamLayer(index, layer, rows, shared, self._control, self._telemetry)
        made = OffloadedLayer(index, layer, rows, shared, self._control, self._telemetry)
        self._made.append(made)
        return made

    def join(self, model: Any, shared: Offload | Pools, decoder: Decoder) -> None:
        """Connect offloaded layers with each other and their routers, and fill the pool."""
        self._telemetry.memory = shared
        if not shared.device.real:
            self._telemetry.clock = shared.now
        control = self._control
        control.make_room, control.chunk = lambda: shared.make_room(control.ran_out), STREAMED_CHUNK
        # The library's cache has memory of its own, and layers that are all on the device leave none to share.
        if isinstance(decoder, FusedDecoder):
            each = zip(self._pack.placement.parts, self._offloads, strict=True)
            decoder.rooms = [one if part.choice.shares.place == "pool" else None for part, one in each]
            for room in (one for one in self._offloads if one in decoder.rooms and one is not None):
                room.share()
        family = family_of(self._pack.architecture.model_type)
        routers = [family.router(block) for block in family.blocks(model)]
        for layer, after in zip(self._made, [*self._made[1:], None], strict=False):
            following = after if after is not None and after.index == layer.index + 1 else None
            router = routers[layer.index]
            # Resident experts stand in for absent ones by their probabilities; other routers have none.
            gate = router if family.routing.kind == "softmax" else None
            layer.neighbours = Neighbours(gate, following, family.normalizes(router))
        ahead = decoder.ahead if isinstance(decoder, FusedDecoder) else None
        for one in (one for one in self._offloads if one is not None):
            if self._made and one.parts.predictor != "none":
                given = one.parts.predictor, model, self._pack.packed
                # Between several cards no attention is passed through ahead by graphs.
                tried = one.tried is not None and len(self._offloads) == 1
                one.predict_by(predictor.candidates(*given, ahead) if tried else [predictor.make(*given, ahead)])
        shared.warm(_heat(self._pack.packed))


def _heat(packed: PackedModel) -> usage_file.Heat:
    """Earlier use, or else popularity in calibration."""
    a = packed.manifest.architecture
    kept = usage_file.read(usage_file.file_of(packed.folder), a.layers, a.experts, a.intermediate)
    if kept is not None:
        return kept
    return usage_file.from_popularity(packed.profile()["popularity"].numpy(), a.intermediate)


def _need_numbers(folder: Path, model: nn.Module) -> None:
    """Raises PackError: some weight of the dense part is NaN or infinite; experts are checked when they are used."""
    weights = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            weights |= {f"{name}.scale": module.weights.scale, f"{name}.zero": module.weights.zero}
    for name, values in weights.items():
        if not is_finite(values.detach()):
            raise damaged(folder, f"{name} in dense.safetensors has values that are NaN or infinite.")
