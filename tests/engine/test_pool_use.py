"""Which experts the pool lets stand in, what it remembers over a restart, and answers of a model opened on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from floe_chat.engine.experts.moe_layer import Choice
from floe_chat.engine.experts.offloaded_layer import OffloadedLayer
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.models.checkpoint import read_config
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from ..helpers import make_checkpoint, make_pack
from .driver import a_preset, open_model, silent
from .driver import answer as generated
from .margins import clear_prompt, prompt_of
from .offloading import answer, offloaded

SHAPE: dict[str, Any] = {"hidden": 100, "intermediate": 50, "experts": 7, "top_k": 3, "layers": 3}
NOTHING = a_preset("", 0.0, lossless=True)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool use")
    make_pack(make_checkpoint(folder / "source", **SHAPE), folder / "pack", PackSpec(up=4, gate=8, down=4, dense=8))
    return folder / "pack"


@pytest.fixture(scope="module")
def loaded(pack: Path) -> LoadedModel:
    return open_model(pack)


def test_only_experts_in_the_pool_stand_in(loaded: LoadedModel) -> None:
    swapped: list[int] = []
    with offloaded(loaded, a_preset("", 0.0, alpha=0.9, lossless=True), 0.7) as shared:
        for index, block in enumerate(loaded.model.model.layers):
            experts: OffloadedLayer = block.mlp.experts
            experts.neighbours = replace(experts.neighbours, gate=block.mlp.gate)

            def compare(
                hidden: Tensor, routed: Tensor, weights: Tensor, index: int = index, choose: Any = experts.choose
            ) -> Choice:
                shares = shared.pool.resident(index)
                choice: Choice = choose(hidden, routed, weights)
                for asked, taken in zip(routed.tolist(), choice.experts.tolist(), strict=True):
                    others = sorted(set(taken) - set(asked))
                    swapped.extend(others)
                    assert all(shares[expert] >= 0.5 for expert in others)
                return choice

            experts.choose = compare  # pyright: ignore[reportAttributeAccessIssue]
        answer(loaded, prompt_of(3))
    assert swapped


def needed(pack: Path) -> Needs:
    packed = PackedModel.open(pack)
    return Needs.of(packed.manifest, [packed.layer(index) for index in range(SHAPE["layers"])], read_config(pack), 2)


@pytest.mark.parametrize("device", ["throttled:8gb", "sim:rtx3060-12gb"])
def test_a_model_opened_on_a_device_answers_as_on_the_cpu(pack: Path, loaded: LoadedModel, device: str) -> None:
    loaded.control.preset = NOTHING
    prompt, wanted = clear_prompt(loaded, lambda prompt: generated(loaded, prompt, max_new_tokens=8).tokens)
    needs = needed(pack)
    parts = Parts(mix=needs.every("pool"))
    there, _ = load(pack, None, device, silent, vram=needs.least() + 100 * needs.row, parts=parts)
    try:
        there.control.preset = NOTHING
        assert generated(there, prompt, max_new_tokens=8).tokens == wanted
    finally:
        there.close()


def test_each_neuron_gets_its_heat_back_after_a_restart(pack: Path) -> None:
    """Heat is kept by place, and so is what is used: places are the pack's own, the same at each start."""
    needs = needed(pack)

    def opened() -> LoadedModel:
        return load(pack, None, "throttled:8gb", silent, vram=needs.least() + 100 * needs.row)[0]

    there = opened()
    assert there.offload is not None
    there.control.preset = NOTHING
    before = there.offload.pool.heat().uses
    generated(there, [1], max_new_tokens=3)
    after, called = there.offload.pool.heat(), [layer.calls for layer in there.telemetry.layers]
    there.close()
    for index in range(SHAPE["layers"]):
        cooled = set(np.flatnonzero((after.uses != before)[index].any(1)).tolist())
        decoded = {expert for expert, count in enumerate(called[index]) if count}
        assert decoded <= cooled and len(cooled - decoded) <= SHAPE["top_k"], "the prompt's token is not counted"
    there = opened()
    try:
        assert there.offload is not None
        again = there.offload.pool.heat()
        np.testing.assert_allclose(again.scores, after.scores, rtol=1e-6)
        np.testing.assert_allclose(again.uses, after.uses, atol=1e-3)
    finally:
        there.close()
