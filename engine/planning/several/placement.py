"""Where a pack is opened: on one device (`device_choice.py`), or on several cards that have some of its layers each.

"cuda:0,cuda:1" names cards of this machine, "sim:NAME,sim:NAME" virtual ones, which may be of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....models.errors import UsageError
from ....models.families import family_of
from ....models.pack.manifest import Manifest
from ....models.pack.packed_model import PackedLayer, PackedModel
from ....models.quantities import digits
from ....models.quantities import memory as size
from ...context import CONTEXT
from ...decoder.kv_stores import KvForm, KvPart
from ...machine import hardware, torch_build
from ...offload import cards
from ...offload.mix import ExpertsPlace, Mix
from ...offload.offload import Offload, Parts
from ...offload.virtual.virtual_device import Turns
from ...quality_presets import Preset
from .. import device_choice, machine, memory_plan, worth
from ..device_choice import THROTTLED, DeviceChoice, kernels_on, unheard
from ..footprint import divisible, kv_element, sizes_of
from ..memory_plan import DeviceShares, Needs
from ..opened_pack import Asked, OpenedPack, UsableGpu
from ..running import DeviceLayers, Running
from .division import CardRoom, Divided, part_needs, ranges


@dataclass(frozen=True, slots=True)
class Part:
    """A device with its layers: those with experts, and all of the decoder's."""

    choice: DeviceChoice
    layers: range
    decoder: range


@dataclass(frozen=True, slots=True)
class Placement:
    """parts: of all layers, in their order; the first one has the embedding and the head. why: in words."""

    parts: tuple[Part, ...]
    why: str

    @property
    def first(self) -> DeviceChoice:
        """The device with the embedding and the head."""
        return self.parts[0].choice

    @property
    def budget(self) -> int | None:
        """Bytes of all devices that weights, keys and values may take; None if the CPU computes in RAM."""
        budgets = [part.choice.budget for part in self.parts]
        return None if None in budgets else sum(budget or 0 for budget in budgets)

    @property
    def places(self) -> tuple[str, ...]:
        """torch's names of the devices."""
        return tuple(part.choice.place for part in self.parts)

    def number(self, layer: int) -> int:
        """Which part has a layer with experts."""
        return next(number for number, part in enumerate(self.parts) if layer in part.layers)

    def kv(self, device: Callable[[str], Any]) -> KvForm:
        """How keys and values are stored. device: torch.device."""
        shares = self.first.shares
        if len(self.parts) == 1:
            return KvForm(shares.kv_bits, shares.most)
        parts = tuple(KvPart(part.decoder, device(part.choice.place), part.choice.shares.most) for part in self.parts)
        return KvForm(shares.kv_bits, None, parts)

    def reserved(self) -> int:
        """Tokens of the longest chat that takes no memory from a pool."""
        return min(part.choice.shares.reserved for part in self.parts)

    def offloads(
        self, layers: Sequence[PackedLayer], parts: Parts, report: Callable[[str], None]
    ) -> list[Offload | None]:
        """The pool of each part; None where there is none. layers: of the pack. report: see `device_choice.offload`."""
        made: list[Offload | None] = []
        try:
            for part in self.parts:
                made.append(device_choice.offload(part.choice, layers, parts, part.layers.start, report))
        except Exception:  # any error: it is raised again, once what was opened is released
            for one in made:
                if one is not None:
                    one.close()
            raise
        return made


def choose(
    wanted: str,
    manifest: Manifest,
    layers: Sequence[PackedLayer],
    config: Any,
    vram: int | None,
    preset: Preset,
    asked: Asked,
    packed: PackedModel,
    report: Callable[[str], None] = unheard,
) -> Placement:
    """As `device_choice.choose`, where `wanted` may name several cards with commas between them; vram: of each.

    Raises:
        UsageError: as there; or cards that cannot share a model, or have too little memory for it.
    """
    names = [name.strip() for name in wanted.split(",")]
    if len(names) == 1:
        choice = device_choice.choose(wanted, manifest, layers, config, vram, preset, asked, packed, report)
        every = range(manifest.architecture.layers)
        return Placement((Part(choice, every, range(config.num_hidden_layers)),), choice.why)
    _check(names)
    if asked.wanted.kind != "auto":
        hint = "Name one card, or use --mix auto (advanced.placement)."
        raise UsageError(f"Several cards cannot take the mix {asked.wanted.kind!r}", "It is for one card.", hint)
    if not divisible(manifest.architecture.model_type):
        cause = "Some of its layers keep a state, which cannot cross from card to card."
        raise UsageError("This model cannot be divided among cards", cause, "Name one card with --device.")
    real = names[0].lower().startswith("cuda")
    element = 2 if real else kv_element(manifest.widths.dense, sizes_of(manifest, config))
    pack = OpenedPack(manifest, layers, config, element, preset, asked)
    found = _Several(names, pack, config, vram).placement()
    slow = [place for place in found.places if place != "cpu" and kernels_on(place, report).name == "reference"]
    if not slow:
        return found
    first, *others = found.parts
    return replace(found, parts=(replace(first, choice=replace(first.choice, remedy=torch_build.remedy())), *others))


