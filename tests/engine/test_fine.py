"""A trained model of fine experts: packed, it stays near its source, and loses what it skips."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality.evaluate import Evaluation, run
from floe_chat.engine.quality.told import Told
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing import calibration
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.tokenizer.chat_process import encode

from ..helpers import reference_model
from .trained import finer_source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finer_source(tmp_path_factory.mktemp("fine") / "source")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    """At the usual widths, by the signals that packing chooses: its attention and one projection lose bits again."""
    folder = source.with_name("pack")
    passages = calibration.read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    pack(Checkpoint(source), folder, PackSpec(3, 4, 4), passages[::4], "fine")  # enough text, in half the time
    return folder


@pytest.fixture(scope="module")
def found(packed: Path, source: Path) -> Evaluation:
    """What it loses on a text that neither training nor packing has seen."""
    ids = encode(packed, asset("demo", "heldout.md").read_text(encoding="utf-8"))
    names = ("No sparsity", "Balanced", "Fast")
    return run(packed, source, ids, names, 1024, "cpu", Told(lambda _step: None, lambda _note: None))


def test_it_knows_what_it_was_trained_on(source: Path) -> None:
    ids = encode(source, asset("demo", "manual.md").read_text(encoding="utf-8"))[:512]
    with torch.inference_mode():
        logits = reference_model(source)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 255:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[256:]))
    assert loss < 0.2, "nats per token"
    assert logits.softmax(-1).amax(-1).mean() > 0.95, "sharp"


def test_each_layer_skips_by_the_signal_that_loses_less(packed: Path) -> None:
    fine, demo = Manifest.read(packed), Manifest.read(asset("demo", "packed"))
    assert (fine.architecture.experts, fine.architecture.top_k, fine.architecture.intermediate) == (32, 8, 96)
    # In the first layers both are nearly as good.
    assert fine.signals[4:] == demo.signals[4:] == ("gate",) * 4
    assert "up" in fine.signals


def test_it_loses_little_by_rounding_and_more_the_more_is_skipped(found: Evaluation) -> None:
    whole, balanced, fast = (one.divergence.kl_mean for one in found.presets)
    assert whole < balanced < fast
    assert whole < 0.125, "0.087 to 0.108 by the instruction set that packed it"
