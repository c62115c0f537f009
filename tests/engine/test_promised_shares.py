"""On text that no calibration saw, layers leave out the share of neurons that a rule says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.quality.text_windows import cut
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.rule import Rule
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import EXACT, pack
from floe_chat.models.tokenizer.chat_process import encode

from .driver import open_model
from .trained import demo_source, finer_source

SOURCES = {"demo": demo_source, "finer": finer_source}
TOKENS = 1536
LAYER, MEAN = 0.03, 0.01  # how far a layer, and the mean of all layers, may be off


@pytest.fixture(scope="module", params=["demo", pytest.param("finer", marks=pytest.mark.thorough)])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, packed without rounding, which thresholds do not hang on."""
    folder = tmp_path_factory.mktemp("promise") / request.param
    source = SOURCES[request.param](folder.with_name("source"))
    text = read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    pack(Checkpoint(source), folder, EXACT, text, request.param)
    return folder


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 0.9])
def test_layers_leave_out_what_a_rule_says(trained: Path, share: float) -> None:
    loaded = open_model(trained)
    loaded.control.preset = Preset("", Rule(sparsity=share, weighed=True))
    left_out: dict[int, float] = {}

    def note(layer: Any, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        hidden, index, weights = given
        work = layer.in_force().work(index, weights)
        skipped, of, signal = 0, 0, layer.packed.signal
        for expert in index.unique().tolist():
            mine = work.part(work.calls.experts == expert)
            if bool((mine.thresholds < 0).all()):
                continue  # no rule leaves anything of it out
            v = signal.dense(expert, torch.float32) @ hidden[mine.calls.tokens].float().T
            v = torch.nn.functional.silu(v) if signal.layout.function == "silu" else v
            skipped, of = skipped + int((v.abs() < mine.thresholds).sum()), of + v.numel()
        left_out[layer.index] = skipped / of

    layers = [block.mlp.experts for block in loaded.model.model.layers if hasattr(block.mlp, "experts")]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    windows, _ = cut(
        encode(trained, asset("demo", "heldout.md").read_text(encoding="utf-8")), loaded.model.config, TOKENS
    )
    with torch.inference_mode():
        loaded.model(input_ids=windows[:, :-1], use_cache=False)
    for handle in handles:
        handle.remove()
    assert len(left_out) == loaded.packed.manifest.architecture.layers
    assert all(abs(found - share) <= LAYER for found in left_out.values()), left_out
    assert abs(sum(left_out.values()) / len(left_out) - share) <= MEAN, left_out