def _check(names: Sequence[str]) -> None:
    """Raises UsageError: names that are not several cards of one kind."""

    def kind(name: str) -> str:
        return next((kind for kind in ("cuda", cards.PREFIX, THROTTLED) if name.lower().startswith(kind)), "")

    hint = "Name cards with a comma between them, such as --devices cuda:0,cuda:1."
    for name in names:
        if not kind(name):
            told = "The CPU works beside the cards by itself." if name.lower() in ("cpu", "cpu:0", "auto") else ""
            raise UsageError(f"{name or 'Nothing'!r} is no card that could share a model with others", told, hint)
    if len({kind(name) for name in names}) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot share a model", "They are devices of unlike kinds.", hint)
    if kind(names[0]) == "cuda":
        places = [device_choice.real_place(name)[0] for name in names]
        if twice := next((place for place in places if places.count(place) > 1), ""):
            raise UsageError(f"{twice} is named twice", "A card has its memory once.", hint)


class _Several:
    """A pack for several cards. budgets: bytes to use of each."""

    def __init__(self, names: Sequence[str], pack: OpenedPack, config: Any, vram: int | None) -> None:
        self._names, self._pack, self._config, self._vram = names, pack, config, vram
        found, self._turns = hardware.probe(Path()), Turns()
        self._gpus: list[UsableGpu] = []
        self._cards = [] if not names[0].startswith(cards.PREFIX) else [cards.named(name, study=True) for name in names]
        here = machine.here(found, None)
        if names[0].lower().startswith("cuda"):
            self._gpus = [UsableGpu.of(device_choice.real_place(name)[0], found) for name in names]
            here, machines = self._gpus[0].machine, [gpu.machine for gpu in self._gpus]
            budgets = [gpu.budget(vram) for gpu in self._gpus]
        elif self._cards:
            machines = [machine.of_card(card, here) for card in self._cards]
            both = zip(self._cards, names, strict=True)
            budgets = [device_choice.virtual_budget(card, name, vram) for card, name in both]
        else:
            for name in names:
                device_choice.throttled_rate(name, vram)
            machines, budgets = [here for _ in names], [vram or 0 for _ in names]
        self._machines, self._ram = machines, here.ram
        speeds = [one.speeds for one in machines]
        self._rooms = tuple(CardRoom(*room) for room in zip(names, speeds, budgets, strict=True))

    def placement(self) -> Placement:
        """The fastest division, or the one that was asked for."""
        best: tuple[float, Needs, list[tuple[range, Needs, DeviceShares]]] | None = None
        failed: UsageError | None = None
        for needs in self._pack.forms:
            try:
                found = self._in_form(needs)
            except UsageError as error:
                failed = error
                continue
            speed = self._tokens_s(found)
            if best is None or self._pays(best, speed, needs):
                best = speed, needs, found
        if best is None:
            assert failed is not None
            if (context := self._pack.needs.context) <= CONTEXT:
                raise failed
            fewer = max(CONTEXT, context // 2)
            self._pack = self._pack.with_forms([replace(needs, context=fewer) for needs in self._pack.forms])
            return self.placement()
        speed, _, found = best
        parts = [self._part(number, *one) for number, one in enumerate(found)]
        counts = ", ".join(f"{len(part.layers)} on {name}" for part, name in zip(parts, self._names, strict=True))
        by = "" if self._given() else f", the fastest division by our estimate{self._against(speed)}"
        each = "; ".join(part.choice.why for part in parts)
        return Placement(tuple(parts), f"its layers are divided, {counts}{by}; {each}{self._pack.lacking}")

    def _against(self, speed: float) -> str:
        """Tokens per second, and those of the best card alone."""
        pack, found = self._pack, list[tuple[float, str]]()
        for one, card in zip(self._machines, self._rooms, strict=True):
            if pack.fits(card.budget):
                found.append((pack.tokens_s(one, pack.shares(one, card.budget)), card.name))
        said = f", {digits(speed, 2)} tokens/s"
        if not found:
            return said
        alone, name = max(found)
        return f"{said} ({name} alone: {digits(alone, 2)}{', which is faster' if alone > speed else ''})"

    def _given(self) -> bool:
        """Whether nothing is left to be estimated."""
        return bool(self._pack.division or self._pack.mix or self._names[0].startswith(THROTTLED))

    def _in_form(self, needs: Needs) -> list[tuple[range, Needs, DeviceShares]]:
        """Each card's layers, their needs, and how its memory is divided."""
        room = max(0, memory_plan.room(self._ram, self._pack.takes))
        divided = Divided(self._pack.takes, self._pack.work, needs, self._rooms, room)
        counts, mix = self._pack.division, self._pack.mix
        if mix is None and self._names[0].startswith(THROTTLED):
            mix = needs.every("pool")
        if mix is None:
            parts = divided.given(counts) if counts else divided.parts()
            placed = [(part.layers, part.needs, part.best.mix, part.best.rows) for part in parts]
        else:
            every = ranges(divided.checked(counts or divided.in_proportion()))
            placed = [
                (part, part_needs(needs, self._pack.takes, len(part), first=not part.start), _of_mix(mix, part), None)
                for part in every
            ]
        return [
            (layers, own, own.share_out(part, card.budget, self._pack.window, rows))
            for (layers, own, part, rows), card in zip(placed, self._rooms, strict=True)
        ]

    def _tokens_s(self, found: Sequence[tuple[range, Needs, DeviceShares]]) -> float:
        total = self._pack.needs.layers
        places = [
            DeviceLayers(
                layers, card.speeds, replace(self._pack.held(own, shares, self._ram), part=len(layers) / total)
            )
            for (layers, own, shares), card in zip(found, self._rooms, strict=True)
        ]
        if not all(card.speeds.gpu for card in self._rooms):
            return 1.0  # test devices: nothing is known of them
        return 1 / Running(self._pack.takes, places).token(self._pack.work).seconds

    def _pays(self, before: tuple[float, Needs, object], speed: float, needs: Needs) -> bool:
        """Whether fewer bits of keys and values make it faster by more than their loss outweighs."""
        gain = worth.of_speed(speed) - worth.of_speed(before[0])
        return worth.pays(gain, worth.kv_loss(needs.kv_bits) - worth.kv_loss(before[1].kv_bits))

    def _part(self, number: int, layers: range, needs: Needs, shares: DeviceShares) -> Part:
        assert shares.mix is not None
        name, pack, card = self._names[number], self._pack, self._rooms[number]
        if not self._gpus or shares.place != "gpu":
            device_choice.need_compiled(name)
        why = f"with {size(card.budget)} of {name}, {shares.mix.describe()}"
        own = pack.layers[layers.start : layers.stop]
        if self._gpus:
            streamed = [layer for layer, place in zip(own, shares.mix.places, strict=True) if place != "gpu"]
            choice = device_choice.gpu_with(self._gpus[number], why, shares, streamed, self._vram)
        elif self._cards:
            why = f"{why}; it is a virtual device: the CPU computes, and times come from the card's profile"
            choice = device_choice.virtual_with(self._cards[number], why, shares, card.budget, pack, self._turns)
        else:
            choice = device_choice.throttled_with(name, why, shares, card.budget, own)
        return Part(choice, layers, self._of_decoder(layers))

    def _of_decoder(self, layers: range) -> range:
        """All layers of the decoder that go with those with experts: what is before the first goes to the first card,
        all others to the card of the one before.
        """
        at = family_of(self._config.model_type).expert_layers(self._config)
        last = self._config.num_hidden_layers if layers.stop == len(at) else at[layers.stop]
        return range(at[layers.start] if layers.start else 0, last)


def _of_mix(mix: Mix, layers: range) -> Mix:
    """Of a model's mix, that of some layers."""
    kinds: tuple[ExpertsPlace, ...] = ("cpu", "pool", "gpu")
    places = mix.places[layers.start : layers.stop]
    order = tuple(sorted(range(len(places)), key=lambda layer: kinds.index(places[layer])))
    counts = {kind: places.count(kind) for kind in kinds}
    return Mix(counts["gpu"], counts["pool"], counts["cpu"], order)
