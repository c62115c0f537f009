"""A model whose rows are in RAM but for a pool of them on a test device, and its answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from floe_chat.engine.decoder.decoders import choose
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.experts.offloaded_layer import Neighbours, OffloadedLayer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload import predictor
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.device import Device
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.offload.links.link import throttled_link
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.offload.virtual.virtual_device import VirtualDevice
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.engine.quality_presets import Preset
from floe_chat.models.checkpoint import read_config
from floe_chat.models.families import family_of
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from .driver import a_preset
from .margins import prompt_of

# The kernels keep all of float32's precision, since with 15 bits of x the order of sums would show.
SKIPPING = a_preset("Skipping", 0.5, 0.7, drop=0.3, major=0.6, lossless=True, weighed=True)
PLAIN = a_preset("Plain", 0.4, lossless=True)
EVERYTHING = a_preset("Everything", 0.0, lossless=True)
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden": 64, "intermediate": 98, "experts": 5, "layers": 3},
    "olmoe": {"hidden": 36, "intermediate": 50, "experts": 7, "top_k": 3, "layers": 2},
}
PROMPT = prompt_of(3)  # where no answers are compared; `prompt` is for those
Answer = tuple[Tensor, list[int]]


def device(kind: str, layer: MoELayer, cpu: float = 2e9) -> Device:
    """A test device whose CPU lane is as fast as its link unless told otherwise."""
    nbytes, hidden = layer.packed.rows.layout.nbytes, layer.packed.rows.layout.other.n
    if kind == "virtual":
        return VirtualDevice(card("sim:rtx3060-12gb"), nbytes, hidden, 10_000)
    rates = Rates(1e9, 1e-6, cpu, cpu, 1e-6, 1e10, 1e-6)
    return Device("throttled", "cpu", throttled_link(nbytes, rate=1e9, chunk=7), rates)


@contextmanager
def offloaded(
    loaded: LoadedModel,
    preset: Preset,
    share: float,
    *,
    kind: str = "throttled",
    predict: bool = True,
    cpu: float = 2e9,
    parts: Parts | None = None,
) -> Generator[Offload]:
    """The model with all rows but a pool of `share` of them in RAM; what the pool does not hold is NaN there."""
    blocks = family_of(loaded.model.config.model_type).blocks(loaded.model)
    before: list[MoELayer] = [block.experts for block in blocks]
    packed = [layer.packed for layer in before]
    total = len(packed) * packed[0].rows.data.shape[0] * packed[0].rows.data.shape[1]
    shared = Offload(device(kind, before[0], cpu), parts or Parts(), packed, max(1, int(share * total)))
    shared.memory.rows.fill_(255)
    if predict:
        shared.predictors = (predictor.make("gate", loaded.model, loaded.packed),)
    previous: OffloadedLayer | None = None
    for index, block in enumerate(blocks):
        block.experts = OffloadedLayer(index, packed[index], packed[index], shared, loaded.control, loaded.telemetry)
        if previous is not None:
            previous.neighbours = Neighbours(following=block.experts)
        previous = block.experts
    loaded.control.preset = preset
    loaded.telemetry.begin(0, 0, 0.0)
    decoder, loaded.decoder = loaded.decoder, choose(loaded.model, loaded.window)
    try:
        yield shared
    finally:
        shared.close()
        loaded.decoder = decoder
        for block, experts in zip(blocks, before, strict=True):
            block.experts = experts


def needs_of(pack: Path, element: int = 2, *more: int) -> Needs:
    """What a pack takes, with so many bytes of a dense weight; see `Needs.of`."""
    packed = PackedModel.open(pack)
    layers = [packed.layer(index) for index in range(packed.manifest.architecture.layers)]
    return Needs.of(packed.manifest, layers, read_config(pack), element, *more)


def resize(shared: Offload, rows: int) -> None:
    """Another size for the pool, between two steps; no row stays."""
    shared.settle()
    shared.pool.resize(0)
    shared.memory.renew(rows)
    shared.pool.resize(rows)


def cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def forward(loaded: LoadedModel, ids: Sequence[int], kv: Any) -> Tensor:
    """Logits (T, V) of these tokens."""
    with torch.inference_mode():
        return loaded.model(input_ids=torch.tensor([list(ids)]), past_key_values=kv, use_cache=True).logits[0]


def answer(loaded: LoadedModel, prompt: list[int], tokens: int = 10) -> Answer:
    """Logits of the prompt and of a greedy answer, and its tokens; decode is counted."""
    kv, drawn = cache(), list[int]()
    logits = [forward(loaded, prompt, kv)]
    loaded.control.counting = True
    for _ in range(tokens):
        drawn.append(int(logits[-1][-1].argmax()))
        logits.append(forward(loaded, drawn[-1:], kv))
    loaded.control.counting = False
    return torch.cat(logits), drawn
